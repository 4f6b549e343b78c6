// The queue over threads that call preadv and pwritev: asynchronous for any file, on any kernel.
#include <sys/prctl.h>
#include <sys/uio.h>

#include <cerrno>
#include <deque>
#include <system_error>
#include <thread>
#include <utility>

#include "queue.h"
#include "signals.h"

namespace aio {

namespace {

// Threads are started when pieces wait for one, up to `depth`, and one at once.
class ThreadPool final : public Queue {
public:
    explicit ThreadPool(int depth) : threads_max_(size_t(depth)) {
        threads_.emplace_back(&ThreadPool::serve, this);
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
        std::lock_guard lock(mutex_);
        waiting_.insert(waiting_.end(), pieces.begin(), pieces.end());
        if (pieces.size() == 1) work_.notify_one();
        else work_.notify_all();
        try {
            for (size_t n = idle_; n < waiting_.size() && threads_.size() < threads_max_; n++)
                threads_.emplace_back(&ThreadPool::serve, this);
        } catch (const std::system_error&) {  // a limit on threads: those there are do it
        }
        return pieces.size();
    }

    bool reap(std::vector<Completion>& out, int64_t wait_ns) override {
        std::unique_lock lock(mutex_);
        wait_for(over_changed_, lock, wait_ns, [&] { return woken_ || !over_.empty(); });
        out.insert(out.end(), over_.begin(), over_.end());
        over_.clear();
        return std::exchange(woken_, false);
    }

    void wake() override {
        std::lock_guard lock(mutex_);
        woken_ = true;
        over_changed_.notify_one();
    }

private:
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
    std::vector<std::thread> threads_;
    std::deque<Piece*> waiting_;
    std::vector<Completion> over_;
    size_t idle_ = 0;
    bool woken_ = false, closing_ = false;
};

}  // namespace

std::unique_ptr<Queue> open_thread_pool(int depth) { return std::make_unique<ThreadPool>(depth); }

}  // namespace aio
