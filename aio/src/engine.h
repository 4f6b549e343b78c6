// Transfers between memory and files that run in the background: the face for C++.
//
//     aio::Engine engine({.kind = aio::Kind::io_uring});
//     auto request = engine.submit({.fd = fd, .writing = true, .align = 4096,
//                                   .parts = {{data, bytes, offset}}});
//     request->done().wait(aio::FOREVER);
//     if (request->failure().code != 0) ...
#pragma once

#include <pthread.h>

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <vector>

#include "queue.h"
#include "signals.h"

namespace aio {

constexpr int RETRIES_MAX = 64;  // calls in a row without progress before giving up
constexpr int64_t RETRY_DELAY_NS = 1'000'000;

enum class Kind { io_uring, linux_aio, threads };

struct Options {
    Kind kind = Kind::io_uring;
    int depth = 32;                                   // pieces under way at once
    int64_t piece_bytes = int64_t(4) << 20;           // longest transfer of one call
    // For tests: what to put round the queue.
    std::function<std::unique_ptr<Queue>(std::unique_ptr<Queue>)> wrap = {};
};

// A stretch of memory, not empty, and where in the file it belongs.
struct Part {
    std::byte* data;
    int64_t bytes;
    int64_t offset;
};

struct Transfer {
    int fd = -1;
    bool writing = false;
    int64_t align = 1;  // after a short transfer it goes on at a multiple of this
    std::vector<Part> parts;
    // Called once, by the engine's thread, before `done` is set. It must not wait for anything.
    std::function<void(const struct Failure&)> finished = {};
};

enum class Cause { refused, end_of_file, no_progress, stopped };

// What failed, the first by offset. `offset` and `bytes` are of the piece, from where it stood.
struct Failure {
    int code = 0;  // errno; 0: nothing failed
    Cause cause = Cause::refused;
    int64_t offset = 0, bytes = 0;
    int last_code = 0;  // of a piece without progress, 0: nothing was transferred; of the queue
};

// A transfer on its way. Its memory belongs to it until `done` is set.
class Request {
public:
    explicit Request(Transfer transfer) : transfer_(std::move(transfer)) {}

    Signal& done() { return done_; }
    const Failure& failure() const { return failure_; }  // once it is done

private:
    friend class Engine;
    void finish();

    Transfer transfer_;
    size_t part_ = 0;    // the next bytes to be given to the queue: of which part,
    int64_t given_ = 0;  // and where in it
    int running_ = 0;    // pieces
    Failure failure_;
    Signal done_;
};

// A piece of a request, with what the engine knows of it.
struct Flight : Piece {
    std::shared_ptr<Request> request;
    int64_t due = 0;   // when it may be tried again
    int tries = 0;     // in a row without progress
};

// [Note: One thread]
// One thread per engine cuts requests into pieces, submits and reaps them; it is the only one that
// knows the queue. Callers hand it requests through an inbox under a lock, and wake it only where
// it sleeps. It takes no lock of Python's, and nothing it waits for waits for Python.
//
// Where the kernel refuses the calls of the queue itself the engine stops: everything under way
// fails with that, once none of it goes on any more; what is submitted later fails at once.
//
// A forked child has no such thread, and must leave the engine alone, its destructor included.
class Engine {
public:
    // Throws std::system_error where the queue cannot be had or does not work: what() names the
    // call. The options are in their ranges: Python checks them.
    explicit Engine(const Options& options);
    ~Engine();  // closes
    Engine(const Engine&) = delete;

    // Start a transfer; null once the engine is closed.
    std::shared_ptr<Request> submit(Transfer transfer);

    // Whether no transfer of `fd` is under way, after waiting at most so long for that.
    bool drain(int fd, int64_t wait_ns);

    // For tests: of the kernel's transfers that end from now on the `number`-th, from 1, fails with
    // `code`, whatever the kernel said of it. How many were to come to the one asked for before.
    int64_t fail(int64_t number, int code) {
        fails_with_ = code;
        return fails_in_.exchange(number);
    }

    // Take no more, finish what was submitted, then end the thread: whether that is done, after
    // waiting at most so long for it. Any number of times, by any thread.
    bool close(int64_t wait_ns = FOREVER);

private:
    void run(std::promise<void>& opened);
    bool take_inbox();
    void give();
    void cut();
    int64_t time_to_sleep();
    void reap();
    void complete(Flight& flight, int64_t result);
    void again(Flight& flight, int last_code);
    void end(Flight& flight, Failure failure);
    void finish(Request& request);
    void wake_if_asleep();
    void stop(int code);
    void close_queue();

    const Options options_;

    std::mutex mutex_;  // guards these
    std::unique_ptr<Queue> queue_;  // changed by the thread only, which reads it without the lock
    std::condition_variable changed_;
    std::vector<std::shared_ptr<Request>> inbox_;
    std::unordered_map<int, int64_t> pending_;  // requests by descriptor
    bool asleep_ = false;  // the thread, until it is woken,
    bool idle_ = false;    // and it could begin with a new request at once
    bool closing_ = false, ended_ = false;
    int stopped_ = 0;  // errno of the queue

    // The engine's thread alone knows these.
    std::vector<Flight> flights_;
    std::vector<Flight*> free_;
    std::vector<Piece*> ready_;     // to be submitted
    std::vector<Flight*> resting_;  // to be tried again later
    std::deque<std::shared_ptr<Request>> requests_;  // with bytes not yet cut
    std::vector<Completion> over_;
    int running_[2] = {};  // pieces that read, and that write
    int64_t submitted_ = 0;

    std::atomic<int64_t> fails_in_{0};  // none where it is not positive
    std::atomic<int> fails_with_{0};
    std::thread thread_;
};

}  // namespace aio
