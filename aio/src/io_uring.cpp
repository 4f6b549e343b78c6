// The queue over io_uring: rings shared with the kernel, one call for submitting and waiting.
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <system_error>

#include "io_uring_abi.h"
#include "queue.h"
#include "signals.h"

namespace aio {

namespace {

using namespace uring;

constexpr uint64_t WAKE = 0;             // user data of the read of the eventfd: no piece is there
constexpr int64_t PAUSE_NS = 1'000'000;  // after a call that the kernel refuses for now

uint64_t discarded;  // what is read of eventfds; outlives every ring

[[noreturn]] void fail(const char* call, int code = errno) {
    throw std::system_error(code, std::generic_category(), call);
}

uint64_t address_of(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer); }

class Mapping {
public:
    Mapping(int fd, uint64_t offset, size_t bytes) : bytes_(bytes) {
        start_ = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd,
                      off_t(offset));
        if (start_ == MAP_FAILED) fail("mmap of the rings of io_uring");
    }
    Mapping(const Mapping&) = delete;
    ~Mapping() { munmap(start_, bytes_); }
    template <class T> T* at(uint64_t offset = 0) const {
        return reinterpret_cast<T*>(static_cast<std::byte*>(start_) + offset);
    }

private:
    void* start_;
    size_t bytes_;
};

// With the best that this kernel has: with DEFER_TASKRUN it interrupts nobody, and does its own
// work in the one thread that asks for results.
int set_up(unsigned entries, Params& params) {
    for (uint32_t flags : {SETUP_SINGLE_ISSUER | SETUP_DEFER_TASKRUN, SETUP_COOP_TASKRUN, 0u}) {
        params = Params{};
        params.flags = flags;
        const int fd = int(syscall(SETUP_CALL, entries, &params));
        if (fd >= 0) return fd;
        if (errno != EINVAL) break;
    }
    fail("io_uring_setup");
}

class IoUring final : public Queue {
public:
    explicit IoUring(int depth)
        : ring_(set_up(unsigned(depth) + 1, params_)),  // one more: the eventfd
          wake_(eventfd(0, EFD_CLOEXEC)),
          rings_(ring_.fd, OFFSET_OF_RINGS, checked_bytes()),
          sqes_(ring_.fd, OFFSET_OF_SQES, params_.sq_entries * sizeof(Sqe)) {
        if (wake_.fd < 0) fail("eventfd");
        uint32_t* array = rings_.at<uint32_t>(params_.sq.array);
        for (uint32_t i = 0; i < params_.sq_entries; i++) array[i] = i;
    }

    ~IoUring() override {
        for (; unsent_ > 0; unsent_--)
            if (sqe_at(tail_ - unsent_).user_data != WAKE) under_way_--;
        while (under_way_ > 0) {
            if (enter(1, 0, PAUSE_NS) < 0) pause_a_moment();
            take([](Piece*, int32_t) {});
        }
    }

    size_t submit(std::span<Piece* const> pieces) override {
        const uint32_t kept = armed_ ? 0 : 1;  // for the eventfd
        const uint32_t room = params_.sq_entries - unsent_;
        const size_t count = std::min(pieces.size(), size_t(room > kept ? room - kept : 0));
        for (Piece* piece : pieces.first(count)) {
            Sqe& sqe = next_sqe();
            sqe.opcode = piece->writing ? OP_WRITE : OP_READ;
            sqe.fd = piece->fd;
            sqe.offset = uint64_t(piece->offset);
            sqe.address = address_of(piece->data);
            sqe.length = uint32_t(piece->bytes);
            sqe.user_data = address_of(piece);
        }
        under_way_ += count;
        return count;
    }

    bool reap(std::vector<Completion>& out, int64_t wait_ns) override {
        if (!armed_) arm();
        const bool waits = wait_ns != 0 && cq_empty();
        const bool idle = under_way_ == 0 && params_.features & FEATURE_NO_IOWAIT;
        std::atomic_ref(*rings_.at<uint32_t>(params_.sq.tail))
            .store(tail_, std::memory_order_release);
        const long sent = enter(waits ? 1 : 0, idle ? ENTER_NO_IOWAIT : 0, wait_ns);
        const int code = sent < 0 ? errno : 0;
        if (sent > 0) unsent_ -= uint32_t(sent);
        const int wake_result = take([&](Piece* piece, int32_t result) {
            out.push_back({piece, result});
        });
        if (wake_result < 0 && wake_result != -EINTR && wake_result != -EAGAIN)
            fail("read of the eventfd", -wake_result);
        // These leave everything as it is for the next call.
        if (code == EAGAIN || code == EBUSY) pause_a_moment();
        else if (code != 0 && code != EINTR && code != ETIME) fail("io_uring_enter", code);
        return wake_result > 0;
    }

