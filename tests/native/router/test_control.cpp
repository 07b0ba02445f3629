// The control channel against an agent that restarts, floods, is slow, or talks nonsense.

#include "common/check.hpp"
#include "router/fake_server.hpp"

#include "router/control.hpp"

#include <nlohmann/json.hpp>

#include <sys/un.h>

#include <chrono>
#include <condition_variable>
#include <mutex>

using namespace swarm;
using nlohmann::json;

namespace {

// The agent's end: accepts one backend at a time, reads lines with a limit on the time to wait for them.
class Agent {
  public:
    Agent() { listen_fd_ = fake::listen_on(port_); }
    explicit Agent(const std::string & path) : path_(path) {
        sockaddr_un address{};
        address.sun_family = AF_UNIX;
        std::strncpy(address.sun_path, path.c_str(), sizeof(address.sun_path) - 1);
        unlink(path.c_str());
        listen_fd_ = socket(AF_UNIX, SOCK_STREAM, 0);
        CHECK(bind(listen_fd_, reinterpret_cast<sockaddr *>(&address), sizeof(address)) == 0 &&
              listen(listen_fd_, 4) == 0);
    }
    ~Agent() {
        drop();
        close(listen_fd_);
        if (!path_.empty()) {
            unlink(path_.c_str());
        }
    }

    bool accept_backend() {
        drop();
        pollfd polled = {listen_fd_, POLLIN, 0};
        if (poll(&polled, 1, 20000) != 1) {
            return false;
        }
        fd_ = accept(listen_fd_, nullptr, nullptr);
        return fd_ >= 0;
    }

    void drop() {
        if (fd_ >= 0) {
            close(fd_);
        }
        fd_ = -1;
        in_.clear();
    }

    // The next line; null: none within 20 s, or the backend closed.
    json line() {
        for (size_t searched = 0;;) {
            const size_t end = in_.find('\n', searched);
            searched         = in_.size();
            if (end != std::string::npos) {
                const json object = json::parse(in_.substr(0, end), nullptr, false);
                in_.erase(0, end + 1);
                return object;
            }
            pollfd polled = {fd_, POLLIN, 0};
            char   bytes[65536];
            if (poll(&polled, 1, 20000) != 1) {
                return json();
            }
            const ssize_t n = recv(fd_, bytes, sizeof(bytes), 0);
            if (n <= 0) {
                return json();
            }
            in_.append(bytes, size_t(n));
        }
    }

    // Until the backend has sent something that is not read yet.
    bool sees_bytes() const {
        pollfd polled = {fd_, POLLIN, 0};
        return poll(&polled, 1, 20000) == 1;
    }

    void say(const std::string & text) {
        for (size_t sent = 0; sent < text.size();) {
            const ssize_t n = send(fd_, text.data() + sent, text.size() - sent, MSG_NOSIGNAL);
            if (n <= 0) {
                return;
            }
            sent += size_t(n);
        }
    }

    std::string address() const { return path_.empty() ? "127.0.0.1:" + std::to_string(port_) : "unix:" + path_; }

  private:
    uint16_t    port_ = 0;
    std::string path_, in_;
    int         listen_fd_ = -1, fd_ = -1;
};

// What the channel handed over.
struct Inbox {
    std::mutex                                       mutex;
    std::condition_variable                          changed;
    std::vector<std::shared_ptr<const RoutingTable>> tables;
    std::vector<std::string>                         problems;
    std::vector<double>                              holds_ms;
    Statistics                                       statistics;
    Trace                                            trace;

