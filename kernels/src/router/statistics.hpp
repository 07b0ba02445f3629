#pragma once
// What the router has asked of its nodes, as docs/protocol.md ("Router control") sends it.

#include <cstdint>
#include <string>
#include <vector>

namespace swarm {

struct NodeStatistics {
    std::string name;
    uint64_t    calls          = 0;  // answered with a result
    uint64_t    pairs          = 0;
    uint64_t    bytes_sent     = 0;
    uint64_t    bytes_received = 0;
    uint64_t    call_us        = 0;  // all calls together, from sending to the last byte of the reply
    uint64_t    compute_us     = 0;  // all calls together, as the node measured it
    double      call_us_ewma   = 0;
};

struct LayerStatistics {
    int      layer  = 0;
    uint64_t rounds = 0;  // layers computed, whatever the number of nodes asked
};

struct Statistics {
    uint64_t                     calls    = 0;  // answered with a result, by all nodes ever in a table
    uint64_t                     failures = 0;  // layers that could not be computed
    std::vector<NodeStatistics>  nodes;         // of the table in use
    std::vector<LayerStatistics> layers;
};

// The JSON object of docs/protocol.md; with a `type` field if one is given.
std::string statistics_json(const Statistics & statistics, const std::string & type = std::string());

}  // namespace swarm
