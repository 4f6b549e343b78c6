// Something that happens once, and threads that wait for it.
#pragma once

#include <time.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>

namespace aio {

constexpr int64_t FOREVER = -1;  // as a number of nanoseconds to wait

inline int64_t now_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * int64_t(1'000'000'000) + now.tv_nsec;
}

// Whether `happened` holds, after waiting at most so long for that. The lock is held.
template <class Happened>
bool wait_for(std::condition_variable& changed, std::unique_lock<std::mutex>& lock, int64_t wait_ns,
              Happened happened) {
    if (wait_ns != FOREVER)
        return changed.wait_for(lock, std::chrono::nanoseconds(wait_ns), happened);
    changed.wait(lock, happened);
    return true;
}

// Set once by anybody, never reset. `is_set` takes no lock: a forked child may ask it.
class Signal {
public:
    bool is_set() const { return set_; }

    void set() {
        std::lock_guard lock(mutex_);
        set_ = true;
        changed_.notify_all();
    }

    // Whether it is set, after waiting at most so long.
    bool wait(int64_t wait_ns) {
        std::unique_lock lock(mutex_);
        return wait_for(changed_, lock, wait_ns, [&] { return is_set(); });
    }

private:
    std::atomic<bool> set_{false};
    std::mutex mutex_;
    std::condition_variable changed_;
};

}  // namespace aio
