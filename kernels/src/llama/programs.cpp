#include "llama/programs.hpp"

#include <cinttypes>
#include <cstdio>

#include <nlohmann/json.hpp>

namespace swarm {

ProgramRegistry & ProgramRegistry::instance() {
    static ProgramRegistry registry;
    return registry;
}

void ProgramRegistry::note(const CaptureResult & result) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const Capture & c : result.captures) {
        const auto [known, added] = layers_.emplace(c.layer, c);
        if (!added && known->second.digest != c.digest) {
            refused_.emplace(c.layer, "two graphs of the layer compute different programs");
        }
    }
    if (!result.refusal.empty()) {
        refused_.emplace(result.refused_layer, result.refusal);
    }
}

std::string ProgramRegistry::json() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    using nlohmann::ordered_json;
    ordered_json layers = ordered_json::array();
    for (const auto & [layer, c] : layers_) {
        ordered_json tensors = ordered_json::object();
        for (const auto & [name, tensor] : c.tensors) {
            tensors[name] = { { "type", tensor.type }, { "ne", tensor.ne } };
        }
        char digest[17];
        std::snprintf(digest, sizeof(digest), "%016" PRIx64, c.digest);
        layers.push_back({ { "layer", layer }, { "program", c.program.text() }, { "digest", digest },
                           { "n_expert", c.n_expert }, { "n_used", c.n_used }, { "n_in", c.n_in },
                           { "n_out", c.n_out }, { "tensors", tensors } });
    }
    ordered_json refused = ordered_json::array();
    for (const auto & [layer, reason] : refused_) {
        refused.push_back({ { "layer", layer }, { "reason", reason } });
    }
    const ordered_json document = { { "build", SWARM_BUILD_ID }, { "layers", layers }, { "refused", refused } };
    return document.dump(-1, ' ', false, ordered_json::error_handler_t::replace);
}

}  // namespace swarm