    ControlChannel::Handlers handlers() {
        return {[this](std::shared_ptr<const RoutingTable> table) {
                    const std::lock_guard<std::mutex> lock(mutex);
                    const bool taken = tables.empty() || table->newer_than(*tables.back());
                    if (taken) {
                        tables.push_back(std::move(table));
                        changed.notify_all();
                    }
                    return std::string(taken ? "" : "it is \xff old");
                },
                [this] {
                    const std::lock_guard<std::mutex> lock(mutex);
                    return statistics;
                },
                [this](const std::string & problem) {
                    const std::lock_guard<std::mutex> lock(mutex);
                    problems.push_back(problem);
                    changed.notify_all();
                },
                [this](double ms) {
                    const std::lock_guard<std::mutex> lock(mutex);
                    holds_ms.push_back(ms);
                    changed.notify_all();
                },
                [this] {
                    const std::lock_guard<std::mutex> lock(mutex);
                    return trace;
                }};
    }
    bool wait(size_t n_tables, size_t n_problems) {
        std::unique_lock<std::mutex> lock(mutex);
        return changed.wait_for(lock, std::chrono::seconds(20),
                                [&] { return tables.size() >= n_tables && problems.size() >= n_problems; });
    }
};

// `more`: further fields of the message, each with a comma behind it.
std::string table_line(int sequence, size_t padding = 0, const std::string & more = "") {
    return R"({"type": "table", )" + more + R"("table": {"version": 1, "sequence": )" + std::to_string(sequence) +
           R"(, "term": 1, "model": "m", "reduce": "sum", "dtype": "bf16", "deadline_floor_ms": 2000, "note": ")" +
           std::string(padding, 'x') +
           R"(", "nodes": [{"name": "a", "host": "127.0.0.1", "port": 1}], )"
           R"("slices": [{"layer": 0, "first": 0, "last": 1, "nodes": [0]}]}})"
           "\n";
}

Failure failure_of(int layer) {
    Failure failure;
    failure.node         = "node \xff\"quoted\"";
    failure.layer        = layer;
    failure.first_expert = 2;
    failure.last_expert  = 5;
    failure.reason       = "no reply";
    failure.waited_ms    = 12.6;
    return failure;
}

std::string unix_path() { return "/tmp/swarm-test-" + std::to_string(getpid()) + ".sock"; }

}  // namespace

TEST(control_hello_tables_failures_statistics) {
    for (const bool local : {false, true}) {
        std::unique_ptr<Agent> agent = local ? std::make_unique<Agent>(unix_path()) : std::make_unique<Agent>();
        Inbox       inbox;
        std::string problem;
        auto        channel = ControlChannel::start(agent->address(), "build-1", inbox.handlers(), problem);
        CHECK(channel != nullptr && problem.empty());
        CHECK(agent->accept_backend());
        const json hello = agent->line();
        CHECK((hello == json{{"type", "hello"}, {"version", 1}, {"build", "build-1"}, {"pid", int64_t(getpid())}}));

        const std::string line = table_line(4);
        agent->say("{\"type\": \"something newer\"}\n" + line.substr(0, 50));
        agent->say(line.substr(50) + table_line(5));
        CHECK(inbox.wait(2, 0));
        CHECK(inbox.tables[0]->sequence == 4 && inbox.tables[1]->sequence == 5 &&
              inbox.tables[1]->dtype == Dtype::bf16);

        channel->report(failure_of(3));
        json object = agent->line();
        CHECK(object["type"] == "failure" && object["layer"] == 3 && object["experts"] == json({2, 5}) &&
              object["waited_ms"] == 13);
        CHECK(object["reason"] == "no reply");

        {
            const std::lock_guard<std::mutex> lock(inbox.mutex);
            inbox.statistics.calls = 8;
            inbox.statistics.nodes.push_back({"a", 8, 24, 1000, 2000, 800, 400, 100});
            inbox.statistics.layers.push_back({3, 8});
        }
        object = agent->line();
        CHECK(object["type"] == "stats" && object["calls"] == 8 && object["failures"] == 0);
        CHECK((object["nodes"] == json::array({{{"name", "a"},
                                                {"calls", 8},
                                                {"pairs", 24},
                                                {"bytes_sent", 1000},
                                                {"bytes_received", 2000},
                                                {"call_us_mean", 100.0},
                                                {"compute_us_mean", 50.0}}})));
        CHECK((object["layers"] == json::array({{{"layer", 3}, {"rounds", 8}}})));
        channel->report(failure_of(9));
        channel.reset();  // what was reported goes out before the end
        CHECK(agent->line()["layer"] == 9);
        CHECK(agent->line().is_null());
    }
}

TEST(control_survives_nonsense_and_long_lines) {
    Agent       agent;
    Inbox       inbox;
    std::string problem;
    const auto  channel = ControlChannel::start(agent.address(), "b", inbox.handlers(), problem);
    CHECK(agent.accept_backend() && agent.line()["type"] == "hello");
    agent.say("nonsense\n\n[]\n{\"type\": \"table\"}\n{\"type\": \"table\", \"table\": 3}\n" + std::string(50000, '[') +
              "\n" + table_line(1));
    CHECK(inbox.wait(1, 6));
    CHECK(inbox.problems.size() == 6);
    agent.say(table_line(2, (15u << 20)));  // long, and allowed
    CHECK(inbox.wait(2, 6));
    agent.say(std::string((16u << 20) + 100000, 'x'));  // too long: the channel closes
    CHECK(inbox.wait(2, 7));
    CHECK(agent.line().is_null());
    CHECK(agent.accept_backend() && agent.line()["type"] == "hello");  // and comes back
}

