// The queue over threads that call preadv and pwritev: asynchronous for any file, on any kernel.
#include <pthread.h>
#include <sys/prctl.h>
#include <sys/uio.h>
#include <time.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

#include "queue.h"
#include "futex.h"

namespace aio {

namespace {

class ThreadPool final : public Queue {
public:
    explicit ThreadPool(int depth) : threads_max_(size_t(depth)) {
        over_.reserve(size_t(depth));  // where memory is short, a worker can still tell its end
    }

    ~ThreadPool() override {
        {
            std::lock_guard lock(mutex_);
            closing_ = true;
        }
        work_.notify_all();
        for (std::thread& thread : threads_) thread.join();
    }

    size_t submit(std::span<Piece* const> pieces) override {
        size_t starting;
        {
            std::lock_guard lock(mutex_);
            waiting_.insert(waiting_.end(), pieces.begin(), pieces.end());
            const size_t wanted = waiting_.size() > idle_ ? waiting_.size() - idle_ : 0;
            starting = std::min(wanted, threads_max_ - threads_.size());
        }
        if (pieces.size() == 1) work_.notify_one();
        else work_.notify_all();
        for (; starting > 0; starting--)
            if (!start_thread()) break;
        return pieces.size();
    }

    bool reap(std::vector<Completion>& out, int64_t wait_ns) override {
        std::unique_lock lock(mutex_);
        const auto due = [&] { return woken_ || !over_.empty(); };
        if (wait_ns == FOREVER) over_changed_.wait(lock, due);
        else if (wait_ns > 0) over_changed_.wait_for(lock, std::chrono::nanoseconds(wait_ns), due);
        out.insert(out.end(), over_.begin(), over_.end());
        over_.clear();
        return std::exchange(woken_, false);
    }

    void wake() override {
        {
            std::lock_guard lock(mutex_);
            woken_ = true;
        }
        over_changed_.notify_one();
    }

    int64_t cpu_ns() override {
        std::lock_guard lock(mutex_);
        int64_t sum = 0;
        for (std::thread& thread : threads_) {
            clockid_t clock;
            timespec used{};
            if (pthread_getcpuclockid(thread.native_handle(), &clock) == 0)
                clock_gettime(clock, &used);
            sum += used.tv_sec * int64_t(1'000'000'000) + used.tv_nsec;
        }
        return sum;
    }

private:
    // A limit on threads is met by working with those there are; without any, pieces fail.
    bool start_thread() {
        std::lock_guard lock(mutex_);
        try {
            threads_.emplace_back(&ThreadPool::serve, this);
            return true;
        } catch (const std::system_error& error) {
            if (!threads_.empty()) return false;
            for (Piece* piece : waiting_) over_.push_back({piece, -error.code().value()});
            waiting_.clear();
            return false;
        }
    }

    void serve() {
        prctl(PR_SET_NAME, "aio-worker", 0, 0, 0);
        std::unique_lock lock(mutex_);
        while (true) {
            idle_++;
            work_.wait(lock, [&] { return closing_ || !waiting_.empty(); });
            idle_--;
            if (waiting_.empty()) return;
            Piece* piece = waiting_.front();
            waiting_.pop_front();
            lock.unlock();
            const iovec part{piece->data, size_t(piece->bytes)};
            const ssize_t moved = piece->writing
                                      ? pwritev(piece->fd, &part, 1, off_t(piece->offset))
                                      : preadv(piece->fd, &part, 1, off_t(piece->offset));
            const int64_t result = moved < 0 ? -int64_t(errno) : int64_t(moved);
            lock.lock();
            over_.push_back({piece, result});
            if (over_.size() == 1) over_changed_.notify_one();
        }
    }

    const size_t threads_max_;
    std::mutex mutex_;  // guards all below
    std::condition_variable work_, over_changed_;
    std::vector<std::thread> threads_;  // changed by the engine's thread only
    std::deque<Piece*> waiting_;
    std::vector<Completion> over_;
    size_t idle_ = 0;
    bool woken_ = false, closing_ = false;
};

}  // namespace

std::unique_ptr<Queue> open_thread_pool(int depth) { return std::make_unique<ThreadPool>(depth); }

}  // namespace aio
