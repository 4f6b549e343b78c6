// The threads that compute: one persistent pool for the process, apart from everybody else's.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <list>
#include <mutex>
#include <thread>
#include <vector>

namespace cpu_adam {

class Job;

// [Note: The pool]
// A caller is the first thread of its own job: it puts the job on a list, wakes the others, takes
// pieces like them until none is left, and waits for those that the others still hold. Callers
// need not wait for one another: idle threads join the oldest job that has pieces.
//
// Threads are started by the first job that wants them. A forked child has one, the caller. Nothing
// is destroyed at exit: threads that wait end with the process.
class Pool {
public:
    // The pool of this process; or that of another library in it, which is shared. Until
    // `configure` it has one thread, the caller.
    static Pool& get();
    static void share(Pool* pool);

    // Have so many threads, with a job's caller. Threads at work finish what they hold.
    void configure(int threads);

    // Threads that a job may have, with its caller.
    int threads();

    // Call `piece(0)` ... `piece(pieces - 1)`, each once, on any threads, and return when all are
    // done. It may not throw, or call `run`.
    void run(int64_t pieces, const std::function<void(int64_t)>& piece);

private:
    void start_missing_threads();
    void serve(int64_t generation);
    Job* open_job();

    std::mutex mutex_;  // guards all below
    std::condition_variable work_, done_;
    size_t wanted_ = 1;
    std::vector<std::thread> threads_;
    int64_t generation_ = 0;  // of the wanted number: threads of another one end
    std::list<Job*> jobs_;    // the oldest first
};

}  // namespace cpu_adam
