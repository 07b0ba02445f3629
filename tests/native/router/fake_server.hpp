#pragma once
// An expert server of a few lines, in a thread of the test: WebSocket on loopback, one connection at a time.
// What it answers, and how badly, is the test's to say.

#include "router/handshake.hpp"
#include "common/msgpack.hpp"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#ifndef MSG_NOSIGNAL
#define MSG_NOSIGNAL 0
#endif

namespace fake {

using Data = std::vector<uint8_t>;

// One side of a listening socket on 127.0.0.1; `port` 0: any.
inline int listen_on(uint16_t & port) {
    const int   fd = socket(AF_INET, SOCK_STREAM, 0);
    const int   on = 1;
    sockaddr_in address{};
    address.sin_family      = AF_INET;
    address.sin_port        = htons(port);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    socklen_t length = sizeof(address);
    if (bind(fd, reinterpret_cast<sockaddr *>(&address), length) != 0 || listen(fd, 16) != 0) {
        std::perror("fake server");
        std::abort();
    }
    getsockname(fd, reinterpret_cast<sockaddr *>(&address), &length);
    port = ntohs(address.sin_port);
    return fd;
}

class Connection {
  public:
    Connection(int fd, int stop_fd) : fd_(fd), stop_fd_(stop_fd) {}

    // False: the peer closed, or the test ends.
    bool read(void * data, size_t size) {
        uint8_t * at = static_cast<uint8_t *>(data);
        while (size > 0) {
            if (!wait(POLLIN)) {
                return false;
            }
            const ssize_t n = recv(fd_, at, size, 0);
            if (n <= 0) {
                return false;
            }
            at += n;
            size -= size_t(n);
        }
        return true;
    }

    bool write(const void * data, size_t size) {
        const uint8_t * at = static_cast<const uint8_t *>(data);
        while (size > 0) {
            if (!wait(POLLOUT)) {
                return false;
            }
            const ssize_t n = ::send(fd_, at, size, MSG_NOSIGNAL | MSG_DONTWAIT);
            if (n < 0 && errno == EAGAIN) {
                continue;
            }
            if (n <= 0) {
                return false;
            }
            at += n;
            size -= size_t(n);
        }
        return true;
    }

    bool frame(unsigned first_byte, const void * payload, size_t size) {
        Data header = {uint8_t(first_byte)};
        if (size < 126) {
            header.push_back(uint8_t(size));
        } else {
            const unsigned n = size <= 0xffff ? 2 : 8;
            header.push_back(n == 2 ? 126 : 127);
            for (unsigned i = 0; i < n; i++) {
                header.push_back(uint8_t(uint64_t(size) >> (8 * (n - 1 - i))));
            }
        }
        header.insert(header.end(), static_cast<const uint8_t *>(payload),
                      static_cast<const uint8_t *>(payload) + size);
        return write(header.data(), header.size());
    }
    bool message(const Data & payload) { return frame(0x82, payload.data(), payload.size()); }

    // One client frame, unmasked. The mask bit is the client's duty, so a frame without it ends the connection.
    bool read_frame(unsigned & opcode, Data & payload) {
        uint8_t head[2];
        if (!read(head, 2) || !(head[1] & 0x80)) {
            return false;
        }
        uint64_t size    = head[1] & 0x7f;
        uint8_t  more[8];
        const unsigned n = size == 126 ? 2 : size == 127 ? 8 : 0;
        if (n > 0) {
            if (!read(more, n)) {
                return false;
            }
            size = 0;
            for (unsigned i = 0; i < n; i++) {
                size = size << 8 | more[i];
            }
        }
        uint8_t mask[4];
        payload.resize(size_t(size));
        if (!read(mask, 4) || !read(payload.data(), payload.size())) {
            return false;
        }
        for (size_t i = 0; i < payload.size(); i++) {
            payload[i] ^= mask[i % 4];
        }
        opcode = head[0] & 0x0f;
        return true;
    }

