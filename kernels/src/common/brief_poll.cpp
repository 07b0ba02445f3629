#include "common/brief_poll.hpp"

#include <sched.h>

#include <algorithm>

namespace swarm {

namespace {

constexpr std::chrono::microseconds longest_yield{20};  // with nobody else to run it takes less than one
constexpr std::chrono::milliseconds first_pause{10};
constexpr std::chrono::milliseconds longest_pause{640};

}  // namespace

int BriefPoll::operator()(pollfd * watched, nfds_t n_watched, int timeout_ms) {
    Clock::time_point now = Clock::now();
    if (timeout_ms == 0 || now < not_before_) {
        return poll(watched, n_watched, timeout_ms);
    }
    const Clock::time_point begun = now;
    const Clock::time_point end =
        begun +
        (timeout_ms < 0 ? limit_ : std::min(limit_, std::chrono::microseconds(std::chrono::milliseconds(timeout_ms))));
    while (now < end) {
        const int n = poll(watched, n_watched, 0);
        if (n != 0) {
            pause_ = {};
            return n;
        }
        const Clock::time_point yielded = Clock::now();
        sched_yield();
        now = Clock::now();
        if (now - yielded > longest_yield) {
            pause_      = pause_.count() == 0 ? first_pause : std::min(2 * pause_, longest_pause);
            not_before_ = now + pause_;
            break;
        }
    }
    return poll(watched, n_watched, timeout_ms);
}

}  // namespace swarm
