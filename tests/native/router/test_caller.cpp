// One layer's call: splitting, order of additions, float formats, tables, statistics.

#include "router/caller_rig.hpp"

#include <condition_variable>
#include <map>
#include <mutex>

using namespace swarm;
using namespace rig;

TEST(caller_rows_are_added_in_slot_order) {
    for (const bool pair : {false, true}) {
        for (const int n_tokens : {1, 2, 33}) {
            for (const int n_used : {1, 3, 8}) {
                const Layer layer(n_tokens, n_used, 8, 12, 20, pair, unsigned(n_tokens * 10 + n_used));
                const auto  a = server_of(good(layer)), b = server_of(good(layer)), c = server_of(good(layer));
                Caller      caller;
                CHECK(caller.set_table(
                    table_of({a->port(), b->port(), c->port()}, {{0, 2, {0}}, {3, 3, {1}}, {4, 5, {2}}, {6, 7, {1}}})));
                for (int round = 0; round < 2; round++) {
                    const Result result = call(caller, layer);
                    CHECK(result.ok);
                    CHECK(same_bits(result.out, layer.expected_rows()));
                }
                CHECK(a->n_connections() <= 1 && b->n_connections() <= 1 && c->n_connections() <= 1);
            }
        }
    }
}

TEST(caller_float_formats) {
    for (const std::string dtype : {"bf16", "f16"}) {
        Layer layer(5, 3, 8);
        for (float & x : layer.h) {
            x = std::fmod(x, 8.0f);
        }
        for (float & x : layer.weights) {
            x = 0.25f;
        }
        const auto a = server_of(good(layer)), b = server_of(good(layer));
        Caller     caller;
        CHECK(caller.set_table(table_of({a->port(), b->port()}, {{0, 3, {0}}, {4, 7, {1}}}, "rows", dtype)));
        const Result       result   = call(caller, layer);
        const auto         expected = layer.expected_rows();
        const float        step     = dtype == "f16" ? 1.0f / 1024 : 1.0f / 128;
        CHECK(result.ok);
        for (size_t i = 0; i < expected.size(); i++) {
            CHECK(std::fabs(result.out[i] - expected[i]) <=
                  3 * step * 24);  // three values of at most 18, rounded twice
        }
        if (dtype == "f16") {
            layer.h[0]          = 1e6f;
            const Result misfit = call(caller, layer);
            CHECK(!misfit.ok);
            CHECK_CONTAINS(misfit.failure.reason, "f16");
        }
    }
}

TEST(caller_sums_in_slice_order_whatever_the_order_of_arrival) {
    const Layer layer(6, 5, 9, 12, 20, false, 5);
    const auto  expected = layer.expected_sum({{0, 2}, {3, 5}, {6, 8}});
    CHECK(!same_bits(expected, layer.expected_sum({{6, 8}, {3, 5}, {0, 2}})));  // the order can be seen
    for (int last = 0; last < 3; last++) {  // this node answers only after the others have
        std::mutex              mutex;
        std::condition_variable answered;
        int                     n_answered = 0;
        std::vector<std::unique_ptr<fake::Server>> servers;
        for (int i = 0; i < 3; i++) {
            servers.push_back(server_of([&, i](fake::Connection & connection, const fake::Request & request) {
                std::unique_lock<std::mutex> lock(mutex);
                if (i == last) {
                    answered.wait(lock, [&] { return n_answered == 2; });
                }
                const bool ok = connection.message(answer(request, layer.n_in, layer.n_out));
                n_answered++;
                answered.notify_all();
                return ok;
            }));
        }
        Caller caller;
        // Slices are given in another order than that of their experts.
        CHECK(caller.set_table(table_of({servers[0]->port(), servers[1]->port(), servers[2]->port()},
                                        {{6, 8, {2}}, {0, 2, {0}}, {3, 5, {1}}}, "sum")));
        const Result result = call(caller, layer);
        CHECK(result.ok);
        CHECK(same_bits(result.out, expected));
    }
}

TEST(caller_asks_only_owners_and_once) {
    Layer layer(2, 2, 8);
    layer.ids = {4, 1, -77, 0, 2, -77};  // nothing of node 2
    std::mutex                              mutex;
    std::map<int, std::vector<fake::Request>> seen;
    std::vector<std::unique_ptr<fake::Server>> servers;
    for (int i = 0; i < 3; i++) {
        servers.push_back(server_of([&, i](fake::Connection & connection, const fake::Request & request) {
            const std::lock_guard<std::mutex> lock(mutex);
            seen[i].push_back(request);
            return connection.message(answer(request, layer.n_in, layer.n_out));
        }));
    }
    Caller caller;
    CHECK(caller.set_table(table_of({servers[0]->port(), servers[1]->port(), servers[2]->port()},
                                    {{0, 3, {0}}, {4, 5, {1}}, {6, 7, {2}}})));
    CHECK(call(caller, layer).ok);
    const std::lock_guard<std::mutex> lock(mutex);
    CHECK(seen[0].size() == 1 && seen[1].size() == 1 && seen[2].empty() && servers[2]->n_connections() == 0);
    CHECK((seen[0][0].row == std::vector<int32_t>{0, 1, 1}) && (seen[0][0].expert == std::vector<int32_t>{1, 0, 2}));
    CHECK(seen[0][0].n_rows == 2 && seen[0][0].h.size() == 2 * 12 * 4);
    CHECK((seen[1][0].row == std::vector<int32_t>{0}) && (seen[1][0].expert == std::vector<int32_t>{4}) &&
          seen[1][0].h.size() == 12 * 4);
    CHECK(seen[0][0].model == "demo-0123" && seen[0][0].term == 3 && seen[0][0].layer == 0);
    const Statistics statistics = caller.statistics();
    CHECK(statistics.calls == 2 && statistics.failures == 0 && statistics.nodes.size() == 3 &&
          statistics.layers.size() == 1);
    CHECK(statistics.nodes[0].calls == 1 && statistics.nodes[0].pairs == 3 && statistics.nodes[0].bytes_sent > 300);
    CHECK(statistics.nodes[1].pairs == 1 && statistics.nodes[2].calls == 0 && statistics.layers[0].rounds == 1);
    CHECK(statistics.nodes[0].bytes_received > 3 * 20 * 4 && statistics.nodes[0].compute_us == 10);
    CHECK_CONTAINS(statistics_json(statistics, "stats"), "\"type\":\"stats\"");
}

