// The ggml backend "Swarm": llama.cpp loads it through GGML_BACKEND_PATH and gives it the routed experts of every
// layer, which it has the expert servers compute.

#include "common/environment.hpp"
#include "llama/backend_session.hpp"
#include "llama/capture.hpp"
#include "llama/expert_weights.hpp"
#include "llama/mapped_loading.hpp"
#include "llama/parent_death.hpp"
#include "llama/programs.hpp"

#include "ggml-backend-impl.h"
#include "ggml-impl.h"
#include "ggml.h"

#include <dlfcn.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>

namespace swarm {

namespace {

// Captures by graph: llama.cpp gives the same graph again for every token, and ggml gives each one a number of its own.
class CaptureCache {
  public:
    std::shared_ptr<const CaptureResult> get(ggml_cgraph * graph) {
        if (graph->uid == 0) {
            return std::make_shared<const CaptureResult>(capture(graph));
        }
        const auto it = entries_.find(graph->uid);
        if (it != entries_.end()) {
            return it->second;
        }
        if (entries_.size() >= entries_max) {
            entries_.clear();
        }
        return entries_[graph->uid] = std::make_shared<const CaptureResult>(capture(graph));
    }

  private:
    // Some shapes of a model of 128 layers.
    static constexpr size_t entries_max = 1024;
    std::unordered_map<uint64_t, std::shared_ptr<const CaptureResult>> entries_;
};

const char * backend_name(ggml_backend_t) { return "Swarm"; }

void backend_free(ggml_backend_t backend) {
    delete static_cast<CaptureCache *>(backend->context);
    delete backend;
}

ggml_status graph_compute(ggml_backend_t backend, ggml_cgraph * graph) {
    const auto found = static_cast<CaptureCache *>(backend->context)->get(graph);
    BackendSession & session = BackendSession::instance();
    if (!found->refusal.empty()) {
        session.report_refusal(found->refused_layer, found->refusal);
        return GGML_STATUS_FAILED;
    }
    for (const Capture & layer : found->captures) {
        if (!session.compute(layer)) {
            return GGML_STATUS_FAILED;
        }
    }
    return GGML_STATUS_SUCCESS;
}

void graph_optimize(ggml_backend_t, ggml_cgraph * graph, ggml_backend_graph_optimize_params *) {
    ProgramRegistry::instance().note(capture(graph));
}

ggml_guid_t backend_guid() {
    static ggml_guid guid = { 0x73, 0x77, 0x61, 0x72, 0x6d, 0x2d, 0x6e, 0x6f,
                              0x64, 0x65, 0x2d, 0x67, 0x67, 0x6d, 0x6c, 0x31 };
    return &guid;
}

const char * device_name(ggml_backend_dev_t) { return "Swarm"; }

const char * device_description(ggml_backend_dev_t) { return "experts on other machines"; }

void device_memory(ggml_backend_dev_t, size_t * free, size_t * total) { *free = *total = 0; }

// ACCEL, so that every llama context adds the device by itself.
enum ggml_backend_dev_type device_type(ggml_backend_dev_t) { return GGML_BACKEND_DEVICE_TYPE_ACCEL; }

void device_props(ggml_backend_dev_t device, ggml_backend_dev_props * props) {
    std::memset(props, 0, sizeof(*props));
    props->name        = device_name(device);
    props->description = device_description(device);
    props->type        = device_type(device);
}

ggml_backend_t device_init(ggml_backend_dev_t device, const char *) {
    auto backend = std::make_unique<ggml_backend>();
    backend->guid                 = backend_guid();
    backend->device               = device;
    backend->context              = new CaptureCache;
    backend->iface.get_name       = backend_name;
    backend->iface.free           = backend_free;
    backend->iface.graph_compute  = graph_compute;
    backend->iface.graph_optimize = graph_optimize;
    return backend.release();
}

// A false yes would put weights of the trunk into memory that keeps nothing.
bool device_supports_op(ggml_backend_dev_t, const ggml_tensor * op) {
    return op->op == GGML_OP_NONE ? is_expert_weight(op) : belongs_to_experts(op);
}

bool device_supports_buffer_type(ggml_backend_dev_t device, ggml_backend_buffer_type_t type) {
    return type == expert_weights_buffer_type(device);
}

ggml_backend_reg_t registry();

ggml_backend_device * device() {
    static ggml_backend_device instance = [] {
        ggml_backend_device d = {};
        d.iface.get_name        = device_name;
        d.iface.get_description = device_description;
        d.iface.get_memory      = device_memory;
        d.iface.get_type        = device_type;
        d.iface.get_props       = device_props;
        d.iface.init_backend    = device_init;
        d.iface.get_buffer_type = expert_weights_buffer_type;
        d.iface.supports_op     = device_supports_op;
        d.iface.supports_buft   = device_supports_buffer_type;
        return d;
    }();
    return &instance;
}

const char * registry_name(ggml_backend_reg_t) { return "Swarm"; }

size_t registry_device_count(ggml_backend_reg_t) { return 1; }

ggml_backend_dev_t registry_device(ggml_backend_reg_t reg, size_t) {
    device()->reg = reg;
    return device();
}

const char * programs_json() {
    static std::string text;
    text = ProgramRegistry::instance().json();
    return text.c_str();
}

void * registry_function(ggml_backend_reg_t, const char * name) {
    return std::strcmp(name, "swarm_programs_json") == 0 ? reinterpret_cast<void *>(programs_json) : nullptr;
}

ggml_backend_reg_t registry() {
    static ggml_backend_reg reg = {
        GGML_BACKEND_API_VERSION, { registry_name, registry_device_count, registry_device, registry_function }, nullptr
    };
    return &reg;
}

std::string library_of(const void * function) {
    Dl_info info = {};
    return dladdr(function, &info) != 0 && info.dli_fname != nullptr ? info.dli_fname : "an unknown file";
}

}  // namespace

}  // namespace swarm

// ggml_backend_load() looks for this name. A host of another build has other struct layouts, which no later error
// would explain.
extern "C" __attribute__((visibility("default"))) ggml_backend_reg_t ggml_backend_init() {
    if (std::string(ggml_commit()) != "swarm-" SWARM_BUILD_ID) {
        GGML_LOG_ERROR("%s", ("swarm: build ids differ: the Swarm backend " +
                              swarm::library_of(reinterpret_cast<void *>(&ggml_backend_init)) +
                              " is of build swarm-" SWARM_BUILD_ID ", but ggml in " +
                              swarm::library_of(reinterpret_cast<void *>(&ggml_commit)) + " is of build " +
                              ggml_commit() + "; use the programs and libraries of one swarm-node package\n")
                                 .c_str());
        return nullptr;
    }
    swarm::end_with_parent();
    // A router's engine; its routed experts are all ours. Other programs load as they do without us.
    if (std::getenv(swarm::environment::control) != nullptr) {
        swarm::load_without_experts();
    }
    return swarm::registry();
}
