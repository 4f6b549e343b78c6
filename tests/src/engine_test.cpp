// The engine without Python, for the sanitizers: `make sanitize`. Ends with 0 where all is well.
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <random>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "engine.h"
#include "io_uring_abi.h"

#if __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
using namespace aio;
static_assert(uring::REGISTER_RING_FDS == IORING_REGISTER_RING_FDS);
static_assert(uring::ENTER_REGISTERED_RING == IORING_ENTER_REGISTERED_RING);
static_assert(sizeof(uring::RingUpdate) == sizeof(io_uring_rsrc_update));
static_assert(sizeof(uring::Sqe) == sizeof(io_uring_sqe));
static_assert(offsetof(uring::Sqe, buffer_index) == offsetof(io_uring_sqe, buf_index));
static_assert(offsetof(uring::Sqe, user_data) == offsetof(io_uring_sqe, user_data));
static_assert(sizeof(uring::Params) == sizeof(io_uring_params));
static_assert(offsetof(uring::Params, features) == offsetof(io_uring_params, features));
static_assert(offsetof(uring::Params, cq) == offsetof(io_uring_params, cq_off));
static_assert(offsetof(uring::SqOffsets, array) == offsetof(io_sqring_offsets, array));
static_assert(offsetof(uring::CqOffsets, cqes) == offsetof(io_cqring_offsets, cqes));
static_assert(uring::SETUP_DEFER_TASKRUN == IORING_SETUP_DEFER_TASKRUN);
static_assert(uring::FEATURE_EXT_ARG == IORING_FEAT_EXT_ARG);
static_assert(int(uring::OP_READ) == int(IORING_OP_READ));
static_assert(uring::REGISTER_BUFFERS_UPDATE == IORING_REGISTER_BUFFERS_UPDATE);
#else
using namespace aio;
#endif

thread_local bool starving = false;  // no memory for this thread

[[gnu::noinline]] void* operator new(size_t bytes) {
    if (void* const found = starving ? nullptr : std::malloc(bytes)) return found;
    throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, size_t) noexcept { std::free(memory); }

namespace {

constexpr int64_t BLOCK = 4096;
constexpr int64_t SIZE = 64 * BLOCK;

#define CHECK(condition) check(condition, #condition, __LINE__)

void check(bool holds, const char* condition, int line) {
    if (holds) return;
    std::fprintf(stderr, "line %d: not true: %s\n", line, condition);
    std::abort();
}

struct Memory {
    explicit Memory(int64_t bytes)
        : data(static_cast<std::byte*>(std::aligned_alloc(size_t(BLOCK), size_t(bytes)))) {
        std::memset(data, 0, size_t(bytes));
    }
    Memory(const Memory&) = delete;
    ~Memory() { std::free(data); }
    std::byte* const data;
};

// A file without a name, of SIZE zeros; O_DIRECT where the directory takes it.
struct File {
    File(const char* directory, bool asked_direct) {
        fd = open(directory, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
        CHECK(fd >= 0);
        Memory zeros(SIZE);
        CHECK(pwrite(fd, zeros.data, size_t(SIZE), 0) == SIZE);
        direct = asked_direct && fcntl(fd, F_SETFL, O_DIRECT) == 0;
    }
    ~File() { close(fd); }
    int fd;
    bool direct;
};

void finish(const std::shared_ptr<Request>& request) {
    CHECK(request != nullptr);
    request->done().wait(FOREVER);
}

// From now on a call fails in this thread, and in those that it starts: with any arguments, or with
// one second argument only.
void forbid(unsigned call, int code, int operation = -1) {
    const unsigned refuse = SECCOMP_RET_ERRNO | unsigned(code);
    const bool any = operation < 0;
    sock_filter program[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, call, 0, 3),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, args[1])),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, unsigned(operation), 0, uint8_t(any ? 0 : 1)),
        BPF_STMT(BPF_RET | BPF_K, refuse),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    const sock_fprog head{std::size(program), program};
    CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
    CHECK(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &head, 0, 0) == 0);
}

// The one descriptor of this process that is a ring.
int descriptor_of_ring() {
    for (int fd = 3; fd < 100; fd++) {
        char target[64] = {};
        const std::string link = "/proc/self/fd/" + std::to_string(fd);
        if (readlink(link.c_str(), target, sizeof target - 1) > 0 &&
            std::strstr(target, "io_uring") != nullptr)
            return fd;
    }
    return -1;
}

