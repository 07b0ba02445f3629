// Expert slices on one ggml device, and the layer program computed on them.
#pragma once

#include "program.hpp"

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

namespace swarm {

struct LoadError : std::runtime_error {
    using std::runtime_error::runtime_error;
};
struct BadCall : std::invalid_argument {
    using std::invalid_argument::invalid_argument;
};
struct NotHeld : std::runtime_error {
    using std::runtime_error::runtime_error;
};
struct ProgramMismatch : std::runtime_error {
    using std::runtime_error::runtime_error;
};
struct ComputeError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

struct TensorPart {
    std::string path;
    uint64_t    offset = 0;
    uint64_t    bytes  = 0;
};

struct TensorParts {
    std::string             type;   // as ggml names it
    std::vector<int64_t>    ne;     // of one expert: [in, out] of a weight, [out] of a bias, [] of a scale
    std::vector<TensorPart> parts;  // the experts first … last, one after the other
};

struct SliceInfo {
    int      layer = 0;
    int      first = 0;
    int      last  = 0;
    int64_t  n_in  = 0;
    int64_t  n_out = 0;
    uint64_t bytes = 0;  // of device memory
};

enum class Reduce { rows, sum };

// One call: n_pairs (row, expert) pairs of one layer. Nothing in it is trusted.
struct FfnCall {
    int             layer = 0;
    uint64_t        program_digest = 0;
    const float *   h = nullptr;        // [n_h, n_in]: n_rows of them, or n_pairs when the program's input is a pair
    int64_t         n_h  = 0;
    int64_t         n_in = 0;
    const int32_t * row = nullptr;      // [n_pairs], not descending, 0 ≤ row < n_rows
    const int32_t * expert = nullptr;   // [n_pairs], global ids
    const float *   weight = nullptr;   // [n_pairs], or nullptr when the program does not use them
    int64_t         n_pairs = 0;
    int64_t         n_rows  = 0;
    Reduce          reduce  = Reduce::rows;
};

class ExpertStore {
  public:
    // device: a ggml device name. threads ≥ 1 for CPU devices.
    ExpertStore(const std::string & device, int threads);
    ~ExpertStore();
    ExpertStore(const ExpertStore &) = delete;
    ExpertStore & operator=(const ExpertStore &) = delete;

    // Throws LoadError. The files are read; nothing of them is kept open.
    SliceInfo load(int layer, const Program & program, int first, int last, int n_expert,
                   const std::map<std::string, TensorParts> & tensors);

    void drop(int layer, int first, int last);  // throws NotHeld

    std::vector<SliceInfo> slices() const;

    // The width of a result row of the layer; throws NotHeld.
    int64_t n_out(int layer) const;

    // out: [n_pairs, n_out] for rows, [n_rows, n_out] for sum. Throws BadCall, NotHeld, ProgramMismatch, ComputeError.
    void ffn(const FfnCall & call, float * out);

    const std::string & device() const { return device_name_; }
    int threads() const { return threads_; }

  private:
    struct Slice;
    struct Engine;

    std::vector<std::shared_ptr<Slice>> held(int layer) const;
    void compute(const Slice & slice, const float * h, const int32_t * ids, const float * weight, int64_t n_pairs,
                 float * out);

    std::string             device_name_;
    int                     threads_;
    std::unique_ptr<Engine> engine_;
    mutable std::mutex      slices_mutex_;   // the map of slices
    std::mutex              compute_mutex_;  // the device: one graph at a time
    std::map<int, std::vector<std::shared_ptr<Slice>>> slices_;  // by layer, in order of first expert
};

}  // namespace swarm