    void wake() override {
        const uint64_t one = 1;
        while (write(wake_.fd, &one, sizeof one) < 0 && errno == EINTR) {}
    }

private:
    // Bytes of the rings, once the kernel is known to have what is needed (all of Linux 5.11).
    size_t checked_bytes() const {
        const uint32_t needed = FEATURE_SINGLE_MMAP | FEATURE_NODROP | FEATURE_EXT_ARG;
        if ((params_.features & needed) != needed) fail("io_uring of Linux 5.11", EOPNOTSUPP);
        return std::max(params_.sq.array + params_.sq_entries * sizeof(uint32_t),
                        params_.cq.cqes + params_.cq_entries * sizeof(Cqe));
    }

    // Sends what is not sent and, where `awaited` is 1, waits for a result, at most so long. As the
    // kernel: entries taken, or -1 and errno.
    long enter(uint32_t awaited, uint32_t flags, int64_t wait_ns) const {
        KernelTimespec span{wait_ns / 1'000'000'000, wait_ns % 1'000'000'000};
        WaitArgument argument{0, 0, 0, wait_ns == FOREVER ? 0 : address_of(&span)};
        return syscall(ENTER_CALL, ring_.fd, unsent_, awaited,
                       flags | ENTER_GETEVENTS | ENTER_EXT_ARG, &argument, sizeof argument);
    }

    static void pause_a_moment() {
        const timespec span{0, PAUSE_NS};
        nanosleep(&span, nullptr);
    }

    Sqe& sqe_at(uint32_t position) const {
        return sqes_.at<Sqe>()[position & (params_.sq_entries - 1)];
    }

    Sqe& next_sqe() {
        Sqe& sqe = sqe_at(tail_);
        sqe = Sqe{};
        tail_++;
        unsent_++;
        return sqe;
    }

    void arm() {
        if (unsent_ == params_.sq_entries) return;
        Sqe& sqe = next_sqe();
        sqe.opcode = OP_READ;
        sqe.fd = wake_.fd;
        sqe.address = address_of(&discarded);
        sqe.length = sizeof discarded;
        sqe.user_data = WAKE;
        armed_ = true;
    }

    uint32_t cq_tail() const {
        return std::atomic_ref(*rings_.at<uint32_t>(params_.cq.tail))
            .load(std::memory_order_acquire);
    }

    bool cq_empty() const { return cq_tail() == *rings_.at<uint32_t>(params_.cq.head); }

    // Takes what is over and tells `each`; what the read of the eventfd came to, 0 if it goes on.
    template <class Each> int take(Each each) {
        int wake_result = 0;
        uint32_t& shared_head = *rings_.at<uint32_t>(params_.cq.head);
        uint32_t head = shared_head;
        for (const uint32_t end = cq_tail(); head != end; head++) {
            const Cqe& cqe = rings_.at<Cqe>(params_.cq.cqes)[head & (params_.cq_entries - 1)];
            if (cqe.user_data == WAKE) {
                armed_ = false;
                wake_result = cqe.result;
                continue;
            }
            each(reinterpret_cast<Piece*>(uintptr_t(cqe.user_data)), cqe.result);
            under_way_--;
        }
        std::atomic_ref(shared_head).store(head, std::memory_order_release);
        return wake_result;
    }

    Params params_{};
    Descriptor ring_, wake_;
    Mapping rings_, sqes_;
    uint32_t tail_ = 0;    // of the submission ring
    uint32_t unsent_ = 0;  // entries in it that the kernel has not taken yet
    size_t under_way_ = 0;
    bool armed_ = false;  // the eventfd is being read
};

}  // namespace

std::unique_ptr<Queue> open_io_uring(int depth) { return std::make_unique<IoUring>(depth); }

}  // namespace aio