// A signal of the system is not what was waited for, and a time is waited to its end.
void test_waits() {
    struct sigaction before, action{};
    action.sa_handler = [](int) {};
    sigaction(SIGUSR1, &action, &before);
    const pthread_t waiting = pthread_self();
    Signal signal, never;
    std::thread other([&] {
        for (int turn = 0; turn < 40; turn++) {
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
            pthread_kill(waiting, SIGUSR1);
        }
        signal.set();
    });
    const int64_t began = now_ns();
    CHECK(!never.wait(20'000'000));
    CHECK(now_ns() - began >= 20'000'000);
    CHECK(signal.wait(FOREVER));
    other.join();
    sigaction(SIGUSR1, &before, nullptr);
}

// Threads write and read stretches of their own, any offset and length, and compare.
void test_bytes(const Options& options, const char* directory, bool direct) {
    Engine engine(options);
    File file(directory, direct);
    const int64_t grain = file.direct ? BLOCK : 1, threads = 4, share = SIZE / threads;
    const auto work = [&](int64_t number) {
        std::mt19937_64 random{uint64_t(number)};
        const auto next = [](auto& random) { return std::byte(random()); };
        Memory truth(share), memory(share);
        for (int turn = 0; turn < 40; turn++) {
            std::uniform_int_distribution<int64_t> cut(0, share / grain);
            int64_t a = cut(random) * grain, b = cut(random) * grain;
            if (a > b) std::swap(a, b);
            const bool writing = turn % 2 == 0;
            if (writing)
                for (int64_t i = a; i < b; i++) truth.data[i] = memory.data[i] = next(random);
            else std::memset(memory.data + a, 7, size_t(b - a));
            const int64_t middle = (a + b) / 2 / grain * grain, at = number * share;
            auto request = engine.submit({file.fd, writing, grain,
                                          {{memory.data + a, middle - a, at + a},
                                           {memory.data + middle, b - middle, at + middle}}});
            auto signal = std::make_shared<Signal>();
            request->watch(signal);
            while (!signal->wait(1'000'000)) engine.counters();
            finish(request);
            CHECK(request->failure().code == 0);
            CHECK(std::memcmp(memory.data + a, truth.data + a, size_t(b - a)) == 0);
        }
    };
    std::vector<std::thread> all;
    for (int64_t number = 0; number < threads; number++) all.emplace_back(work, number);
    for (std::thread& thread : all) thread.join();
    CHECK(engine.drain(file.fd, FOREVER));
    CHECK(engine.counters().depth_max <= options.depth);
    engine.forget(file.fd);
}

// The n-th piece fails for every n; what is reported is the first by offset.
void test_failures(Kind kind, const char* directory) {
    Memory memory(SIZE);
    int failures = 0;
    for (int64_t number = 1;; number++) {
        Engine engine({.kind = kind, .depth = 3, .piece_bytes = 8 * BLOCK,
                       .faults = {.errors = {{number, ENOSPC}, {number + 1, EIO}}}});
        File file(directory, false);
        auto request = engine.submit({file.fd, true, 1, {{memory.data, SIZE, 0}}});
        finish(request);
        if (request->failure().code == 0) break;
        CHECK(request->failure().code == ENOSPC);
        CHECK(request->failure().offset == (number - 1) * 8 * BLOCK);
        failures++;
    }
    CHECK(failures == 8);
}

// The queue breaks with requests under way, waiting and yet to come, of several threads: all fail.
void test_broken(Kind kind, const char* directory) {
    for (int64_t number = 1; number < 12; number++) {
        Engine engine({.kind = kind, .depth = 3, .piece_bytes = BLOCK,
                       .faults = {.broken_at = number}});
        File file(directory, false);
        Memory memory(SIZE);
        const auto work = [&](std::byte* into) {
            for (int turn = 0; turn < 8; turn++) {
                auto request = engine.submit({file.fd, false, 1, {{into, 4 * BLOCK, 0}}});
                finish(request);
                const Failure& failure = request->failure();
                CHECK(failure.code == 0 || failure.cause == Cause::queue_broken);
                CHECK(turn < 4 || failure.last_code == EBADF);
            }
        };
        std::thread one(work, memory.data), other(work, memory.data + 4 * BLOCK);
        one.join();
        other.join();
        CHECK(engine.drain(file.fd, FOREVER));
        CHECK(engine.register_buffer(memory.data, SIZE) == ESHUTDOWN);
        engine.forget(file.fd);
    }
}

