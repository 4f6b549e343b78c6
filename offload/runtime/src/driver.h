// A compute device as lanes use it: copies and kernels on streams, and events that tell how far a
// stream is. Where the CPU computes there is none, and a copy is memcpy.
//
// It is CUDA by its driver's library, which is opened when it is needed: nothing of CUDA is needed
// to build. What is declared here is part of the library's stable interface.
//
// [Note: Contexts]
// Torch works in the primary context of a device, and so do we. A stream of torch's may be 0, which
// means the default stream of the calling thread's current context. So every call makes ours
// current, and afterwards that one again which was.
#pragma once

#include <dlfcn.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

namespace driver {

using Stream = uintptr_t;  // as torch tells it
using Event = void*;

constexpr unsigned NON_BLOCKING = 1;  // a stream in no order with stream 0
constexpr unsigned SLEEPING = 1 | 2;  // an event whose waiters sleep, which keeps no time
constexpr int RELAXED = 2;            // a mode of captures

using Result = int;
using Context = void*;

struct Symbol {
    template <typename Call>
    operator Call() const { return reinterpret_cast<Call>(at); }
    void* at;
};

// Calls may come from any thread, and leave its current context as it was. What the device refuses
// is thrown as `std::runtime_error`, in a sentence. In a forked child nothing may be called, and
// where a driver ends there it calls nothing.
class Driver {
public:
    Driver(const std::string& library, int ordinal) : library_(library) {
        check("cuInit", init_(0));
        check("cuDeviceGet", device_get_(&device_, ordinal));
        check("cuDevicePrimaryCtxRetain", retain_(&context_, device_));
    }
    Driver(const Driver&) = delete;
    ~Driver() {
        if (getpid() != pid_) return;
        try {
            const Current here(*this);
            for (const Event event : events_) event_destroy_(event);
            if (module_ != nullptr) module_unload_(module_);
        } catch (const std::runtime_error&) {  // At the end of the process it may be gone.
        }
        release_(device_);
    }

    Stream make_stream() {
        const Current here(*this);
        Stream made = 0;
        check("cuStreamCreateWithPriority", stream_create_(&made, NON_BLOCKING, 0));
        return made;
    }
    // Wait for what is queued on a stream of ours, and let go of it; whatever fails.
    void end_stream(Stream stream) noexcept {
        try {
            const Current here(*this);
            stream_synchronize_(stream);
            stream_destroy_(stream);
        } catch (const std::runtime_error&) {
        }
    }

    // Queue a copy, between any two memories.
    void copy(void* into, const void* source, size_t bytes, Stream stream) {
        const Current here(*this);
        check("cuMemcpyAsync", copy_(Address(into), Address(source), bytes, stream));
    }

    // Load the text of kernels, which may be launched then.
    void load(const std::string& text) {
        const Current here(*this);
        check("cuModuleLoadData", module_load_(&module_, text.c_str()));
    }
    // Queue a kernel of that name: blocks in columns and rows, of so many threads. It is handed the
    // bytes at `argument`, which are copied.
    void launch(const std::string& name, unsigned columns, unsigned rows, unsigned threads,
                const void* argument, Stream stream) {
        const Current here(*this);
        Kernel kernel = nullptr;
        {
            const std::lock_guard lock(mutex_);
            Kernel& known = kernels_[name];
            if (known == nullptr)
                check("cuModuleGetFunction", function_(&known, module_, name.c_str()));
            kernel = known;
        }
        void* arguments[] = {const_cast<void*>(argument)};
        check("cuLaunchKernel", launch_(kernel, columns, rows, 1, threads, 1, 1, 0, stream,
                                        arguments, nullptr));
    }

    // An event behind all that is queued on a stream now, to be waited for once.
    Event record(Stream stream) {
        const Current here(*this);
        Event event = nullptr;
        {
            const std::lock_guard lock(mutex_);
            if (!events_.empty()) {
                event = events_.back();
                events_.pop_back();
            }
        }
        if (event == nullptr) check("cuEventCreate", event_create_(&event, SLEEPING));
        const Result result = event_record_(event, stream);
        if (result != 0) give_back(event);
        check("cuEventRecord", result);
        return event;
    }
    // Sleep until the device has come to it.
    void wait(Event event) {
        const Current here(*this);
        const Result result = event_synchronize_(event);
        give_back(event);
        check("cuEventSynchronize", result);
    }

private:
    using Address = unsigned long long;
    using Module = void*;
    using Kernel = void*;

