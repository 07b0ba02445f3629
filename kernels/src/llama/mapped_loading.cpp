#include "llama/mapped_loading.hpp"

#include "ggml-backend-impl.h"
#include "ggml-backend.h"

#include <sys/mman.h>

#include <cinttypes>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <map>
#include <string>

namespace swarm {

namespace {

using GetFunction = void * (*) (ggml_backend_reg_t, const char *);
using GetProps    = void (*)(ggml_backend_dev_t, ggml_backend_dev_props *);

GetFunction & cpu_function() {
    static GetFunction instance = nullptr;
    return instance;
}

std::map<ggml_backend_dev_t, GetProps> & device_props() {
    static std::map<ggml_backend_dev_t, GetProps> instance;
    return instance;
}

bool is_numa() { return true; }

// Asked for by name, and only by the loader: ggml's own code calls ggml_is_numa().
void * function_of_cpu(ggml_backend_reg_t reg, const char * name) {
    if (std::strcmp(name, "ggml_backend_cpu_is_numa") == 0) {
        return reinterpret_cast<void *>(is_numa);
    }
    return cpu_function()(reg, name);
}

void props_without_mapping(ggml_backend_dev_t device, ggml_backend_dev_props * props) {
    device_props().at(device)(device, props);
    props->caps.buffer_from_host_ptr = false;
}

}  // namespace

void load_without_experts() {
    const ggml_backend_dev_t cpu = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    if (cpu == nullptr || cpu_function() != nullptr) {
        return;
    }
    const ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(cpu);
    cpu_function()               = reg->iface.get_proc_address;
    reg->iface.get_proc_address  = function_of_cpu;
    for (size_t i = 0; i < ggml_backend_dev_count(); ++i) {
        const ggml_backend_dev_t device = ggml_backend_dev_get(i);
        device_props()[device]          = device->iface.get_props;
        device->iface.get_props         = props_without_mapping;
    }
}

void read_ahead_in_mappings() {
    // "address-address r--s offset device inode path"; there is no such file elsewhere than on Linux and Android.
    // llama.cpp is the only one here to map files shared and for reading.
    std::ifstream maps("/proc/self/maps");
    std::string   line;
    while (std::getline(maps, line)) {
        uintptr_t begin = 0, end = 0;
        char      mode[5] = {};
        if (std::sscanf(line.c_str(), "%" SCNxPTR "-%" SCNxPTR " %4s", &begin, &end, mode) == 3 &&
            std::strcmp(mode, "r--s") == 0 && line.find('/') != std::string::npos) {
            // Advice: that it is not taken costs time only.
            (void) posix_madvise(reinterpret_cast<void *>(begin), end - begin, POSIX_MADV_NORMAL);
        }
    }
}

}  // namespace swarm
