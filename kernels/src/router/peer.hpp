#pragma once
// The nodes of the routing table as the router knows them: connection, speed, back-off, counters.

#include "router/routing.hpp"
#include "router/statistics.hpp"
#include "router/trace.hpp"
#include "router/websocket.hpp"

#include <chrono>
#include <memory>
#include <mutex>
#include <vector>

namespace swarm {

using Clock = std::chrono::steady_clock;

inline double ms_between(Clock::time_point from, Clock::time_point to) {
    return std::chrono::duration<double, std::milli>(to - from).count();
}

inline Clock::time_point after_ms(Clock::time_point from, double ms) {
    return from + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double, std::milli>(ms));
}

struct Job;
struct Peer;

// When one layer's round came how far, and whose reply was the last.
struct Round {
    Clock::time_point entered{};  // before holds
    Clock::time_point begun{};
    Clock::time_point asked{};    // nothing was left to do but to wait; never, if nobody was asked
    Clock::time_point replied{};  // the last reply was there
    Clock::time_point ended{};
    Clock::duration   waited{};

    Peer *            last_peer = nullptr;
    Clock::time_point last_asked_at{}, last_reply_at{}, reply_before_at{};
    double            last_compute_us = 0, last_queue_us = 0;

    // Replies are noted in the order in which they are read; those that came in together have the same time.
    void note_reply(Peer & peer, Clock::time_point asked_at, Clock::time_point now, double compute_us,
                    double queue_us) {
        reply_before_at = last_reply_at;
        last_peer       = &peer;
        last_asked_at   = asked_at;
        last_reply_at   = now;
        last_compute_us = compute_us;
        last_queue_us   = queue_us;
    }
};

struct Peer {
    RoutingTable::Node node;
    Address            address;
    WebSocket          socket;
    Job *              asking = nullptr;  // its call is under way on the socket, or the connection for it
    Job *              holder = nullptr;  // its reply lies in the socket's buffer
    Clock::time_point  next_attempt{};    // not before: back-off after a broken connection or a refusal
    Clock::time_point  avoid_until{};     // other holders of a slice are preferred: a deadline was missed

    // Time this node may take for a call: 10 times what its past calls lead to expect, and never under the floor.
    double deadline_ms(uint64_t n_pairs, double floor_ms) const;

    // As above, where another node can be asked instead: under the floor as well.
    double patience_ms(uint64_t n_pairs, double floor_ms) const;

    void answered(double call_us, double compute_us, double queue_us, uint64_t n_pairs);
    void troubled(Clock::time_point now);
    void missed_deadline(Clock::time_point now);
    bool is_avoided(Clock::time_point now) const { return now < next_attempt || now < avoid_until; }

    NodeStatistics         statistics;  // guarded by PeerSet's mutex
    std::vector<CallTrace> trace;       // likewise; by layer, as far as it was asked
    uint64_t       bytes_sent_before     = 0;  // through the sockets of former addresses
    uint64_t       bytes_received_before = 0;

  private:
    bool   measured_      = false;
    double round_trip_us_ = 0;  // what a call costs besides computing and queueing
    double pair_us_       = 0;  // whole call divided by its pairs: also right for a link slower than the node
    double backoff_ms_    = 0;
    double avoid_ms_      = 0;
};

class PeerSet {
  public:
    // Proved whenever a connection is opened from now on; see WebSocket::set_call_key.
    void set_call_key(const std::string & key) { call_key_ = key; }

    // Peers of the table's nodes, in its order. A node of the same name, host and port stays connected; the others are
    // kept until forget_replies(), as a layer that is being computed may have calls or replies there.
    void follow(const RoutingTable & table);

    Peer & at(int node) { return *peers_[size_t(node)]; }

    // The node of the slice to be asked first: none of `given_up`, if another is left.
    int preferred(const RoutingTable::Slice & slice, Clock::time_point now,
                  const std::vector<const Peer *> & given_up = {}) const;

    void count_call(Peer & peer, int layer, uint64_t n_pairs, double call_us, double compute_us, double queue_us);
    void count_bytes(Peer & peer);
    void count_round(int layer, int n_rows, const Round & round);
    void count_failure();
    Statistics statistics() const;
    Trace      trace() const;

    // Ends every call under way by closing its connection; a late reply then meets nobody.
    void abandon_calls();
    void forget_replies();

  private:
    std::string                        call_key_;
    std::vector<std::unique_ptr<Peer>> peers_;
    std::vector<std::unique_ptr<Peer>> former_;  // of tables before; the calling thread's alone
    mutable std::mutex                 mutex_;  // peers_ itself and all counters
    uint64_t                           calls_    = 0;
    uint64_t                           failures_ = 0;
    std::vector<LayerTrace>            layers_;
    uint64_t                           passes_     = 0;
    uint64_t                           between_ns_ = 0;
    uint64_t                           held_ns_    = 0;
    int last_layer_ = -1;  // of the pass under way; -1: before the first and after a failure
    Clock::time_point                  last_ended_{};
};

}  // namespace swarm
