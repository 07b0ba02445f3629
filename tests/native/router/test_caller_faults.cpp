// Everything a node can do wrong in one layer's call: deadlines, retries, replicas, and failures that say what
// happened.

#include "router/caller_rig.hpp"

#include <sys/time.h>

#include <atomic>
#include <csignal>
#include <condition_variable>
#include <limits>
#include <mutex>

using namespace swarm;
using namespace rig;

TEST(caller_ends_by_the_deadline_when_a_node_is_silent) {
    check_bad_node(
        [](fake::Connection & connection, const fake::Request &) {
            connection.wait_for_close();
            return false;
        },
        "no reply within", first_deadline_ms - 1);
    check_bad_node(
        [](fake::Connection & connection, const fake::Request &) {
            connection.freeze();
            return false;
        },
        "no reply within", first_deadline_ms - 1);
}

TEST(caller_ends_by_the_deadline_when_a_reply_drips) {
    check_bad_node(
        [](fake::Connection & connection, const fake::Request & request) {
            const fake::Data message = answer(request, 12, 20);
            uint8_t          head[4] = {0x82, 126, uint8_t(message.size() >> 8), uint8_t(message.size())};
            connection.write(head, 4);
            for (size_t i = 0; i < message.size() && connection.pause_ms(20) && connection.write(&message[i], 1); i++) {
            }
            return false;
        },
        "of the reply received", first_deadline_ms - 1);
}

TEST(caller_ends_by_the_deadline_when_a_node_closes_each_time) {
    check_bad_node([](fake::Connection &, const fake::Request &) { return false; },
                   "last: the peer closed the connection", first_deadline_ms - 1);
    check_bad_node(
        [](fake::Connection & connection, const fake::Request &) {
            const uint8_t frame[4] = {0x88, 2, 0x03, 0xe9};
            connection.write(frame, 4);
            return false;
        },
        "closed the connection with code 1001", first_deadline_ms - 1);
    check_bad_node(
        [](fake::Connection & connection, const fake::Request & request) {
            const fake::Data message = answer(request, 12, 20);
            connection.write("\x82\x7e\x01\x80", 4);  // a frame of 384 bytes is promised
            connection.write(message.data(), 100);
            return false;
        },
        "closed the connection", first_deadline_ms - 1);
}

TEST(caller_ends_by_the_deadline_when_nobody_listens_or_upgrades) {
    const Layer layer(2, 2, 4);
    uint16_t    port = 0;
    const int   fd   = fake::listen_on(port);
    {
        Caller caller;
        CHECK(caller.set_table(table_of({port}, {{0, 3, {0}}}, "rows", "f32", floor_ms)));
        // The kernel accepts, nobody answers: a stopped process.
        check_failure(call(caller, layer), "upgrade was not answered", first_deadline_ms - 1, first_deadline_ms);
    }
    close(fd);
    Caller caller;
    CHECK(caller.set_table(table_of({port}, {{0, 3, {0}}}, "rows", "f32", floor_ms)));
    check_failure(call(caller, layer), "refused", first_deadline_ms - 1, first_deadline_ms);
}

TEST(caller_ends_by_the_deadline_when_a_large_request_is_not_read) {
    const Layer  layer(64, 1, 4, 32768, 8);  // 8 MB, more than the kernel's buffers
    fake::Server server([](fake::Connection & connection) { connection.freeze(); });
    Caller       caller;
    CHECK(caller.set_table(table_of({server.port()}, {{0, 3, {0}}}, "rows", "f32", floor_ms)));
    const double deadline_ms = floor_ms + 64 * 5;
    const Result result      = call(caller, layer);
    check_failure(result, "bytes of the request not sent yet", deadline_ms - 1, deadline_ms);
    CHECK(result.failure.reason.find("(0 bytes of the request") == std::string::npos);
}

