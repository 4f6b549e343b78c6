// A stand-in for the library of CUDA's driver: the calls that the engine makes, on the memory of
// this machine, so that the code of `cuda.cpp` runs where there is no device.
//
// What is queued on a stream is done by a thread of the stream, after a while: seeded delays,
// before and in the midst of a copy. An event is over when its stream has come to it. A stream that
// was not made here is a test's own: it is asked to say where it is (`stand_in_hooks`), or else it
// is the calling thread, and all that was queued on it is done.
//
// Beyond the calls of CUDA there are those of tests, `stand_in_...`: any call can be let fail, and
// calls are counted, and what has not been given back.
#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include <dlfcn.h>

#include "../../cpu_adam/src/device/table.cuh"

#define EXPORTED extern "C" __attribute__((visibility("default")))

namespace {

constexpr int DONE = 0, INVALID_VALUE = 1, NOT_INITIALIZED = 3, INVALID_CONTEXT = 201,
              INVALID_IMAGE = 200, UNSUPPORTED_TEXT = 222, INVALID_HANDLE = 400, NOT_FOUND = 500,
              ILLEGAL_ADDRESS = 700, CAPTURE_UNSUPPORTED = 900;
constexpr unsigned NON_BLOCKING = 1, SLEEPING_WITHOUT_TIME = 3;
constexpr int DEVICES = 1;

using RecordHook = uint64_t (*)(uintptr_t stream);
using WaitHook = void (*)(uint64_t token);
using LaterHook = void (*)(uintptr_t stream, uint64_t token);

struct Event {
    int left = 0;  // records that their streams have not come to
    bool recorded = false, foreign = false;
    uint64_t token = 0;
};

struct Stream {
    std::thread thread;
    std::deque<std::function<void()>> items;
    size_t done = 0, queued = 0;
    bool ending = false;
};

struct Machine {
    std::mutex mutex;
    std::condition_variable changed;
    std::mt19937 luck{0};
    unsigned delay_us_max = 0;
    int calls = 0, fails_at = 0, retained = 0;
    bool started = false, stays_failed = false;
    int unwaited = 0;  // events that nobody waits for: 1 those of streams made here, 2 the others
    std::string failed;  // the call that was let fail first
    std::set<Stream*> streams;
    std::set<Event*> events;
    RecordHook record = nullptr;
    WaitHook wait = nullptr;
    LaterHook later = nullptr;
    uint64_t told = 0;
    std::map<uint64_t, std::function<void()>> items;  // of tests' streams
    void* kernels = nullptr;

    // Every call begins so: whether it is the one that is to fail.
    int enter(const char* call) {
        const std::lock_guard lock(mutex);
        calls++;
        const bool fails = fails_at > 0 && (stays_failed ? calls >= fails_at : calls == fails_at);
        if (fails && failed.empty()) failed = call;
        return fails ? ILLEGAL_ADDRESS : DONE;
    }
    void pause() {
        unsigned us = 0;
        {
            const std::lock_guard lock(mutex);
            if (delay_us_max > 0 && luck() % 3 == 0) us = unsigned(luck() % delay_us_max);
        }
        if (us > 0) std::this_thread::sleep_for(std::chrono::microseconds(us));
    }
    void run(Stream* stream) {
        std::unique_lock lock(mutex);
        while (!stream->ending || !stream->items.empty()) {
            if (stream->items.empty()) {
                changed.wait(lock);
                continue;
            }
            const std::function<void()> item = std::move(stream->items.front());
            stream->items.pop_front();
            lock.unlock();
            pause();
            item();
            lock.lock();
            stream->done++;
            changed.notify_all();
        }
    }
    // On a stream made here; a test's own is told of, and does it by `stand_in_run`.
    int enqueue(uintptr_t handle, std::function<void()> item) {
        auto* stream = reinterpret_cast<Stream*>(handle);
        std::unique_lock lock(mutex);
        if (streams.contains(stream)) {
            queue(stream, std::move(item));
            return DONE;
        }
        const auto tell = later;
        if (tell == nullptr) return INVALID_HANDLE;
        const uint64_t token = ++told;
        items[token] = std::move(item);
        lock.unlock();
        tell(handle, token);
        return DONE;
    }
    void queue(Stream* stream, std::function<void()> item) {
        stream->items.push_back(std::move(item));
        stream->queued++;
        changed.notify_all();
    }
};

Machine& machine = *new Machine;  // Threads of streams may outlive what is static.
char the_context;
thread_local std::vector<void*> contexts;
thread_local int capture_mode = 0;

// What a call needs: to be none that fails, and our context where it asks for one. It is then as if
// another thread captured a graph all the time, which it must say not to be in.
int begin(const char* call, bool in_context) {
    if (const int code = machine.enter(call)) return code;
    if (!machine.started) return NOT_INITIALIZED;
    const bool here = !contexts.empty() && contexts.back() == &the_context;
    if (!in_context) return DONE;
    return !here ? INVALID_CONTEXT : capture_mode == 0 ? CAPTURE_UNSUPPORTED : DONE;
}

}  // namespace

