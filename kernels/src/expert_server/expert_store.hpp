// Expert slices on one ggml device, and the layer program computed on them.
#pragma once

#include "expert_server/device_gate.hpp"
#include "common/program.hpp"
#include "common/reduce.hpp"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

namespace swarm {

struct ProgramGraph;

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
struct NotFinite : ComputeError {
    using ComputeError::ComputeError;
};

// A call that could not begin in time, or that too many others wait before.
struct TooLate : std::runtime_error {
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

// One call: n_pairs (row, expert) pairs of one layer. Nothing in it is trusted.
struct FfnCall {
    int             layer = 0;
    uint64_t        program_digest = 0;
    const float *   h = nullptr;        // [n_h, n_in]: n_rows of them, or n_pairs when the program's input is a pair
    int64_t         n_h  = 0;
    int64_t         n_in = 0;
    int64_t         n_out = -1;         // what `out` has room for; -1: not said
    const int32_t * row = nullptr;      // [n_pairs], not descending, 0 ≤ row < n_rows
    const int32_t * expert = nullptr;   // [n_pairs], global ids
    const float *   weight = nullptr;   // [n_pairs], or nullptr when the program does not use them
    int64_t         n_pairs = 0;
    int64_t         n_rows  = 0;
    Reduce          reduce  = Reduce::rows;
};

// When a call may begin, and what became of that.
struct FfnTiming {
    using Clock = std::chrono::steady_clock;

    Clock::time_point arrived{};
    Clock::time_point deadline    = Clock::time_point::max();
    size_t            waiting_max = SIZE_MAX;  // of other calls, when this one comes
    double            delay_s     = 0;         // slept once the device is free: a test hook
    uint64_t          queue_us    = 0;         // out: from arrival until the device was free
    uint64_t          compute_us  = 0;         // out: from then on
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

    // out: [n_pairs, n_out] for rows, [n_rows, n_out] for sum. Throws BadCall, NotHeld, ProgramMismatch, ComputeError,
    // and with `timing` TooLate. May be called by several threads. A large call is computed in parts, between which
    // the device is free for others. A small one allocates nothing once its shape is known.
    void ffn(const FfnCall & call, float * out, FfnTiming * timing = nullptr);

    size_t waiting() const { return gate_->waiting(); }

    // On a CPU, of one part of a large call: its time on a core, some 10 ms, is what a small call may have to wait.
    static constexpr int64_t part_products_max = int64_t{ 1 } << 29;
    // A call of more than so many parts is large: a token of each of eight users, with all experts here, is not.
    static constexpr int64_t large_in_parts = 4;
    void                     set_part_products_max(int64_t n) {
        part_products_max_ = std::min(n, INT64_MAX / large_in_parts);
    }  // for tests

    // Graphs of calls of up to so many pairs are kept: of eight users' tokens, all experts of each.
    static constexpr int64_t kept_pairs_max = 64;
    size_t                   kept_graphs() const;

    const std::string & device() const { return device_name_; }
    int threads() const { return threads_; }

  private:
    struct Slice;
    struct Engine;
    struct Scratch;
    using Slices = std::vector<std::shared_ptr<Slice>>;

    std::shared_ptr<const Slices> held(int layer) const;  // nullptr: none
    void check(const FfnCall & call, const Slices & of_layer, Scratch & scratch) const;
    void compute_pairs(const FfnCall & call, const Slice & slice, const int64_t * pairs, int64_t n_pairs, float * rows,
                       Scratch & scratch);
    void compute_in_parts(const FfnCall & call, const Slices & of_layer, float * rows, Scratch & scratch,
                          const std::function<void()> & begin_turn);
    void compute(const Slice & slice, const float * h, const int32_t * ids, const float * weight, int64_t n_pairs,
                 float * out);
    void compute_graph(const ProgramGraph & graph, int64_t n_products, const float * h, const int32_t * ids,
                       const float * weight, float * out);
    const ProgramGraph * kept_graph(const Slice & slice, int64_t n_pairs);

    std::string             device_name_;
    int                     threads_;
    std::unique_ptr<Engine> engine_;
    int64_t                 part_products_max_ = part_products_max;
    std::shared_ptr<DeviceGate> gate_;  // guards engine_ as well
    mutable std::mutex      slices_mutex_;
    uint64_t                last_serial_ = 0;
    std::map<int, std::shared_ptr<const Slices>> slices_;  // by layer, in order of first expert; replaced, not changed
};

}  // namespace swarm
