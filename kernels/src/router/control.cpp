#include "router/control.hpp"

#include "common/net.hpp"
#include "router/peer.hpp"

#include <nlohmann/json.hpp>

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <deque>
#include <mutex>
#include <optional>
#include <system_error>
#include <thread>

namespace swarm {

namespace {

using json = nlohmann::json;

constexpr double first_backoff_ms   = 50;
constexpr double longest_backoff_ms = 2000;
constexpr double stats_interval_ms  = 1000;
constexpr size_t read_bytes         = 65536;
constexpr size_t idle_buffer_bytes  = size_t(1) << 20;  // kept between lines; a big table's buffer is given back

std::string line_of(const json & object) { return object.dump(-1, ' ', false, json::error_handler_t::replace) + "\n"; }

std::string failure_line(const Failure & failure) {
    return line_of({{"type", "failure"},
                    {"node", failure.node},
                    {"layer", failure.layer},
                    {"experts", {failure.first_expert, failure.last_expert}},
                    {"reason", failure.reason},
                    {"waited_ms", std::llround(failure.waited_ms)}});
}

}  // namespace

struct ControlChannel::Impl {
    Address     address;
    std::string build_id;
    Handlers    handlers;
    int         wake[2] = {-1, -1};
    std::thread thread;

    mutable std::mutex  mutex;  // the three below
    std::deque<Failure> failures;
    size_t              n_dropped = 0;
    bool                stopping  = false;

    // The rest belongs to the thread.
    int                     fd           = -1;
    bool                    is_connected = false;
    bool                    said_hello   = false;
    std::string             out, in;
    size_t                  out_sent = 0, in_scanned = 0;
    std::deque<std::string> answers;         // lines about tables
    std::optional<uint64_t> trace_asked;     // made when the agent reads on: a trace can be long
    std::optional<Failure>  failure_in_out;  // comes back into the queue if the agent goes away before it has the line
    double                  backoff_ms = 0;
    Clock::time_point       next_connect{}, next_stats{};
    uint64_t                stats_sent = 0;  // calls and failures in the last statistics sent
    std::string             problem;

    ~Impl() {
        for (const int end : {wake[0], wake[1], fd}) {
            if (end >= 0) {
                close(end);
            }
        }
    }

    bool open_wake_pipe() {
        if (pipe(wake) != 0) {
            return false;
        }
        for (const int end : wake) {
            const int flags = fcntl(end, F_GETFL);
            if (flags < 0 || fcntl(end, F_SETFL, flags | O_NONBLOCK) < 0 || fcntl(end, F_SETFD, FD_CLOEXEC) < 0) {
                return false;
            }
        }
        return true;
    }

    void wake_up() const {
        const char byte = 0;
        while (write(wake[1], &byte, 1) < 0 && errno == EINTR) {
        }
    }

    bool is_stopping() const {
        const std::lock_guard<std::mutex> lock(mutex);
        return stopping;
    }

    void say(const std::string & text) const {
        if (handlers.on_problem) {
            handlers.on_problem("control channel " + address.text + ": " + text);
        }
    }

    void push_failure(Failure failure, bool to_front) {
        const std::lock_guard<std::mutex> lock(mutex);
        if (failures.size() >= max_failures) {
            n_dropped++;
            if (to_front) {
                return;  // it is the oldest
            }
            failures.pop_front();
        }
        if (to_front) {
            failures.push_front(std::move(failure));
        } else {
            failures.push_back(std::move(failure));
        }
    }

    void disconnect(Clock::time_point now) {
        if (fd >= 0) {
            close(fd);
        }
        fd           = -1;
        is_connected = said_hello = false;
        out.clear();
        in.clear();
        answers.clear();  // the next agent sends its table again
        trace_asked.reset();
        out_sent = in_scanned = 0;
        if (failure_in_out) {
            push_failure(std::move(*failure_in_out), true);
            failure_in_out.reset();
        }
        backoff_ms   = backoff_ms == 0 ? first_backoff_ms : std::min(2 * backoff_ms, longest_backoff_ms);
        next_connect = after_ms(now, backoff_ms);
    }

    void connect(Clock::time_point now) {
        fd = start_connect(address, is_connected, problem);
        if (fd < 0) {
            disconnect(now);
        }
    }

