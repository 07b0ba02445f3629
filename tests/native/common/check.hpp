#pragma once
// The least a test needs: named tests, checks that count, an exit code.

#include <cstdio>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

// Calls of operator new by the calling thread, defined in test_main.cpp.
long n_allocations_of_thread();

struct TestCase {
    const char *          name;
    std::function<void()> body;
};

inline std::vector<TestCase> & test_cases() {
    static std::vector<TestCase> cases;
    return cases;
}

inline int & n_failed_checks() {
    static int n = 0;
    return n;
}

struct TestRegistration {
    TestRegistration(const char * name, std::function<void()> body) { test_cases().push_back({name, std::move(body)}); }
};

#define TEST(name)                                           \
    static void             name();                          \
    static TestRegistration name##_registration(#name, name); \
    static void             name()

#define CHECK(condition)                                                                     \
    do {                                                                                     \
        if (!(condition)) {                                                                  \
            std::printf("  %s:%d: not true: %s\n", __FILE__, __LINE__, #condition);          \
            n_failed_checks()++;                                                             \
        }                                                                                    \
    } while (0)

// The text contains the part; shows the text if not.
#define CHECK_CONTAINS(text, part)                                                                          \
    do {                                                                                                    \
        if (std::string(text).find(part) == std::string::npos) {                                            \
            std::printf("  %s:%d: \"%s\" is not in \"%s\"\n", __FILE__, __LINE__, std::string(part).c_str(), \
                        std::string(text).c_str());                                                         \
            n_failed_checks()++;                                                                            \
        }                                                                                                   \
    } while (0)

inline int run_tests(int argc, char ** argv) {
    int n_run = 0;
    for (const TestCase & test : test_cases()) {
        if (argc > 1 && std::strstr(test.name, argv[1]) == nullptr) {
            continue;
        }
        const int before = n_failed_checks();
        std::printf("%s\n", test.name);
        std::fflush(stdout);
        test.body();
        n_run++;
        if (n_failed_checks() != before) {
            std::printf("FAILED %s\n", test.name);
        }
    }
    std::printf("%d tests, %d failed checks\n", n_run, n_failed_checks());
    return n_failed_checks() == 0 && n_run > 0 ? 0 : 1;
}