TEST(control_says_which_table_is_in_use) {
    Agent       agent;
    Inbox       inbox;
    std::string problem;
    const auto  channel = ControlChannel::start(agent.address(), "b", inbox.handlers(), problem);
    CHECK(agent.accept_backend() && agent.line()["type"] == "hello");
    agent.say(table_line(3, 0, R"("id": 18446744073709551615, )") + table_line(3, 0, R"("id": 8, )"));
    CHECK((agent.line() == json{{"type", "table"}, {"id", 18446744073709551615u}, {"ok", true}}));
    json answer = agent.line();
    CHECK(answer["id"] == 8 && answer["ok"] == false);
    CHECK_CONTAINS(answer["problem"].get<std::string>(), " old");
    agent.say("{\"type\": \"table\", \"id\": 9}\n{\"type\": \"table\", \"id\": 10, \"table\": {\"version\": 2}}\n");
    answer = agent.line();
    CHECK((answer == json{{"type", "table"}, {"id", 9}, {"ok", false}, {"problem", "the message has no \"table\""}}));
    answer = agent.line();
    CHECK(answer["id"] == 10 && answer["ok"] == false);
    CHECK_CONTAINS(answer["problem"].get<std::string>(), "version 2");
    CHECK(inbox.wait(1, 3));
    // Without an id that can be one there is no answer; the next line is about the last of these.
    agent.say(table_line(4) + table_line(5, 0, R"("id": -1, )") + table_line(6, 0, R"("id": "x", )") +
              table_line(7, 0, R"("id": 11, )"));
    CHECK((agent.line() == json{{"type", "table"}, {"id", 11}, {"ok", true}}));
    CHECK(inbox.tables.size() == 5 && inbox.problems.size() == 3);
    // An agent that takes no answers: the last ones are kept for it.
    std::string many;
    for (int id = 0; id < 100000; id++) {  // more than the kernel takes of the answers
        many += "{\"type\": \"table\", \"id\": " + std::to_string(id) + "}\n";
    }
    agent.say(many);
    int last = -1;
    for (answer = agent.line(); answer.is_object(); answer = agent.line()) {
        CHECK(answer["id"].get<int>() > last);
        last = answer["id"].get<int>();
        if (last == 99999) {
            break;
        }
    }
    CHECK(last == 99999);
}

TEST(control_hands_over_holds_within_their_bound) {
    Agent       agent;
    Inbox       inbox;
    std::string problem;
    const auto  channel = ControlChannel::start(agent.address(), "b", inbox.handlers(), problem);
    CHECK(agent.accept_backend() && agent.line()["type"] == "hello");
    const auto hold = [](const std::string & ms) { return "{\"type\": \"hold\", \"ms\": " + ms + "}\n"; };
    agent.say(hold("1100") + hold("0") + hold("2000"));
    agent.say("{\"type\": \"hold\"}\n" + hold("2001") + hold("-1") + hold("1.5") + hold("\"9\"") + hold("null") +
              hold("1e99") + hold("true") + hold("18446744073709551616") + hold("7"));
    CHECK(inbox.wait(0, 9));
    agent.say(table_line(1));
    CHECK(inbox.wait(1, 9));
    CHECK((inbox.holds_ms == std::vector<double>{1100, 0, 2000, 7}));
    CHECK(inbox.problems.size() == 9);
    for (const std::string & text : inbox.problems) {
        CHECK_CONTAINS(text, "not a whole number from 0 to 2000");
    }
}

