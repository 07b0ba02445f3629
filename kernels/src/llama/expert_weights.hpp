// The buffer type "Swarm": as weights, address space that keeps nothing; as compute buffer, memory.
#pragma once

#include "ggml-backend-impl.h"

#include <set>
#include <string>

namespace swarm {

ggml_backend_buffer_type_t expert_weights_buffer_type(ggml_backend_dev_t device);

// True for an expert tensor of the model: named to llama.cpp by -ot, held by the expert servers.
bool is_expert_weight(const ggml_tensor * tensor);


// Every expert tensor whose data llama.cpp has offered so far.
std::set<std::string> expert_weight_names();

}  // namespace swarm