    // The next line to send, if there is one: hello, then answers, then failures, then a trace, then statistics.
    void fill_out(Clock::time_point now) {
        if (!said_hello) {
            out        = line_of({{"type", "hello"}, {"version", 1}, {"build", build_id}, {"pid", int64_t(getpid())}});
            said_hello = true;
            stats_sent = 0;  // a new agent knows nothing yet
            next_stats = now;
            return;
        }
        if (!answers.empty()) {
            out = std::move(answers.front());
            answers.pop_front();
            return;
        }
        {
            const std::lock_guard<std::mutex> lock(mutex);
            if (!failures.empty()) {
                failure_in_out = std::move(failures.front());
                failures.pop_front();
            }
        }
        if (failure_in_out) {
            out = failure_line(*failure_in_out);
            return;
        }
        if (trace_asked) {
            out = trace_json(handlers.trace ? handlers.trace() : Trace(), *trace_asked) + "\n";
            trace_asked.reset();
            return;
        }
        if (now < next_stats) {
            return;
        }
        next_stats                  = after_ms(now, stats_interval_ms);
        const Statistics statistics = handlers.statistics ? handlers.statistics() : Statistics();
        if (statistics.calls + statistics.failures != stats_sent) {
            stats_sent = statistics.calls + statistics.failures;
            out        = statistics_json(statistics, "stats") + "\n";
        }
    }

    // Sends until there is nothing left or the agent takes no more. False: disconnected.
    bool send_lines(Clock::time_point now) {
        for (;;) {
            if (out.empty()) {
                fill_out(now);
                if (out.empty()) {
                    return true;
                }
            }
            const ptrdiff_t n = send_some(fd, out.data() + out_sent, out.size() - out_sent, problem);
            if (n == -1) {
                return true;
            }
            if (n < 0) {
                disconnect(now);
                return false;
            }
            out_sent += size_t(n);
            if (out_sent == out.size()) {
                out.clear();
                out_sent = 0;
                failure_in_out.reset();
            }
        }
    }

    void receive_lines(Clock::time_point now) {
        const size_t before = in.size();
        in.resize(before + read_bytes);
        const ptrdiff_t n = receive_some(fd, &in[before], read_bytes, problem);
        in.resize(before + (n > 0 ? size_t(n) : 0));
        if (n == -1) {
            return;
        }
        if (n <= 0) {
            disconnect(now);
            return;
        }
        size_t begin = 0;
        for (size_t end; (end = in.find('\n', std::max(begin, in_scanned))) != std::string::npos; begin = end + 1) {
            backoff_ms = 0;  // an agent that talks is one
            handle_line(in.data() + begin, end - begin);
        }
        in.erase(0, begin);
        in_scanned = in.size();
        if (in.size() > max_line_bytes) {
            say("a line is longer than " + std::to_string(max_line_bytes) + " bytes; the connection is closed");
            disconnect(now);
        } else if (in.empty() && in.capacity() > idle_buffer_bytes) {
            in.shrink_to_fit();
        }
    }

    void handle_line(const char * data, size_t size) {
        const json object = size <= max_line_bytes ? json::parse(data, data + size, nullptr, false) : json();
        if (!object.is_object()) {
            say("a line is no JSON object or longer than " + std::to_string(max_line_bytes) + " bytes; it is ignored");
            return;
        }
        const auto type = object.find("type");
        if (type != object.end() && *type == "table") {
            handle_table(object);
        } else if (type != object.end() && *type == "hold") {
            handle_hold(object);
        } else if (type != object.end() && *type == "trace") {
            handle_trace(object);
        }  // newer agents may say more
    }

    void handle_table(const json & message) {
        const auto  table = message.find("table");
        std::string wrong = "the message has no \"table\"";
        const auto  parsed = table == message.end()
                                 ? nullptr
                                 : RoutingTable::parse(table->dump(-1, ' ', false, json::error_handler_t::replace),
                                                       wrong);
        if (parsed) {
            wrong = handlers.on_table ? handlers.on_table(parsed) : std::string();
        }
        if (!wrong.empty()) {
            say("a routing table is refused and the one in use kept: " + wrong);
        }
        const auto id = message.find("id");
        if (id == message.end() || !id->is_number_unsigned()) {
            return;
        }
        json answer = {{"type", "table"}, {"id", *id}, {"ok", wrong.empty()}};
        if (!wrong.empty()) {
            answer["problem"] = wrong;
        }
        answers.push_back(line_of(answer));
        if (answers.size() > max_answers) {
            answers.pop_front();
        }
    }

