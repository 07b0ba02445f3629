// The WebSocket client against a server that frames well, badly, slowly or not at all.

#include "common/check.hpp"
#include "router/fake_server.hpp"

#include "router/websocket.hpp"

#include <chrono>

using namespace swarm;

namespace {

using Time = std::chrono::steady_clock;

Address address_of(uint16_t port) {
    Address     address;
    std::string problem;
    CHECK(parse_address("127.0.0.1", port, address, problem));
    return address;
}

// One turn of the loop that the client is made for. False: nothing happened for 10 s.
bool turn(WebSocket & socket) {
    const int events = (socket.want_read() ? POLLIN : 0) | (socket.want_write() ? POLLOUT : 0);
    pollfd    polled = {socket.fd(), short(events), 0};
    if (poll(&polled, 1, 10000) <= 0) {
        return false;
    }
    if ((polled.revents & (POLLOUT | POLLERR | POLLHUP)) && socket.want_write()) {
        socket.on_writable();
    }
    if ((polled.revents & (POLLIN | POLLERR | POLLHUP)) && socket.want_read()) {
        socket.on_readable();
    }
    return true;
}

void open(WebSocket & socket, const fake::Server & server) {
    socket.start_connect(address_of(server.port()), "/v1/ffn");
    while (socket.state() != WebSocket::State::open && socket.state() != WebSocket::State::closed && turn(socket)) {
    }
}

bool next_message(WebSocket & socket, fake::Data & message) {
    while (socket.state() != WebSocket::State::closed && !socket.has_message() && turn(socket)) {
    }
    if (!socket.has_message()) {
        return false;
    }
    const Bytes bytes = socket.message();
    message.assign(bytes.data, bytes.data + bytes.size);
    socket.release_message();
    return true;
}

// The reason why the connection ended, after `serve` did what it did.
std::string reason_after(fake::Server::Serve serve, size_t max_message_bytes = 1000) {
    fake::Server server([serve](fake::Connection & connection) {
        serve(connection);
        connection.wait_for_close();
    });
    WebSocket socket;
    socket.set_max_message_bytes(max_message_bytes);
    open(socket, server);
    fake::Data message;
    CHECK(!next_message(socket, message));
    CHECK(socket.state() == WebSocket::State::closed && socket.fd() == -1);
    return socket.reason();
}

fake::Data text(const char * characters) { return fake::Data(characters, characters + std::strlen(characters)); }

}  // namespace

TEST(websocket_echo_of_many_sizes) {
    fake::Server server([](fake::Connection & connection) {
        unsigned   opcode = 0;
        fake::Data message;
        while (connection.read_frame(opcode, message)) {
            if (opcode == 2) {
                connection.message(message);
            }
        }
    });
    WebSocket socket;
    open(socket, server);
    socket.set_max_message_bytes(8 << 20);
    for (int round = 0; round < 2; round++) {
        for (const size_t size : {0, 1, 2, 7, 125, 126, 127, 128, 65535, 65536, 65537, 200000, 5000000}) {
            fake::Data sent(size), received;
            for (size_t i = 0; i < size; i++) {
                sent[i] = uint8_t(i * 131 + (i >> 9));
            }
            socket.send(sent.data(), sent.size());
            CHECK(next_message(socket, received));
            CHECK(received == sent);
        }
    }
    CHECK(server.n_connections() == 1);
    CHECK(socket.bytes_sent() > 10000000 && socket.bytes_received() > 10000000);
}

TEST(websocket_masks_differ_from_frame_to_frame) {
    std::atomic<int> n_distinct{0};
    fake::Server     server([&](fake::Connection & connection) {
        std::vector<std::vector<uint8_t>> masks;
        for (int i = 0; i < 8; i++) {
            uint8_t frame[2 + 4 + 4];  // header, mask, four zero bytes: which show the mask once more
            if (!connection.read(frame, sizeof(frame)) || std::memcmp(frame + 2, frame + 6, 4) != 0) {
                return;
            }
            const std::vector<uint8_t> mask(frame + 2, frame + 6);
            bool                       is_new = true;
            for (const auto & known : masks) {
                is_new = is_new && known != mask;
            }
            masks.push_back(mask);
            n_distinct += is_new;
        }
        connection.message(text("seen"));
        connection.wait_for_close();
    });
    WebSocket socket;
    open(socket, server);
    for (int i = 0; i < 8; i++) {
        socket.send("\0\0\0\0", 4);
    }
    fake::Data message;
    CHECK(next_message(socket, message));
    CHECK(n_distinct == 8);
}

TEST(websocket_fragments_and_control_frames_between_them) {
    for (const bool bytewise : {false, true}) {
        fake::Server server([bytewise](fake::Connection & connection) {
            const fake::Data frames = {0x02, 3,   'a', 'b', 'c',  0x89, 2,   'h',  'i', 0x00, 0,   0x8a, 0, 0x00,
                                       3,    'd', 'e', 'f', 0x80, 1,    'g', 0x82, 2,   'x',  'y', 0x82, 0};
            for (size_t i = 0; bytewise && i < frames.size(); i++) {
                connection.write(&frames[i], 1);
            }
            if (!bytewise) {
                connection.write(frames.data(), frames.size());
            }
            unsigned   opcode = 0;
            fake::Data pong;
            const bool ok = connection.read_frame(opcode, pong) && opcode == 10 && pong == text("hi");
            connection.message(text(ok ? "pong" : "no pong"));
            connection.wait_for_close();
        });
        WebSocket  socket;
        fake::Data message;
        open(socket, server);
        CHECK(next_message(socket, message) && message == text("abcdefg"));
        CHECK(next_message(socket, message) && message == text("xy"));
        CHECK(next_message(socket, message) && message.empty());
        CHECK(next_message(socket, message) && message == text("pong"));
    }
}

