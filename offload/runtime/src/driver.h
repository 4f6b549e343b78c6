// A compute device as lanes use it: copies and kernels on streams, and events that tell how far a
// stream is.
// Where the CPU computes there is none, and a copy is memcpy.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace driver {

using Stream = uintptr_t;  // as torch tells it
using Event = void*;

// Calls may come from any thread, and leave its current context as it was. What the device refuses
// is thrown as `std::runtime_error`, in a sentence. In a forked child nothing may be called, and
// where a driver ends there it calls nothing.
class Driver {
public:
    virtual ~Driver() = default;
    virtual Stream make_stream() = 0;
    // Wait for what is queued on a stream of ours, and let go of it; whatever fails.
    virtual void end_stream(Stream stream) noexcept = 0;
    // Queue a copy, between any two memories.
    virtual void copy(void* into, const void* source, size_t bytes, Stream stream) = 0;
    // Load the text of kernels, which may be launched then.
    virtual void load(const std::string& text) = 0;
    // Queue a kernel of that name: blocks in columns and rows, of so many threads. It is handed the
    // bytes at `argument`, which are copied.
    virtual void launch(const std::string& name, unsigned columns, unsigned rows, unsigned threads,
                        const void* argument, Stream stream) = 0;
    // An event behind all that is queued on a stream now, to be waited for once.
    virtual Event record(Stream stream) = 0;
    // Sleep until the device has come to it.
    virtual void wait(Event event) = 0;
};

using DriverPtr = std::shared_ptr<Driver>;

// CUDA's own, by the library of that name.
DriverPtr open_cuda(const std::string& library, int ordinal);

}  // namespace driver
