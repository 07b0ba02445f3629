#pragma once
// The environment variables that native code reads, all set by the agent. docs/environment.md has those of the whole
// project, and a test compares.

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <string>

namespace swarm::environment {

constexpr char parent_pid[] = "SWARM_PARENT_PID";    // the process that must not be outlived
constexpr char call_key[]   = "SWARM_CALL_KEY";      // the key that expert calls prove, 64 hexadecimal digits
constexpr char control[]    = "SWARM_CONTROL";       // where the router's agent listens: unix:/path or HOST:PORT
constexpr char table[]      = "SWARM_TABLE";         // a file with a routing table, for a program without an agent
constexpr char stats[]      = "SWARM_STATS";         // the file for the statistics, written at the end
constexpr char poll_us[]    = "SWARM_NODE_POLL_US";  // for how long a thread looks for a message before it sleeps

// Of poll_us, as node/environment.py has them for the expert server.
constexpr long default_poll_us = 300;
constexpr long max_poll_us     = 10000;

// Empty if it is not set.
inline std::string text(const char * name) {
    const char * value = std::getenv(name);
    return value != nullptr ? value : "";
}

// The default where the variable is not set or no such number.
inline std::chrono::microseconds poll_limit() {
    const std::string digits = text(poll_us);
    const bool        is_number =
        !digits.empty() && digits.size() <= 6 && digits.find_first_not_of("0123456789") == std::string::npos;
    return std::chrono::microseconds(is_number ? std::min(std::stol(digits), max_poll_us) : default_poll_us);
}

}  // namespace swarm::environment
