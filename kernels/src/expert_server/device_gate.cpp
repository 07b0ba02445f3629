#include "expert_server/device_gate.hpp"

#include <map>

namespace swarm {

std::shared_ptr<DeviceGate> DeviceGate::of(const std::string & device) {
    static std::mutex                                         mutex;
    static std::map<std::string, std::shared_ptr<DeviceGate>> gates;  // as many as the machine has devices
    const std::lock_guard<std::mutex>                         lock(mutex);
    std::shared_ptr<DeviceGate> &                             gate = gates[device];
    if (!gate) {
        gate = std::make_shared<DeviceGate>();
    }
    return gate;
}

void DeviceGate::Line::join(Waiter & waiter) {
    (last != nullptr ? last->behind : first) = &waiter;
    last                                     = &waiter;
}

DeviceGate::Waiter * DeviceGate::Line::take() {
    Waiter * const taken = first;
    if (taken != nullptr) {
        first = taken->behind;
        last  = first != nullptr ? last : nullptr;
    }
    return taken;
}

void DeviceGate::enter(Size size) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (!busy_) {
        busy_ = true;
        return;
    }
    Waiter self;
    (size == Size::small ? small_ : parts_).join(self);
    n_waiting_++;
    self.wake.wait(lock, [&] { return self.is_next; });
    n_waiting_--;
}

void DeviceGate::leave() {
    const std::lock_guard<std::mutex> lock(mutex_);
    const bool part_is_due = parts_.first != nullptr && (small_.first == nullptr || n_passed_ >= passed_max);
    n_passed_              = part_is_due || parts_.first == nullptr ? 0 : n_passed_ + 1;
    // It stays busy when somebody waits: the device is handed over, so that nobody can slip in between.
    Waiter * const next = part_is_due ? parts_.take() : small_.take();
    if (next == nullptr) {
        busy_ = false;
        return;
    }
    next->is_next = true;
    next->wake.notify_one();  // under the lock, since the waiter's memory lives until it has the lock
}

size_t DeviceGate::waiting() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return n_waiting_;
}

}  // namespace swarm
