// Where the time of a layer went: that the figures add up, and who is waited for.

#include "router/caller_rig.hpp"

#include <condition_variable>
#include <map>
#include <mutex>
#include <thread>

using namespace swarm;
using namespace rig;

namespace {

constexpr std::chrono::milliseconds delay{50};

uint64_t ns(std::chrono::nanoseconds time) { return uint64_t(time.count()); }

// Experts 0 to 3 of `n_layers` layers on one node.
std::shared_ptr<const RoutingTable> layers_table(int n_layers, uint16_t port) {
    std::string slices, problem;
    for (int layer = 0; layer < n_layers; layer++) {
        slices += std::string(layer ? "," : "") + "{\"layer\":" + std::to_string(layer) +
                  ",\"first\":0,\"last\":3,\"nodes\":[0]}";
    }
    const auto table = RoutingTable::parse(
        "{\"version\":1,\"term\":1,\"sequence\":1,\"model\":\"demo-0123\",\"reduce\":\"rows\",\"dtype\":\"f32\","
        "\"deadline_floor_ms\":20000,\"nodes\":[{\"name\":\"node0\",\"host\":\"127.0.0.1\",\"port\":" +
            std::to_string(port) + "}],\"slices\":[" + slices + "]}",
        problem);
    CHECK(table != nullptr && problem.empty());
    return table;
}

const LayerTrace & layer_of(const Trace & trace, int layer) {
    static const LayerTrace none;
    for (const Trace::Layer & entry : trace.layers) {
        if (entry.layer == layer) {
            return entry.counters;
        }
    }
    return none;
}

}  // namespace

TEST(trace_names_the_node_that_answers_last) {
    constexpr uint64_t n_rounds = 5;
    const Layer        layer(6, 5, 9, 12, 20, false, 5);
    for (size_t slow = 0; slow < 3; slow++) {  // this node answers a while after the others have
        std::mutex              mutex;
        std::condition_variable answered;
        int                     n_answered = 0;
        std::vector<std::unique_ptr<fake::Server>> servers;
        for (size_t i = 0; i < 3; i++) {
            servers.push_back(server_of([&, i](fake::Connection & connection, const fake::Request & request) {
                std::unique_lock<std::mutex> lock(mutex);
                if (i == slow) {
                    answered.wait(lock, [&] { return n_answered == 2; });
                    n_answered = 0;
                    lock.unlock();
                    std::this_thread::sleep_for(delay);
                    return connection.message(answer(request, layer.n_in, layer.n_out));
                }
                const bool ok = connection.message(answer(request, layer.n_in, layer.n_out));
                n_answered++;
                answered.notify_all();
                return ok;
            }));
        }
        Caller caller;
        CHECK(caller.set_table(table_of({servers[0]->port(), servers[1]->port(), servers[2]->port()},
                                        {{0, 2, {0}}, {3, 5, {1}}, {6, 8, {2}}})));
        double wall_ms = 0;
        for (uint64_t i = 0; i < n_rounds; i++) {
            const Result result = call(caller, layer);
            CHECK(result.ok);
            wall_ms += result.wall_ms;
        }
        const Trace trace = caller.trace();
        CHECK((trace.nodes == std::vector<std::string>{"node0", "node1", "node2"}));
        CHECK(trace.layers.size() == 1 && trace.calls.size() == 3 && trace.left_out == 0);
        const LayerTrace & round = layer_of(trace, 0);
        CHECK(round.rounds == n_rounds && round.rows == n_rounds * 6 && round.trunk_ns == 0 &&
              trace.passes == n_rounds);
        CHECK(round.encode_ns > 0 && round.add_ns > 0 && round.wait_ns >= n_rounds * ns(delay));
        CHECK(round.encode_ns + round.wait_ns + round.add_ns <= round.round_ns &&
              double(round.round_ns) <= wall_ms * 1e6);
        CallTrace all;
        for (const Trace::Call & entry : trace.calls) {
            const CallTrace & c = entry.counters;
            CHECK(entry.layer == 0 && c.calls == n_rounds);
            CHECK(c.compute_ns == n_rounds * 10000 && c.compute_ns + c.queue_ns <= c.call_ns);
            CHECK(c.last_compute_ns + c.last_queue_ns <= c.last_wait_ns &&
                  c.alone_ns <= c.last_wait_ns + c.last * round.encode_ns);
            CHECK((c.last == 0) == (c.last_wait_ns == 0));
            all.pairs += c.pairs;
            all.last += c.last;
            all.last_wait_ns += c.last_wait_ns;
        }
        CHECK(all.pairs == n_rounds * 6 * 5 && all.last == n_rounds && all.last_wait_ns == round.wait_ns);
        // Replies that are read together have no order; a stalled machine may do that once or twice.
        const CallTrace & waited_for = trace.calls[slow].counters;
        CHECK(trace.calls[slow].node == slow && waited_for.last >= 3 && waited_for.alone_ns >= ns(delay) &&
              waited_for.call_ns >= n_rounds * ns(delay));
    }
}