    void handle_hold(const json & message) {
        const auto ms = message.find("ms");
        if (ms == message.end() || !ms->is_number_unsigned() || ms->get<uint64_t>() > uint64_t(max_hold_ms)) {
            say("a hold is ignored: its \"ms\" is not a whole number from 0 to " + std::to_string(max_hold_ms));
        } else if (handlers.on_hold) {
            handlers.on_hold(double(ms->get<uint64_t>()));
        }
    }

    // Of requests that are not answered yet only the last one counts.
    void handle_trace(const json & message) {
        const auto id = message.find("id");
        if (id == message.end() || !id->is_number_unsigned()) {
            say("a request for a trace is ignored: its \"id\" is not a whole number");
            return;
        }
        trace_asked = id->get<uint64_t>();
    }

    void turn() {
        Clock::time_point now = Clock::now();
        if (fd < 0 && now >= next_connect) {
            connect(now);
        }
        if (fd >= 0 && is_connected && !send_lines(now)) {
            return;
        }
        pollfd polled[2] = {{wake[0], POLLIN, 0}, {fd, 0, 0}};  // poll() passes over fd -1
        if (fd >= 0) {
            polled[1].events = short((is_connected ? POLLIN : 0) | (!is_connected || !out.empty() ? POLLOUT : 0));
        }
        const Clock::time_point until = fd < 0         ? next_connect
                                        : is_connected ? next_stats
                                                       : after_ms(now, stats_interval_ms);
        const double timeout_ms = std::ceil(std::max(0.0, ms_between(now, std::max(until, now))));
        // While a line waits for the agent to read, the statistics wait too.
        const bool waits_for_agent = fd >= 0 && !out.empty();
        const int  wait_ms         = int(waits_for_agent ? stats_interval_ms : std::min(timeout_ms, stats_interval_ms));
        const int  n               = poll(polled, 2, wait_ms);
        if (n <= 0) {
            return;
        }
        now = Clock::now();
        if (polled[0].revents) {
            char bytes[64];
            while (read(wake[0], bytes, sizeof(bytes)) > 0) {
            }
        }
        if (polled[1].revents && !is_connected) {
            if (finish_connect(fd, problem)) {
                is_connected = true;
            } else {
                disconnect(now);
            }
        } else if (polled[1].revents & (POLLIN | POLLERR | POLLHUP)) {
            receive_lines(now);
        }
    }

    void run() {
        while (!is_stopping()) {
            try {
                turn();
            } catch (const std::exception & error) {  // out of memory, or a handler's
                disconnect(Clock::now());
                say(error.what());
            }
        }
        // What was reported just before the end still goes out if the agent takes it at once.
        if (fd >= 0 && is_connected) {
            next_stats = Clock::now();
            send_lines(next_stats);
        }
    }
};

std::unique_ptr<ControlChannel> ControlChannel::start(const std::string & address, const std::string & build_id,
                                                      Handlers handlers, std::string & problem) {
    auto impl      = std::make_unique<Impl>();
    impl->build_id = build_id;
    impl->handlers = std::move(handlers);
    if (!parse_address(address, impl->address, problem)) {
        problem = "SWARM_CONTROL: " + problem;
        return nullptr;
    }
    if (!impl->open_wake_pipe()) {
        problem = "no pipe for the control channel: " + error_text(errno);
        return nullptr;
    }
    // The host program's signals are for its own threads.
    sigset_t all, former;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &former);
    try {
        impl->thread = std::thread(&Impl::run, impl.get());
    } catch (const std::system_error & error) {
        problem = std::string("no thread for the control channel: ") + error.what();
    }
    pthread_sigmask(SIG_SETMASK, &former, nullptr);
    if (!impl->thread.joinable()) {
        return nullptr;
    }
    return std::unique_ptr<ControlChannel>(new ControlChannel(std::move(impl)));
}

ControlChannel::ControlChannel(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

ControlChannel::~ControlChannel() {
    {
        const std::lock_guard<std::mutex> lock(impl_->mutex);
        impl_->stopping = true;
    }
    impl_->wake_up();
    impl_->thread.join();
}

void ControlChannel::report(const Failure & failure) {
    impl_->push_failure(failure, false);
    impl_->wake_up();
}

size_t ControlChannel::n_dropped() const {
    const std::lock_guard<std::mutex> lock(impl_->mutex);
    return impl_->n_dropped;
}

}  // namespace swarm