    // Until the peer closes (what it still sends is read and dropped) or the test ends.
    void wait_for_close() {
        uint8_t byte;
        while (read(&byte, 1)) {
        }
    }

    // Until the test ends, without reading: a stopped process.
    void freeze() {
        pollfd polled = {stop_fd_, POLLIN, 0};
        while (poll(&polled, 1, -1) < 0) {
        }
    }

    // False: the peer closed or the test ends; waits at most this long.
    bool pause_ms(int ms) {
        pollfd polled[2] = {{fd_, POLLIN, 0}, {stop_fd_, POLLIN, 0}};
        return poll(polled, 2, ms) == 0;
    }

    int fd() const { return fd_; }

  private:
    bool wait(int events) {
        pollfd polled[2] = {{fd_, short(events), 0}, {stop_fd_, POLLIN, 0}};
        while (poll(polled, 2, -1) < 0) {
        }
        return !(polled[1].revents & POLLIN);
    }

    int fd_;
    int stop_fd_;
};

class Server {
  public:
    // `serve` handles one upgraded connection; it is closed when `serve` returns. `accept_upgrade` false: the raw
    // connection is handed over instead.
    using Serve = std::function<void(Connection &)>;

    explicit Server(Serve serve, bool accept_upgrade = true, uint16_t port = 0)
        : port_(port), serve_(std::move(serve)), accept_upgrade_(accept_upgrade) {
        if (pipe(stop_) != 0) {
            std::abort();
        }
        listen_fd_ = listen_on(port_);
        thread_    = std::thread([this] { run(); });
    }

    ~Server() {
        const ssize_t n = ::write(stop_[1], "", 1);
        (void) n;
        thread_.join();
        close(listen_fd_);
        close(stop_[0]);
        close(stop_[1]);
    }

    uint16_t port() const { return port_; }
    int      n_connections() const { return n_connections_; }

  private:
    void run() {
        for (;;) {
            pollfd polled[2] = {{listen_fd_, POLLIN, 0}, {stop_[0], POLLIN, 0}};
            if (poll(polled, 2, -1) < 0) {
                continue;
            }
            if (polled[1].revents) {
                return;
            }
            const int fd = accept(listen_fd_, nullptr, nullptr);
            const int on = 1;
            setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
            n_connections_++;
            Connection connection(fd, stop_[0]);
            if (!accept_upgrade_ || upgrade(connection)) {
                serve_(connection);
            }
            close(fd);
        }
    }

    static bool upgrade(Connection & connection) {
        std::string head;
        for (char c; head.size() < 4096 && head.find("\r\n\r\n") == std::string::npos; head += c) {
            if (!connection.read(&c, 1)) {
                return false;
            }
        }
        const std::string name  = "Sec-WebSocket-Key: ";
        const size_t      begin = head.find(name);
        if (head.compare(0, 20, "GET /v1/ffn HTTP/1.1") != 0 || begin == std::string::npos) {
            return false;
        }
        const std::string key    = head.substr(begin + name.size(), head.find("\r\n", begin) - begin - name.size());
        const std::string answer =
            "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nconnection: keep-alive, Upgrade\r\n"
            "Sec-WebSocket-Accept: " +
            swarm::websocket_accept(key) + "\r\n\r\n";
        return connection.write(answer.data(), answer.size());
    }

