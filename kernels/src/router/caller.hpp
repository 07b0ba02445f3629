#pragma once
// Computes the routed experts of one layer by calling the nodes that hold them.

#include "router/routing.hpp"
#include "router/statistics.hpp"
#include "router/trace.hpp"

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace swarm {

// All strides in floats (ids: in int32), of any size; the innermost dimension is contiguous, ids included.
struct LayerInput {
    int             layer      = 0;
    uint64_t        program    = 0;      // digest
    int             n_tokens   = 0;
    int             n_used     = 0;
    int             n_in       = 0;
    int             n_out      = 0;
    bool            input_pair = false;  // h has one row per (token, slot), not one per token
    bool            uses_weight = true;
    const float *   h              = nullptr;
    size_t          h_token_stride = 0;
    size_t          h_slot_stride  = 0;  // input_pair only
    const int32_t * ids              = nullptr;
    size_t          ids_token_stride = 0;
    const float *   weights              = nullptr;
    size_t          weights_token_stride = 0;
    size_t          weights_slot_stride  = 0;
};

struct Failure {
    std::string node;  // empty: no single node is at fault
    int         layer        = 0;
    int         first_expert = -1;
    int         last_expert  = -1;
    std::string reason;
    double      waited_ms = 0;
};

class Caller {
  public:
    // call_key: 32 bytes that nodes and this router prove to each other, or empty. poll_limit: for how long replies are
    // looked for before the thread sleeps.
    explicit Caller(const std::string & call_key = "", std::chrono::microseconds poll_limit = {});
    ~Caller();
    Caller(const Caller &)             = delete;
    Caller & operator=(const Caller &) = delete;

    // From the next layer on, and for what of the present one failed and would be tried again. False: not newer than
    // the table in use, and ignored.
    bool set_table(std::shared_ptr<const RoutingTable> table);
    std::shared_ptr<const RoutingTable> table() const;

    // From any thread: no layer is begun within the next `ms`; 0 ends that. The last call counts.
    void hold(double ms);

    // out: n_tokens × n_out floats, contiguous. False: `failure` says which node and experts failed and why; `out`
    // may have been written in part. Never waits longer than the deadlines of the nodes asked, one after the other
    // where an expert has several; waits as long as hold() said, and up to 5 s for the first table. Calls from several
    // threads run one by one.
    bool ffn(const LayerInput & input, float * out, Failure & failure);

    // From any thread.
    Statistics statistics() const;
    Trace      trace() const;

  private:
    struct Impl;
    std::unique_ptr<Impl> impl_;
};

}  // namespace swarm
