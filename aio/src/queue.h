// The seam between the engine and the kernel: pieces go in, results come out.
#pragma once

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace aio {

// One transfer of the kernel. It stays where it is in memory until it is reaped.
struct Piece {
    int fd = -1;
    bool writing = false;
    std::byte* data = nullptr;
    int64_t bytes = 0;
    int64_t offset = 0;
};

struct Completion {
    Piece* piece;
    int64_t result;  // bytes transferred, or -errno
};

// [Note: Queues]
// A queue is opened, used and destroyed by one thread, the engine's; only `wake` and `cpu_ns` are
// for others. Nothing may be under way when it is destroyed, unless it threw and was told to
// `quiesce`. It moves what it is told and reports what the kernel said: cutting, retrying and
// counting are the engine's.
class Queue {
public:
    virtual ~Queue() = default;

    // Take pieces from the front, and say how many; fewer than all where there is no room now.
    virtual size_t submit(std::span<Piece* const> pieces) = 0;

    // Add what is over to `out`. Where nothing is, wait for something, for `wake`, or so long.
    // Whether there was a `wake`, if nothing is over. Throws std::system_error, with the call,
    // where the kernel refuses it: nothing more is to be had from this queue then.
    virtual bool reap(std::vector<Completion>& out, int64_t wait_ns) = 0;

    // After a throw: return once no memory that it was told of is read or written any more. Where
    // the kernel does not say so (it may be forbidden to be asked), that is never: better a
    // transfer that does not end than memory that changes after its end. Not needed where the
    // destructor waits for that.
    virtual void quiesce() {}

    // Let a `reap` that waits, or the next one that would, return.
    virtual void wake() = 0;

    // To be called before a descriptor that pieces named is closed: its number may be given again.
    virtual void forget(int) {}

    // Have memory known to the kernel, at most BUFFER_BYTES_MAX. 0, or the errno.
    virtual int register_buffer(std::byte*, int64_t) { return EOPNOTSUPP; }
    virtual void unregister_buffer(std::byte*, int64_t) {}

    // Processor time of threads of the queue's own.
    virtual int64_t cpu_ns() { return 0; }
};

constexpr int64_t BUFFER_BYTES_MAX = int64_t(1) << 30;  // the kernel's own limit

// Room for `depth` pieces. Each throws std::system_error with the call that failed.
std::unique_ptr<Queue> open_io_uring(int depth);
std::unique_ptr<Queue> open_linux_aio(int depth);
std::unique_ptr<Queue> open_thread_pool(int depth);

}  // namespace aio