    uint16_t         port_;
    Serve            serve_;
    bool             accept_upgrade_;
    int              listen_fd_ = -1;
    int              stop_[2]   = {-1, -1};
    std::atomic<int> n_connections_{0};
    std::thread      thread_;
};

// A request as the server sees it.
struct Request {
    uint64_t    id = 0, term = 0, layer = 0, n_rows = 0, program = 0, deadline_ms = 0;
    std::string model, reduce, dtype;
    Data        h;
    std::vector<int32_t> row, expert;
    std::vector<float>   weight;
};

inline bool parse_request(const Data & message, Request & request) {
    swarm::MsgpackReader reader(message.data(), message.size());
    uint32_t             n = 0;
    if (!reader.map(n)) {
        return false;
    }
    const auto bytes = [&reader](void (*store)(Request &, const uint8_t *, size_t), Request & target) {
        swarm::Bytes value;
        const bool   ok = reader.bin(value);
        if (ok) {
            store(target, value.data, value.size);
        }
        return ok;
    };
    const auto text = [&reader](std::string & target) {
        std::string_view value;
        const bool       ok = reader.str(value);
        target              = std::string(value);
        return ok;
    };
    for (uint32_t i = 0; i < n; i++) {
        std::string_view key;
        uint64_t         version = 0;
        bool             ok      = reader.str(key);
        if (key == "v") { ok = ok && reader.number(version) && version == 1; }
        else if (key == "id") { ok = ok && reader.number(request.id); }
        else if (key == "term") { ok = ok && reader.number(request.term); }
        else if (key == "layer") { ok = ok && reader.number(request.layer); }
        else if (key == "rows") { ok = ok && reader.number(request.n_rows); }
        else if (key == "program") { ok = ok && reader.number(request.program); }
        else if (key == "deadline_ms") { ok = ok && reader.number(request.deadline_ms); }
        else if (key == "model") { ok = ok && text(request.model); }
        else if (key == "reduce") { ok = ok && text(request.reduce); }
        else if (key == "dtype") { ok = ok && text(request.dtype);
        } else if (key == "h") {
            ok = ok && bytes([](Request & r, const uint8_t * d, size_t s) { r.h.assign(d, d + s); }, request);
        } else if (key == "row") {
            ok = ok && bytes(
                           [](Request & r, const uint8_t * d, size_t s) {
                               r.row.resize(s / 4);
                               std::memcpy(r.row.data(), d, s / 4 * 4);
                           },
                           request);
        } else if (key == "expert") {
            ok = ok && bytes(
                           [](Request & r, const uint8_t * d, size_t s) {
                               r.expert.resize(s / 4);
                               std::memcpy(r.expert.data(), d, s / 4 * 4);
                           },
                           request);
        } else if (key == "weight") {
            ok = ok && bytes(
                           [](Request & r, const uint8_t * d, size_t s) {
                               r.weight.resize(s / 4);
                               std::memcpy(r.weight.data(), d, s / 4 * 4);
                           },
                           request);
        } else {
            ok = false;
        }
        if (!ok) {
            return false;
        }
    }
    return reader.at_end() && request.row.size() == request.expert.size();
}

inline Data reply(uint64_t id, const Data & y, uint64_t compute_us = 10) {
    Data                 buffer(y.size() + 128);
    swarm::MsgpackWriter writer(buffer.data(), buffer.size());
    writer.map(5);
    writer.str("v");
    writer.number(1);
    writer.str("id");
    writer.number(id);
    writer.str("y");
    writer.bin_header(y.size());
    writer.raw(y.data(), y.size());
    writer.str("compute_us");
    writer.number(compute_us);
    writer.str("queue_us");
    writer.number(0);
    buffer.resize(writer.size());
    return buffer;
}

inline Data error(uint64_t id, const std::string & kind, const std::string & message, bool retry) {
    Data                 buffer(512);
    swarm::MsgpackWriter writer(buffer.data(), buffer.size());
    writer.map(3);
    writer.str("v");
    writer.number(1);
    writer.str("id");
    writer.number(id);
    writer.str("error");
    writer.map(5);
    writer.str("kind");
    writer.str(kind);
    writer.str("message");
    writer.str(message);
    writer.str("layer");
    writer.number(0);
    writer.str("experts");
    writer.array(1);
    writer.number(2);
    writer.str("retry");
    writer.boolean(retry);
    buffer.resize(writer.size());
    return buffer;
}

}  // namespace fake
