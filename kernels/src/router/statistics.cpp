#include "router/statistics.hpp"

#include <nlohmann/json.hpp>

namespace swarm {

std::string statistics_json(const Statistics & statistics, const std::string & type) {
    nlohmann::json nodes  = nlohmann::json::array();
    nlohmann::json layers = nlohmann::json::array();
    for (const NodeStatistics & node : statistics.nodes) {
        const double n = node.calls ? double(node.calls) : 1.0;
        nodes.push_back({{"name", node.name},
                         {"calls", node.calls},
                         {"pairs", node.pairs},
                         {"bytes_sent", node.bytes_sent},
                         {"bytes_received", node.bytes_received},
                         {"call_us_mean", double(node.call_us) / n},
                         {"compute_us_mean", double(node.compute_us) / n}});
    }
    for (const LayerStatistics & layer : statistics.layers) {
        layers.push_back({{"layer", layer.layer}, {"rounds", layer.rounds}});
    }
    nlohmann::json object = {
        {"calls", statistics.calls}, {"failures", statistics.failures}, {"nodes", nodes}, {"layers", layers}};
    if (!type.empty()) {
        object["type"] = type;
    }
    return object.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

}  // namespace swarm
