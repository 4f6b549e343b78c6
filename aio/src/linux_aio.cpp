// The queue over Linux AIO (io_submit): asynchronous for O_DIRECT only, since Linux 4.18.
#include <linux/aio_abi.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <system_error>

#include "queue.h"
#include "signals.h"

namespace aio {

namespace {

constexpr size_t EVENTS_MAX = 64;  // reaped by one call

// [Note: Few calls]
// One call submits all that is ready; one waits for what is over and takes all of it. What is over
// already is read from the ring that the kernel shares with us, by no call. `wake` ends the same
// wait: it is a poll of an eventfd in the same context, renewed after each wake.

// The kernel's struct aio_ring, at the address that is the context.
struct Ring {
    static constexpr uint32_t MAGIC = 0xa10a10a1;
    uint32_t id, count, head, tail, magic, compatible, incompatible, header_bytes;
    io_event events[];
};

class LinuxAio final : public Queue {
public:
    explicit LinuxAio(int depth)
        : wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)), blocks_(size_t(depth)) {
        if (wake_.fd < 0) fail("eventfd");
        if (syscall(SYS_io_setup, depth + 1, &context_) != 0) fail("io_setup");
        for (iocb& block : blocks_) free_.push_back(&block);
    }

    ~LinuxAio() override { syscall(SYS_io_destroy, context_); }

    size_t submit(std::span<Piece* const> pieces) override {
        const size_t count = std::min(pieces.size(), free_.size());
        chosen_.assign(free_.end() - ptrdiff_t(count), free_.end());
        free_.resize(free_.size() - count);
        for (size_t i = 0; i < count; i++) describe(*pieces[i], *chosen_[i]);
        size_t done = 0;
        while (done < count) {
            const long taken = syscall(SYS_io_submit, context_, count - done, &chosen_[done]);
            if (taken > 0) {
                done += size_t(taken);
            } else if (taken == 0 || errno == EAGAIN || errno == EINTR) {
                break;
            } else {  // the first of these is what the kernel does not take
                refused_.push_back({pieces[done], -errno});
                free_.push_back(chosen_[done++]);
            }
        }
        free_.insert(free_.end(), chosen_.begin() + ptrdiff_t(done), chosen_.end());
        return done;
    }

    bool reap(std::vector<Completion>& out, int64_t wait_ns) override {
        if (!refused_.empty()) wait_ns = 0;
        out.insert(out.end(), refused_.begin(), refused_.end());
        refused_.clear();
        woken_ = false;
        if (take_shared(out) || (wait_ns == 0 && readable())) return woken_;
        if (!armed_) arm();
        io_event events[EVENTS_MAX];
        timespec span{wait_ns / 1'000'000'000, wait_ns % 1'000'000'000};
        const long found = syscall(SYS_io_getevents, context_, wait_ns == 0 ? 0 : 1, EVENTS_MAX,
                                   events, wait_ns == FOREVER ? nullptr : &span);
        if (found < 0 && errno != EINTR) fail("io_getevents");
        for (long i = 0; i < found; i++) take(events[i], out);
        return woken_;
    }

    void wake() override {
        const uint64_t one = 1;
        while (write(wake_.fd, &one, sizeof one) < 0 && errno == EINTR) {}
    }

private:
    [[noreturn]] static void fail(const char* call, int code = errno) {
        throw std::system_error(code, std::generic_category(), call);
    }

    static void describe(const Piece& piece, iocb& block) {
        block = iocb{};
        block.aio_data = reinterpret_cast<uintptr_t>(&piece);
        block.aio_lio_opcode = piece.writing ? IOCB_CMD_PWRITE : IOCB_CMD_PREAD;
        block.aio_fildes = uint32_t(piece.fd);
        block.aio_buf = reinterpret_cast<uintptr_t>(piece.data);
        block.aio_nbytes = uint64_t(piece.bytes);
        block.aio_offset = piece.offset;
    }

    // Has the eventfd polled, which kernels before Linux 4.18 refuse with EINVAL.
    void arm() {
        poll_ = iocb{};
        poll_.aio_lio_opcode = IOCB_CMD_POLL;
        poll_.aio_fildes = uint32_t(wake_.fd);
        poll_.aio_buf = POLLIN;
        iocb* const one[] = {&poll_};
        armed_ = syscall(SYS_io_submit, context_, 1, one) == 1;
        if (!armed_) fail("io_submit of a poll", errno == EINVAL ? EOPNOTSUPP : errno);
    }

    void take(const io_event& event, std::vector<Completion>& out) {
        if (event.obj == reinterpret_cast<uintptr_t>(&poll_)) {
            uint64_t ignored;
            while (read(wake_.fd, &ignored, sizeof ignored) < 0 && errno == EINTR) {}
            armed_ = false;
            woken_ = true;
            return;
        }
        out.push_back({reinterpret_cast<Piece*>(uintptr_t(event.data)), int64_t(event.res)});
        free_.push_back(reinterpret_cast<iocb*>(uintptr_t(event.obj)));
    }

    Ring& ring() const { return *reinterpret_cast<Ring*>(context_); }
    bool readable() const { return ring().magic == Ring::MAGIC && ring().incompatible == 0; }

    // Takes what is in the shared ring; whether that was anything.
    bool take_shared(std::vector<Completion>& out) {
        if (!readable()) return false;
        Ring& ring = this->ring();
        const uint32_t end = std::atomic_ref(ring.tail).load(std::memory_order_acquire);
        uint32_t head = ring.head;
        const bool found = head != end;
        for (; head != end; head = (head + 1) % ring.count) take(ring.events[head], out);
        std::atomic_ref(ring.head).store(head, std::memory_order_release);
        return found;
    }

    aio_context_t context_ = 0;
    const Descriptor wake_;  // written by `wake`
    iocb poll_{};            // of it
    bool armed_ = false, woken_ = false;
    std::vector<iocb> blocks_;
    std::vector<iocb*> free_, chosen_;
    std::vector<Completion> refused_;
};

}  // namespace

std::unique_ptr<Queue> open_linux_aio(int depth) { return std::make_unique<LinuxAio>(depth); }

}  // namespace aio
