#pragma once
// One layer's (token, slot) pairs, split into one job per node, and the jobs' replies put together again.

#include "router/caller.hpp"
#include "router/peer.hpp"

#include <cstdint>
#include <deque>
#include <string>
#include <vector>

namespace swarm {

// The part of a layer that one node computes in one call.
struct Job {
    const RoutingTable *     table = nullptr;
    std::vector<int32_t>     slices;           // of the table
    const std::vector<int> * nodes = nullptr;  // that can do it, in order of preference
    bool                     is_uniform = true;  // all its slices have these same nodes
    int                      order      = 0;     // partial sums are added in ascending order
    int                      first_expert = 0;
    int                      last_expert  = 0;

    std::vector<int32_t>       row, expert;  // of each pair
    std::vector<float>         weight;       // of each pair
    std::vector<const float *> h;
    std::vector<int32_t>       token;        // of each row
    Bytes                      y;            // the reply
    std::vector<uint8_t>       kept_reply;   // holds y once the connection is needed for another job

    // How far its call has come.
    enum class State { waiting, connecting, asked, done };
    State             state = State::waiting;
    int               node  = 0;  // asked, or to be asked
    Peer *            peer  = nullptr;
    std::vector<const Peer *> tried;     // that were given their time already
    std::vector<const Peer *> hurried;   // that were given less, since another one was left to be asked
    bool                      is_hurried = false;  // the present attempt
    std::vector<const Peer *> given_up;  // not to be asked again for this job
    Clock::time_point begun{}, deadline{}, asked_at{};
    uint64_t          id = 0;
    std::string       problem;    // what went wrong last

    void clear_pairs() {
        row.clear();
        expert.clear();
        weight.clear();
        h.clear();
        token.clear();
    }
    size_t n_pairs() const { return expert.size(); }
    size_t n_rows() const { return token.size(); }
};

class LayerSplit {
  public:
    // Checks ids and makes the jobs. `input` and `table` must outlive the use of the jobs.
    bool build(const LayerInput & input, const RoutingTable & table, const PeerSet & peers, Failure & failure);

    // Of a job whose slices have different nodes, leaves those with the nodes of the first one and makes new jobs of
    // the others, so that each can go to a node of its own.
    void separate(size_t job);

    // The table of jobs from now on. It holds the layer's experts as the one before does, and must outlive the jobs.
    void follow(const RoutingTable & table);

    // Makes new jobs of a job's pairs, for the nodes that hold them now. The job itself is done then, and empty.
    void replan(size_t job, const PeerSet & peers, Clock::time_point now);

    // Adds the replies: `rows` in slot order, `sum` in slice order, never in order of arrival.
    bool combine(float * out, Failure & failure);

    size_t n_jobs() const { return n_jobs_; }
    Job &  job(size_t index) { return jobs_[index]; }

  private:
    struct Place {
        int32_t job;
        int32_t pair;
    };
    Job & new_job(int32_t slice, int node);
    Job & new_job_from(const Job & former, int32_t slice, int node);
    int   slot_of(int token, int32_t expert) const;
    void  forget_slices();
    void  append(size_t job, int token, int slot, int32_t expert);
    void  add_slice(size_t job, int32_t slice);
    bool  combine_rows(float * out, Failure & failure);
    bool  combine_sums(float * out, Failure & failure);

    const LayerInput *    input_ = nullptr;
    const RoutingTable *  table_ = nullptr;
    std::deque<Job>       jobs_;  // the first n_jobs_ are in use, the others keep their memory
    size_t                n_jobs_ = 0;
    std::vector<int32_t>  job_of_slice_;  // of the layer's slices and their nodes
    std::vector<int32_t>  job_of_node_;
    std::vector<int64_t>  last_token_of_expert_;
    std::vector<Place>    places_;  // of each (token, slot)
    std::vector<uint8_t>  is_written_;
    std::vector<uint32_t> sequence_;
};

}  // namespace swarm