TEST(caller_refuses_wrong_replies_at_once) {
    const auto with_values = [](std::vector<float> y, uint64_t id_offset = 0) {
        return [y, id_offset](fake::Connection & connection, const fake::Request & request) {
            const uint8_t * first = reinterpret_cast<const uint8_t *>(y.data());
            return connection.message(fake::reply(request.id + id_offset, fake::Data(first, first + y.size() * 4)));
        };
    };
    std::vector<float> values(4 * 20, 0.5f);
    check_bad_node(with_values(values, 1), "belongs to call");
    check_bad_node(with_values(std::vector<float>(4 * 20 - 1)), "bytes of values instead of 320");
    check_bad_node(with_values(std::vector<float>(4 * 20 + 1)), "bytes of values instead of 320");
    check_bad_node(with_values({}), "0 bytes of values");
    check_bad_node(with_values(std::vector<float>(10000)), "longer than");
    check_bad_node(
        [](fake::Connection & connection, const fake::Request &) { return connection.message({0xc1, 2, 3}); },
        "not a msgpack map");

    for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
        for (const std::string reduce : {"rows", "sum"}) {
            const Layer layer(2, 2, 4);
            const auto  server = server_of([&](fake::Connection & connection, const fake::Request & request) {
                std::vector<float> y((reduce == "rows" ? 4 : 2) * 20, 0.5f);
                y.back() = bad;
                fake::Data bytes(y.size() * 4);
                std::memcpy(bytes.data(), y.data(), bytes.size());
                return connection.message(fake::reply(request.id, bytes));
            });
            Caller caller;
            CHECK(caller.set_table(table_of({server->port()}, {{0, 3, {0}}}, reduce, "f32", floor_ms)));
            const Result result = call(caller, layer);
            CHECK(!result.ok && result.failure.node == "node0");
            CHECK_CONTAINS(result.failure.reason, "not finite");
            CHECK(reduce == "sum" || result.failure.first_expert == layer.id(1, 1));
        }
    }
}

TEST(caller_reports_a_nodes_error_in_its_words) {
    check_bad_node(
        [](fake::Connection & connection, const fake::Request & request) {
            return connection.message(
                fake::error(request.id, "failed", "expert 2 gave a value that is not finite\n\x01", false));
        },
        "failed: expert 2 gave a value that is not finite??");
    check_bad_node([](fake::Connection & connection, const fake::Request &) {
        return connection.message(fake::error(0, "bad_request", "no map", false));
    }, "bad_request: no map");
    check_bad_node([](fake::Connection & connection, const fake::Request & request) {
        return connection.message(fake::error(request.id, "not_ready", "layer 0 is loading", true));
    }, "not_ready: layer 0 is loading", first_deadline_ms - 1);
}

TEST(caller_tries_again_until_a_node_is_ready) {
    const Layer layer(2, 2, 4);
    int         n_requests = 0;
    const auto  server     = server_of([&](fake::Connection & connection, const fake::Request & request) {
        n_requests++;
        return n_requests == 1   ? connection.message(fake::error(request.id, "not_ready", "loading", true))
               : n_requests == 2 ? false
                                 : connection.message(answer(request, layer.n_in, layer.n_out));
    });
    Caller caller;
    CHECK(caller.set_table(table_of({server->port()}, {{0, 3, {0}}})));
    const Result result = call(caller, layer);
    CHECK(result.ok && same_bits(result.out, layer.expected_rows()));
    CHECK(n_requests == 3 && server->n_connections() == 2);
    CHECK(result.wall_ms >= 20 + 40);  // the back-off
}