// Somebody else closes the ring while a read goes on, until there is something in a pipe. Where
// the kernel knows the ring by an index, nothing is lost; else everything fails, once that is over.
void test_ring_lost(const char* directory, bool by_index) {
    if (!by_index) forbid(unsigned(uring::REGISTER_CALL), EINVAL, uring::REGISTER_RING_FDS);
    Engine engine({.kind = Kind::io_uring, .depth = 2});
    File file(directory, false);
    Memory memory(2 * BLOCK);
    int ends[2];
    CHECK(pipe(ends) == 0);
    const auto read = engine.submit({ends[0], false, 1, {{memory.data, BLOCK, 0}}});
    while (engine.counters().depth_max == 0) std::this_thread::yield();
    std::this_thread::sleep_for(std::chrono::milliseconds(20));  // it is sent and waited for
    const int ring = descriptor_of_ring();
    CHECK(ring >= 0 && close(ring) == 0);
    const auto other = engine.submit({file.fd, false, 1, {{memory.data + BLOCK, BLOCK, 0}}});
    CHECK(!read->done().wait(100'000'000));
    const std::vector<std::byte> bytes(size_t(BLOCK), std::byte(7));
    CHECK(write(ends[1], bytes.data(), size_t(BLOCK)) == BLOCK);
    for (const auto& request : {read, other}) {
        finish(request);
        CHECK((request->failure().code == 0) == by_index);
        CHECK(by_index || request->failure().cause == Cause::queue_broken);
    }
    CHECK(std::memcmp(memory.data, bytes.data(), size_t(BLOCK)) == 0);
    engine.forget(ends[0]);
    for (int end : ends) close(end);
}

// A kernel that does not take anything for now, again and again: there is a limit, and no haste.
void test_endless_refusals(const char* directory) {
    Engine engine({.kind = Kind::io_uring, .depth = 3, .piece_bytes = BLOCK});
    File file(directory, false);
    Memory memory(SIZE);
    const auto refuse = [](int64_t, int64_t) { forbid(unsigned(uring::ENTER_CALL), EAGAIN); };
    const std::vector<Part> parts{{memory.data, SIZE, 0}};
    finish(engine.submit({file.fd, false, 1, parts, refuse}));
    const int64_t before = engine.counters().cpu_ns;
    const auto request = engine.submit({file.fd, true, 1, parts});
    finish(request);
    CHECK(request->failure().cause == Cause::no_progress);
    CHECK(request->failure().last_code == EAGAIN);
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    CHECK(engine.counters().cpu_ns - before < 150'000'000);
}

// No memory for the engine's thread: everything fails, and the process goes on.
void test_no_memory(Kind kind, const char* directory) {
    Engine engine({.kind = kind, .depth = 2, .piece_bytes = BLOCK});
    File file(directory, false);
    Memory memory(SIZE);
    const std::vector<Part> parts{{memory.data, SIZE, 0}};
    const auto starve = [](int64_t, int64_t) { starving = true; };
    finish(engine.submit({file.fd, false, 1, parts, starve}));
    std::vector<std::shared_ptr<Request>> requests;
    for (int number = 0; number < 200; number++)
        requests.push_back(engine.submit({file.fd, false, 1, parts}));
    for (const auto& request : requests) finish(request);
    CHECK(requests.back()->failure().cause == Cause::queue_broken);
    CHECK(requests.back()->failure().last_code == ENOMEM);
    CHECK(engine.drain(file.fd, FOREVER));
}

