// The layer programs seen so far in this process, collected while llama.cpp reserves its graphs.
#pragma once

#include "llama/capture.hpp"

#include <map>
#include <mutex>
#include <set>
#include <string>

namespace swarm {

class ProgramRegistry {
  public:
    static ProgramRegistry & instance();

    void note(const CaptureResult & result);

    // {"build", "layers": […], "refused": […]}: docs/protocol.md, "Layer program".
    std::string json() const;

  private:
    mutable std::mutex         mutex_;
    std::map<int, Capture>     layers_;
    std::map<int, std::string> refused_;
};

}  // namespace swarm
