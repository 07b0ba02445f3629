#pragma once
// Expert calls over WebSockets without Python: one thread a connection reads, computes and answers.
//
// What is held here, and up to which term, the owner says (node/expert_server/held_slices.py). A call that is right in
// every respect is answered here. Any other message goes to the owner, so that refusals have one source, whatever
// carried the call.

#include "common/brief_poll.hpp"
#include "expert_server/client_frames.hpp"
#include "expert_server/expert_store.hpp"
#include "common/floats.hpp"

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

namespace swarm {

struct HeldLayer {
    std::shared_ptr<ExpertStore> store;
    uint64_t                     program  = 0;
    int64_t                      n_in     = 0;
    int64_t                      n_out    = 0;
    int64_t                      n_used   = 0;
    bool                         per_pair = false;
    bool                         uses_weight = false;
    std::vector<uint8_t>         ready;  // of each expert of the layer
};

struct CallCounters {
    uint64_t calls = 0, pairs = 0, bytes_received = 0, bytes_sent = 0, queue_us = 0, compute_us = 0;
};

class CallServer {
  public:
    // waiting_max: calls that may wait for the device. poll_limit: for how long a connection looks for its next message
    // before it sleeps. delay_s: slept before each call computes, a test hook.
    CallServer(const std::string & device, int64_t max_rows, size_t waiting_max, std::chrono::microseconds poll_limit,
               double delay_s);

    void publish(const std::string & model, int layer, HeldLayer held);
    void withdraw(const std::string & model, int layer);
    // Calls of this term are answered here; the first of any other goes to the owner.
    void set_term(const std::string & model, uint64_t term);

    CallCounters counters() const;
    size_t       waiting() const { return gate_->waiting(); }

  private:
    friend class CallConnection;
    struct Model {
        bool                                            has_term = false;
        uint64_t                                        term     = 0;
        std::map<uint64_t, std::shared_ptr<const HeldLayer>> layers;
    };

    std::shared_ptr<const HeldLayer> find(std::string_view model, uint64_t layer,
                                          uint64_t term) const;  // nullptr: none
    void count(const CallCounters & of_call);

    const int64_t                             max_rows_;
    const size_t                              waiting_max_;
    const std::chrono::microseconds           poll_limit_;
    const double                              delay_s_;
    const std::shared_ptr<DeviceGate>         gate_;
    mutable std::mutex                        mutex_;
    std::map<std::string, Model, std::less<>> models_;
    CallCounters                              counters_;
};

class CallConnection {
  public:
    // Answers a message (nullptr: a text one) that came `age_s` ago by calling `reply` once. Throws to end the
    // connection.
    using Reply = std::function<void(const void * data, size_t size)>;
    using Other = std::function<void(const uint8_t * data, size_t size, double age_s, const Reply & reply)>;

    struct Timeouts {
        double silence_s = 10;  // of a peer in the middle of a message, or that does not take an answer
        double linger_s  = 1;   // for the peer to take the close frame
    };

    // Owns the descriptor of a connection on which the upgrade has been answered; throws std::runtime_error.
    CallConnection(std::shared_ptr<CallServer> server, int fd, size_t max_message_bytes, Timeouts timeouts);
    ~CallConnection();
    CallConnection(const CallConnection &)             = delete;
    CallConnection & operator=(const CallConnection &) = delete;

    void serve(const Other & other);  // until the connection ends
    void renew();                     // closes it with code 1012 between two calls; from any thread
    void stop();                      // ends it at once; from any thread

  private:
    struct Ended {};  // thrown when there is nobody to talk to any more
    struct Call;

    bool  wait(bool for_writing, double timeout_s);
    void  shrink();
    void  receive();
    void  send(const uint8_t * data, size_t size);
    void  send_message(const uint8_t * data, size_t size);
    void  answer(const uint8_t * data, size_t size, const Other & other);
    bool  answer_call(const uint8_t * data, size_t size, FfnTiming & timing);
    bool  check_call(Call & call) const;
    bool  read_values(Call & call);
    bool  compute(Call & call, FfnTiming & timing);
    void  send_result(const Call & call, size_t n_received, const FfnTiming & timing);
    void  close(unsigned code, std::string_view reason);
    void  wake();

    std::shared_ptr<CallServer> server_;
    const int                   fd_;
    int                         wake_[2] = { -1, -1 };  // a byte comes when stop() or renew() was called
    const Timeouts              timeouts_;
    std::atomic<bool>           is_stopped_{ false };
    std::atomic<bool>           is_renewed_{ false };
    ClientFrames                frames_;
    BriefPoll                   poll_;
    std::vector<int32_t>        row_, expert_;
    std::vector<float>          weight_;
    std::vector<float>          h_, y_;  // where the wire's format is not f32
    struct Free {
        void operator()(uint8_t * data) const { std::free(data); }
    };
    uint8_t * tx(size_t n_bytes);
    std::unique_ptr<uint8_t, Free> tx_;
    size_t                         tx_capacity_ = 0;
};

}  // namespace swarm
