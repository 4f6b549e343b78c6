#include "pool.h"

#include <pthread.h>
#include <signal.h>

#include <atomic>
#include <exception>

#include "float_state.h"

namespace cpu_adam {

// Pieces of one call of `run`, as they are taken.
class Job {
public:
    Job(int64_t pieces, const std::function<void(int64_t)>& piece)
        : piece_(piece), pieces_(pieces) {}

    // Take pieces until none is left.
    void work() {
        for (int64_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < pieces_;) piece_(i);
    }

    bool open() const { return next_.load(std::memory_order_relaxed) < pieces_; }

    int helpers = 0;  // threads in `work`, without the caller; guarded by the pool

private:
    const std::function<void(int64_t)>& piece_;
    const int64_t pieces_;
    alignas(64) std::atomic<int64_t> next_{0};
};

namespace {

std::atomic<Pool*> instance{new Pool};

// A forked child has none of the threads, and jobs that never end: it leaves that pool as it is.
[[maybe_unused]] const int forked = pthread_atfork(nullptr, nullptr, [] { Pool::share(new Pool); });

}  // namespace

Pool& Pool::get() { return *instance.load(); }
void Pool::share(Pool* pool) { instance.store(pool); }
int Pool::threads() {
    std::lock_guard lock(mutex_);
    return int(wanted_);
}

void Pool::configure(int threads) {
    std::vector<std::thread> leaving;
    {
        std::lock_guard lock(mutex_);
        generation_++;
        leaving.swap(threads_);
        wanted_ = size_t(threads);
    }
    work_.notify_all();
    for (std::thread& thread : leaving) thread.join();
}

// Called with the lock held. Signals are left to the threads of the program.
void Pool::start_missing_threads() {
    if (threads_.size() + 1 >= wanted_) return;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
        while (threads_.size() + 1 < wanted_)
            threads_.emplace_back(&Pool::serve, this, generation_);
    } catch (const std::exception&) {
    }  // A limit on threads or memory: work with those there are, and try again next time.
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

Job* Pool::open_job() {
    for (Job* job : jobs_)
        if (job->open()) return job;
    return nullptr;
}

void Pool::serve(int64_t generation) {
    FloatState state;
    std::unique_lock lock(mutex_);
    while (generation == generation_) {
        Job* job = open_job();
        if (job == nullptr) {
            work_.wait(lock);
            continue;
        }
        job->helpers++;
        lock.unlock();
        job->work();
        lock.lock();
        if (--job->helpers == 0) done_.notify_all();
    }
}

void Pool::run(int64_t pieces, const std::function<void(int64_t)>& piece) {
    FloatState state;
    std::unique_lock lock(mutex_);
    if (pieces <= 1 || wanted_ == 1) {
        lock.unlock();
        for (int64_t i = 0; i < pieces; i++) piece(i);
        return;
    }
    start_missing_threads();
    Job job(pieces, piece);
    const auto here = jobs_.insert(jobs_.end(), &job);
    lock.unlock();
    if (pieces == 2) work_.notify_one();
    else work_.notify_all();
    job.work();
    lock.lock();
    jobs_.erase(here);
    done_.wait(lock, [&] { return job.helpers == 0; });
}

}  // namespace cpu_adam