TEST(trace_of_a_lone_node_begins_with_its_request) {
    const Layer layer(2, 2, 4);
    const auto  server = server_of([&](fake::Connection & connection, const fake::Request & request) {
        std::this_thread::sleep_for(delay);
        return connection.message(answer(request, layer.n_in, layer.n_out));
    });
    Caller      caller;
    CHECK(caller.set_table(table_of({server->port()}, {{0, 3, {0}}})));
    CHECK(call(caller, layer).ok);
    const CallTrace c = caller.trace().calls.at(0).counters;
    CHECK(c.last == 1 && c.alone_ns >= ns(delay) && c.alone_ns <= c.call_ns + 1000);
}

TEST(trace_tells_the_trunk_from_what_lies_between_passes) {
    const Layer layer(2, 2, 4);
    const auto  server = server_of(good(layer));
    Caller      caller;
    CHECK(caller.set_table(layers_table(3, server->port())));
    const auto pass = [&](std::vector<int> layers) {
        for (const int number : layers) {
            std::this_thread::sleep_for(delay);
            CHECK(call(caller, layer, number).ok);
        }
    };
    pass({0, 2});
    Trace trace = caller.trace();
    CHECK(trace.passes == 1 && trace.between_ns == 0 && layer_of(trace, 0).trunk_ns == 0 &&
          layer_of(trace, 2).trunk_ns >= ns(delay));
    CHECK(trace.layers.size() == 2);
    pass({0, 1, 2});
    trace = caller.trace();
    CHECK(trace.passes == 2 && trace.between_ns >= ns(delay) && layer_of(trace, 0).trunk_ns == 0 &&
          layer_of(trace, 1).trunk_ns >= ns(delay));
    const uint64_t between_ns = trace.between_ns, trunk_ns = layer_of(trace, 2).trunk_ns;
    CHECK(trunk_ns >= 2 * ns(delay));
    // A layer that fails ends its pass: what comes next says nothing about how long the trunk took.
    CHECK(!call(caller, layer, 7).ok);
    pass({2});
    trace = caller.trace();
    CHECK(trace.passes == 3 && trace.between_ns == between_ns && layer_of(trace, 2).trunk_ns == trunk_ns &&
          layer_of(trace, 2).rounds == 3);
    // A hold is no part of a round.
    const uint64_t round_ns = layer_of(trace, 2).round_ns;
    caller.hold(double(delay.count()));
    const Result held = call(caller, layer, 2);
    trace             = caller.trace();
    CHECK(held.ok && trace.held_ns > 0 &&
          double(layer_of(trace, 2).round_ns - round_ns + trace.held_ns) <= held.wall_ms * 1e6 + 1e5);
}

TEST(trace_goes_on_where_a_node_moves_and_ends_where_it_leaves) {
    const Layer layer(3, 2, 4);
    const auto  a = server_of(good(layer)), b = server_of(good(layer));
    Caller      caller;
    CHECK(caller.trace().layers.empty() && caller.trace().nodes.empty());
    CHECK(caller.set_table(table_of({a->port()}, {{0, 3, {0}}}, "rows", "f32", 20000, 1)));
    CHECK(call(caller, layer).ok);
    CHECK(caller.set_table(table_of({b->port()}, {{0, 3, {0}}}, "rows", "f32", 20000, 2)));
    CHECK(call(caller, layer).ok && b->n_connections() == 1);
    CHECK(caller.trace().calls.at(0).counters.calls == 2);
    CHECK(caller.set_table(table_of({b->port(), a->port()}, {{0, 3, {1}}}, "rows", "f32", 20000, 3)));
    CHECK(call(caller, layer).ok);
    Trace trace = caller.trace();
    CHECK(trace.nodes.size() == 2 && trace.calls.size() == 2 && trace.calls[1].node == 1 &&
          trace.calls[1].counters.calls == 1);
    CHECK(layer_of(trace, 0).rounds == 3);
}
