// Reads tensor data from files into device memory.
#pragma once

#include "expert_server/expert_store.hpp"

struct ggml_tensor;

namespace swarm {

// Fills the tensor, whose size is that of all parts together. Throws LoadError naming the path.
void read_tensor(const std::vector<TensorPart> & parts, ggml_tensor * tensor);

}  // namespace swarm
