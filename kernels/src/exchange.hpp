#pragma once
// Carries out the jobs of one layer: all nodes at once, in one poll() loop, with deadlines and retries.

#include "split.hpp"

#include <poll.h>

#include <vector>

namespace swarm {

class Exchange {
  public:
    explicit Exchange(PeerSet & peers) : peers_(peers) {}

    // True: every job is done, and its y has the right size and points to memory that stays until
    // PeerSet::forget_replies(). False: `failure` is set, and no call is under way any more.
    bool run(const LayerInput & input, const RoutingTable & table, LayerSplit & split, Failure & failure);

  private:
    // All return false when the layer has failed.
    bool advance(size_t index, Clock::time_point now);
    bool take_reply(size_t index, Clock::time_point now);
    bool take_error(size_t index, const struct Reply & reply, Clock::time_point now);
    bool ask(Job & job, Clock::time_point now);
    bool broken(size_t index, const std::string & problem, Clock::time_point now);
    bool late(size_t index, Clock::time_point now);
    bool next_node(size_t index, Clock::time_point now);
    bool fail(const Job & job, const std::string & reason, Clock::time_point now);
    bool wait(Clock::time_point now);

    void   begin(Job & job, int node, Clock::time_point now);
    void   connect(Job & job);
    size_t reply_bytes(const Job & job) const;

    PeerSet &            peers_;
    const LayerInput *   input_   = nullptr;
    const RoutingTable * table_   = nullptr;
    LayerSplit *         split_   = nullptr;
    Failure *            failure_ = nullptr;
    uint64_t             next_id_ = 1;
    std::string          problem_;
    std::vector<pollfd>  polled_;
    std::vector<Peer *>  polled_peers_;
};

}  // namespace swarm
