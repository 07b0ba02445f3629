// Finds the routed-expert subgraph of a layer in a ggml graph and translates it into a layer program.
#pragma once

#include "common/program.hpp"

#include "ggml.h"

#include <map>
#include <memory>
#include <string>
#include <vector>

struct ggml_cgraph;

namespace swarm {

struct ExpertTensor {
    std::string          type;  // as ggml names it
    std::vector<int64_t> ne;    // with the expert dimension last
};

// One layer's routed experts in one graph.
struct Capture {
    int     layer = -1;
    Program program;
    uint64_t digest = 0;
    int64_t n_expert = 0;
    int64_t n_used   = 0;
    int64_t n_tokens = 0;
    int64_t n_in     = 0;
    int64_t n_out    = 0;
    std::map<std::string, ExpertTensor> tensors;  // by name without "blk.N."

    const ggml_tensor * h       = nullptr;  // f32 [n_in, 1 or n_used, n_tokens]
    const ggml_tensor * ids     = nullptr;  // i32 [n_used, n_tokens]
    const ggml_tensor * weights = nullptr;  // f32 [1, n_used, n_tokens]; nullptr when the program does not use them
    ggml_tensor *       out     = nullptr;  // f32 [n_out, n_tokens]
};

struct CaptureResult {
    std::vector<Capture> captures;
    std::string          refusal;  // not empty: the graph holds something that cannot be served, by name
    int                  refused_layer = -1;
};

// nodes: the split of the graph that the scheduler gave to the Swarm backend. Never throws.
CaptureResult capture(ggml_cgraph * graph);

// True when the op belongs to a routed-expert subgraph, that is, must be computed by the Swarm backend.
// Ops that take a value per (token, expert) pair belong there even if the program language lacks them, so that
// capture() can refuse them by name instead of splitting the subgraph silently.
bool belongs_to_experts(const ggml_tensor * op);

}  // namespace swarm
