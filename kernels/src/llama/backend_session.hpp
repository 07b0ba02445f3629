// What the Swarm backend keeps for the life of the process: routing table, connections, control channel, statistics.
#pragma once

#include "router/caller.hpp"
#include "llama/capture.hpp"
#include "router/control.hpp"

#include <memory>
#include <string>

namespace swarm {

class BackendSession {
  public:
    // Reads SWARM_TABLE, SWARM_CONTROL and SWARM_STATS at first use.
    static BackendSession & instance();

    // One layer of one graph; false when the decode must fail, which was reported then.
    bool compute(const Capture & layer);

    void report_refusal(int layer, const std::string & reason);

    void write_stats() const;

  private:
    BackendSession();
    std::string use_table(std::shared_ptr<const RoutingTable> table);
    void        report(const Failure & failure);

    std::unique_ptr<Caller>         caller_;
    std::unique_ptr<ControlChannel> control_;
    std::string                     stats_path_;
};

}  // namespace swarm
