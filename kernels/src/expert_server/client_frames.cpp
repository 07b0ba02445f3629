#include "expert_server/client_frames.hpp"

#include <algorithm>
#include <cstring>
#include <new>

namespace swarm {

namespace {

constexpr size_t first_buffer = 65536;
constexpr size_t kept_buffer  = size_t{ 1 } << 20;  // of an idle connection: 64 of them keep no more than 64 MiB

enum : unsigned { op_continuation = 0, op_text = 1, op_binary = 2, op_close = 8, op_ping = 9, op_pong = 10 };

// `done`: bytes of the frame before these.
void unmask(uint8_t * data, size_t n, const uint8_t * mask, size_t done) {
    uint8_t turned[8];
    for (size_t i = 0; i < 8; i++) {
        turned[i] = mask[(done + i) % 4];
    }
    uint64_t wide;
    std::memcpy(&wide, turned, 8);
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        uint64_t word;
        std::memcpy(&word, data + i, 8);
        word ^= wide;
        std::memcpy(data + i, &word, 8);
    }
    for (; i < n; i++) {
        data[i] = uint8_t(data[i] ^ turned[i % 8]);
    }
}

}  // namespace

void ClientFrames::reserve(size_t n_bytes) {
    if (n_bytes <= capacity_) {
        return;
    }
    const size_t                   grown = std::max(n_bytes, first_buffer);
    std::unique_ptr<uint8_t, Free> larger(static_cast<uint8_t *>(std::malloc(grown)));
    if (!larger) {
        throw std::bad_alloc();
    }
    if (end_ > 0) {
        std::memcpy(larger.get(), data_.get(), end_);
    }
    data_     = std::move(larger);
    capacity_ = grown;
}

uint8_t * ClientFrames::space(size_t & n_bytes) {
    // What was parsed goes; what is put together of a message stays where it is.
    if (!in_message_) {
        begin_ = assembled_ = 0;
    }
    if (parsed_ > assembled_) {
        std::memmove(data_.get() + assembled_, data_.get() + parsed_, end_ - parsed_);
        end_ -= parsed_ - assembled_;
        parsed_ = assembled_;
    }
    // Room for the rest of the frame at once: it is within the limit, and memory that is not filled costs nothing.
    reserve(end_ + std::max<size_t>(in_frame_ ? frame_left_ : 0, 4096));
    n_bytes = capacity_ - end_;
    return data_.get() + end_;
}

void ClientFrames::received(size_t n_bytes) { end_ += n_bytes; }

void ClientFrames::shrink() {
    if (given_) {
        given_ = in_message_ = false;
        begin_ = assembled_ = parsed_;
    }
    payload_ = {};
    if (capacity_ > kept_buffer && parsed_ == end_ && !in_message_) {
        data_.reset();
        capacity_ = begin_ = assembled_ = parsed_ = end_ = 0;
    }
}

ClientFrames::Kind ClientFrames::violate(unsigned code, std::string_view reason) {
    broken_     = true;
    close_code_ = code;
    reason_     = reason;
    return Kind::violation;
}

ClientFrames::Kind ClientFrames::next() {
    if (broken_) {
        return Kind::violation;
    }
    if (given_) {
        given_ = in_message_ = false;
        begin_ = assembled_ = parsed_;
    }
    payload_ = {};
    for (;;) {
        if (!in_frame_) {
            Kind kind = Kind::incomplete;
            if (!parse_header(kind)) {
                return kind;
            }
            continue;
        }
        const size_t    n  = std::min(end_ - parsed_, frame_left_);
        uint8_t * const at = data_.get() + assembled_;
        if (n > 0) {
            if (assembled_ != parsed_) {  // the frames of one message are put together in place
                std::memmove(at, data_.get() + parsed_, n);
            }
            unmask(at, n, mask_, frame_done_);
        }
        assembled_ += n;
        parsed_ += n;
        frame_left_ -= n;
        frame_done_ += n;
        if (frame_left_ > 0) {
            return Kind::incomplete;
        }
        in_frame_ = false;
        if (is_last_) {
            given_   = true;
            payload_ = { data_.get() + begin_, assembled_ - begin_ };
            return is_text_ ? Kind::text : Kind::binary;
        }
    }
}

// One frame header, and with it the whole of a control frame. True: go on; false: `kind` is next.
bool ClientFrames::parse_header(Kind & kind) {
    kind               = Kind::incomplete;
    uint8_t * const at = data_.get() + parsed_;
    const size_t    left = end_ - parsed_;
    if (left < 2) {
        return false;
    }
    const bool     is_last = (at[0] & 0x80) != 0;
    const unsigned opcode  = at[0] & 0x0f;
    const unsigned code    = at[1] & 0x7f;
    if (at[0] & 0x70) {
        kind = violate(1002, "reserved bits are set: no extension was agreed on");
        return false;
    }
    if (!(at[1] & 0x80)) {
        kind = violate(1002, "a client's frames must be masked");
        return false;
    }
    const size_t n_length = code == 126 ? 2 : code == 127 ? 8 : 0;
    const size_t n_header = 2 + n_length + 4;
    if (opcode >= 8) {
        if (!is_last || code > 125 || opcode > op_pong) {
            kind = violate(1002, "a control frame is fragmented, too long or of unknown kind");
            return false;
        }
    } else if (opcode > op_binary || (opcode == op_continuation) != in_message_) {
        kind = violate(1002, "a frame of this kind is not due");
        return false;
    }
    if (left < n_header - 4) {
        return false;
    }
    uint64_t length = n_length ? 0 : code;
    for (size_t i = 0; i < n_length; i++) {
        length = length << 8 | at[2 + i];
    }
    const size_t so_far = in_message_ ? assembled_ - begin_ : 0;
    if (opcode < 8 && (length > max_message_bytes_ || so_far + size_t(length) > max_message_bytes_)) {
        kind = violate(1009, "the message is longer than the limit");
        return false;
    }
    if (left < n_header || (opcode >= 8 && left < n_header + size_t(length))) {
        return false;
    }
    std::memcpy(mask_, at + n_header - 4, 4);
    parsed_ += n_header;
    if (opcode >= 8) {
        parsed_ += size_t(length);
        unmask(at + n_header, size_t(length), mask_, 0);
        payload_ = { at + n_header, size_t(length) };
        if (opcode == op_pong) {
            return true;
        }
        if (opcode == op_ping) {
            kind = Kind::ping;
            return false;
        }
        close_code_ = length >= 2 ? unsigned(payload_.data[0]) << 8 | payload_.data[1] : 1005;
        kind = length == 1 || close_code_ < 1000 ? violate(1002, "a close frame without a valid code") : Kind::close;
        return false;
    }
    if (!in_message_) {
        begin_ = assembled_ = parsed_;
        is_text_            = opcode == op_text;
    }
    in_message_ = in_frame_ = true;
    is_last_                = is_last;
    frame_left_             = size_t(length);
    frame_done_             = 0;
    return true;
}

size_t server_frame_header(unsigned opcode, size_t n_bytes, uint8_t * end) {
    uint8_t *      at    = end;
    const unsigned code  = n_bytes < 126 ? unsigned(n_bytes) : n_bytes <= 0xffff ? 126 : 127;
    const size_t   bytes = code == 126 ? 2 : code == 127 ? 8 : 0;
    uint64_t       rest  = n_bytes;
    for (size_t i = 0; i < bytes; i++) {
        *--at = uint8_t(rest);
        rest >>= 8;
    }
    *--at = uint8_t(code);
    *--at = uint8_t(0x80 | opcode);
    return size_t(end - at);
}

}  // namespace swarm
