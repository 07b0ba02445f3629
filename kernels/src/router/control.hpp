#pragma once
// The control channel between the router's agent and the Swarm backend: docs/protocol.md, "Router control".

#include "router/caller.hpp"
#include "router/routing.hpp"
#include "router/statistics.hpp"
#include "router/trace.hpp"

#include <functional>
#include <memory>
#include <string>

namespace swarm {

class ControlChannel {
  public:
    struct Handlers {
        // All are called on the channel's own thread, until the destructor returns.
        std::function<std::string(std::shared_ptr<const RoutingTable>)> on_table;  // empty: in use now; else why not
        std::function<Statistics()>                                     statistics;
        std::function<void(const std::string &)>                        on_problem;  // for the log; may be empty
        std::function<void(double)>                                     on_hold;     // ms from now, 0: none any more
        std::function<Trace()>                                          trace;
    };
    static constexpr int    max_hold_ms    = 2000;
    static constexpr size_t max_line_bytes = size_t(16) << 20;
    static constexpr size_t max_failures   = 256;  // kept for an agent that does not read; the oldest go first
    static constexpr size_t max_answers    = 256;  // about tables; likewise

    // `address`: unix:/path or HOST:PORT. Connects, and connects again whenever the agent went away, for ever.
    // Null: `problem` says what is wrong with the address, or why there is no thread.
    static std::unique_ptr<ControlChannel> start(const std::string & address, const std::string & build_id,
                                                 Handlers handlers, std::string & problem);
    ~ControlChannel();
    ControlChannel(const ControlChannel &)             = delete;
    ControlChannel & operator=(const ControlChannel &) = delete;

    // From any thread; never waits for the agent.
    void   report(const Failure & failure);
    size_t n_dropped() const;  // failures that were never sent

  private:
    struct Impl;
    explicit ControlChannel(std::unique_ptr<Impl> impl);
    std::unique_ptr<Impl> impl_;
};

}  // namespace swarm