#define BEGIN(in_context) \
    if (const int code = begin(__func__, in_context)) return code

// -- calls of CUDA -------------------------------------------------------------------------------

EXPORTED int cuInit(unsigned flags) {
    machine.started = true;
    BEGIN(false);
    return flags == 0 ? DONE : INVALID_VALUE;
}

EXPORTED int cuGetErrorString(int code, const char** told) {
    *told = code == ILLEGAL_ADDRESS ? "an illegal memory access was encountered"
            : code == INVALID_CONTEXT ? "invalid device context"
            : code == INVALID_HANDLE  ? "invalid resource handle"
            : code == UNSUPPORTED_TEXT
                ? "the provided PTX was compiled with an unsupported toolchain"
                                      : "invalid argument";
    return DONE;
}

EXPORTED int cuDeviceGet(int* device, int ordinal) {
    BEGIN(false);
    *device = 7 + ordinal;
    return ordinal >= 0 && ordinal < DEVICES ? DONE : INVALID_VALUE;
}

EXPORTED int cuDevicePrimaryCtxRetain(void** context, int device) {
    BEGIN(false);
    if (device != 7) return INVALID_VALUE;
    const std::lock_guard lock(machine.mutex);
    machine.retained++;
    *context = &the_context;
    return DONE;
}

EXPORTED int cuDevicePrimaryCtxRelease_v2(int) {
    BEGIN(false);
    const std::lock_guard lock(machine.mutex);
    machine.retained--;
    return DONE;
}

EXPORTED int cuThreadExchangeStreamCaptureMode(int* mode) {
    std::swap(*mode, capture_mode);
    return DONE;
}

EXPORTED int cuCtxPushCurrent_v2(void* context) {
    BEGIN(false);
    contexts.push_back(context);
    return DONE;
}

EXPORTED int cuCtxPopCurrent_v2(void** context) {
    // The call that is let fail pops nevertheless, as nobody could go on from a stack of contexts
    // that is not what it seems.
    const int code = begin(__func__, true);
    if (contexts.empty()) return INVALID_CONTEXT;
    *context = contexts.back();
    contexts.pop_back();
    return code;
}

#ifndef LACKS_STREAMS
EXPORTED int cuStreamCreateWithPriority(uintptr_t* made, unsigned flags, int) {
    BEGIN(true);
    if (flags != NON_BLOCKING) return INVALID_VALUE;
    auto* stream = new Stream;
    const std::lock_guard lock(machine.mutex);
    machine.streams.insert(stream);
    stream->thread = std::thread([stream] { machine.run(stream); });
    *made = reinterpret_cast<uintptr_t>(stream);
    return DONE;
}
#endif

EXPORTED int cuStreamSynchronize(uintptr_t handle) {
    BEGIN(true);
    auto* stream = reinterpret_cast<Stream*>(handle);
    std::unique_lock lock(machine.mutex);
    if (!machine.streams.contains(stream)) return INVALID_HANDLE;
    const size_t until = stream->queued;
    machine.changed.wait(lock, [&] { return stream->done >= until; });
    return DONE;
}

EXPORTED int cuStreamDestroy_v2(uintptr_t handle) {
    auto* stream = reinterpret_cast<Stream*>(handle);
    {
        const std::lock_guard lock(machine.mutex);
        if (machine.streams.erase(stream) == 0) return INVALID_HANDLE;
        stream->ending = true;
        machine.changed.notify_all();
    }
    stream->thread.join();
    delete stream;
    return begin(__func__, true);
}

EXPORTED int cuMemcpyAsync(unsigned long long into, unsigned long long source, size_t bytes,
                           uintptr_t handle) {
    BEGIN(true);
    return machine.enqueue(handle, [=] {
        const size_t half = bytes / 2;
        auto* there = reinterpret_cast<char*>(into);
        const auto* here = reinterpret_cast<const char*>(source);
        std::memcpy(there, here, half);
        machine.pause();
        std::memcpy(there + half, here + half, bytes - half);
    });
}

// Kernels are those of a library that tests have built of the same text; without one the device is
// one that can load none.
EXPORTED int cuModuleLoadData(void** module, const void* text) {
    BEGIN(true);
    if (std::strstr(static_cast<const char*>(text), ".entry exact") == nullptr)
        return INVALID_IMAGE;
    *module = machine.kernels;
    return machine.kernels == nullptr ? UNSUPPORTED_TEXT : DONE;
}

EXPORTED int cuModuleUnload(void*) {
    BEGIN(true);
    return DONE;
}

EXPORTED int cuModuleGetFunction(void** function, void* module, const char* name) {
    BEGIN(true);
    *function = dlsym(module, name);
    return *function == nullptr ? NOT_FOUND : DONE;
}

