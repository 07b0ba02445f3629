#include "router/peer.hpp"

#include <algorithm>
#include <string>
#include <unordered_map>

namespace swarm {

namespace {

constexpr double first_backoff_ms    = 20;
constexpr double longest_backoff_ms  = 250;
constexpr double first_avoid_ms      = 5000;   // a silent node costs a whole deadline each time it is tried
constexpr double longest_avoid_ms    = 60000;
constexpr double unmeasured_pair_ms  = 5;
constexpr double deadline_multiple   = 10;
constexpr double longest_deadline_ms = 600000;
constexpr double shortest_patience_ms =
    250;  // a busy machine may be that late; to ask another node for nothing costs a connection
constexpr double ewma_weight         = 0.2;

uint64_t ns(Clock::duration time) {
    return uint64_t(std::max<int64_t>(0, std::chrono::duration_cast<std::chrono::nanoseconds>(time).count()));
}

uint64_t ns(double us) { return uint64_t(us * 1000); }

CallTrace & of_layer(Peer & peer, int layer) {
    if (peer.trace.size() <= size_t(layer)) {
        peer.trace.resize(size_t(layer) + 1);
    }
    return peer.trace[size_t(layer)];
}

void blend(double & average, double sample, bool measured) {
    average = measured ? average + ewma_weight * (sample - average) : sample;
}

}  // namespace

double Peer::deadline_ms(uint64_t n_pairs, double floor_ms) const {
    const double ms = measured_
                          ? std::max(floor_ms, deadline_multiple * (round_trip_us_ + double(n_pairs) * pair_us_) / 1000)
                          : floor_ms + double(n_pairs) * unmeasured_pair_ms;
    return std::min(ms, std::max(floor_ms, longest_deadline_ms));
}

double Peer::patience_ms(uint64_t n_pairs, double floor_ms) const {
    return measured_ ? deadline_ms(n_pairs, std::min(floor_ms, shortest_patience_ms)) : deadline_ms(n_pairs, floor_ms);
}

void Peer::answered(double call_us, double compute_us, double queue_us, uint64_t n_pairs) {
    blend(round_trip_us_, std::max(0.0, call_us - compute_us - queue_us), measured_);
    blend(pair_us_, std::max(0.0, call_us - queue_us) / double(std::max<uint64_t>(n_pairs, 1)), measured_);
    measured_    = true;
    backoff_ms_  = 0;
    avoid_ms_    = 0;
    next_attempt = avoid_until = {};
}

void Peer::troubled(Clock::time_point now) {
    backoff_ms_  = backoff_ms_ == 0 ? first_backoff_ms : std::min(2 * backoff_ms_, longest_backoff_ms);
    next_attempt = after_ms(now, backoff_ms_);
}

void Peer::missed_deadline(Clock::time_point now) {
    avoid_ms_   = avoid_ms_ == 0 ? first_avoid_ms : std::min(2 * avoid_ms_, longest_avoid_ms);
    avoid_until = after_ms(now, avoid_ms_);
}

void PeerSet::follow(const RoutingTable & table) {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::unordered_map<std::string, std::unique_ptr<Peer>> former;
    for (auto & peer : peers_) {
        former.emplace(peer->node.name, std::move(peer));
    }
    peers_.clear();
    for (const RoutingTable::Node & node : table.nodes()) {
        const auto found = former.find(node.name);
        if (found != former.end() && found->second && found->second->node.host == node.host &&
            found->second->node.port == node.port) {
            peers_.push_back(std::move(found->second));
            continue;
        }
        auto        peer = std::make_unique<Peer>();
        std::string problem;
        peer->node = node;
        peer->socket.set_call_key(call_key_);
        parse_address(node.host, node.port, peer->address, problem);  // the table checked that it can be parsed
        if (found != former.end() && found->second) {
            peer->statistics                = found->second->statistics;  // restarted elsewhere: its counters go on
            peer->trace                     = found->second->trace;
            peer->bytes_sent_before         = peer->statistics.bytes_sent;
            peer->bytes_received_before     = peer->statistics.bytes_received;
        }
        peer->statistics.name = node.name;
        peers_.push_back(std::move(peer));
    }
    for (auto & entry : former) {
        if (entry.second) {
            former_.push_back(std::move(entry.second));
        }
    }
}

int PeerSet::preferred(const RoutingTable::Slice & slice, Clock::time_point now,
                       const std::vector<const Peer *> & given_up) const {
    int second_best = -1;
    for (const int node : slice.nodes) {
        const Peer * const peer = peers_[size_t(node)].get();
        if (std::find(given_up.begin(), given_up.end(), peer) != given_up.end()) {
            continue;
        }
        if (!peer->is_avoided(now)) {
            return node;
        }
        second_best = second_best < 0 ? node : second_best;
    }
    return second_best < 0 ? slice.nodes.front() : second_best;
}

void PeerSet::count_call(Peer & peer, int layer, uint64_t n_pairs, double call_us, double compute_us, double queue_us) {
    const std::lock_guard<std::mutex> lock(mutex_);
    NodeStatistics & counters = peer.statistics;
    blend(counters.call_us_ewma, call_us, counters.calls > 0);
    calls_++;
    counters.calls++;
    counters.pairs += n_pairs;
    counters.call_us += uint64_t(call_us);
    counters.compute_us += uint64_t(compute_us);
    counters.bytes_sent     = peer.bytes_sent_before + peer.socket.bytes_sent();
    counters.bytes_received = peer.bytes_received_before + peer.socket.bytes_received();
    CallTrace & trace = of_layer(peer, layer);
    trace.calls++;
    trace.pairs += n_pairs;
    trace.call_ns += ns(call_us);
    trace.compute_ns += ns(compute_us);
    trace.queue_ns += ns(queue_us);
}

void PeerSet::count_bytes(Peer & peer) {
    const std::lock_guard<std::mutex> lock(mutex_);
    peer.statistics.bytes_sent     = peer.bytes_sent_before + peer.socket.bytes_sent();
    peer.statistics.bytes_received = peer.bytes_received_before + peer.socket.bytes_received();
}

void PeerSet::count_round(int layer, int n_rows, const Round & round) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (layers_.size() <= size_t(layer)) {
        layers_.resize(size_t(layer) + 1);
    }
    LayerTrace & counters = layers_[size_t(layer)];
    counters.rounds++;
    counters.rows += uint64_t(n_rows);
    counters.round_ns += ns(round.ended - round.begun);
    if (round.asked != Clock::time_point{}) {
        counters.encode_ns += ns(round.asked - round.begun);
        counters.wait_ns += ns(round.waited);
        counters.add_ns += ns(round.ended - round.replied);
    }
    held_ns_ += ns(round.begun - round.entered);
    // A pass goes through the layers in ascending order.
    if (last_layer_ >= 0 && layer > last_layer_) {
        counters.trunk_ns += ns(round.entered - last_ended_);
    } else {
        passes_++;
        between_ns_ += last_layer_ >= 0 ? ns(round.entered - last_ended_) : 0;
    }
    last_layer_ = layer;
    last_ended_ = round.ended;
    if (round.last_peer != nullptr) {
        CallTrace &    trace   = of_layer(*round.last_peer, layer);
        const uint64_t wait    = ns(round.waited);
        const uint64_t compute = std::min(ns(round.last_compute_us), wait);
        trace.last++;
        trace.last_wait_ns += wait;
        trace.last_compute_ns += compute;
        trace.last_queue_ns += std::min(ns(round.last_queue_us), wait - compute);
        trace.alone_ns += ns(round.last_reply_at - std::max(round.reply_before_at, round.last_asked_at));
    }
}

