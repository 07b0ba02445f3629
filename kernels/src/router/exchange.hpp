#pragma once
// Carries out the jobs of one layer: all nodes at once, in one poll() loop, with deadlines and retries.

#include "common/brief_poll.hpp"
#include "router/newest_table.hpp"
#include "router/split.hpp"

#include <poll.h>

#include <memory>
#include <vector>

namespace swarm {

class Exchange {
  public:
    // poll_limit: for how long it looks for replies before it sleeps.
    Exchange(PeerSet & peers, const NewestTable & newest, std::chrono::microseconds poll_limit)
        : peers_(peers), newest_(newest), poll_(poll_limit) {}

    // True: every job is done, and its y has the right size and points to memory that stays until
    // PeerSet::forget_replies(). False: `failure` is set, and no call is under way any more.
    // Each attempt at a job uses one table. `split` and the peers belong to `table`; where a job fails and a newer
    // table has come that fits, all three go over to that one, and the job's pairs to the nodes that it names. `round`:
    // gets the times from the first wait to the last reply.
    bool run(const LayerInput & input, std::shared_ptr<const RoutingTable> & table, LayerSplit & split, Round & round,
             Failure & failure);

  private:
    // All return false when the layer has failed.
    bool advance(size_t index, Clock::time_point now);
    bool take_reply(size_t index, Clock::time_point now);
    bool take_error(size_t index, const struct Reply & reply, Clock::time_point now);
    bool ask(Job & job, Clock::time_point now);
    bool broken(size_t index, const std::string & problem, Clock::time_point now);
    bool late(size_t index, Clock::time_point now);
    bool next_node(size_t index, Clock::time_point now);
    bool other_node(size_t index, Clock::time_point now);
    bool replan(size_t index, Clock::time_point now);
    bool fail(const Job & job, const std::string & reason, Clock::time_point now);
    bool wait(Clock::time_point now);

    void   begin(Job & job, int node, Clock::time_point now);
    void   connect(Job & job);
    bool   is_of_former_table(const Job & job);
    size_t reply_bytes(const Job & job) const;

    PeerSet &            peers_;
    const NewestTable &  newest_;
    const LayerInput *   input_   = nullptr;
    LayerSplit *         split_   = nullptr;
    std::shared_ptr<const RoutingTable> *            table_ = nullptr;
    std::vector<std::shared_ptr<const RoutingTable>> former_tables_;  // of jobs that are still under way
    Round *              round_   = nullptr;
    Failure *            failure_ = nullptr;
    uint64_t             next_id_ = 1;
    std::string          problem_;
    std::vector<pollfd>  polled_;
    std::vector<Peer *>  polled_peers_;
    BriefPoll            poll_;
};

}  // namespace swarm
