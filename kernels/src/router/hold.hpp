#pragma once
// One thread keeps another from going on for a while.

#include <chrono>
#include <condition_variable>
#include <mutex>

namespace swarm {

class Hold {
  public:
    using Clock = std::chrono::steady_clock;

    // When pass() was called, and when it returned.
    struct Passed {
        Clock::time_point from, to;
    };

    // pass() returns no earlier than `ms` from now; 0: at once. The last call counts.
    void begin(double ms) {
        const std::lock_guard<std::mutex> lock(mutex_);
        until_ = Clock::now() +
                 std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double, std::milli>(ms));
        changed_.notify_all();
    }

    Passed pass() {
        std::unique_lock<std::mutex> lock(mutex_);
        const Clock::time_point from = Clock::now();
        Clock::time_point       now  = from;
        while (now < until_) {
            changed_.wait_until(lock, until_);
            now = Clock::now();
        }
        return {from, now};
    }

  private:
    std::mutex              mutex_;
    std::condition_variable changed_;
    Clock::time_point       until_{};
};

}  // namespace swarm
