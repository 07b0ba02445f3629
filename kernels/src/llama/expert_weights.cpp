#include "llama/expert_weights.hpp"

#include "llama/mapped_loading.hpp"

#include <sys/mman.h>

#include <cstring>
#include <mutex>

namespace swarm {

namespace {

bool holds_weights(ggml_backend_buffer_t buffer) { return buffer->usage == GGML_BACKEND_BUFFER_USAGE_WEIGHTS; }

std::set<std::string> & names() {
    static std::set<std::string> instance;
    return instance;
}

std::mutex & names_mutex() {
    static std::mutex instance;
    return instance;
}

const char * get_name(ggml_backend_buffer_type_t) { return "Swarm"; }

void free_buffer(ggml_backend_buffer_t buffer) { munmap(buffer->context, buffer->size); }

void * get_base(ggml_backend_buffer_t buffer) { return buffer->context; }

void memset_tensor(ggml_backend_buffer_t buffer, ggml_tensor * tensor, uint8_t value, size_t offset, size_t size) {
    if (!holds_weights(buffer)) {
        std::memset(static_cast<char *>(tensor->data) + offset, value, size);
    }
}

void set_tensor(ggml_backend_buffer_t buffer, ggml_tensor * tensor, const void * data, size_t offset, size_t size) {
    if (!holds_weights(buffer)) {
        std::memcpy(static_cast<char *>(tensor->data) + offset, data, size);
        return;
    }
    const std::lock_guard<std::mutex> lock(names_mutex());
    names().insert(tensor->name);
}

void get_tensor(ggml_backend_buffer_t, const ggml_tensor * tensor, void * data, size_t offset, size_t size) {
    std::memcpy(data, static_cast<const char *>(tensor->data) + offset, size);
}

void clear(ggml_backend_buffer_t buffer, uint8_t value) {
    // Fresh anonymous memory is zero already; writing zeros would commit it.
    if (value != 0) {
        std::memset(buffer->context, value, buffer->size);
    }
}

ggml_backend_buffer_t alloc_buffer(ggml_backend_buffer_type_t type, size_t size) {
    // The experts' address space may exceed memory and swap many times over: reserved, never committed.
    void * address =
        mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (address == MAP_FAILED) {
        return nullptr;
    }
    read_ahead_in_mappings();
    ggml_backend_buffer_i interface = {};
    interface.free_buffer   = free_buffer;
    interface.get_base      = get_base;
    interface.memset_tensor = memset_tensor;
    interface.set_tensor    = set_tensor;
    interface.get_tensor    = get_tensor;
    interface.clear         = clear;
    return ggml_backend_buffer_init(type, interface, address, size);
}

size_t get_alignment(ggml_backend_buffer_type_t) { return 64; }

// Not host memory to llama.cpp: its loader would read the weights straight into it.
bool is_host(ggml_backend_buffer_type_t) { return false; }

ggml_backend_buffer_type * instance() {
    static ggml_backend_buffer_type type = {
        { get_name, alloc_buffer, get_alignment, nullptr, nullptr, is_host }, nullptr, nullptr
    };
    return &type;
}

}  // namespace

ggml_backend_buffer_type_t expert_weights_buffer_type(ggml_backend_dev_t device) {
    instance()->device = device;
    return instance();
}

bool is_expert_weight(const ggml_tensor * tensor) {
    return tensor != nullptr && tensor->op == GGML_OP_NONE && tensor->view_src == nullptr &&
           tensor->buffer != nullptr && tensor->buffer->buft == instance() && holds_weights(tensor->buffer);
}

std::set<std::string> expert_weight_names() {
    const std::lock_guard<std::mutex> lock(names_mutex());
    return names();
}

}  // namespace swarm
