#pragma once
// The newest routing table: one thread sets it, another computes with it.

#include "router/routing.hpp"

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <utility>

namespace swarm {

class NewestTable {
  public:
    // False: not newer than the one there is, and ignored.
    bool set(std::shared_ptr<const RoutingTable> table) {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (!table || (table_ && !table->newer_than(*table_))) {
            return false;
        }
        table_ = std::move(table);
        came_.notify_all();
        return true;
    }

    // Null before the first.
    std::shared_ptr<const RoutingTable> get() const {
        const std::lock_guard<std::mutex> lock(mutex_);
        return table_;
    }

    // As get(), but waits for the first.
    std::shared_ptr<const RoutingTable> wait(std::chrono::milliseconds longest) const {
        std::unique_lock<std::mutex> lock(mutex_);
        came_.wait_for(lock, longest, [this] { return table_ != nullptr; });
        return table_;
    }

  private:
    mutable std::mutex                  mutex_;
    mutable std::condition_variable     came_;
    std::shared_ptr<const RoutingTable> table_;
};

}  // namespace swarm