// A file that was shortened, to the middle of a block too, is told as what it is.
void test_end_of_file(Kind kind, const char* directory) {
    for (int64_t size : {int64_t(0), int64_t(1000), BLOCK, 2 * BLOCK + 1000}) {
        for (bool direct : {false, true}) {
            Engine engine({.kind = kind, .depth = 2});
            File file(directory, direct);
            Memory memory(SIZE);
            CHECK(ftruncate(file.fd, size) == 0);
            const auto request = engine.submit({file.fd, false, file.direct ? BLOCK : 1,
                                                {{memory.data, SIZE, 0}}});
            finish(request);
            CHECK(request->failure().code == EIO);
            CHECK(request->failure().cause == Cause::end_of_file);
            CHECK(request->failure().offset == size);
            CHECK(request->failure().bytes == SIZE - size);
        }
    }
}

// Engines come and go with work under way, closed by several threads at once, or just dropped.
void test_closing(Kind kind, const char* directory) {
    File file(directory, true);
    Memory memory(SIZE);
    for (int turn = 0; turn < 10; turn++) {
        std::vector<std::shared_ptr<Request>> requests;
        {
            Engine engine({.kind = kind, .depth = 2, .piece_bytes = BLOCK});
            for (int i = 0; i < 8; i++)
                requests.push_back(engine.submit({file.fd, true, BLOCK, {{memory.data, SIZE, 0}}}));
            if (turn % 2 == 0) {
                std::thread other([&] { engine.close(); });
                engine.close();
                other.join();
                CHECK(engine.submit({file.fd, true, 1, {{memory.data, 1, 0}}}) == nullptr);
                engine.forget(file.fd);
            }
        }
        for (const auto& request : requests) CHECK(request->done().is_set());
    }
}

void test_registered(Kind kind, const char* directory) {
    Engine engine({.kind = kind, .depth = 4, .piece_bytes = 2 * BLOCK});
    File file(directory, true);
    Memory source(SIZE), back(SIZE);
    std::memset(source.data, 3, size_t(SIZE));
    const int code = engine.register_buffer(source.data, SIZE);
    std::printf("    registered: %s\n", code == 0 ? "yes" : std::strerror(code));
    CHECK(kind == Kind::io_uring || code == EOPNOTSUPP);
    finish(engine.submit({file.fd, true, BLOCK, {{source.data, SIZE, 0}}}));
    finish(engine.submit({file.fd, false, BLOCK, {{back.data, SIZE, 0}}}));
    CHECK(std::memcmp(source.data, back.data, size_t(SIZE)) == 0);
    if (code == 0) engine.unregister_buffer(source.data, SIZE);
}

// A forked child leaves the engine alone.
void test_fork(Kind kind, const char* directory) {
    auto engine = std::make_unique<Engine>(Options{.kind = kind});
    File file(directory, false);
    Memory memory(SIZE);
    auto request = engine->submit({file.fd, true, 1, {{memory.data, SIZE, 0}}});
    const pid_t child = fork();
    if (child == 0) {
        engine.reset();
        _exit(7);
    }
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child && WEXITSTATUS(status) == 7);
    finish(request);
}

}  // namespace

int main(int count, char** arguments) {
    const char* directory = count > 1 ? arguments[1] : ".";
    test_waits();
    const char* names[] = {"io_uring", "linux_aio", "threads"};
    for (Kind kind : {Kind::io_uring, Kind::linux_aio, Kind::threads}) {
        try {
            Engine({.kind = kind});
        } catch (const std::system_error& error) {
            std::printf("%s: not here: %s\n", names[int(kind)], error.what());
            continue;
        }
        std::printf("%s\n", names[int(kind)]);
        for (bool direct : {false, true}) {
            Options options{.kind = kind, .depth = 5, .piece_bytes = 3 * BLOCK,
                            .inflight_bytes_max = 9 * BLOCK};
            test_bytes(options, directory, direct);
            options.faults = {.errors = {}, .seed = 5, .short_rate = 0.3, .retry_rate = 0.1,
                              .refusal_rate = 0.2};
            test_bytes(options, directory, direct);
        }
        test_failures(kind, directory);
        test_end_of_file(kind, directory);
        test_broken(kind, directory);
        test_no_memory(kind, directory);
        if (kind == Kind::io_uring) {
            test_endless_refusals(directory);
            for (bool by_index : {true, false})  // in a thread, which is filtered for good
                std::thread([&] { test_ring_lost(directory, by_index); }).join();
        }
        test_closing(kind, directory);
        test_registered(kind, directory);
        test_fork(kind, directory);
    }
}