TEST(websocket_large_fragmented_message) {
    fake::Data whole(1 << 20);
    for (size_t i = 0; i < whole.size(); i++) {
        whole[i] = uint8_t(i * 7 + (i >> 11));
    }
    fake::Server server([&whole](fake::Connection & connection) {
        for (size_t at = 0; at < whole.size(); at += 50000) {
            const size_t n = std::min<size_t>(50000, whole.size() - at);
            connection.frame((at == 0 ? 2u : 0u) | (at + n == whole.size() ? 0x80u : 0u), whole.data() + at, n);
            connection.frame(0x89, "ping", 4);
        }
        connection.wait_for_close();
    });
    WebSocket  socket;
    fake::Data message;
    socket.set_max_message_bytes(whole.size());
    open(socket, server);
    CHECK(next_message(socket, message) && message == whole);
}

TEST(websocket_refuses_bad_frames) {
    const auto raw = [](fake::Data bytes) {
        return [bytes](fake::Connection & connection) { connection.write(bytes.data(), bytes.size()); };
    };
    CHECK_CONTAINS(reason_after(raw({0x82, 0x81, 1, 2, 3, 4, 5})), "mask");
    CHECK_CONTAINS(reason_after(raw({0xc2, 1, 'a'})), "reserved");
    CHECK_CONTAINS(reason_after(raw({0x81, 1, 'a'})), "kind 1");
    CHECK_CONTAINS(reason_after(raw({0x83, 1, 'a'})), "kind 3");
    CHECK_CONTAINS(reason_after(raw({0x8b, 0})), "unknown kind 11");
    CHECK_CONTAINS(reason_after(raw({0x80, 1, 'a'})), "kind 0");
    CHECK_CONTAINS(reason_after(raw({0x02, 1, 'a', 0x82, 1, 'b'})), "kind 2");
    CHECK_CONTAINS(reason_after(raw({0x09, 1, 'a'})), "fragmented");
    CHECK_CONTAINS(reason_after(raw({0x89, 126, 0, 126})), "too long");
    CHECK_CONTAINS(reason_after(raw({0x82, 126, 0x03, 0xe9})), "longer than the 1000 bytes");
    CHECK_CONTAINS(reason_after(raw({0x82, 127, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff})), "longer than");
    CHECK_CONTAINS(reason_after(raw({0x02, 1, 'a', 0x80, 126, 0x03, 0xe8})), "longer than the 1000 bytes");
    CHECK_CONTAINS(reason_after(raw({0x88, 7, 0x03, 0xf1, 't', 'o', 'o', '\n', '!'})), "code 1009: too?!");
    CHECK_CONTAINS(reason_after(raw({0x88, 0})), "closed");
}

TEST(websocket_sees_a_peer_that_closes) {
    for (const fake::Data & bytes :
         {fake::Data{}, fake::Data{0x82}, fake::Data{0x82, 5, 'a'}, fake::Data{0x02, 1, 'a'}}) {
        fake::Server server([&bytes](fake::Connection & connection) {
            if (!bytes.empty()) {
                connection.write(bytes.data(), bytes.size());
            }
            shutdown(connection.fd(), SHUT_WR);  // half closed: it would still read
            connection.wait_for_close();
        });
        WebSocket  socket;
        fake::Data message;
        open(socket, server);
        CHECK(!next_message(socket, message));
        CHECK_CONTAINS(socket.reason(), "closed");
    }
}

TEST(websocket_upgrade_refused_or_endless) {
    for (const bool endless : {false, true}) {
        fake::Server server(
            [endless](fake::Connection & connection) {
                const std::string line = endless ? std::string(600, 'x')
                                                 : "HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n";
                while (connection.write(line.data(), line.size()) && endless) {
                }
                connection.wait_for_close();
            },
            false);
        WebSocket socket;
        open(socket, server);
        CHECK(socket.state() == WebSocket::State::closed);
        CHECK_CONTAINS(socket.reason(), endless ? "longer than" : "503 Service Unavailable");
    }
}

TEST(websocket_connection_refused) {
    uint16_t  port = 0;
    close(fake::listen_on(port));  // free again, and nobody listens
    WebSocket socket;
    socket.start_connect(address_of(port), "/v1/ffn");
    while (socket.state() != WebSocket::State::closed && turn(socket)) {
    }
    CHECK_CONTAINS(socket.reason(), "refused");
}

TEST(websocket_keeps_little_for_a_peer_that_pings_and_never_reads) {
    fake::Server server([](fake::Connection & connection) {
        const fake::Data ping(100, 'p');
        for (int i = 0; i < 100000; i++) {  // 10 MB: more than the kernel's buffers hold
            if (!connection.frame(0x89, ping.data(), ping.size())) {
                return;
            }
        }
        connection.message(text("done"));
        connection.freeze();
    });
    WebSocket  socket;
    fake::Data message;
    open(socket, server);
    size_t most = 0;
    while (!socket.has_message() && socket.state() == WebSocket::State::open && turn(socket)) {
        most = std::max(most, socket.bytes_unsent());
    }
    CHECK(socket.has_message());
    CHECK(most <= 2048);
}
