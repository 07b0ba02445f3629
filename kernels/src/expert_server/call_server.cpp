#include "expert_server/call_server.hpp"

#include "common/floats.hpp"
#include "common/net.hpp"
#include "expert_server/wire.hpp"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <new>
#include <stdexcept>

namespace swarm {

namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kept_buffer = size_t{ 1 } << 20;  // of an idle connection, as in client_frames.cpp
constexpr double idle_s      = 1;                  // the calls of a prompt come one after the other
// Before `y` in the send buffer: the frame's header and the reply's head; a multiple of any alignment that floats want.
constexpr size_t head_room = 128;
static_assert(head_room >= 10 + reply_part_max);

template <typename T> void copy_values(const Bytes & bytes, std::vector<T> & values) {
    values.resize(bytes.size / sizeof(T));
    if (!values.empty()) {
        std::memcpy(values.data(), bytes.data, values.size() * sizeof(T));
    }
}

template <typename T> void shrink_values(std::vector<T> & values) {
    if (values.capacity() * sizeof(T) > kept_buffer) {
        std::vector<T>().swap(values);
    }
}

}  // namespace

CallServer::CallServer(const std::string & device, int64_t max_rows, size_t waiting_max,
                       std::chrono::microseconds poll_limit, double delay_s)
    : max_rows_(max_rows), waiting_max_(waiting_max), poll_limit_(poll_limit), delay_s_(delay_s),
      gate_(DeviceGate::of(device)) {}

void CallServer::publish(const std::string & model, int layer, HeldLayer held) {
    auto                              shared = std::make_shared<const HeldLayer>(std::move(held));
    const std::lock_guard<std::mutex> lock(mutex_);
    models_[model].layers[uint64_t(layer)] = std::move(shared);
}

void CallServer::withdraw(const std::string & model, int layer) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto                        found = models_.find(model);
    if (found != models_.end()) {
        found->second.layers.erase(uint64_t(layer));
    }
}

void CallServer::set_term(const std::string & model, uint64_t term) {
    const std::lock_guard<std::mutex> lock(mutex_);
    models_[model].has_term = true;
    models_[model].term     = term;
}

std::shared_ptr<const HeldLayer> CallServer::find(std::string_view model, uint64_t layer, uint64_t term) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto                        found = models_.find(model);
    if (found == models_.end() || !found->second.has_term || found->second.term != term) {
        return nullptr;
    }
    const auto held = found->second.layers.find(layer);
    return held == found->second.layers.end() ? nullptr : held->second;
}

void CallServer::count(const CallCounters & of_call) {
    const std::lock_guard<std::mutex> lock(mutex_);
    counters_.calls += of_call.calls;
    counters_.pairs += of_call.pairs;
    counters_.bytes_received += of_call.bytes_received;
    counters_.bytes_sent += of_call.bytes_sent;
    counters_.queue_us += of_call.queue_us;
    counters_.compute_us += of_call.compute_us;
}

CallCounters CallServer::counters() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return counters_;
}

