// Tables that come, and holds that begin, while a layer is being computed.

#include "router/caller_rig.hpp"

#include <condition_variable>
#include <mutex>
#include <thread>

using namespace swarm;
using namespace rig;

namespace {

// Something that happened, once or more often.
class Signal {
  public:
    void raise() {
        const std::lock_guard<std::mutex> lock(mutex_);
        n_++;
        changed_.notify_all();
    }
    bool wait(int n = 1) {
        std::unique_lock<std::mutex> lock(mutex_);
        return changed_.wait_for(lock, std::chrono::seconds(20), [&] { return n_ >= n; });
    }
    int count() {
        const std::lock_guard<std::mutex> lock(mutex_);
        return n_;
    }

  private:
    std::mutex              mutex_;
    std::condition_variable changed_;
    int                     n_ = 0;
};

// A node that reads calls and ends the connection instead of an answer: a crashed server that comes back and crashes.
std::unique_ptr<fake::Server> dying(Signal & asked) {
    return server_of([&asked](fake::Connection &, const fake::Request &) {
        asked.raise();
        return false;
    });
}

// A node that answers, and is to be asked for these experts only.
std::unique_ptr<fake::Server> holding(const Layer & layer, int first, int last, Signal & asked) {
    return server_of([&layer, first, last, &asked](fake::Connection & connection, const fake::Request & request) {
        for (const int32_t expert : request.expert) {
            CHECK(expert >= first && expert <= last);
        }
        asked.raise();
        return connection.message(answer(request, layer.n_in, layer.n_out));
    });
}

// The deadlines are far away: a call that ends within this did not wait for one.
constexpr int    far_ms       = 20000;
constexpr double far_enough_ms = 10000;

}  // namespace

TEST(caller_in_retries_goes_over_to_a_newer_table) {
    const Layer layer(6, 4, 8, 12, 20, false, 3);
    for (const std::string reduce : {"rows", "sum"}) {
        Signal     asked, whole, first_half, second_half;
        const auto dead = dying(asked);
        const auto a = holding(layer, 0, 3, whole), b = holding(layer, 4, 5, first_half),
                   c = holding(layer, 6, 7, second_half);
        Caller     caller;
        CHECK(caller.set_table(
            table_of({a->port(), dead->port()}, {{0, 3, {0}}, {4, 7, {1}}}, reduce, "f32", far_ms, 1)));
        Result      result;
        std::thread calling([&] { result = call(caller, layer); });
        CHECK(asked.wait(2) && whole.wait());
        // Names again, other slices, and nothing of the node whose reply is there already.
        CHECK(caller.set_table(
            table_of({b->port(), c->port(), dead->port()}, {{0, 5, {0}}, {6, 7, {1}}}, reduce, "f32", far_ms, 2)));
        calling.join();
        CHECK(result.ok && result.wall_ms < far_enough_ms);
        CHECK(same_bits(result.out,
                        reduce == "rows" ? layer.expected_rows() : layer.expected_sum({{0, 3}, {4, 5}, {6, 7}})));
        CHECK(whole.count() == 1 && first_half.count() == 1 && second_half.count() == 1);
        CHECK(caller.statistics().failures == 0 && caller.statistics().nodes.size() == 3);
    }
}

TEST(caller_asks_the_newer_tables_node_after_a_silent_one) {
    const Layer layer(2, 2, 4);
    Signal      asked, answering;
    const auto  silent = server_of([&](fake::Connection & connection, const fake::Request &) {
        asked.raise();
        connection.wait_for_close();
        return false;
    });
    const auto  other = holding(layer, 0, 3, answering);
    Caller      caller;
    CHECK(caller.set_table(table_of({silent->port()}, {{0, 3, {0}}}, "rows", "f32", floor_ms, 1)));
    Result      result;
    std::thread calling([&] { result = call(caller, layer); });
    CHECK(asked.wait());
    CHECK(caller.set_table(table_of({silent->port(), other->port()}, {{0, 3, {0, 1}}}, "rows", "f32", far_ms, 2)));
    calling.join();
    // One call is under way by one table: the silent node has its time, and no more by the new one.
    CHECK(result.ok && result.wall_ms >= first_deadline_ms - 1 && result.wall_ms < far_enough_ms);
    CHECK(same_bits(result.out, layer.expected_rows()) && asked.count() == 1);
}

