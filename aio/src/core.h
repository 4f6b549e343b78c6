// What an engine is made of: see [Note: One thread] in engine.h.
#pragma once

#include <pthread.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <vector>

#include "engine.h"
#include "queue.h"

namespace aio {

// Opened and tried: throws std::system_error where it cannot be had or does not work.
std::unique_ptr<Queue> open_queue(Kind kind, int depth);

// A count that one thread adds to and others read.
class Count {
public:
    void add(int64_t value) { value_.store(get() + value, std::memory_order_relaxed); }
    int64_t get() const { return value_.load(std::memory_order_relaxed); }

private:
    std::atomic<int64_t> value_{0};
};

// A piece of a request, with what the engine knows of it.
struct Flight : Piece {
    std::shared_ptr<Request> request;
    int64_t room = 0;      // bytes it holds of those that may be in flight
    int64_t started = 0;   // when it was given to the queue
    int64_t due = 0;       // when it may be tried again
    int tries = 0;         // in a row without progress
};

class Core {
public:
    explicit Core(const Options& options);

    std::shared_ptr<Request> submit(Transfer transfer);
    bool drain(int fd, int64_t wait_ns);
    void call(const std::function<void(Queue&)>& action);
    Counters counters();
    bool close(int64_t wait_ns);

    const pid_t pid = getpid();

private:
    struct Call {
        const std::function<void(Queue&)>* action;
        Signal done;
    };

    void run(Signal& opened, std::exception_ptr& failure);
    bool take_inbox();
    void give();
    void cut();
    int64_t time_to_sleep();
    void reap();
    void complete(Flight& flight, int64_t result);
    void again(Flight& flight, int last_code);
    void end(Flight& flight, Failure failure);
    void finish(Request& request);
    void count(const Flight& flight, int64_t now);
    void wake_if_asleep();
    void give_up(int code);
    void close_queue();

    const Options options_;
    std::thread thread_;
    pthread_t handle_{};  // of the thread, as long as there is a queue

    std::mutex mutex_;  // guards these
    std::unique_ptr<Queue> queue_;  // changed by the thread only, which reads it without the lock
    std::condition_variable drained_, ended_;
    std::vector<std::shared_ptr<Request>> inbox_;
    std::vector<Call*> calls_;
    std::unordered_map<int, int64_t> pending_;  // requests by descriptor
    bool asleep_ = false;  // the thread, until it is woken,
    bool idle_ = false;    // and it could begin with a new request at once
    bool closing_ = false, open_ = false;
    bool ended_thread_ = false, joining_ = false, joined_ = false;
    int broken_ = 0;  // errno of the queue
    int64_t cpu_ns_at_end_ = 0;

    // The engine's thread alone knows these.
    std::vector<Flight> flights_;
    std::vector<Flight*> free_;
    std::vector<Piece*> ready_;     // to be submitted
    std::vector<Flight*> resting_;  // to be tried again later
    std::deque<std::shared_ptr<Request>> requests_;  // with bytes not yet cut
    std::vector<std::shared_ptr<Request>> taken_;
    std::vector<Call*> taken_calls_;
    std::vector<Completion> over_;
    int64_t inflight_bytes_ = 0;
    size_t submitted_ = 0;
    int refusals_ = 0;  // in a row, of all that is ready, while nothing is under way

    Count bytes_read_, bytes_written_, operations_, retries_, depth_max_;
    std::array<Count, LATENCIES> latencies_;
};

}  // namespace aio
