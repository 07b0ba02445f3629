#pragma once
// The frames that a WebSocket client sends (RFC 6455), as a server reads them. No I/O; nothing in them is trusted.
//
// Loop: react to next() until it says `incomplete`; then receive into space() and say how much with received().

#include "common/msgpack.hpp"

#include <cstdlib>
#include <memory>
#include <string_view>

namespace swarm {

class ClientFrames {
  public:
    enum class Kind { incomplete, binary, text, ping, close, violation };

    // A longer message is a violation, as soon as a frame's header announces it.
    explicit ClientFrames(size_t max_message_bytes) : max_message_bytes_(max_message_bytes) {}

    uint8_t * space(size_t & n_bytes);  // throws std::bad_alloc
    void      received(size_t n_bytes);

    Kind  next();
    Bytes payload() const { return payload_; }  // of what next() gave, until the next call of anything

    // What a close frame must say: of a violation why, of `close` what the client said (1005: nothing).
    unsigned         close_code() const { return close_code_; }
    std::string_view reason() const { return reason_; }

    // Something has come of a message that is not complete.
    bool in_message() const { return in_message_ || in_frame_ || parsed_ < end_; }

    // Gives the memory of a large message back; `payload` is gone.
    void shrink();

  private:
    struct Free {
        void operator()(uint8_t * data) const { std::free(data); }
    };

    Kind violate(unsigned code, std::string_view reason);
    bool parse_header(Kind & kind);
    void reserve(size_t n_bytes);

    size_t                         max_message_bytes_;
    std::unique_ptr<uint8_t, Free> data_;
    size_t                         capacity_ = 0;
    // [begin_, assembled_) of the message put together so far, [parsed_, end_) not looked at yet.
    size_t           begin_ = 0, assembled_ = 0, parsed_ = 0, end_ = 0;
    size_t           frame_left_ = 0, frame_done_ = 0;
    uint8_t          mask_[4]    = {};
    bool in_message_ = false, in_frame_ = false, is_last_ = false, is_text_ = false, given_ = false, broken_ = false;
    Bytes            payload_;
    unsigned         close_code_ = 0;
    std::string_view reason_;
};

// Writes the header of a whole, unmasked frame so that it ends just before `end`; its size, at most 10 bytes.
size_t server_frame_header(unsigned opcode, size_t n_bytes, uint8_t * end);

constexpr unsigned frame_binary = 2, frame_close = 8, frame_pong = 10;

}  // namespace swarm
