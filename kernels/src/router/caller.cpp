#include "router/caller.hpp"

#include "router/exchange.hpp"
#include "router/hold.hpp"
#include "router/newest_table.hpp"

#include <mutex>

namespace swarm {

namespace {
constexpr std::chrono::milliseconds first_table_wait{5000};  // the agent sends it when the control channel opens
}

struct Caller::Impl {
    std::mutex  call_mutex;  // one layer at a time; guards everything but the table, the hold and the counters
    PeerSet     peers;
    NewestTable newest;
    Hold        hold;
    Exchange    exchange;
    LayerSplit  split;
    std::shared_ptr<const RoutingTable> followed;  // the table that `peers` belongs to

    explicit Impl(std::chrono::microseconds poll_limit) : exchange(peers, newest, poll_limit) {}

    bool compute(const LayerInput & input, float * out, Failure & failure);
};

bool Caller::Impl::compute(const LayerInput & input, float * out, Failure & failure) {
    const Hold::Passed passed = hold.pass();
    Round              round;
    round.entered = passed.from;
    round.begun   = passed.to;
    auto current  = newest.get();
    if (!current) {
        current     = newest.wait(first_table_wait);
        round.begun = Clock::now();
    }
    if (!current) {
        failure.layer     = input.layer;
        failure.reason    = "no routing table came: the agent has not yet said which node holds which experts";
        failure.waited_ms = double(first_table_wait.count());
        return false;
    }
    if (current != followed) {
        peers.follow(*current);
        followed = current;
    }
    const bool computed = split.build(input, *current, peers, failure) &&
                          exchange.run(input, current, split, round, failure) && split.combine(out, failure);
    followed            = current;
    round.ended         = Clock::now();
    if (computed) {
        peers.count_round(input.layer, input.n_tokens, round);
    }
    return computed;
}

Caller::Caller(const std::string & call_key, std::chrono::microseconds poll_limit)
    : impl_(std::make_unique<Impl>(poll_limit)) {
    impl_->peers.set_call_key(call_key);
}

Caller::~Caller() = default;

bool Caller::set_table(std::shared_ptr<const RoutingTable> table) { return impl_->newest.set(std::move(table)); }

std::shared_ptr<const RoutingTable> Caller::table() const { return impl_->newest.get(); }

void Caller::hold(double ms) { impl_->hold.begin(ms); }

bool Caller::ffn(const LayerInput & input, float * out, Failure & failure) {
    const std::lock_guard<std::mutex> lock(impl_->call_mutex);
    failure       = Failure();
    bool computed = false;
    try {
        computed = impl_->compute(input, out, failure);
    } catch (const std::exception & error) {  // out of memory; the callers are C code
        failure.layer  = input.layer;
        failure.reason = std::string("the call could not be made: ") + error.what();
        impl_->peers.abandon_calls();
    }
    impl_->peers.forget_replies();
    if (!computed) {
        impl_->peers.count_failure();
    }
    return computed;
}

Statistics Caller::statistics() const { return impl_->peers.statistics(); }

Trace Caller::trace() const { return impl_->peers.trace(); }

}  // namespace swarm
