// The threads that compute: one persistent pool for the process, apart from everybody else's.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <list>
#include <mutex>
#include <thread>
#include <vector>

namespace cpu_adam {

// Where one thread of the pool works: on a NUMA node, bound to these processors (none: unbound).
struct Place {
    int node = 0;
    std::vector<int> processors;
};

class Job;

// [Note: The pool]
// A caller is the first thread of its own job: it puts the job on a list, wakes the others, takes
// pieces like them until none is left, and waits for those that the others still hold. Callers
// need not wait for one another: idle threads join the oldest job that has pieces. Pieces are
// numbered, and each node takes those of its own contiguous share first, so that a thread keeps to
// the memory that its node touched last time; then it helps the others.
//
// Threads are started by the first job that wants them. A forked child has none and starts its
// own. Nothing is destroyed at exit: threads that wait end with the process.
class Pool {
public:
    // The pool of this process. Until `configure` it has one thread, the caller.
    static Pool& get();

    // As many threads as places; the first is the caller's and binds nothing. Threads at work
    // finish what they hold.
    void configure(std::vector<Place> places);

    // Threads that a job may have, with its caller.
    int threads();

    // Call `piece(0)` ... `piece(pieces - 1)`, each once, on any threads, and return when all are
    // done. `begun` is called once by the caller, before it takes a piece itself: the others are at
    // work by then. Neither may throw, or call `run`.
    void run(int64_t pieces, const std::function<void(int64_t)>& piece,
             const std::function<void()>& begun = [] {});

private:
    void start_missing_threads();
    void serve(Place place, int64_t generation);
    Job* open_job();
    int node_of_caller() const;
    static void before_fork();
    static void after_fork_in_parent();
    static void after_fork_in_child();

    std::mutex mutex_;  // guards all below
    std::condition_variable work_, done_;
    std::vector<Place> places_{1};
    std::vector<int> node_of_processor_;
    int nodes_ = 1;
    std::vector<std::thread> threads_;
    int64_t generation_ = 0;  // of places_: threads of another one end
    std::list<Job*> jobs_;    // the oldest first
};

}  // namespace cpu_adam
