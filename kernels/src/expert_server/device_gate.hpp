#pragma once
// One graph at a time on a device, whoever computes: the stores of several models, calls of many connections.

#include <condition_variable>
#include <cstddef>
#include <memory>
#include <mutex>
#include <string>

namespace swarm {

// Waiting threads sleep and get the device in their order, small calls before parts of large ones. A part that small
// calls have passed `passed_max` times is next, so that a large call goes on under any load.
class DeviceGate {
  public:
    enum class Size { small, part_of_large };

    // The highest number of waiting calls (docs/protocol.md, "Limits"): each of them once before a part of a large one.
    static constexpr int passed_max = 16;

    // The one gate of that device in this process.
    static std::shared_ptr<DeviceGate> of(const std::string & device);

    void   enter(Size size);
    void   leave();
    size_t waiting() const;

    class Turn {
      public:
        Turn(DeviceGate & gate, Size size) : gate_(gate) { gate_.enter(size); }
        ~Turn() { gate_.leave(); }
        Turn(const Turn &)             = delete;
        Turn & operator=(const Turn &) = delete;

      private:
        DeviceGate & gate_;
    };

  private:
    struct Waiter {
        std::condition_variable wake;
        bool                    is_next = false;
        Waiter *                behind  = nullptr;
    };
    struct Line {
        Waiter * first = nullptr;
        Waiter * last  = nullptr;
        void     join(Waiter & waiter);
        Waiter * take();
    };

    mutable std::mutex mutex_;
    bool               busy_      = false;
    Line               small_, parts_;
    size_t             n_waiting_ = 0;
    int                n_passed_  = 0;  // small calls since the first of parts_ could have gone
};

}  // namespace swarm
