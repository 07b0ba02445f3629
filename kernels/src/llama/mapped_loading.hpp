// Has llama.cpp load a model without reading the experts that the swarm computes.
//
// Without a mapping (--load-mode none) llama.cpp reads every tensor and hands it to its buffer, and ours throws it
// away: 70 GB of disk to start a trunk of 4 GB, and holes of a sparse file are read, and cached, like anything else.
// With one (mmap) it passes a pointer, which our buffer never follows; but it has the kernel read the whole file first,
// and leaves the trunk in the mapping, between the experts. So the mapping is to be made without reading ahead, as
// llama.cpp makes it on machines of several NUMA nodes, and the trunk is to be copied out of it, as for a device that
// cannot use host memory. Both are answers of ggml's registry, and this gives them for it. llama.cpp's files:
// src/llama-model-loader.cpp (init_mappings), src/llama-mmap.cpp, src/llama-model.cpp (load_tensors).

#pragma once

namespace swarm {

// For this process, from now on; once. Only for one whose routed experts are all in our buffer type: what else is
// loaded is copied.
void load_without_experts();

// The mappings of model files are read from begin to end, where the system lets us find them (Linux): llama.cpp's NUMA
// case asks for single pages. Called when the first buffer is made, which is after the mapping and before the reading.
void read_ahead_in_mappings();

}  // namespace swarm
