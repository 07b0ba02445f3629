#pragma once
// Where the time of a forward pass went, by layer and node, as docs/protocol.md ("Router control") sends it.
// All figures are sums since the start of the process.

#include <cstdint>
#include <string>
#include <vector>

namespace swarm {

// One node in one layer.
struct CallTrace {
    uint64_t calls      = 0;  // answered with a result
    uint64_t pairs      = 0;
    uint64_t call_ns    = 0;  // from sending to the last byte of the reply
    uint64_t compute_ns = 0;  // of that, as the node measured it
    uint64_t queue_ns   = 0;  // likewise: waited at the node before it was computed
    // Of the rounds in which this node's reply was the last one:
    uint64_t last            = 0;  // how many
    uint64_t last_wait_ns    = 0;  // what they waited in all
    uint64_t last_compute_ns = 0;  // of that, at most: this node computed
    uint64_t last_queue_ns   = 0;
    uint64_t alone_ns        = 0;  // from the reply before it, or from its own request if that was later, to its reply
};

struct LayerTrace {
    uint64_t rounds    = 0;  // layers computed, whatever the number of nodes asked
    uint64_t rows      = 0;
    uint64_t round_ns  = 0;  // from the layer's begin to its end; at least the three below together
    uint64_t encode_ns = 0;  // splitting, and making and handing over the requests
    uint64_t wait_ns   = 0;  // until all replies had come
    uint64_t add_ns    = 0;  // adding them up
    uint64_t trunk_ns  = 0;  // from the end of the layer before in the same pass; 0 for the first layer of a pass
};

struct Trace {
    struct Layer {
        int        layer = 0;
        LayerTrace counters;
    };
    struct Call {
        int       layer = 0;
        size_t    node  = 0;  // index into `nodes`
        CallTrace counters;
    };
    static constexpr size_t max_calls = size_t(1) << 16;  // in one message: some 8 MB of the 16 that a line may have

    uint64_t passes     = 0;  // forward passes begun
    uint64_t between_ns = 0;  // from the last layer of a pass to the first of the next: output, sampling, and idle time
    uint64_t held_ns    = 0;  // waited before a layer because of a hold, or for the first table
    uint64_t left_out   = 0;  // calls beyond max_calls
    std::vector<std::string> nodes;   // of the table in use
    std::vector<Layer>       layers;  // that were computed
    std::vector<Call>        calls;
};

// The JSON object of docs/protocol.md, as the answer to the request `id`.
std::string trace_json(const Trace & trace, uint64_t id);

}  // namespace swarm
