// The queue over Linux AIO (io_submit): asynchronous for O_DIRECT only, on any kernel.
#include <linux/aio_abi.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <system_error>

#include "queue.h"
#include "futex.h"

namespace aio {

namespace {

constexpr size_t EVENTS_MAX = 64;  // reaped by one call

class LinuxAio final : public Queue {
public:
    explicit LinuxAio(int depth) : blocks_(size_t(depth)) {
        if (syscall(SYS_io_setup, depth, &context_) != 0) fail("io_setup");
        wake_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
        if (wake_ < 0) {
            const int code = errno;
            syscall(SYS_io_destroy, context_);
            fail("eventfd", code);
        }
        for (iocb& block : blocks_) free_.push_back(&block);
    }

    ~LinuxAio() override {
        syscall(SYS_io_destroy, context_);
        close(wake_);
    }

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
        if (wait_ns != 0) {
            const timespec span{wait_ns / 1'000'000'000, wait_ns % 1'000'000'000};
            pollfd awaited{wake_, POLLIN, 0};
            const int found = ppoll(&awaited, 1, wait_ns == FOREVER ? nullptr : &span, nullptr);
            if (found < 0 && errno != EINTR) fail("ppoll");
            if (found > 0 && awaited.revents & POLLNVAL) fail("ppoll of the eventfd", EBADF);
        }
        uint64_t ignored;
        const bool signalled = read(wake_, &ignored, sizeof ignored) > 0;
        io_event events[EVENTS_MAX];
        timespec none{};
        for (long found = EVENTS_MAX; found == long(EVENTS_MAX);) {
            found = syscall(SYS_io_getevents, context_, 0, EVENTS_MAX, events, &none);
            if (found < 0 && errno != EINTR) fail("io_getevents");
            for (long i = 0; i < found; i++) {
                out.push_back({reinterpret_cast<Piece*>(uintptr_t(events[i].data)),
                               int64_t(events[i].res)});
                free_.push_back(reinterpret_cast<iocb*>(uintptr_t(events[i].obj)));
            }
        }
        return signalled;
    }

    void wake() override {
        const uint64_t one = 1;
        while (write(wake_, &one, sizeof one) < 0 && errno == EINTR) {}
    }

private:
    [[noreturn]] static void fail(const char* call, int code = errno) {
        throw std::system_error(code, std::generic_category(), call);
    }

    void describe(const Piece& piece, iocb& block) const {
        block = iocb{};
        block.aio_data = reinterpret_cast<uintptr_t>(&piece);
        block.aio_lio_opcode = piece.writing ? IOCB_CMD_PWRITE : IOCB_CMD_PREAD;
        block.aio_fildes = uint32_t(piece.fd);
        block.aio_buf = reinterpret_cast<uintptr_t>(piece.data);
        block.aio_nbytes = uint64_t(piece.bytes);
        block.aio_offset = piece.offset;
        block.aio_flags = IOCB_FLAG_RESFD;
        block.aio_resfd = uint32_t(wake_);
    }

    aio_context_t context_ = 0;
    int wake_ = -1;  // counts completions and calls of `wake`
    std::vector<iocb> blocks_;
    std::vector<iocb*> free_, chosen_;
    std::vector<Completion> refused_;
};

}  // namespace

std::unique_ptr<Queue> open_linux_aio(int depth) { return std::make_unique<LinuxAio>(depth); }

}  // namespace aio