CallConnection::CallConnection(std::shared_ptr<CallServer> server, int fd, size_t max_message_bytes, Timeouts timeouts)
    : server_(std::move(server)), fd_(fd), timeouts_(timeouts), frames_(max_message_bytes),
      poll_(server_->poll_limit_) {
    // The descriptor shares O_NONBLOCK with the one it was made from, whose owner needs it set.
    const int flags = fcntl(fd_, F_GETFL);
    if (flags < 0 || fcntl(fd_, F_SETFL, flags | O_NONBLOCK) < 0 || pipe(wake_) != 0) {
        const std::string problem = error_text(errno);
        ::close(fd_);
        throw std::runtime_error("the connection cannot be taken over: " + problem);
    }
    for (const int end : wake_) {
        fcntl(end, F_SETFD, FD_CLOEXEC);
        fcntl(end, F_SETFL, O_NONBLOCK);
    }
    const int on = 1;
    setsockopt(fd_, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
    // A caller whose machine vanished would keep its connection, of which there are 64, for ever.
    setsockopt(fd_, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof(on));
#ifdef SO_NOSIGPIPE
    setsockopt(fd_, SOL_SOCKET, SO_NOSIGPIPE, &on, sizeof(on));
#endif
}

CallConnection::~CallConnection() {
    for (const int end : { fd_, wake_[0], wake_[1] }) {
        ::close(end);
    }
}

void CallConnection::wake() {
    const char byte = 0;
    // A full pipe wakes as well.
    const ssize_t ignored = write(wake_[1], &byte, 1);
    static_cast<void>(ignored);
}

void CallConnection::renew() {
    is_renewed_ = true;
    wake();
}

void CallConnection::stop() {
    is_stopped_ = true;
    wake();
}

// Until the socket is ready, or renew() was called; timeout_s < 0: for ever. False: in vain. Throws Ended after stop().
bool CallConnection::wait(bool for_writing, double timeout_s) {
    pollfd    watched[2] = { { fd_, short(for_writing ? POLLOUT : POLLIN), 0 }, { wake_[0], POLLIN, 0 } };
    const int n          = poll_(watched, 2, timeout_s < 0 ? -1 : int(timeout_s * 1000));
    if (n < 0 && errno != EINTR) {
        throw Ended();
    }
    if (n > 0 && watched[1].revents != 0) {
        char          bytes[64];
        const ssize_t ignored = read(wake_[0], bytes, sizeof(bytes));
        static_cast<void>(ignored);
    }
    if (is_stopped_) {
        throw Ended();
    }
    return n != 0;
}

// Gives the memory of large messages back.
void CallConnection::shrink() {
    frames_.shrink();
    shrink_values(h_);
    shrink_values(y_);
    if (tx_capacity_ > kept_buffer) {
        tx_.reset();
        tx_capacity_ = 0;
    }
}

void CallConnection::receive() {
    size_t          room;
    uint8_t * const at = frames_.space(room);
    std::string     problem;
    const ptrdiff_t n = receive_some(fd_, at, room, problem);
    if (n > 0) {
        frames_.received(size_t(n));
        return;
    }
    if (n != -1) {
        throw Ended();
    }
    if (frames_.in_message()) {
        if (!wait(false, timeouts_.silence_s)) {
            throw Ended();
        }
    } else if (!wait(false, idle_s)) {
        shrink();
        wait(false, -1);
    }
}

void CallConnection::send(const uint8_t * data, size_t size) {
    std::string problem;
    while (size > 0) {
        const ptrdiff_t n = send_some(fd_, data, size, problem);
        if (n >= 0) {
            data += n;
            size -= size_t(n);
        } else if (n == -1) {
            if (!wait(true, timeouts_.silence_s)) {
                throw Ended();
            }
        } else {
            throw Ended();
        }
    }
}

uint8_t * CallConnection::tx(size_t n_bytes) {
    if (n_bytes > tx_capacity_) {
        tx_.reset();
        tx_.reset(static_cast<uint8_t *>(std::malloc(n_bytes)));
        if (!tx_) {
            tx_capacity_ = 0;
            throw std::bad_alloc();
        }
        tx_capacity_ = n_bytes;
    }
    return tx_.get();
}

void CallConnection::send_message(const uint8_t * data, size_t size) {
    uint8_t * const frame = tx(head_room + size);
    std::memcpy(frame + head_room, data, size);
    const size_t n_header = server_frame_header(frame_binary, size, frame + head_room);
    send(frame + head_room - n_header, n_header + size);
}

// Says why, and gives the peer time to read it: closing with unread data would take it back.
void CallConnection::close(unsigned code, std::string_view reason) {
    uint8_t      frame[10 + 125];
    const size_t n_reason  = std::min<size_t>(reason.size(), 123);
    const size_t n_payload = code == 1005 ? 0 : 2 + n_reason;
    uint8_t *    payload   = frame + 10;
    payload[0]             = uint8_t(code >> 8);
    payload[1]             = uint8_t(code);
    std::memcpy(payload + 2, reason.data(), n_reason);
    const size_t n_header = server_frame_header(frame_close, n_payload, payload);
    send(payload - n_header, n_header + n_payload);
    shutdown(fd_, SHUT_WR);
    const auto end = Clock::now() + std::chrono::duration<double>(timeouts_.linger_s);
    uint8_t    dropped[4096];
    for (;;) {
        std::string     problem;
        const double    left_s = std::chrono::duration<double>(end - Clock::now()).count();
        const ptrdiff_t n      = left_s > 0 ? receive_some(fd_, dropped, sizeof(dropped), problem) : 0;
        if (n == 0 || n == -2) {
            return;
        }
        if (n == -1 && !wait(false, left_s)) {
            return;
        }
    }
}

void CallConnection::serve(const Other & other) {
    try {
        while (!is_stopped_) {
            const ClientFrames::Kind kind    = frames_.next();
            const Bytes              payload = frames_.payload();
            switch (kind) {
                case ClientFrames::Kind::binary: answer(payload.data, payload.size, other); break;
                case ClientFrames::Kind::text: answer(nullptr, 0, other); break;
                case ClientFrames::Kind::ping: {
                    uint8_t frame[10 + 125];
                    std::memcpy(frame + 10, payload.data, payload.size);
                    const size_t n_header = server_frame_header(frame_pong, payload.size, frame + 10);
                    send(frame + 10 - n_header, n_header + payload.size);
                    break;
                }
                case ClientFrames::Kind::close: close(frames_.close_code(), ""); return;
                case ClientFrames::Kind::violation: close(frames_.close_code(), frames_.reason()); return;
                case ClientFrames::Kind::incomplete:
                    if (is_renewed_) {
                        close(1012, "the body limit has grown");
                        return;
                    }
                    receive();
                    break;
            }
        }
    } catch (const Ended &) {
    } catch (const std::bad_alloc &) {  // for a message of legal size: the other connections go on
    } catch (...) {
        shutdown(fd_, SHUT_RDWR);
        throw;
    }
    shutdown(fd_, SHUT_RDWR);
}

void CallConnection::answer(const uint8_t * data, size_t size, const Other & other) {
    FfnTiming timing;
    timing.arrived = Clock::now();
    if (data == nullptr || !answer_call(data, size, timing)) {
        const double age_s = std::chrono::duration<double>(Clock::now() - timing.arrived).count();
        other(data, size, age_s,
              [&](const void * reply, size_t n) { send_message(static_cast<const uint8_t *>(reply), n); });
    }
    if (is_renewed_) {
        close(1012, "the body limit has grown");
        throw Ended();
    }
}

// One call on its way through answer_call.
struct CallConnection::Call {
    CallMessage                      message;
    std::shared_ptr<const HeldLayer> layer;
    uint64_t                         n_pairs = 0;
    size_t                           n_h     = 0;  // rows of the input
    FfnCall                          ffn;
    size_t                           n_y     = 0;  // values of the result
    size_t                           y_bytes = 0;
    uint8_t *                        y       = nullptr;  // where the result lies in the send buffer
};

// False: the call has not been answered, for whatever reason.
bool CallConnection::answer_call(const uint8_t * data, size_t size, FfnTiming & timing) {
    Call call;
    if (!decode_call(data, size, call.message) || !check_call(call) || !read_values(call)) {
        return false;
    }
    timing.waiting_max = server_->waiting_max_;
    timing.delay_s     = server_->delay_s_;
    // Beyond a day nobody computes with it, and the clock would overflow.
    timing.deadline = timing.arrived +
                      std::chrono::milliseconds(std::min<uint64_t>(call.message.deadline_ms, 86400000));
    if (!compute(call, timing)) {
        return false;
    }
    send_result(call, size, timing);
    return true;
}

// That a layer held here is meant, and every length against what the fields before it imply.
bool CallConnection::check_call(Call & call) const {
    const CallMessage & message = call.message;
    call.layer                  = server_->find(message.model, message.layer, message.term);
    if (!call.layer || call.layer->program != message.program || message.n_rows < 1 ||
        message.n_rows > uint64_t(server_->max_rows_) || message.has_weight != call.layer->uses_weight) {
        return false;
    }
    // None of these products can wrap, rows being bounded.
    call.n_pairs = message.expert.size / 4;
    call.n_h     = size_t(call.layer->per_pair ? call.n_pairs : message.n_rows);
    return message.expert.size % 4 == 0 && call.n_pairs >= 1 &&
           call.n_pairs <= message.n_rows * uint64_t(call.layer->n_used) && message.row.size == message.expert.size &&
           (!message.has_weight || message.weight.size == message.expert.size) &&
           message.h.size == call.n_h * size_t(call.layer->n_in) * dtype_bytes(message.dtype);
}

// The message's values as the store wants them; that the experts are there, and no value is infinite.
bool CallConnection::read_values(Call & call) {
    const CallMessage & message = call.message;
    const HeldLayer &   layer   = *call.layer;
    copy_values(message.row, row_);
    copy_values(message.expert, expert_);
    copy_values(message.weight, weight_);
    for (const int32_t expert : expert_) {
        if (expert < 0 || size_t(expert) >= layer.ready.size() || !layer.ready[size_t(expert)]) {
            return false;
        }
    }
    FfnCall & ffn = call.ffn;
    if (message.dtype == Dtype::f32) {
        // As it lies in the message, on any address: the store only copies from it.
        ffn.h = reinterpret_cast<const float *>(message.h.data);
    } else {
        h_.resize(call.n_h * size_t(layer.n_in));
        if (!decode_floats(message.dtype, message.h.data, h_.size(), h_.data())) {
            return false;
        }
        ffn.h = h_.data();
    }
    ffn.layer          = int(message.layer);
    ffn.program_digest = message.program;
    ffn.n_h            = int64_t(call.n_h);
    ffn.n_in           = layer.n_in;
    ffn.n_out          = layer.n_out;
    ffn.row            = row_.data();
    ffn.expert         = expert_.data();
    ffn.weight         = layer.uses_weight ? weight_.data() : nullptr;
    ffn.n_pairs        = int64_t(call.n_pairs);
    ffn.n_rows         = int64_t(message.n_rows);
    ffn.reduce         = message.reduce;
    return true;
}

// Into the send buffer, in the message's format.
bool CallConnection::compute(Call & call, FfnTiming & timing) {
    const CallMessage & message = call.message;
    call.n_y     = size_t(message.reduce == Reduce::rows ? call.n_pairs : message.n_rows) * size_t(call.layer->n_out);
    call.y_bytes = call.n_y * dtype_bytes(message.dtype);
    call.y       = tx(head_room + call.y_bytes + reply_part_max) + head_room;
    try {
        if (message.dtype == Dtype::f32) {
            float * const values = reinterpret_cast<float *>(call.y);
            call.layer->store->ffn(call.ffn, values, &timing);
            // Rows are checked where they are computed; a sum of them is not.
            return message.reduce != Reduce::sum || all_finite(values, call.n_y);
        }
        y_.resize(call.n_y);
        call.layer->store->ffn(call.ffn, y_.data(), &timing);
        return all_finite(y_.data(), call.n_y) && encode_floats(message.dtype, y_.data(), call.n_y, call.y);
    } catch (const std::exception &) {  // the owner meets it again, and says what it is
        return false;
    }
}

// Head and tail are written around the result: it is not copied.
void CallConnection::send_result(const Call & call, size_t n_received, const FfnTiming & timing) {
    uint8_t * const y = call.y;
    uint8_t         head[reply_part_max];
    const size_t    n_head = write_reply_head(call.message.id, call.y_bytes, head);
    const size_t    n_tail = write_reply_tail(timing.compute_us, timing.queue_us, y + call.y_bytes);
    std::memcpy(y - n_head, head, n_head);
    const size_t n_message = n_head + call.y_bytes + n_tail;
    const size_t n_header  = server_frame_header(frame_binary, n_message, y - n_head);
    server_->count({ 1, call.n_pairs, n_received, n_message, timing.queue_us, timing.compute_us });
    send(y - n_head - n_header, n_header + n_message);
}

}  // namespace swarm