TEST(caller_gives_nobody_its_time_twice_by_newer_tables) {
    const Layer layer(2, 2, 4);
    Signal      asked;
    const auto  dead = dying(asked);
    Caller      caller;
    CHECK(caller.set_table(table_of({dead->port()}, {{0, 3, {0}}}, "rows", "f32", 1000, 1)));
    Result            result;
    std::atomic<bool> ended{false};
    std::thread       calling([&] {
        result = call(caller, layer);
        ended  = true;
    });
    for (int sequence = 2; !ended; sequence++) {
        CHECK(asked.wait(std::min(sequence, 5)));
        // Sometimes in two slices, of which one has another holder that is no better.
        CHECK(caller.set_table(
            table_of({dead->port(), dead->port()},
                     sequence % 2 ? std::vector<Part>{{0, 3, {0}}} : std::vector<Part>{{0, 1, {0, 1}}, {2, 3, {0}}},
                     "rows", "f32", 1000, sequence)));
    }
    calling.join();
    CHECK(!result.ok && result.failure.node == "node0");
    CHECK_CONTAINS(result.failure.reason, "last: the peer closed the connection");
    CHECK(result.wall_ms >= 1000 && result.wall_ms < 3 * 1020 + 2000);
}

TEST(caller_keeps_to_the_old_table_where_the_newer_one_does_not_fit) {
    const Layer layer(2, 2, 4);
    struct Newer {
        std::vector<Part> parts;
        std::string       reduce, dtype;
    };
    for (const Newer & newer :
         {Newer{{{0, 3, {0}}}, "sum", "f32"}, Newer{{{0, 3, {0}}}, "rows", "bf16"}, Newer{{{0, 2, {0}}}, "rows", "f32"},
          Newer{{{0, 1, {0}}, {3, 3, {0}}}, "rows", "f32"}, Newer{{}, "rows", "f32"}}) {
        Signal     asked, answering;
        const auto dead = dying(asked), other = holding(layer, 0, 3, answering);
        Caller     caller;
        CHECK(caller.set_table(table_of({dead->port()}, {{0, 3, {0}}}, "rows", "f32", 600, 1)));
        Result      result;
        std::thread calling([&] { result = call(caller, layer); });
        CHECK(asked.wait());
        CHECK(caller.set_table(table_of({other->port()}, newer.parts, newer.reduce, newer.dtype, far_ms, 2)));
        calling.join();
        CHECK(!result.ok && result.failure.node == "node0" && answering.count() == 0);
        CHECK_CONTAINS(result.failure.reason, "no success within");
        // From the next layer on it counts.
        CHECK(call(caller, layer).ok == (newer.parts.size() == 1 && newer.parts[0].last == 3));
    }
}

TEST(caller_begins_no_layer_during_a_hold) {
    const Layer layer(2, 2, 4);
    Signal      answering;
    const auto  server = holding(layer, 0, 3, answering);
    Caller      caller;
    CHECK(caller.set_table(table_of({server->port()}, {{0, 3, {0}}}, "rows", "f32", far_ms, 1)));
    CHECK(call(caller, layer).ok);
    caller.hold(300);
    Result result = call(caller, layer);
    CHECK(result.ok && result.wall_ms >= 299 && result.cpu_ms < 150);
    // The last one counts, and 0 ends it.
    caller.hold(60000);
    std::thread calling([&] { result = call(caller, layer); });
    CHECK(caller.set_table(table_of({server->port()}, {{0, 3, {0}}}, "sum", "f32", far_ms, 2)));
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    CHECK(answering.count() == 2);
    caller.hold(0);
    calling.join();
    CHECK(result.ok && answering.count() == 3);
    CHECK(same_bits(result.out, layer.expected_sum({{0, 3}})));  // by the table that came during the hold
}
