#include "llama/parent_death.hpp"

#include "common/environment.hpp"

#include <csignal>
#include <cstdlib>
#include <unistd.h>

#ifdef __linux__
#    include <sys/prctl.h>
#else
#    include <chrono>
#    include <thread>
#endif

namespace swarm {

void end_with_parent() {
    const char * text = std::getenv(environment::parent_pid);
    if (text == nullptr) {
        return;
    }
    const long parent = std::strtol(text, nullptr, 10);
#ifdef __linux__
    prctl(PR_SET_PDEATHSIG, SIGKILL);
#else
    std::thread([parent] {
        while (getppid() == parent) {
            std::this_thread::sleep_for(std::chrono::milliseconds(500));
        }
        _exit(1);
    }).detach();
#endif
    // The parent may have died before the lines above.
    if (getppid() != parent) {
        _exit(1);
    }
}

}  // namespace swarm
