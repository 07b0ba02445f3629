#include "peer.hpp"

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
constexpr double ewma_weight         = 0.2;

void blend(double & average, double sample, bool measured) {
    average = measured ? average + ewma_weight * (sample - average) : sample;
}

}  // namespace

double Peer::deadline_ms(uint64_t n_pairs, double floor_ms) const {
    const double ms = measured_ ? std::max(floor_ms, deadline_multiple * (round_trip_us_ + double(n_pairs) * pair_us_) / 1000)
                                : floor_ms + double(n_pairs) * unmeasured_pair_ms;
    return std::min(ms, std::max(floor_ms, longest_deadline_ms));
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
        if (found != former.end() && found->second && found->second->node.host == node.host && found->second->node.port == node.port) {
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

int PeerSet::preferred(const RoutingTable::Slice & slice, Clock::time_point now, const std::vector<const Peer *> & given_up) const {
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

void PeerSet::count_call(Peer & peer, uint64_t n_pairs, double call_us, double compute_us) {
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
}

void PeerSet::count_bytes(Peer & peer) {
    const std::lock_guard<std::mutex> lock(mutex_);
    peer.statistics.bytes_sent     = peer.bytes_sent_before + peer.socket.bytes_sent();
    peer.statistics.bytes_received = peer.bytes_received_before + peer.socket.bytes_received();
}

void PeerSet::count_layer(int layer, bool computed) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!computed) {
        failures_++;
        return;
    }
    if (rounds_.size() <= size_t(layer)) {
        rounds_.resize(size_t(layer) + 1);
    }
    rounds_[size_t(layer)]++;
}

Statistics PeerSet::statistics() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    Statistics result;
    result.calls    = calls_;
    result.failures = failures_;
    for (const auto & peer : peers_) {
        result.nodes.push_back(peer->statistics);
    }
    for (size_t layer = 0; layer < rounds_.size(); layer++) {
        if (rounds_[layer] > 0) {
            result.layers.push_back({int(layer), rounds_[layer]});
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
