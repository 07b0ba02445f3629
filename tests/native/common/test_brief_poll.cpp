#include "common/brief_poll.hpp"
#include "common/check.hpp"

#include <pthread.h>
#include <sched.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <thread>

using namespace swarm;
using std::chrono::microseconds;

namespace {

struct Pipe {
    int ends[2] = { -1, -1 };
    Pipe() { CHECK(pipe(ends) == 0); }
    ~Pipe() {
        ::close(ends[0]);
        ::close(ends[1]);
    }
    void    write_byte() { CHECK(::write(ends[1], "x", 1) == 1); }
    pollfd  reading() const { return { ends[0], POLLIN, 0 }; }
};

double thread_cpu_s() {
    timespec t = {};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return double(t.tv_sec) + double(t.tv_nsec) * 1e-9;
}

}  // namespace

TEST(brief_poll_finds_what_is_there_what_comes_while_it_looks_and_while_it_sleeps) {
    for (const long limit_us : { 0, 1000, 1000000 }) {
        for (const int delay_ms : { 0, 5 }) {
            Pipe        pipe;
            BriefPoll   brief_poll{ microseconds(limit_us) };
            std::thread writer([&] {
                std::this_thread::sleep_for(std::chrono::milliseconds(delay_ms));
                pipe.write_byte();
            });
            pollfd      watched = pipe.reading();
            CHECK(brief_poll(&watched, 1, 10000) == 1);
            CHECK(watched.revents == POLLIN);
            writer.join();
        }
    }
}

TEST(brief_poll_keeps_the_timeout_whichever_of_the_two_is_longer) {
    Pipe pipe;
    for (const long limit_us : { 0, 1000, 1000000 }) {
        BriefPoll  brief_poll{ microseconds(limit_us) };
        pollfd     watched = pipe.reading();
        const auto begun   = std::chrono::steady_clock::now();
        CHECK(brief_poll(&watched, 1, 20) == 0);
        CHECK(std::chrono::steady_clock::now() - begun >= std::chrono::milliseconds(19));
        CHECK(brief_poll(&watched, 1, 0) == 0);
    }
}

#ifdef __linux__
TEST(brief_poll_leaves_a_core_that_another_thread_wants) {
    std::atomic<bool> stop{ false };
    double            used_s = 0;
    std::thread       both([&] {
        // This thread and the one it starts have one core between them.
        cpu_set_t allowed, one;
        CHECK(pthread_getaffinity_np(pthread_self(), sizeof(allowed), &allowed) == 0);
        int cpu = 0;
        while (!CPU_ISSET(cpu, &allowed)) {
            cpu++;
        }
        CPU_ZERO(&one);
        CPU_SET(cpu, &one);
        CHECK(pthread_setaffinity_np(pthread_self(), sizeof(one), &one) == 0);
        std::thread other([&] {
            while (!stop) {
            }
        });
        Pipe         pipe;
        BriefPoll    brief_poll{ std::chrono::seconds(10) };
        pollfd       watched = pipe.reading();
        const double before  = thread_cpu_s();
        for (int i = 0; i < 20; i++) {
            CHECK(brief_poll(&watched, 1, 50) == 0);
        }
        used_s = thread_cpu_s() - before;
        stop   = true;
        other.join();
    });
    both.join();
    CHECK(used_s < 0.2);  // of a second; half of it would be its share
}
#endif