TEST(caller_goes_to_the_next_node_of_the_list) {
    const Layer layer(4, 3, 8);
    uint16_t    dead_port = 0;
    close(fake::listen_on(dead_port));
    // Each checks that it is asked for nothing but what the table says it holds.
    const auto holding = [&layer](std::vector<int32_t> experts) {
        return server_of([&layer, experts](fake::Connection & connection, const fake::Request & request) {
            for (const int32_t expert : request.expert) {
                CHECK(std::find(experts.begin(), experts.end(), expert) != experts.end());
            }
            return connection.message(answer(request, layer.n_in, layer.n_out));
        });
    };
    const auto b = holding({0, 1, 4, 5, 6, 7}), c = holding({2, 3}), d = holding({0, 1, 2, 3, 4, 5, 6, 7});
    for (const std::string reduce : {"rows", "sum"}) {
        // Node 0 holds three slices alone in name: their replicas differ, so its part is cut up.
        Caller caller;
        CHECK(caller.set_table(table_of({dead_port, b->port(), c->port()},
                                        {{0, 1, {0, 1}}, {2, 3, {0, 2}}, {4, 5, {0, 1}}, {6, 7, {1}}}, reduce)));
        const Result result = call(caller, layer);
        CHECK(result.ok && result.wall_ms < 10000);  // at once, not after the dead node's deadline of 20 s
        if (reduce == "rows") {
            CHECK(same_bits(result.out, layer.expected_rows()));
        }
        const Result again = call(caller, layer);  // node 0 is being avoided now
        CHECK(again.ok);
        CHECK(caller.statistics().nodes[0].calls == 0 && caller.statistics().failures == 0);
    }
    const auto refusing = server_of([](fake::Connection & connection, const fake::Request & request) {
        return connection.message(fake::error(request.id, "not_held", "not here", false));
    });
    Caller caller;
    CHECK(caller.set_table(table_of({refusing->port(), d->port()}, {{0, 7, {0, 1}}})));
    const Result result = call(caller, layer);
    CHECK(result.ok && same_bits(result.out, layer.expected_rows()));
}

TEST(caller_replaces_a_silent_node_after_its_deadline) {
    const Layer layer(2, 2, 4);
    const auto  silent = server_of([](fake::Connection & connection, const fake::Request &) {
        connection.wait_for_close();
        return false;
    });
    const auto  other  = server_of(good(layer));
    Caller      caller;
    CHECK(caller.set_table(table_of({silent->port(), other->port()}, {{0, 3, {0, 1}}}, "rows", "f32", floor_ms)));
    const Result first = call(caller, layer);
    CHECK(first.ok && same_bits(first.out, layer.expected_rows()) && first.wall_ms >= first_deadline_ms - 1);
    const Result second = call(caller, layer);
    CHECK(second.ok && silent->n_connections() == 1);  // not asked again so soon
}

TEST(caller_never_takes_a_late_reply) {
    const Layer first(2, 2, 4), second(2, 2, 4, 12, 20, false, 9);
    std::mutex              mutex;
    std::condition_variable changed;
    bool                    gave_up = false;
    int                     n_requests = 0;
    const auto server = server_of([&](fake::Connection & connection, const fake::Request & request) {
        if (n_requests++ == 0) {
            std::unique_lock<std::mutex> lock(mutex);
            changed.wait(lock, [&] { return gave_up; });
        }
        return connection.message(answer(request, first.n_in, first.n_out));  // the first one: too late
    });
    Caller caller;
    CHECK(caller.set_table(table_of({server->port()}, {{0, 3, {0}}}, "rows", "f32", floor_ms)));
    check_failure(call(caller, first), "no reply within", first_deadline_ms - 1, first_deadline_ms);
    {
        const std::lock_guard<std::mutex> lock(mutex);
        gave_up = true;
        changed.notify_all();
    }
    const Result result = call(caller, second);
    CHECK(result.ok && same_bits(result.out, second.expected_rows()));
    CHECK(server->n_connections() == 2);
}

TEST(caller_does_not_wait_long_where_another_node_can_be_asked) {
    const Layer       layer(2, 2, 4);
    std::atomic<bool> frozen{false}, second_fails{false};
    std::atomic<int>  n_asked_again{0};
    const auto        first = server_of([&](fake::Connection & connection, const fake::Request & request) {
        if (frozen && n_asked_again == 0) {
            connection.wait_for_close();
            return false;
        }
        return connection.message(answer(request, layer.n_in, layer.n_out));
    });
    const auto second = server_of([&](fake::Connection & connection, const fake::Request & request) {
        if (second_fails) {
            n_asked_again++;  // from now on the first one answers again
            return connection.message(fake::error(request.id, "not_held", "not here", false));
        }
        return connection.message(answer(request, layer.n_in, layer.n_out));
    });
    for (const bool both_fail : {false, true}) {
        frozen        = false;
        second_fails  = both_fail;
        n_asked_again = 0;
        Caller caller;
        CHECK(caller.set_table(table_of({first->port(), second->port()}, {{0, 1, {0, 1}}, {2, 3, {0, 1}}})));
        CHECK(call(caller, layer).ok && n_asked_again == 0);  // measured now: it needs far less than the floor of 20 s
        frozen              = true;
        const Result result = call(caller, layer);
        CHECK(result.ok && same_bits(result.out, layer.expected_rows()));
        CHECK(result.wall_ms >= 249 && result.wall_ms < 10000);
        CHECK(n_asked_again == (both_fail ? 1 : 0));
    }
}

