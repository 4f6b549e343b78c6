#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <algorithm>
#include <memory>
#include <system_error>

#include "float_state.h"

namespace cpu_adam {

// Pieces of one call of `run`, as they are taken.
class Job {
public:
    Job(int64_t pieces, int nodes, const std::function<void(int64_t)>& piece)
        : piece_(piece), shares_(size_t(nodes)) {
        for (int64_t k = 0; k < nodes; k++) {
            shares_[size_t(k)].next = pieces * k / nodes;
            shares_[size_t(k)].end = pieces * (k + 1) / nodes;
        }
    }

    // Take pieces until none is left, those of the node's own share first.
    void work(int node) {
        const size_t count = shares_.size();
        for (size_t k = 0; k < count; k++) {
            Share& share = shares_[(size_t(node) + k) % count];
            for (int64_t i; (i = share.next.fetch_add(1, std::memory_order_relaxed)) < share.end;)
                piece_(i);
        }
    }

    bool open() const {
        return std::any_of(shares_.begin(), shares_.end(), [](const Share& share) {
            return share.next.load(std::memory_order_relaxed) < share.end;
        });
    }

    int helpers = 0;  // threads in `work`, without the caller; guarded by the pool

private:
    struct alignas(64) Share {
        std::atomic<int64_t> next{0};
        int64_t end = 0;
    };

    const std::function<void(int64_t)>& piece_;
    std::vector<Share> shares_;
};

namespace {

std::atomic<Pool*> instance{nullptr};

void bind_this_thread(const std::vector<int>& processors) {
    if (processors.empty()) return;
    cpu_set_t* set = CPU_ALLOC(size_t(processors.back()) + 1);
    size_t bytes = CPU_ALLOC_SIZE(size_t(processors.back()) + 1);
    if (set == nullptr) return;
    CPU_ZERO_S(bytes, set);
    for (int processor : processors) CPU_SET_S(size_t(processor), bytes, set);
    sched_setaffinity(0, bytes, set);  // where it is refused, the thread works all the same
    CPU_FREE(set);
}

}  // namespace

Pool& Pool::get() {
    Pool* pool = instance.load(std::memory_order_acquire);
    if (pool != nullptr) return *pool;
    auto made = std::make_unique<Pool>();
    if (!instance.compare_exchange_strong(pool, made.get())) return *pool;
    pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
    return *made.release();
}

void Pool::before_fork() { instance.load()->mutex_.lock(); }
void Pool::after_fork_in_parent() { instance.load()->mutex_.unlock(); }

// The child has none of the threads, and jobs of others that will never end: it leaves that pool
// as it is (its destructor would wait) and takes a new one of the same places.
void Pool::after_fork_in_child() {
    Pool* left = instance.load();
    Pool* made = new Pool;
    made->places_ = left->places_;
    made->node_of_processor_ = left->node_of_processor_;
    made->nodes_ = left->nodes_;
    instance.store(made);
}

int Pool::threads() {
    std::lock_guard lock(mutex_);
    return int(places_.size());
}

void Pool::configure(std::vector<Place> places) {
    std::vector<std::thread> leaving;
    {
        std::lock_guard lock(mutex_);
        generation_++;
        leaving.swap(threads_);
        places_ = std::move(places);
        nodes_ = 1;
        node_of_processor_.clear();
        for (Place& place : places_) {
            nodes_ = std::max(nodes_, place.node + 1);
            std::sort(place.processors.begin(), place.processors.end());
            for (int processor : place.processors) {
                size_t need = size_t(processor) + 1;
                if (node_of_processor_.size() < need) node_of_processor_.resize(need);
                node_of_processor_[size_t(processor)] = place.node;
            }
        }
    }
    work_.notify_all();
    for (std::thread& thread : leaving) thread.join();
}

int Pool::node_of_caller() const {
    if (nodes_ == 1) return 0;
    size_t processor = size_t(std::max(sched_getcpu(), 0));
    return processor < node_of_processor_.size() ? node_of_processor_[processor] : 0;
}

// Called with the lock held. Signals are left to the threads of the program.
void Pool::start_missing_threads() {
    if (threads_.size() + 1 >= places_.size()) return;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
        while (threads_.size() + 1 < places_.size()) {
            const Place& place = places_[threads_.size() + 1];
            threads_.emplace_back(&Pool::serve, this, place, generation_);
        }
    } catch (const std::system_error&) {
        // A limit on threads: work with those there are, and try again next time.
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

Job* Pool::open_job() {
    for (Job* job : jobs_)
        if (job->open()) return job;
    return nullptr;
}

void Pool::serve(Place place, int64_t generation) {
    FloatState state;
    bind_this_thread(place.processors);
    std::unique_lock lock(mutex_);
    while (generation == generation_) {
        Job* job = open_job();
        if (job == nullptr) {
            work_.wait(lock);
            continue;
        }
        job->helpers++;
        lock.unlock();
        job->work(place.node);
        lock.lock();
        if (--job->helpers == 0) done_.notify_all();
    }
}

void Pool::run(int64_t pieces, const std::function<void(int64_t)>& piece,
               const std::function<void()>& begun) {
    FloatState state;
    std::unique_lock lock(mutex_);
    if (pieces <= 1 || places_.size() == 1) {
        lock.unlock();
        begun();
        for (int64_t i = 0; i < pieces; i++) piece(i);
        return;
    }
    start_missing_threads();
    Job job(pieces, nodes_, piece);
    const auto here = jobs_.insert(jobs_.end(), &job);
    const int node = node_of_caller();
    lock.unlock();
    if (pieces == 2) work_.notify_one();
    else work_.notify_all();
    begun();
    job.work(node);
    lock.lock();
    jobs_.erase(here);
    done_.wait(lock, [&] { return job.helpers == 0; });
}

}  // namespace cpu_adam