void PeerSet::count_failure() {
    const std::lock_guard<std::mutex> lock(mutex_);
    failures_++;
    last_layer_ = -1;
}

Statistics PeerSet::statistics() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    Statistics result;
    result.calls    = calls_;
    result.failures = failures_;
    for (const auto & peer : peers_) {
        result.nodes.push_back(peer->statistics);
    }
    for (size_t layer = 0; layer < layers_.size(); layer++) {
        if (layers_[layer].rounds > 0) {
            result.layers.push_back({int(layer), layers_[layer].rounds});
        }
    }
    return result;
}

Trace PeerSet::trace() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    Trace result;
    result.passes     = passes_;
    result.between_ns = between_ns_;
    result.held_ns    = held_ns_;
    for (size_t layer = 0; layer < layers_.size(); layer++) {
        if (layers_[layer].rounds > 0) {
            result.layers.push_back({int(layer), layers_[layer]});
        }
    }
    for (size_t node = 0; node < peers_.size(); node++) {
        result.nodes.push_back(peers_[node]->node.name);
        for (size_t layer = 0; layer < peers_[node]->trace.size(); layer++) {
            const CallTrace & counters = peers_[node]->trace[layer];
            if (counters.calls > 0 && result.calls.size() < Trace::max_calls) {
                result.calls.push_back({int(layer), node, counters});
            } else {
                result.left_out += counters.calls > 0;
            }
        }
    }
    return result;
}

void PeerSet::abandon_calls() {
    for (auto & peer : peers_) {
        if (peer->asking) {
            peer->socket.close("its call was abandoned");
            peer->asking = nullptr;
            count_bytes(*peer);
        }
    }
    former_.clear();
}

void PeerSet::forget_replies() {
    for (auto & peer : peers_) {
        if (peer->holder) {
            peer->socket.release_message();
            peer->holder = nullptr;
        }
    }
    former_.clear();
}

}  // namespace swarm
