#include "router/trace.hpp"

#include <nlohmann/json.hpp>

namespace swarm {

std::string trace_json(const Trace & trace, uint64_t id) {
    nlohmann::json layers = nlohmann::json::array();
    nlohmann::json calls  = nlohmann::json::array();
    for (const Trace::Layer & layer : trace.layers) {
        const LayerTrace & c = layer.counters;
        layers.push_back({{"layer", layer.layer},
                          {"rounds", c.rounds},
                          {"rows", c.rows},
                          {"round_ns", c.round_ns},
                          {"encode_ns", c.encode_ns},
                          {"wait_ns", c.wait_ns},
                          {"add_ns", c.add_ns},
                          {"trunk_ns", c.trunk_ns}});
    }
    for (const Trace::Call & call : trace.calls) {
        const CallTrace & c = call.counters;
        calls.push_back({call.layer, call.node, c.calls, c.pairs, c.call_ns, c.compute_ns, c.queue_ns, c.last,
                         c.last_wait_ns, c.last_compute_ns, c.last_queue_ns, c.alone_ns});
    }
    const nlohmann::json object = {{"type", "trace"},
                                   {"id", id},
                                   {"passes", trace.passes},
                                   {"between_ns", trace.between_ns},
                                   {"held_ns", trace.held_ns},
                                   {"left_out", trace.left_out},
                                   {"nodes", trace.nodes},
                                   {"layers", std::move(layers)},
                                   {"calls", std::move(calls)}};
    return object.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

}  // namespace swarm