TEST(caller_refuses_bad_ids_and_tables) {
    Layer      layer(3, 2, 4);
    const auto server = server_of(good(layer));
    Caller     caller;
    CHECK(caller.set_table(table_of({server->port()}, {{0, 3, {0}}}, "rows", "f32", floor_ms, 5)));
    CHECK(!caller.set_table(table_of({server->port()}, {{0, 3, {0}}}, "rows", "f32", floor_ms, 5)));
    CHECK(!caller.set_table(table_of({server->port()}, {{0, 3, {0}}}, "rows", "f32", floor_ms, 4)));
    CHECK(!caller.set_table(nullptr));
    const auto refused = [&](std::vector<int32_t> ids, int expert, const std::string & reason) {
        layer.ids           = std::move(ids);
        const Result result = call(caller, layer);
        CHECK(!result.ok && result.failure.layer == 0 && result.failure.first_expert == expert &&
              result.failure.last_expert == expert);
        CHECK_CONTAINS(result.failure.reason, reason);
    };
    refused({0, 1, 0, 2, 3, 0, 1, 1, 0}, 1, "expert 1 twice for token 2");
    refused({0, 1, 0, 2, 4, 0, 1, 2, 0}, 4, "expert 4 for token 1");
    refused({0, -1, 0, 2, 3, 0, 1, 2, 0}, -1, "expert -1 for token 0");
    CHECK(server->n_connections() == 0);  // nothing was sent
    const Result other = call(caller, layer, 7);
    CHECK(!other.ok && other.failure.layer == 7);
    CHECK_CONTAINS(other.failure.reason, "layer 7");
    CHECK(caller.set_table(table_of({server->port()}, {{0, 1, {0}}, {3, 3, {0}}}, "rows", "f32", floor_ms, 6)));
    layer.ids = {0, 1, 0, 0, 1, 0, 0, 1, 0};
    CHECK_CONTAINS(call(caller, layer).failure.reason, "expert 2 of layer 0");
}

TEST(caller_follows_new_tables_and_keeps_connections) {
    const Layer layer(3, 2, 4);
    const auto  a = server_of(good(layer)), b = server_of(good(layer));
    Caller      caller;
    CHECK(caller.set_table(table_of({a->port(), b->port()}, {{0, 3, {0}}}, "rows", "f32", 20000, 1)));
    CHECK(call(caller, layer).ok && b->n_connections() == 0);
    CHECK(caller.set_table(table_of({a->port(), b->port()}, {{0, 3, {1}}}, "sum", "f32", 20000, 2)));
    CHECK(call(caller, layer).ok && b->n_connections() == 1);
    CHECK(caller.set_table(table_of({a->port(), b->port()}, {{0, 3, {0}}}, "rows", "f32", 20000, 3)));
    CHECK(call(caller, layer).ok && a->n_connections() == 1);
}

TEST(caller_answers_pings_between_calls) {
    const Layer layer(2, 2, 4);
    std::atomic<bool> ponged{false};
    fake::Server server([&](fake::Connection & connection) {
        unsigned   opcode = 0;
        fake::Data message;
        while (connection.read_frame(opcode, message)) {
            fake::Request request;
            if (opcode == 10) {
                ponged = true;
            } else if (opcode == 2 && parse_request(message, request)) {
                connection.message(answer(request, layer.n_in, layer.n_out));
                connection.frame(0x89, "", 0);
            }
        }
    });
    Caller caller;
    CHECK(caller.set_table(table_of({server.port()}, {{0, 3, {0}}})));
    while (!ponged && call(caller, layer).ok) {
    }
    CHECK(ponged);
}

TEST(caller_allocates_nothing_in_steady_state) {
    for (const std::string reduce : {"rows", "sum"}) {
        const Layer layer(7, 3, 8, 300, 300);
        const auto  a = server_of(good(layer)), b = server_of(good(layer));
        Caller      caller;
        CHECK(caller.set_table(table_of({a->port(), b->port()}, {{0, 3, {0}}, {4, 7, {1}}}, reduce)));
        std::vector<float> out(7 * 300);
        Failure            failure;
        for (int i = 0; i < 3; i++) {
            CHECK(caller.ffn(layer.input(), out.data(), failure));
        }
        const long before = n_allocations_of_thread();
        for (int i = 0; i < 50; i++) {
            CHECK(caller.ffn(layer.input(), out.data(), failure));
        }
        CHECK(n_allocations_of_thread() == before);
    }
}
