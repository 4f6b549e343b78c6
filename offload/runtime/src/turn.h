// The runner's lock; who is to be woken is told when it is let go.
#pragma once

#include <chrono>
#include <mutex>
#include <utility>

#include "runner.h"

namespace runner {

class Runner::Turn {
public:
    explicit Turn(Runner& runner) : runner_(runner), lock_(runner.mutex_) {}
    Turn(const Turn&) = delete;
    ~Turn() { tell(); }

    // Do something without the lock. Returns how it failed.
    template <typename Function>
    std::exception_ptr without(Function function) {
        std::exception_ptr failure;
        tell();
        lock_.unlock();
        try {
            function();
        } catch (...) {
            failure = std::current_exception();
        }
        lock_.lock();
        return failure;
    }

    // Wait until somebody tells, or the time is up; whether it is not.
    bool sleep(std::chrono::steady_clock::time_point until) {
        return runner_.changed_.wait_until(lock_, until) != std::cv_status::timeout;
    }
    // Wait until the lane may have something to do.
    void sleep(Lane& lane) {
        tell();
        lane.asleep = true;
        lane.wake.wait(lock_);
        lane.asleep = false;
    }
    void sleep(std::condition_variable& until) {
        tell();
        until.wait(lock_);
    }
    // Wake whom it concerns.
    void tell() {
        if (std::exchange(runner_.told_, false)) runner_.changed_.notify_all();
        for (Lane& lane : runner_.lanes_) {
            if (!lane.asleep || runner_.stopped_ || !runner_.has_work(lane)) continue;
            lane.asleep = false;
            lane.wake.notify_one();
        }
    }

private:
    Runner& runner_;
    std::unique_lock<std::mutex> lock_;
};

}  // namespace runner
