// A layer program as a ggml graph over n_pairs (row, expert) pairs.
#pragma once

#include "common/program.hpp"

#include "ggml.h"

#include <cstdint>
#include <map>
#include <string>

namespace swarm {

struct ProgramShape {
    int64_t n_in  = 0;
    int64_t n_out = 0;
};

// ne of one expert by tensor name. Checks every width of the program; throws ProgramError naming the step.
ProgramShape program_shape(const Program & program, const std::map<std::string, std::vector<int64_t>> & tensors);

struct ProgramGraph {
    ggml_tensor * h      = nullptr;  // f32 [n_in, 1, n_pairs]
    ggml_tensor * ids    = nullptr;  // i32 [1, n_pairs]
    ggml_tensor * weight = nullptr;  // f32 [1, 1, n_pairs]; nullptr when the program does not use it
    ggml_tensor * out    = nullptr;  // f32 [n_out, 1, n_pairs]
    ggml_cgraph * graph  = nullptr;
};

// Memory of the ggml context that the graph of this program is built in.
size_t program_graph_context_bytes(const Program & program);

// weights: [..., n_local] tensors by name.
ProgramGraph build_program_graph(ggml_context * context, const Program & program, const ProgramShape & shape,
                                 const std::map<std::string, ggml_tensor *> & weights, int64_t n_pairs);

}  // namespace swarm