    // While another thread captures a graph, as torch does it, most calls are refused to all
    // threads but those that say that nothing of theirs is in it.
    struct InNoCapture {
        explicit InNoCapture(const Driver& driver) : driver(driver) { driver.exchange_(&mode); }
        InNoCapture(const InNoCapture&) = delete;
        ~InNoCapture() { driver.exchange_(&mode); }
        const Driver& driver;
        int mode = RELAXED;
    };

    // See [Note: Contexts].
    struct Current {
        explicit Current(const Driver& driver) : driver(driver), apart(driver) {
            driver.check("cuCtxPushCurrent", driver.push_(driver.context_));
        }
        Current(const Current&) = delete;
        ~Current() {
            Context ours;
            driver.pop_(&ours);
        }
        const Driver& driver;
        const InNoCapture apart;
    };

    void give_back(Event event) {
        const std::lock_guard lock(mutex_);
        events_.push_back(event);
    }

    void check(const char* call, Result result) const {
        if (result == 0) return;
        const char* told = nullptr;
        if (error_string_(result, &told) != 0 || told == nullptr) told = "an unknown error";
        throw std::runtime_error(std::string("the device's driver refused ") + call + ": " + told +
                                 " (" + std::to_string(result) +
                                 "); likely something before it went wrong on the device, which "
                                 "CUDA_LAUNCH_BLOCKING=1 in the environment lets show where");
    }

    void* opened() const {
        if (void* const found = dlopen(library_.c_str(), RTLD_NOW | RTLD_LOCAL)) return found;
        throw std::runtime_error(library_ + " cannot be opened (" + dlerror() +
                                 "): likely no driver is installed, or not in this container");
    }
    Symbol find(const char* name) const {
        if (void* const found = dlsym(handle_, name)) return {found};
        throw std::runtime_error(library_ + " lacks " + name +
                                 ": likely it is too old; update the device's driver");
    }

    const std::string library_;
    void* const handle_ = opened();
    const pid_t pid_ = getpid();
    int device_ = 0;
    Context context_ = nullptr;
    Module module_ = nullptr;
    std::mutex mutex_;           // guards
    std::vector<Event> events_;  // that nobody has, as making one takes long
    std::map<std::string, Kernel> kernels_;

    Result (*const error_string_)(Result, const char**) = find("cuGetErrorString");
    Result (*const init_)(unsigned) = find("cuInit");
    Result (*const device_get_)(int*, int) = find("cuDeviceGet");
    Result (*const retain_)(Context*, int) = find("cuDevicePrimaryCtxRetain");
    Result (*const release_)(int) = find("cuDevicePrimaryCtxRelease_v2");
    Result (*const push_)(Context) = find("cuCtxPushCurrent_v2");
    Result (*const pop_)(Context*) = find("cuCtxPopCurrent_v2");
    Result (*const exchange_)(int*) = find("cuThreadExchangeStreamCaptureMode");
    Result (*const stream_create_)(Stream*, unsigned, int) = find("cuStreamCreateWithPriority");
    Result (*const stream_synchronize_)(Stream) = find("cuStreamSynchronize");
    Result (*const stream_destroy_)(Stream) = find("cuStreamDestroy_v2");
    Result (*const copy_)(Address, Address, size_t, Stream) = find("cuMemcpyAsync");
    Result (*const module_load_)(Module*, const void*) = find("cuModuleLoadData");
    Result (*const module_unload_)(Module) = find("cuModuleUnload");
    Result (*const function_)(Kernel*, Module, const char*) = find("cuModuleGetFunction");
    Result (*const launch_)(Kernel, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                            unsigned, Stream, void**, void**) = find("cuLaunchKernel");
    Result (*const event_create_)(Event*, unsigned) = find("cuEventCreate");
    Result (*const event_record_)(Event, Stream) = find("cuEventRecord");
    Result (*const event_synchronize_)(Event) = find("cuEventSynchronize");
    Result (*const event_destroy_)(Event) = find("cuEventDestroy_v2");
};

using DriverPtr = std::shared_ptr<Driver>;

}  // namespace driver
