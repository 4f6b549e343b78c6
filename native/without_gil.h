// Letting the GIL go, and asking for it again, so that the end of the interpreter does no harm.
// For module.cpp of each extension, which includes nanobind before; each has state of its own.
#pragma once

#include <pthread.h>
#include <unistd.h>

#include <atomic>

namespace without_gil {

// [Note: The end of Python]
// A daemon thread that asks for the GIL when the interpreter has begun to end is ended by Python
// with an unwinding that C++ does not survive. So at exit, while Python still runs, those that
// wait here without the GIL are told to sleep for ever instead of coming back; nobody begins what
// may let the GIL go; and those in the midst of it are let through first.
static std::atomic<bool> ending{false};
static std::atomic<int> passing{0};  // threads that may be asking for the GIL
static pthread_t ending_thread;

static thread_local int passes = 0;  // how often this thread is among them

// For what may let the GIL go and take it again.
struct Passing {
    Passing() { passing++, passes++; }
    Passing(const Passing&) = delete;
    ~Passing() { passes--, passing--; }
};

inline bool must_not_ask() {
    return ending && passes == 0 && !pthread_equal(pthread_self(), ending_thread);
}

// The GIL is let go as long as it lives.
class WithoutGil {
public:
    WithoutGil() : state_(PyEval_SaveThread()) {}
    WithoutGil(const WithoutGil&) = delete;
    ~WithoutGil() {
        passing++;
        if (must_not_ask()) {
            passing--;
            while (true) pause();
        }
        PyEval_RestoreThread(state_);
        passing--;
    }

private:
    PyThreadState* state_;
};

inline void end() {
    ending_thread = pthread_self();
    ending = true;
    const WithoutGil released;
    while (passing > 0) usleep(100);
}

// To be called once, when the module is made.
inline void prepare_for_the_end() {
    pthread_atfork(nullptr, nullptr, [] { passing = 0; });
    nanobind::module_::import_("atexit").attr("register")(nanobind::cpp_function(&end));
}

}  // namespace without_gil
