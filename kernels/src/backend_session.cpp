#include "backend_session.hpp"

#include "expert_weights.hpp"

#include "ggml-impl.h"

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <set>
#include <sstream>

#include <nlohmann/json.hpp>

namespace swarm {

namespace {

std::string environment(const char * name) {
    const char * value = std::getenv(name);
    return value != nullptr ? value : "";
}

std::string describe(const Failure & f) {
    std::string text = "layer " + std::to_string(f.layer);
    if (f.first_expert >= 0) {
        text += ", experts " + std::to_string(f.first_expert) + " to " + std::to_string(f.last_expert);
    }
    return text + (f.node.empty() ? "" : " on node " + f.node) + ": " + f.reason;
}

}  // namespace

BackendSession & BackendSession::instance() {
    // Never destroyed: llama.cpp's own statics may still compute while the process ends.
    static BackendSession * session = new BackendSession;
    return *session;
}

BackendSession::BackendSession() : caller_(std::make_unique<Caller>()), stats_path_(environment("SWARM_STATS")) {
    const std::string table_path = environment("SWARM_TABLE");
    if (!table_path.empty()) {
        std::ifstream     file(table_path);
        std::stringstream text;
        text << file.rdbuf();
        if (!file) {
            GGML_LOG_ERROR("swarm: cannot read the routing table '%s'\n", table_path.c_str());
        } else {
            try {
                caller_->set_table(RoutingTable::parse(text.str()));
            } catch (const std::exception & error) {
                GGML_LOG_ERROR("swarm: routing table '%s': %s\n", table_path.c_str(), error.what());
            }
        }
    }
    const std::string address = environment("SWARM_CONTROL");
    if (!address.empty()) {
        control_ = std::make_unique<ControlChannel>(
            address, SWARM_BUILD_ID, [this](std::shared_ptr<const RoutingTable> table) { caller_->set_table(table); },
            [this] { return caller_->statistics(); });
    }
    if (!stats_path_.empty()) {
        std::atexit([] { BackendSession::instance().write_stats(); });
    }
}

bool BackendSession::compute(const Capture & layer) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto floats = [](size_t bytes) { return bytes / sizeof(float); };
    LayerInput input = {};
    input.layer    = layer.layer;
    input.program  = layer.digest;
    input.n_tokens = static_cast<int>(layer.n_tokens);
    input.n_used   = static_cast<int>(layer.n_used);
    input.n_in     = static_cast<int>(layer.n_in);
    input.n_out    = static_cast<int>(layer.n_out);
    input.input_pair     = layer.program.input_pair;
    input.uses_weight    = layer.weights != nullptr;
    input.h              = static_cast<const float *>(layer.h->data);
    input.h_token_stride = floats(layer.h->nb[2]);
    input.h_slot_stride  = floats(layer.h->nb[1]);
    input.ids              = static_cast<const int32_t *>(layer.ids->data);
    input.ids_token_stride = layer.ids->nb[1] / sizeof(int32_t);
    if (layer.weights != nullptr) {
        input.weights              = static_cast<const float *>(layer.weights->data);
        input.weights_token_stride = floats(layer.weights->nb[2]);
        input.weights_slot_stride  = floats(layer.weights->nb[1]);
    }
    Failure failure;
    if (caller_->ffn(input, static_cast<float *>(layer.out->data), failure)) {
        return true;
    }
    report(failure);
    return false;
}

void BackendSession::report(const Failure & failure) {
    GGML_LOG_ERROR("swarm: %s\n", describe(failure).c_str());
    if (control_) {
        control_->report(failure);
    }
}

void BackendSession::report_refusal(int layer, const std::string & reason) {
    Failure failure;
    failure.layer        = layer;
    failure.first_expert = -1;
    failure.last_expert  = -1;
    failure.reason       = "cannot be served: " + reason;
    report(failure);
}

void BackendSession::write_stats() const {
    nlohmann::ordered_json document = nlohmann::ordered_json::parse(caller_->statistics());
    document["swarm_tensors"]       = expert_weight_names();
    std::ofstream(stats_path_) << document.dump(1) << "\n";
}

}  // namespace swarm
