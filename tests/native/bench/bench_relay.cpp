// A link between this machine and servers on it, for scripts/bench: TCP connections with a round trip and a rate.
//   swarm-bench-relay ROUND_TRIP_US RATE_MBIT_S LESS_US PORT...
// For each PORT of loopback it listens on another one; prints these, in order, as a JSON array, and relays until its
// stdin ends. All connections of a direction share the rate, as on the cable of the machine that connects. LESS_US:
// what the relay itself takes for a round trip, which is taken off its delays; scripts/bench measures it.

#include "common/net.hpp"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sched.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <list>
#include <string>
#include <vector>

using namespace swarm;
using Clock = std::chrono::steady_clock;

namespace {

constexpr size_t chunk_bytes_max = 16 << 10;  // some packets: what has come is passed on before more is read
constexpr size_t queue_bytes_max = 4 << 20;   // as much as sockets would buffer
constexpr std::chrono::microseconds awake{2000};  // looks without sleeping for so long after the last byte

struct Chunk {
    Clock::time_point    due;
    std::vector<uint8_t> bytes;
    size_t               sent = 0;
};

// One direction of the cable.
struct Cable {
    Clock::duration   delay{};
    double            ns_per_byte = 0;
    Clock::time_point free{};

    Clock::time_point due(size_t n_bytes, Clock::time_point now) {
        const auto takes = std::chrono::nanoseconds(static_cast<int64_t>(ns_per_byte * double(n_bytes)));
        free             = std::max(free, now) + takes;
        return free + delay;
    }
};

struct Flow {
    int               from = -1, to = -1;
    Cable *           cable = nullptr;
    std::deque<Chunk> chunks;
    size_t            n_bytes = 0;
    bool              from_ended = false;

    // False: the connection is over. `moved`: whether a byte was.
    bool run(Clock::time_point now, bool & moved) {
        std::string problem;
        while (!chunks.empty() && chunks.front().due <= now) {
            Chunk &         chunk = chunks.front();
            const ptrdiff_t n     = send_some(to, chunk.bytes.data() + chunk.sent, chunk.bytes.size() - chunk.sent,
                                              problem);
            if (n == -2) {
                return false;
            }
            if (n == -1) {
                break;
            }
            moved = true;
            chunk.sent += size_t(n);
            n_bytes -= size_t(n);
            if (chunk.sent == chunk.bytes.size()) {
                chunks.pop_front();
            }
        }
        if (!from_ended && n_bytes < queue_bytes_max) {
            uint8_t         buffer[chunk_bytes_max];
            const ptrdiff_t n = receive_some(from, buffer, sizeof(buffer), problem);
            if (n == -2) {
                return false;
            }
            from_ended = n == 0;
            if (n > 0) {
                moved = true;
                chunks.push_back({cable->due(size_t(n), now), std::vector<uint8_t>(buffer, buffer + n)});
                n_bytes += size_t(n);
            }
        }
        return !(from_ended && chunks.empty());
    }
};

int listen_on_loopback(uint16_t & port) {
    const int   fd = socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address{};
    address.sin_family      = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length        = sizeof(address);
    if (fd < 0 || bind(fd, reinterpret_cast<sockaddr *>(&address), length) != 0 || listen(fd, 64) != 0 ||
        getsockname(fd, reinterpret_cast<sockaddr *>(&address), &length) != 0) {
        std::perror("swarm-bench-relay");
        std::exit(1);
    }
    port = ntohs(address.sin_port);
    return fd;
}

void prepare(int fd) {
    const int on = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
    fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
}

int connect_to(uint16_t port) {
    const int   fd = socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address{};
    address.sin_family      = AF_INET;
    address.sin_port        = htons(port);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (fd < 0 || connect(fd, reinterpret_cast<sockaddr *>(&address), sizeof(address)) != 0) {
        ::close(fd);
        return -1;
    }
    return fd;
}

}  // namespace

int main(int argc, char ** argv) {
    if (argc < 5) {
        std::fprintf(stderr, "usage: %s ROUND_TRIP_US RATE_MBIT_S LESS_US PORT...\n", argv[0]);
        return 2;
    }
    Cable        cables[2];
    const double one_way_us = std::max(0.0, std::atof(argv[1]) - std::atof(argv[3])) / 2;
    for (Cable & cable : cables) {
        cable.delay       = std::chrono::nanoseconds(static_cast<int64_t>(one_way_us * 1000));
        cable.ns_per_byte = 8000 / std::max(0.001, std::atof(argv[2]));
    }
    std::vector<pollfd>   listening;
    std::vector<uint16_t> targets;
    std::string           ports;
    for (int i = 4; i < argc; i++) {
        uint16_t port = 0;
        listening.push_back({listen_on_loopback(port), POLLIN, 0});
        targets.push_back(uint16_t(std::atoi(argv[i])));
        ports += (ports.empty() ? "" : ", ") + std::to_string(port);
    }
    std::printf("[%s]\n", ports.c_str());
    std::fflush(stdout);

    struct Pair {
        Flow flows[2];
    };
    std::list<Pair>     pairs;
    std::vector<pollfd> watched;
    Clock::time_point   last_moved = Clock::now();
    for (uint64_t round = 0;; round++) {
        Clock::time_point now   = Clock::now();
        bool              moved = false, waiting = false;
        for (auto pair = pairs.begin(); pair != pairs.end();) {
            const bool both = pair->flows[0].run(now, moved) && pair->flows[1].run(now, moved);
            waiting         = waiting || !pair->flows[0].chunks.empty() || !pair->flows[1].chunks.empty();
            if (!both) {
                ::close(pair->flows[0].from);
                ::close(pair->flows[0].to);
                pair = pairs.erase(pair);
            } else {
                ++pair;
            }
        }
        last_moved        = moved ? now : last_moved;
        const bool asleep = !waiting && now - last_moved > awake;
        if (!asleep && round % 64 != 0) {
            // Others may have the core; a timer would be late by what it takes to wake one.
            sched_yield();
            continue;
        }
        watched.assign(listening.begin(), listening.end());
        watched.push_back({0, POLLIN, 0});
        for (const Pair & pair : pairs) {
            watched.push_back({pair.flows[0].from, POLLIN, 0});
            watched.push_back({pair.flows[1].from, POLLIN, 0});
        }
        if (poll(watched.data(), nfds_t(watched.size()), asleep ? -1 : 0) < 0) {
            continue;
        }
        char byte;
        if (watched[listening.size()].revents != 0 && read(0, &byte, 1) <= 0) {
            return 0;
        }
        for (size_t i = 0; i < listening.size(); i++) {
            if (!(watched[i].revents & POLLIN)) {
                continue;
            }
            const int client = accept(listening[i].fd, nullptr, nullptr);
            const int server = client < 0 ? -1 : connect_to(targets[i]);
            if (server < 0) {
                ::close(client);
                continue;
            }
            prepare(client);
            prepare(server);
            pairs.emplace_back();
            pairs.back().flows[0] = {client, server, &cables[0], {}, 0, false};
            pairs.back().flows[1] = {server, client, &cables[1], {}, 0, false};
        }
        last_moved = asleep ? Clock::now() : last_moved;
    }
}