// The bytes are those of docs/protocol.md, which tests/node/commands/test_trace.py reads.
TEST(control_answers_a_request_for_a_trace) {
    Agent       agent;
    Inbox       inbox;
    std::string problem;
    inbox.trace.passes     = 3;
    inbox.trace.between_ns = 5000;
    inbox.trace.nodes      = {"alpha"};
    inbox.trace.layers.push_back({4, {2, 7, 900, 100, 600, 150, 300}});
    inbox.trace.calls.push_back({4, 0, {2, 14, 800, 400, 50, 2, 600, 400, 50, 550}});
    const auto channel = ControlChannel::start(agent.address(), "b", inbox.handlers(), problem);
    CHECK(agent.accept_backend() && agent.line()["type"] == "hello");
    agent.say("{\"type\": \"trace\"}\n{\"type\": \"trace\", \"id\": -1}\n{\"type\": \"trace\", \"id\": \"7\"}\n");
    CHECK(inbox.wait(0, 3));
    agent.say("{\"type\": \"trace\", \"id\": 18446744073709551615}\n");
    CHECK(agent.line()["id"] == 18446744073709551615u);
    agent.say("{\"type\": \"trace\", \"id\": 8}\n");
    CHECK(agent.line().dump() ==
          R"({"between_ns":5000,"calls":[[4,0,2,14,800,400,50,2,600,400,50,550]],"held_ns":0,"id":8,)"
          R"("layers":[{"add_ns":150,"encode_ns":100,"layer":4,"round_ns":900,"rounds":2,"rows":7,)"
          R"("trunk_ns":300,"wait_ns":600}],"left_out":0,"nodes":["alpha"],"passes":3,"type":"trace"})");
    CHECK(inbox.problems.size() == 3);
}

TEST(control_connects_again_and_keeps_order) {
    Agent       agent;
    Inbox       inbox;
    std::string problem;
    const auto  channel = ControlChannel::start(agent.address(), "b", inbox.handlers(), problem);
    for (int round = 0; round < 3; round++) {
        CHECK(agent.accept_backend());
        CHECK(agent.line()["type"] == "hello");
        agent.say(table_line(round + 1));
        CHECK(inbox.wait(size_t(round) + 1, 0));
        agent.drop();
    }
    CHECK(agent.accept_backend() && agent.line()["type"] == "hello");
    for (int i = 0; i < 20; i++) {
        channel->report(failure_of(i));
    }
    for (int i = 0; i < 20; i++) {
        CHECK(agent.line()["layer"] == i);
    }
    CHECK(channel->n_dropped() == 0);
}

TEST(control_sends_again_what_was_cut_off) {
    Agent       agent(unix_path());
    Inbox       inbox;
    std::string problem;
    const auto  channel = ControlChannel::start(agent.address(), "b", inbox.handlers(), problem);
    CHECK(agent.accept_backend() && agent.line()["type"] == "hello");
    for (int i = 0; i < 3; i++) {
        Failure failure = failure_of(i);
        failure.reason.assign(size_t(8) << 20,
                              'r');  // more than the kernel takes at once: the agent goes amid the first
        channel->report(failure);
    }
    CHECK(agent.sees_bytes());
    CHECK(agent.accept_backend() && agent.line()["type"] == "hello");
    for (int i = 0; i < 3; i++) {
        CHECK(agent.line()["layer"] == i);
    }
}

TEST(control_bounds_the_failures_it_keeps) {
    uint16_t    port = 0;
    close(fake::listen_on(port));
    Inbox       inbox;
    std::string problem;
    const auto  channel = ControlChannel::start("127.0.0.1:" + std::to_string(port), "b", inbox.handlers(), problem);
    CHECK(channel != nullptr);
    for (int i = 0; i < 1000; i++) {
        channel->report(failure_of(i));
    }
    CHECK(channel->n_dropped() == 1000 - ControlChannel::max_failures);
}

TEST(control_ends_at_once_with_an_agent_that_never_reads) {
    Agent       agent;
    Inbox       inbox;
    std::string problem;
    auto        channel = ControlChannel::start(agent.address(), "b", inbox.handlers(), problem);
    CHECK(agent.accept_backend());
    Failure big = failure_of(1);
    big.reason.assign(200000, 'r');
    for (int i = 0; i < 100; i++) {  // 20 MB: more than the kernel takes
        channel->report(big);
    }
    const auto begun = std::chrono::steady_clock::now();
    channel.reset();
    CHECK(std::chrono::steady_clock::now() - begun < std::chrono::seconds(5));
}

TEST(control_refuses_addresses) {
    Inbox inbox;
    for (const char * address :
         {"", "unix:", "host.name:80", "127.0.0.1", "127.0.0.1:0", "127.0.0.1:99999", "127.0.0.1:8x"}) {
        std::string problem;
        CHECK(ControlChannel::start(address, "b", inbox.handlers(), problem) == nullptr);
        CHECK_CONTAINS(problem, "SWARM_CONTROL");
    }
    std::string problem;
    CHECK(ControlChannel::start("unix:/" + std::string(200, 'p'), "b", inbox.handlers(), problem) == nullptr);
}
