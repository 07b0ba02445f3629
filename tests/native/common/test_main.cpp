// The main program of the native tests. An argument runs only the tests whose name contains it.

#include "common/check.hpp"

#include <cstdlib>
#include <new>

// Counted in a file of its own: where compilers can inline them they complain about the pairing with free().
static thread_local long n_allocations = 0;

long n_allocations_of_thread() { return n_allocations; }

void * operator new(size_t size) {
    n_allocations++;
    void * memory = std::malloc(size ? size : 1);
    if (!memory) {
        throw std::bad_alloc();
    }
    return memory;
}
void operator delete(void * memory) noexcept { std::free(memory); }
void operator delete(void * memory, size_t) noexcept { std::free(memory); }

int main(int argc, char ** argv) { return run_tests(argc, argv); }