TEST(caller_finds_a_restarted_server) {
    const Layer layer(2, 2, 4);
    auto        server = server_of(good(layer));
    uint16_t    port   = server->port();
    Caller      caller;
    CHECK(caller.set_table(table_of({port}, {{0, 3, {0}}})));
    CHECK(call(caller, layer).ok);
    const auto spare = server_of(good(layer));
    CHECK(caller.set_table(table_of({port, spare->port()}, {{0, 3, {0, 1}}}, "rows", "f32", 20000, 2)));
    server.reset();
    server              = server_of(good(layer), port);
    const Result result = call(caller, layer);
    CHECK(result.ok && same_bits(result.out, layer.expected_rows()));
    // The closed connection was noticed before anything was sent on it, so it counts for no failed attempt.
    CHECK(caller.statistics().failures == 0 && spare->n_connections() == 0 && server->n_connections() == 1);
}

TEST(caller_believes_no_nodes_clock) {
    const Layer layer(1, 1, 4);
    const auto  server = server_of([&](fake::Connection & connection, const fake::Request & request) {
        fake::Data y(20 * 4);
        return connection.message(fake::reply(request.id, y, uint64_t(1) << 40));
    });
    Caller caller;
    CHECK(caller.set_table(table_of({server->port()}, {{0, 3, {0}}})));
    CHECK(call(caller, layer).ok && call(caller, layer).ok);
    const NodeStatistics node = caller.statistics().nodes[0];
    CHECK(node.calls == 2 && node.compute_us <= node.call_us && node.call_us < 40000000);
}

TEST(caller_is_not_disturbed_by_signals) {
    const Layer layer(2, 2, 4);
    sigset_t    alarms;
    sigemptyset(&alarms);
    sigaddset(&alarms, SIGALRM);
    pthread_sigmask(SIG_BLOCK, &alarms, nullptr);  // for the servers' threads
    const auto server = server_of(good(layer));
    const auto                   silent    = server_of([](fake::Connection & connection, const fake::Request &) {
        connection.wait_for_close();
        return false;
    });
    static volatile sig_atomic_t n_signals = 0;
    struct sigaction             action{}, former{};
    action.sa_handler = [](int) { n_signals = n_signals + 1; };  // without SA_RESTART: system calls end with EINTR
    sigaction(SIGALRM, &action, &former);
    const itimerval each_ms{{0, 1000}, {0, 1000}}, never{};
    setitimer(ITIMER_REAL, &each_ms, nullptr);
    pthread_sigmask(SIG_UNBLOCK, &alarms, nullptr);

    Caller caller;
    CHECK(caller.set_table(table_of({server->port(), silent->port()}, {{0, 3, {0}}}, "rows", "f32", floor_ms, 1)));
    for (int i = 0; i < 200; i++) {
        const Result result = call(caller, layer);
        CHECK(result.ok && same_bits(result.out, layer.expected_rows()));
    }
    CHECK(caller.set_table(table_of({silent->port(), server->port()}, {{0, 3, {0}}}, "rows", "f32", floor_ms, 2)));
    const Result result = call(caller, layer);
    setitimer(ITIMER_REAL, &never, nullptr);
    sigaction(SIGALRM, &former, nullptr);
    check_failure(result, "no reply within", first_deadline_ms - 1, first_deadline_ms);
    CHECK(n_signals > 10);
}
