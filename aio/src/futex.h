// Something that happens once, and threads that wait for it.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdint>

namespace aio {

constexpr int64_t FOREVER = -1;  // as a number of nanoseconds to wait

inline int64_t now_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * int64_t(1'000'000'000) + now.tv_nsec;
}

// Set once by anybody, never reset. Neither a wait nor `set` takes a lock, so that one inherited by
// a forked child can still be asked.
class Signal {
public:
    bool is_set() const { return word_.load(std::memory_order_acquire) == SET; }

    void set() {
        if (word_.exchange(SET, std::memory_order_acq_rel) == AWAITED)
            syscall(SYS_futex, &word_, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
    }

    // Whether it is set, after waiting at most so long, whatever signals of the system come.
    bool wait(int64_t nanoseconds) {
        const int64_t end = nanoseconds == FOREVER ? 0 : now_ns() + nanoseconds;
        while (!wait_once(nanoseconds)) {
            if (nanoseconds == FOREVER) continue;
            nanoseconds = end - now_ns();
            if (nanoseconds <= 0) return is_set();
        }
        return true;
    }

    // The same after one sleep, which a signal of the system ends early.
    bool wait_once(int64_t nanoseconds) {
        uint32_t found = UNSET;
        word_.compare_exchange_strong(found, AWAITED, std::memory_order_acq_rel);
        if (found == SET) return true;
        const timespec span{nanoseconds / 1'000'000'000, nanoseconds % 1'000'000'000};
        syscall(SYS_futex, &word_, FUTEX_WAIT_PRIVATE, AWAITED,
                nanoseconds == FOREVER ? nullptr : &span, nullptr, 0);
        return is_set();
    }

private:
    enum : uint32_t { UNSET, SET, AWAITED };
    std::atomic<uint32_t> word_{UNSET};
};

}  // namespace aio
