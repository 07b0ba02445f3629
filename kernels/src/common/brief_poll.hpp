#pragma once
// poll() that looks for a while before it sleeps, as long as a core is free: to wake a core takes longer than most
// expert calls compute.

#include <poll.h>

#include <chrono>

namespace swarm {

// For one thread. Between two looks it yields; a yield that takes long has let another thread run, so that the core was
// not free. From then on it sleeps at once, for a time that doubles as long as that is found again.
class BriefPoll {
  public:
    // limit: for how long it looks before it sleeps.
    explicit BriefPoll(std::chrono::microseconds limit) : limit_(limit) {}

    // As poll(). timeout_ms 0 does not look twice.
    int operator()(pollfd * watched, nfds_t n_watched, int timeout_ms);

  private:
    using Clock = std::chrono::steady_clock;

    const std::chrono::microseconds limit_;
    Clock::time_point               not_before_{};
    std::chrono::milliseconds       pause_{0};
};

}  // namespace swarm