EXPORTED int cuLaunchKernel(void* kernel, unsigned columns, unsigned rows, unsigned depth,
                            unsigned threads, unsigned, unsigned, unsigned, uintptr_t handle,
                            void** arguments, void**) {
    BEGIN(true);
    if (depth != 1 || threads != 256) return INVALID_VALUE;
    using Run = void (*)(void*, int64_t, int64_t, const cpu_adam::DeviceTable*);
    const auto run = reinterpret_cast<Run>(dlsym(machine.kernels, "run_blocks"));
    const auto table = *static_cast<const cpu_adam::DeviceTable*>(arguments[0]);
    return machine.enqueue(handle, [=] { run(kernel, columns, rows, &table); });
}

EXPORTED int cuEventCreate(Event** event, unsigned flags) {
    BEGIN(true);
    if (flags != SLEEPING_WITHOUT_TIME) return INVALID_VALUE;
    const std::lock_guard lock(machine.mutex);
    *event = new Event;
    machine.events.insert(*event);
    return DONE;
}

EXPORTED int cuEventDestroy_v2(Event* event) {
    {
        const std::lock_guard lock(machine.mutex);
        if (machine.events.erase(event) == 0) return INVALID_HANDLE;
        if (event->left == 0) delete event;  // Else its stream would still tell it.
    }
    return begin(__func__, true);
}

EXPORTED int cuEventRecord(Event* event, uintptr_t handle) {
    BEGIN(true);
    auto* stream = reinterpret_cast<Stream*>(handle);
    std::unique_lock lock(machine.mutex);
    if (!machine.events.contains(event)) return INVALID_HANDLE;
    event->recorded = true;
    event->foreign = !machine.streams.contains(stream);
    if (!event->foreign) {
        event->left++;
        machine.queue(stream, [event] {
            const std::lock_guard lock(machine.mutex);
            event->left--;
        });
    } else if (const RecordHook record = machine.record) {
        lock.unlock();
        event->token = record(handle);
    }
    return DONE;
}

EXPORTED int cuEventSynchronize(Event* event) {
    BEGIN(true);
    std::unique_lock lock(machine.mutex);
    if (!machine.events.contains(event) || !event->recorded) return INVALID_HANDLE;
    if (machine.unwaited == (event->foreign ? 2 : 1)) return DONE;
    if (!event->foreign) {
        machine.changed.wait(lock, [&] { return event->left == 0; });
    } else if (const WaitHook wait = machine.wait) {
        lock.unlock();
        wait(event->token);
    }
    return DONE;
}

// -- calls of tests ------------------------------------------------------------------------------

// Go on by these delays, of at most so many microseconds, as what was told before is forgotten.
EXPORTED void stand_in_reset(unsigned seed, unsigned delay_us_max) {
    const std::lock_guard lock(machine.mutex);
    machine.luck.seed(seed);
    machine.delay_us_max = delay_us_max;
    machine.calls = machine.fails_at = 0;
    machine.stays_failed = false;
    machine.unwaited = 0;
    machine.failed.clear();
    machine.record = nullptr;
    machine.wait = nullptr;
    machine.later = nullptr;
    machine.items.clear();
}

// Let the n-th call from the reset on fail, or all from that one on; 0 for none.
EXPORTED void stand_in_fail(int at, int stays) {
    const std::lock_guard lock(machine.mutex);
    machine.fails_at = at;
    machine.stays_failed = stays != 0;
}

// What torch's own synchronization of a device does.
EXPORTED void stand_in_drain() {
    std::unique_lock lock(machine.mutex);
    machine.changed.wait(lock, [] {
        return std::ranges::all_of(machine.streams, [](const Stream* one) {
            return one->done == one->queued;
        });
    });
}

EXPORTED int stand_in_calls() {
    const std::lock_guard lock(machine.mutex);
    return machine.calls;
}

// Streams, events and contexts that were not given back.
EXPORTED int stand_in_live() {
    const std::lock_guard lock(machine.mutex);
    return int(machine.streams.size() + machine.events.size()) + machine.retained;
}


// Let nobody wait for events, which must show: 1 those of streams made here, 2 the others.
EXPORTED void stand_in_unwait(int which) { machine.unwaited = which; }

// The call that was let fail; empty where it has not come.
EXPORTED const char* stand_in_failed() { return machine.failed.c_str(); }

EXPORTED void stand_in_hooks(RecordHook record, WaitHook wait, LaterHook later) {
    const std::lock_guard lock(machine.mutex);
    machine.record = record;
    machine.wait = wait;
    machine.later = later;
}

// Do what was queued on a stream of a test's own.
EXPORTED void stand_in_run(uint64_t token) {
    std::function<void()> item;
    {
        const std::lock_guard lock(machine.mutex);
        item = std::move(machine.items[token]);
        machine.items.erase(token);
    }
    item();
}

// The library of the kernels; an empty path for none.
EXPORTED void stand_in_kernels(const char* path) {
    machine.kernels = *path == 0 ? nullptr : dlopen(path, RTLD_NOW | RTLD_LOCAL);
}
