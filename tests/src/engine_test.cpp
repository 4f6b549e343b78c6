// The engine without Python, for the sanitizers: `make sanitize`. Ends with 0 where all is well.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <system_error>
#include <thread>
#include <vector>

#include "engine.h"
#include "faults.h"
#include "io_uring_abi.h"

#if __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
using namespace aio;
static_assert(sizeof(uring::Sqe) == sizeof(io_uring_sqe));
static_assert(offsetof(uring::Sqe, user_data) == offsetof(io_uring_sqe, user_data));
static_assert(sizeof(uring::Params) == sizeof(io_uring_params));
static_assert(offsetof(uring::Params, features) == offsetof(io_uring_params, features));
static_assert(offsetof(uring::Params, cq) == offsetof(io_uring_params, cq_off));
static_assert(offsetof(uring::SqOffsets, array) == offsetof(io_sqring_offsets, array));
static_assert(offsetof(uring::CqOffsets, cqes) == offsetof(io_cqring_offsets, cqes));
static_assert(uring::SETUP_DEFER_TASKRUN == IORING_SETUP_DEFER_TASKRUN);
static_assert(uring::FEATURE_EXT_ARG == IORING_FEAT_EXT_ARG);
static_assert(int(uring::OP_READ) == int(IORING_OP_READ));
#else
using namespace aio;
#endif

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
            std::vector<Part> parts{{memory.data + a, middle - a, at + a},
                                    {memory.data + middle, b - middle, at + middle}};
            std::erase_if(parts, [](const Part& part) { return part.bytes == 0; });
            auto request = engine.submit({file.fd, writing, grain, parts});
            finish(request);
            CHECK(request->failure().code == 0);
            CHECK(std::memcmp(memory.data + a, truth.data + a, size_t(b - a)) == 0);
        }
    };
    std::vector<std::thread> all;
    for (int64_t number = 0; number < threads; number++) all.emplace_back(work, number);
    for (std::thread& thread : all) thread.join();
    CHECK(engine.drain(file.fd, FOREVER));
}

// The n-th piece fails for every n; what is reported is the first by offset.
void test_failures(Kind kind, const char* directory) {
    Memory memory(SIZE);
    int failures = 0;
    for (int64_t number = 1;; number++) {
        Engine engine({.kind = kind, .depth = 3, .piece_bytes = 8 * BLOCK,
                       .wrap = with_faults({.errors = {{number, ENOSPC}, {number + 1, EIO}}})});
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
                       .wrap = with_faults({.broken_at = number})});
        File file(directory, false);
        Memory memory(SIZE);
        const auto work = [&](std::byte* into) {
            for (int turn = 0; turn < 8; turn++) {
                auto request = engine.submit({file.fd, false, 1, {{into, 4 * BLOCK, 0}}});
                finish(request);
                const Failure& failure = request->failure();
                CHECK(failure.code == 0 || failure.cause == Cause::stopped);
                CHECK(turn < 4 || failure.last_code == EBADF);
            }
        };
        std::thread one(work, memory.data), other(work, memory.data + 4 * BLOCK);
        one.join();
        other.join();
        CHECK(engine.drain(file.fd, FOREVER));
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
                        }
        }
        for (const auto& request : requests) CHECK(request->done().is_set());
    }
}

}  // namespace

int main(int count, char** arguments) {
    const char* directory = count > 1 ? arguments[1] : ".";
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
            Options options{.kind = kind, .depth = 5, .piece_bytes = 3 * BLOCK};
            test_bytes(options, directory, direct);
            options.wrap = with_faults({.seed = 5, .short_rate = 0.3, .retry_rate = 0.1,
                                        .refusal_rate = 0.2});
            test_bytes(options, directory, direct);
        }
        test_failures(kind, directory);
        test_broken(kind, directory);
        test_closing(kind, directory);
    }
}
