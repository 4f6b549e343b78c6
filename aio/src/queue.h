// The seam between the engine and the kernel: pieces go in, results come out.
#pragma once

#include <unistd.h>

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
// A queue is opened, used and destroyed by one thread, the engine's; only `wake` is for
// others. The destructor returns once no memory that the queue was given is read or written any
// more: where the kernel no longer says so, that is never. It moves what it is told and reports
// what the kernel said: cutting and retrying are the engine's.
class Queue {
public:
    virtual ~Queue() = default;

    // Take pieces from the front, and say how many; fewer than all where there is no room now.
    virtual size_t submit(std::span<Piece* const> pieces) = 0;

    // Add what is over to `out`. Where nothing is, wait for something, for `wake`, or so long.
    // Whether there was a `wake`, if nothing is over. Throws std::system_error, with the call,
    // where the kernel refuses it: nothing more is to be had from this queue then.
    virtual bool reap(std::vector<Completion>& out, int64_t wait_ns) = 0;

    // Let a `reap` that waits, or the next one that would, return.
    virtual void wake() = 0;
};

// Closed at the end.
struct Descriptor {
    explicit Descriptor(int fd) : fd(fd) {}
    Descriptor(const Descriptor&) = delete;
    ~Descriptor() {
        if (fd >= 0) close(fd);
    }
    const int fd;
};

// Room for `depth` pieces. Each throws std::system_error with the call that failed.
std::unique_ptr<Queue> open_io_uring(int depth);
std::unique_ptr<Queue> open_linux_aio(int depth);
std::unique_ptr<Queue> open_thread_pool(int depth);

}  // namespace aio
