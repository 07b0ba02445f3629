#include "llama/backend_session.hpp"

#include "common/environment.hpp"
#include "llama/expert_weights.hpp"
#include "router/call_proof.hpp"

#include "ggml-impl.h"

#include <cstdlib>
#include <fstream>

#include <nlohmann/json.hpp>

namespace swarm {

namespace {

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

BackendSession::BackendSession()
    : caller_(std::make_unique<Caller>(parse_call_key(environment::text(environment::call_key)),
                                       environment::poll_limit())),
      stats_path_(environment::text(environment::stats)) {
    const std::string key = environment::text(environment::call_key);
    if (!key.empty() && parse_call_key(key).empty()) {
        GGML_LOG_ERROR("swarm: SWARM_CALL_KEY is not 64 hexadecimal digits; calls prove no key\n");
    }
    const std::string table_path = environment::text(environment::table);
    if (!table_path.empty()) {
        std::string problem;
        const auto  table = RoutingTable::read(table_path, problem);
        if (table == nullptr) {
            GGML_LOG_ERROR("swarm: routing table '%s': %s\n", table_path.c_str(), problem.c_str());
        } else {
            caller_->set_table(table);
        }
    }
    const std::string address = environment::text(environment::control);
    if (!address.empty()) {
        ControlChannel::Handlers handlers;
        handlers.on_table   = [this](std::shared_ptr<const RoutingTable> table) { return use_table(std::move(table)); };
        handlers.on_hold    = [this](double ms) { caller_->hold(ms); };
        handlers.statistics = [this] { return caller_->statistics(); };
        handlers.trace      = [this] { return caller_->trace(); };
        handlers.on_problem = [](const std::string & text) { GGML_LOG_WARN("swarm: %s\n", text.c_str()); };
        std::string problem;
        control_ = ControlChannel::start(address, SWARM_BUILD_ID, std::move(handlers), problem);
        if (!control_) {
            GGML_LOG_ERROR("swarm: control channel '%s': %s\n", address.c_str(), problem.c_str());
        }
    }
    if (!stats_path_.empty()) {
        std::atexit([] { BackendSession::instance().write_stats(); });
    }
}

std::string BackendSession::use_table(std::shared_ptr<const RoutingTable> table) {
    if (caller_->set_table(table)) {
        return std::string();
    }
    const auto used = caller_->table();
    if (!used->newer_than(*table)) {
        return std::string();  // the same: it comes again with every connection
    }
    const auto number = [](const RoutingTable & t) {
        return "term " + std::to_string(t.term) + ", sequence " + std::to_string(t.sequence);
    };
    return "it is older (" + number(*table) + ") than the one in use (" + number(*used) + ")";
}

bool BackendSession::compute(const Capture & layer) {
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
    nlohmann::ordered_json document = nlohmann::ordered_json::parse(statistics_json(caller_->statistics()));
    document["swarm_tensors"]       = expert_weight_names();
    std::ofstream(stats_path_) << document.dump(1) << "\n";
}

}  // namespace swarm
