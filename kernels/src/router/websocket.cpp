#include "router/websocket.hpp"

#include "router/handshake.hpp"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <new>
#include <random>

namespace swarm {

namespace {

constexpr size_t max_head_bytes    = 8192;   // of the answer to the upgrade
constexpr size_t first_buffer      = 65536;
constexpr size_t max_frame_header  = 14;
constexpr size_t max_unsent_pongs  = 1024;   // a peer that pings and never reads gets no more than this kept for it
constexpr int    max_reads         = 16;     // per on_readable(): the loop's other connections get their turn

enum : unsigned { op_continuation = 0, op_text = 1, op_binary = 2, op_close = 8, op_ping = 9, op_pong = 10 };

uint64_t seed() {
    uint64_t value = uint64_t(std::chrono::steady_clock::now().time_since_epoch().count());
    try {
        std::random_device device;
        value ^= uint64_t(device()) << 32 ^ device();
    } catch (const std::exception &) {
        // No random device: masks only keep proxies from mistaking payload for HTTP, so the clock will do.
    }
    return value;
}

}  // namespace

void WebSocket::Buffer::reserve(size_t capacity, size_t keep) {
    if (capacity <= capacity_) {
        return;
    }
    capacity = std::max(capacity, std::max(first_buffer, capacity_ + capacity_ / 2));
    std::unique_ptr<uint8_t, Free> larger(static_cast<uint8_t *>(std::malloc(capacity)));
    if (!larger) {
        throw std::bad_alloc();
    }
    if (keep > 0) {
        std::memcpy(larger.get(), data_.get(), keep);
    }
    data_     = std::move(larger);
    capacity_ = capacity;
}

WebSocket::WebSocket() : random_state_(seed()) {}

WebSocket::~WebSocket() { close("done"); }

uint64_t WebSocket::random() {  // splitmix64
    uint64_t z = (random_state_ += 0x9e3779b97f4a7c15u);
    z          = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z          = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

void WebSocket::reset() {
    if (fd_ >= 0) {
        ::close(fd_);
    }
    fd_       = -1;
    state_    = State::closed;
    tx_begin_ = tx_end_ = 0;
    rx_parsed_ = rx_end_ = message_begin_ = message_end_ = frame_left_ = 0;
    in_message_ = in_frame_ = frame_is_last_ = message_ready_ = false;
}

void WebSocket::fail(const std::string & reason) {
    reason_ = reason;
    reset();
}

void WebSocket::start_connect(const Address & address, const std::string & path) {
    address_    = address;
    host_       = address.text;
    path_       = path;
    challenges_ = 0;
    connect();
}

void WebSocket::connect() {
    reset();
    bool connected = false;
    fd_            = swarm::start_connect(address_, connected, problem_);
    if (fd_ < 0) {
        fail(problem_);
        return;
    }
    state_ = State::connecting;
    if (connected) {
        start_upgrade();
    }
}

void WebSocket::start_upgrade() {
    uint8_t nonce[16];
    for (size_t i = 0; i < 16; i += 8) {
        const uint64_t value = random();
        std::memcpy(nonce + i, &value, 8);
    }
    key_                      = base64(nonce, sizeof(nonce));
    std::string authorization;
    if (!call_key_.empty() && !nonce_.empty()) {
        // The characters that base64 has besides base64url's are few enough to be replaced.
        std::string cnonce = key_.substr(0, 22);
        std::replace(cnonce.begin(), cnonce.end(), '+', '-');
        std::replace(cnonce.begin(), cnonce.end(), '/', '_');
        proof_        = prove_call(call_key_, path_, host_, nonce_, cnonce);
        authorization = proof_.authorization;
        nonce_.clear();
    }
    const std::string request = upgrade_request(host_, path_, key_, authorization);
    tx_.reserve(request.size(), 0);
    std::memcpy(tx_.data(), request.data(), request.size());
    tx_begin_ = 0;
    tx_end_   = request.size();
    state_    = State::upgrading;
    flush();
}

void WebSocket::on_writable() {
    if (state_ == State::connecting) {
        if (!finish_connect(fd_, problem_)) {
            fail(problem_);
            return;
        }
        start_upgrade();
    } else if (state_ != State::closed) {
        flush();
    }
}

void WebSocket::flush() {
    while (tx_begin_ < tx_end_) {
        const ptrdiff_t n = send_some(fd_, tx_.data() + tx_begin_, tx_end_ - tx_begin_, problem_);
        if (n == -1) {
            return;
        }
        if (n < 0) {
            fail(problem_);
            return;
        }
        tx_begin_ += size_t(n);
        bytes_sent_ += uint64_t(n);
    }
}

void WebSocket::on_readable() {
    for (int i = 0; i < max_reads && want_read(); i++) {
        compact();
        const size_t space = in_frame_ ? frame_left_ : std::max(first_buffer, rx_end_ + 4096) - rx_end_;
        rx_.reserve(rx_end_ + space, rx_end_);
        const size_t    asked = rx_.capacity() - rx_end_;
        const ptrdiff_t n     = receive_some(fd_, rx_.data() + rx_end_, asked, problem_);
        if (n == -1) {
            return;
        }
        if (n <= 0) {
            fail(n == 0 ? "the peer closed the connection" : problem_);
            return;
        }
        rx_end_ += size_t(n);
        bytes_received_ += uint64_t(n);
        if (state_ == State::upgrading && !parse_upgrade()) {
            continue;
        }
        parse_frames();
        if (size_t(n) < asked) {
            return;
        }
    }
}

bool WebSocket::parse_upgrade() {
    const std::string_view received(reinterpret_cast<const char *>(rx_.data()), rx_end_);
    const size_t           end = received.find("\r\n\r\n");
    if (end == std::string_view::npos || end > max_head_bytes) {
        if (rx_end_ > max_head_bytes) {
            fail("the answer to the WebSocket upgrade is longer than " + std::to_string(max_head_bytes) + " bytes");
        }
        return false;
    }
    const std::string head(received.substr(0, end + 4));
    if (!call_key_.empty() && http_status(head) == 401 && answer_challenge(head)) {
        return false;
    }
    if (!check_upgrade_response(head, key_, problem_)) {
        fail(problem_);
        return false;
    }
    if (!call_key_.empty() &&
        (proof_.mac.empty() || !answer_is_proved(call_key_, proof_, 101, http_header(head, "authentication-info")))) {
        fail("the node does not prove the swarm key: it has none, or another");
        return false;
    }
    rx_parsed_ = end + 4;
    state_     = State::open;
    return true;
}

// True: the upgrade is tried again with the nonce that the server gave.
bool WebSocket::answer_challenge(std::string_view head) {
    // The first attempt asks for a nonce; a second may meet one that has aged meanwhile.
    constexpr int max_challenges = 3;
    const std::string nonce      = nonce_in(http_header(head, "www-authenticate"));
    if (nonce.empty() || ++challenges_ > max_challenges) {
        return false;
    }
    nonce_ = nonce;
    connect();
    return true;
}

void WebSocket::compact() {
    if (state_ != State::open) {
        return;
    }
    const size_t target = in_message_ ? message_end_ : 0;
    if (rx_parsed_ > target) {
        std::memmove(rx_.data() + target, rx_.data() + rx_parsed_, rx_end_ - rx_parsed_);
        rx_end_ -= rx_parsed_ - target;
        rx_parsed_ = target;
    }
}

void WebSocket::parse_frames() {
    while (state_ == State::open && !message_ready_) {
        if (!in_frame_) {
            if (!parse_header()) {
                return;
            }
            continue;
        }
        const size_t n = std::min(rx_end_ - rx_parsed_, frame_left_);
        if (message_end_ != rx_parsed_) {  // the frames of one message are put together in place
            std::memmove(rx_.data() + message_end_, rx_.data() + rx_parsed_, n);
        }
        message_end_ += n;
        rx_parsed_ += n;
        frame_left_ -= n;
        if (frame_left_ > 0) {
            return;
        }
        in_frame_      = false;
        message_ready_ = frame_is_last_;
    }
}

// One frame header, and with it the whole of a control frame. False: not enough bytes yet, or closed.
bool WebSocket::parse_header() {
    const uint8_t * at   = rx_.data() + rx_parsed_;
    const size_t    left = rx_end_ - rx_parsed_;
    if (left < 2) {
        return false;
    }
    const bool     is_last = (at[0] & 0x80) != 0;
    const unsigned opcode  = at[0] & 0x0f;
    const unsigned code    = at[1] & 0x7f;
    if ((at[0] & 0x70) || (at[1] & 0x80)) {
        close("the peer's WebSocket frame has reserved bits or a mask");
        return false;
    }
    const size_t n_length = code == 126 ? 2 : code == 127 ? 8 : 0;
    if (left < 2 + n_length) {
        return false;
    }
    uint64_t length = n_length ? 0 : code;
    for (size_t i = 0; i < n_length; i++) {
        length = length << 8 | at[2 + i];
    }
    if (opcode >= 8) {
        if (!is_last || code > 125) {
            close("the peer's WebSocket control frame is fragmented or too long");
            return false;
        }
        if (left < 2 + size_t(length)) {
            return false;
        }
        rx_parsed_ += 2 + size_t(length);
        return handle_control(opcode, at + 2, size_t(length));
    }
    const bool starts = opcode == op_binary;
    if ((!starts && opcode != op_continuation) || starts == in_message_) {
        close("the peer sent a WebSocket frame of kind " + std::to_string(opcode) + " where none was due");
        return false;
    }
    const size_t so_far = in_message_ ? message_end_ - message_begin_ : 0;
    if (length > max_message_bytes_ || so_far + size_t(length) > max_message_bytes_) {
        close("the peer's message is longer than the " + std::to_string(max_message_bytes_) +
              " bytes expected at most");
        return false;
    }
    rx_parsed_ += 2 + n_length;
    if (starts) {
        message_begin_ = message_end_ = rx_parsed_;
    }
    in_message_    = true;
    in_frame_      = true;
    frame_is_last_ = is_last;
    frame_left_    = size_t(length);
    return true;
}

bool WebSocket::handle_control(unsigned opcode, const uint8_t * payload, size_t size) {
    if (opcode == op_ping) {
        if (tx_end_ - tx_begin_ < max_unsent_pongs) {
            send_control(op_pong, payload, size);
        }
        return state_ == State::open;
    }
    if (opcode == op_pong) {
        return true;
    }
    if (opcode != op_close) {
        close("the peer sent a WebSocket frame of unknown kind " + std::to_string(opcode));
        return false;
    }
    std::string reason = "the peer closed the connection";
    if (size >= 2) {
        reason += " with code " + std::to_string(unsigned(payload[0]) << 8 | payload[1]);
    }
    for (size_t i = 2; i < size; i++) {
        reason += i == 2 ? ": " : "";
        reason += payload[i] >= ' ' && payload[i] <= '~' ? char(payload[i]) : '?';
    }
    close(reason);
    return false;
}

// Writes the header so that it ends just before `end`; its size.
size_t WebSocket::frame_header(unsigned opcode, size_t payload, uint32_t mask, uint8_t * end) {
    uint8_t * at = end - 4;
    std::memcpy(at, &mask, 4);
    const unsigned code  = payload < 126 ? unsigned(payload) : payload <= 0xffff ? 126 : 127;
    const size_t   bytes = code == 126 ? 2 : code == 127 ? 8 : 0;
    uint64_t       rest  = payload;
    for (size_t i = 0; i < bytes; i++) {
        *--at = uint8_t(rest);
        rest >>= 8;
    }
    *--at = uint8_t(0x80 | code);
    *--at = uint8_t(0x80 | opcode);
    return size_t(end - at);
}

MsgpackWriter WebSocket::begin_message(size_t bound) {
    if (tx_begin_ == tx_end_) {
        tx_begin_ = tx_end_ = 0;
    }
    tx_.reserve(tx_end_ + max_frame_header + bound, tx_end_);
    tx_mask_ = uint32_t(random());
    return MsgpackWriter(tx_.data() + tx_end_ + max_frame_header, bound, tx_mask_);
}

void WebSocket::end_message(const MsgpackWriter & writer) {
    if (state_ != State::open) {
        return;
    }
    uint8_t *    payload = tx_.data() + tx_end_ + max_frame_header;
    const size_t header  = frame_header(op_binary, writer.size(), tx_mask_, payload);
    const size_t begin   = tx_end_ + max_frame_header - header;
    const size_t size    = header + writer.size();
    if (tx_begin_ == tx_end_) {
        tx_begin_ = begin;
        tx_end_   = begin + size;
    } else {  // a pong still waits: close the gap behind it
        std::memmove(tx_.data() + tx_end_, tx_.data() + begin, size);
        tx_end_ += size;
    }
    flush();
}

void WebSocket::send(const void * data, size_t size) {
    MsgpackWriter writer = begin_message(size);
    writer.raw(data, size);
    end_message(writer);
}

void WebSocket::send_control(unsigned opcode, const uint8_t * payload, size_t size) {
    if (tx_begin_ == tx_end_) {
        tx_begin_ = tx_end_ = 0;
    }
    uint8_t        frame[max_frame_header + 125];
    const uint32_t mask   = uint32_t(random());
    const size_t   header = frame_header(opcode, size, mask, frame + max_frame_header);
    masked_copy(frame + max_frame_header, payload, size, mask);
    tx_.reserve(tx_end_ + header + size, tx_end_);
    std::memcpy(tx_.data() + tx_end_, frame + max_frame_header - header, header + size);
    tx_end_ += header + size;
    flush();
}

void WebSocket::close(const std::string & reason) {
    if (state_ == State::closed) {
        return;
    }
    const std::string kept = reason;  // may be reason_ itself, which a failing flush overwrites
    if (state_ == State::open && tx_begin_ == tx_end_) {
        const uint8_t normal[2] = {1000 >> 8, 1000 & 0xff};
        send_control(op_close, normal, sizeof(normal));
    }
    fail(kept);
}

void WebSocket::release_message() {
    message_ready_ = false;
    in_message_    = false;
    message_begin_ = message_end_ = 0;
    parse_frames();
    compact();
}

size_t WebSocket::bytes_pending() const {
    return in_message_ ? message_end_ - message_begin_ : 0;
}

}  // namespace swarm
