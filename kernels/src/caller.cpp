#include "caller.hpp"

#include "exchange.hpp"

#include <condition_variable>
#include <mutex>

namespace swarm {

namespace {
constexpr int first_table_wait_ms = 5000;  // the agent sends it when the control channel opens
}

struct Caller::Impl {
    std::mutex call_mutex;  // one layer at a time; guards everything but the table and the counters
    PeerSet    peers;
    Exchange   exchange{peers};
    LayerSplit split;
    std::shared_ptr<const RoutingTable> followed;  // the table that `peers` belongs to

    mutable std::mutex                  table_mutex;
    std::condition_variable             table_came;
    std::shared_ptr<const RoutingTable> table;

    std::shared_ptr<const RoutingTable> snapshot();
    bool compute(const LayerInput & input, float * out, Failure & failure);
};

std::shared_ptr<const RoutingTable> Caller::Impl::snapshot() {
    std::unique_lock<std::mutex> lock(table_mutex);
    table_came.wait_for(lock, std::chrono::milliseconds(first_table_wait_ms), [this] { return table != nullptr; });
    return table;
}

bool Caller::Impl::compute(const LayerInput & input, float * out, Failure & failure) {
    const auto current = snapshot();
    if (!current) {
        failure.layer     = input.layer;
        failure.reason    = "no routing table came: the agent has not yet said which node holds which experts";
        failure.waited_ms = first_table_wait_ms;
        return false;
    }
    if (current != followed) {
        peers.follow(*current);
        followed = current;
    }
    return split.build(input, *current, peers, failure) && exchange.run(input, *current, split, failure) &&
           split.combine(out, failure);
}

Caller::Caller(const std::string & call_key) : impl_(std::make_unique<Impl>()) { impl_->peers.set_call_key(call_key); }

Caller::~Caller() = default;

bool Caller::set_table(std::shared_ptr<const RoutingTable> table) {
    const std::lock_guard<std::mutex> lock(impl_->table_mutex);
    if (!table || (impl_->table && !table->newer_than(*impl_->table))) {
        return false;
    }
    impl_->table = std::move(table);
    impl_->table_came.notify_all();
    return true;
}

std::shared_ptr<const RoutingTable> Caller::table() const {
    const std::lock_guard<std::mutex> lock(impl_->table_mutex);
    return impl_->table;
}

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
    impl_->peers.count_layer(input.layer, computed);
    return computed;
}

Statistics Caller::statistics() const { return impl_->peers.statistics(); }

}  // namespace swarm
