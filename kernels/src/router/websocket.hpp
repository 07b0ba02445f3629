#pragma once
// A WebSocket client (RFC 6455) on a non-blocking socket, to be driven from a poll() loop over many of them. It
// starts no thread and, once its buffers have grown to the size of the messages, allocates nothing per message.
//
// Loop: poll fd() for what want_read() and want_write() say; call on_writable() or on_readable() (either on POLLERR
// or POLLHUP); then look at state(). One received message is kept until release_message().

#include "router/call_proof.hpp"
#include "common/msgpack.hpp"
#include "common/net.hpp"

#include <cstdlib>
#include <memory>
#include <string>

namespace swarm {

class WebSocket {
  public:
    enum class State { closed, connecting, upgrading, open };

    WebSocket();
    ~WebSocket();
    WebSocket(const WebSocket &)             = delete;
    WebSocket & operator=(const WebSocket &) = delete;

    // 32 bytes: the upgrade proves this key to the server, and demands the same of it. Empty: no proof either way.
    void set_call_key(const std::string & key) { call_key_ = key; }

    // Drops what there was and starts anew. State closed afterwards: failed at once, reason() says why.
    void start_connect(const Address & address, const std::string & path);
    void close(const std::string & reason);  // sends a close frame if the socket takes it; never waits

    State               state() const { return state_; }
    const std::string & reason() const { return reason_; }  // why the state is closed
    int                 fd() const { return fd_; }
    bool want_read() const { return state_ != State::closed && state_ != State::connecting && !message_ready_; }
    bool                want_write() const { return state_ == State::connecting || tx_begin_ < tx_end_; }
    void                on_readable();
    void                on_writable();

    // A longer message from the peer closes the connection. No more than this is ever kept for a message.
    void set_max_message_bytes(size_t n_bytes) { max_message_bytes_ = n_bytes; }

    // A binary message of at most `bound` bytes, to be written into the send buffer (masked on the way) and then sent
    // with end_message(). A message that was begun and not ended leaves no trace.
    MsgpackWriter begin_message(size_t bound);
    void          end_message(const MsgpackWriter & writer);
    void          send(const void * data, size_t size);

    bool  has_message() const { return message_ready_; }
    Bytes message() const { return {rx_.data() + message_begin_, message_end_ - message_begin_}; }
    void  release_message();

    uint64_t bytes_sent() const { return bytes_sent_; }
    uint64_t bytes_received() const { return bytes_received_; }
    size_t   bytes_unsent() const { return tx_end_ - tx_begin_; }
    size_t   bytes_pending() const;  // received of a message that is not complete

  private:
    class Buffer {
      public:
        uint8_t * data() const { return data_.get(); }
        size_t    capacity() const { return capacity_; }
        void      reserve(size_t capacity, size_t keep);

      private:
        struct Free {
            void operator()(uint8_t * data) const { std::free(data); }
        };
        std::unique_ptr<uint8_t, Free> data_;
        size_t                         capacity_ = 0;
    };

    void     reset();
    void     fail(const std::string & reason);
    void     flush();
    void     start_upgrade();
    bool     parse_upgrade();
    bool     answer_challenge(std::string_view head);
    void     connect();
    void     parse_frames();
    bool     parse_header();
    bool     handle_control(unsigned opcode, const uint8_t * payload, size_t size);
    void     send_control(unsigned opcode, const uint8_t * payload, size_t size);
    size_t   frame_header(unsigned opcode, size_t payload, uint32_t mask, uint8_t * end);
    void     compact();
    uint64_t random();

    State       state_ = State::closed;
    int         fd_    = -1;
    std::string reason_ = "not connected";
    std::string host_, path_, key_;
    std::string call_key_, nonce_;  // nonce_: given by the server for the next attempt
    Address     address_;
    CallProof   proof_;
    int         challenges_ = 0;    // answered in a row
    std::string problem_;
    uint64_t    random_state_;

    Buffer tx_;
    size_t tx_begin_ = 0, tx_end_ = 0;
    uint32_t tx_mask_ = 0;

    // rx: [message_begin_, message_end_) payload put together so far, [rx_parsed_, rx_end_) not looked at yet.
    Buffer rx_;
    size_t rx_parsed_ = 0, rx_end_ = 0;
    size_t message_begin_ = 0, message_end_ = 0;
    size_t frame_left_    = 0;
    bool   in_message_ = false, in_frame_ = false, frame_is_last_ = false, message_ready_ = false;
    size_t max_message_bytes_ = 1 << 20;

    uint64_t bytes_sent_ = 0, bytes_received_ = 0;
};

}  // namespace swarm
