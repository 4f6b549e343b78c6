// The queue over io_uring: rings shared with the kernel, one call for submitting and waiting.
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <system_error>

#include "descriptor.h"
#include "futex.h"
#include "io_uring_abi.h"
#include "queue.h"

namespace aio {

namespace {

using namespace uring;

constexpr uint32_t FILES_MAX = 64;     // registered descriptors; others go by their number
constexpr uint32_t BUFFERS_MAX = 256;  // registered slabs
constexpr int REFUSALS_MAX = 64;       // in a row, a millisecond between them
constexpr uint64_t WAKE = 0;           // user data of the read of the eventfd: no piece is there

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

// A ring with the best that this kernel has: with DEFER_TASKRUN it interrupts nobody, and does its
// own work in the one thread that asks for results.
int open_ring(unsigned entries, Params& params) {
    for (uint32_t flags : {SETUP_SINGLE_ISSUER | SETUP_DEFER_TASKRUN, SETUP_COOP_TASKRUN, 0u}) {
        params = Params{};
        params.flags = flags;
        const long fd = syscall(SETUP_CALL, entries, &params);
        if (fd >= 0) return int(fd);
        if (errno != EINVAL) break;
    }
    fail("io_uring_setup");
}

class IoUring final : public Queue {
public:
    explicit IoUring(int depth)
        : ring_(open_ring(unsigned(depth) + 1, params_)),  // one more: the eventfd
          wake_(eventfd(0, EFD_CLOEXEC)),
          rings_(ring_, OFFSET_OF_RINGS, checked_bytes()),
          sqes_(ring_, OFFSET_OF_SQES, params_.sq_entries * sizeof(Sqe)) {
        if (wake_ < 0) fail("eventfd");
        uint32_t* array = rings_.at<uint32_t>(params_.sq.array);
        for (uint32_t i = 0; i < params_.sq_entries; i++) array[i] = i;
        files_.fill(-1);
        files_known_ = call_register(REGISTER_FILES, files_.data(), FILES_MAX) == 0;
    }

    ~IoUring() override {
        // At once: the kernel takes a ring apart in its own time, and not before a child that was
        // forked with it ends.
        files_.fill(-1);
        update_files(0, FILES_MAX);
        if (!buffers_.empty()) call_register(UNREGISTER_BUFFERS, nullptr, 0);
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
            if (const int slot = slot_of_file(piece->fd); slot >= 0) {
                sqe.fd = slot;
                sqe.flags = SQE_FIXED_FILE;
            }
            if (const int slot = slot_of_buffer(*piece); slot >= 0) {
                sqe.opcode = piece->writing ? OP_WRITE_FIXED : OP_READ_FIXED;
                sqe.buffer_index = uint16_t(slot);
            }
        }
        under_way_ += count;
        return count;
    }

    bool reap(std::vector<Completion>& out, int64_t wait_ns) override {
        if (!armed_) arm();
        const bool waits = wait_ns != 0 && cq_empty();
        uint32_t flags = ENTER_GETEVENTS | ENTER_EXT_ARG;
        if (under_way_ == 0 && params_.features & FEATURE_NO_IOWAIT) flags |= ENTER_NO_IOWAIT;
        KernelTimespec span{wait_ns / 1'000'000'000, wait_ns % 1'000'000'000};
        WaitArgument argument{0, 0, 0, wait_ns == FOREVER ? 0 : address_of(&span)};
        std::atomic_ref(*rings_.at<uint32_t>(params_.sq.tail))
            .store(tail_, std::memory_order_release);
        const long sent = syscall(ENTER_CALL, int(ring_), unsent_, waits ? 1 : 0, flags, &argument,
                                  sizeof argument);
        const int code = sent < 0 ? errno : 0;
        if (sent > 0) unsent_ -= uint32_t(sent);
        const bool woken = drain(out);
        // These leave everything as it is for the next call.
        const bool passes = code == EINTR || code == ETIME || code == EAGAIN || code == EBUSY;
        if (code != 0 && !passes && out.empty()) fail("io_uring_enter", code);
        refused((code == EAGAIN || code == EBUSY) && out.empty() && unsent_ > 0, code);
        if (code == ETIME && !wake_.is_ours()) fail("the eventfd", EBADF);
        return woken;
    }

    void wake() override {
        if (!wake_.is_ours()) return;  // closed by others; `reap` finds that, too
        const uint64_t one = 1;
        while (write(wake_, &one, sizeof one) < 0 && errno == EINTR) {}
    }

    void forget(int fd) override {
        for (uint32_t slot = 0; slot < FILES_MAX; slot++) {
            if (files_[slot] != fd) continue;
            files_[slot] = -1;
            update_files(slot, 1);
        }
    }

    int register_buffer(std::byte* data, int64_t bytes) override {
        if (buffers_.empty()) {
            const TableRegister table{BUFFERS_MAX, REGISTER_SPARSE, 0, 0, 0};
            if (call_register(REGISTER_BUFFERS2, &table, sizeof table) != 0) return errno;
            buffers_.resize(BUFFERS_MAX);
        }
        const auto free = std::find_if(buffers_.begin(), buffers_.end(),
                                       [](const iovec& b) { return b.iov_base == nullptr; });
        if (free == buffers_.end()) return ENOBUFS;
        *free = {data, size_t(bytes)};
        const int code = update_buffer(size_t(free - buffers_.begin()));
        if (code != 0) *free = {};
        return code;
    }

    void unregister_buffer(std::byte* data, int64_t bytes) override {
        for (size_t slot = 0; slot < buffers_.size(); slot++) {
            const iovec& known = buffers_[slot];
            if (known.iov_base != data || known.iov_len != size_t(bytes)) continue;
            buffers_[slot] = {};
            update_buffer(slot);
            return;  // another like it was registered for somebody else
        }
    }

private:
    // Bytes of the rings, once the kernel is known to have what is needed (all of Linux 5.11).
    size_t checked_bytes() const {
        const uint32_t needed = FEATURE_SINGLE_MMAP | FEATURE_NODROP | FEATURE_EXT_ARG;
        if ((params_.features & needed) != needed) fail("io_uring of Linux 5.11", EOPNOTSUPP);
        return std::max(params_.sq.array + params_.sq_entries * sizeof(uint32_t),
                        params_.cq.cqes + params_.cq_entries * sizeof(Cqe));
    }

    // The kernel took nothing and gave nothing back: soon again, but not for ever.
    void refused(bool again, int code) {
        refusals_ = again ? refusals_ + 1 : 0;
        if (refusals_ > REFUSALS_MAX) fail("io_uring_enter", code);
        const timespec pause{0, 1'000'000};
        if (again) nanosleep(&pause, nullptr);
    }

    Sqe& next_sqe() {
        Sqe& sqe = sqes_.at<Sqe>()[tail_ & (params_.sq_entries - 1)];
        sqe = Sqe{};
        tail_++;
        unsent_++;
        return sqe;
    }

    void arm() {
        if (unsent_ == params_.sq_entries) return;
        Sqe& sqe = next_sqe();
        sqe.opcode = OP_READ;
        sqe.fd = wake_;
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

    // Takes what is over; whether the eventfd was read, which is `wake`.
    bool drain(std::vector<Completion>& out) {
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
            out.push_back({reinterpret_cast<Piece*>(uintptr_t(cqe.user_data)), cqe.result});
            under_way_--;
        }
        std::atomic_ref(shared_head).store(head, std::memory_order_release);
        const bool again = wake_result == -EINTR || wake_result == -EAGAIN;
        if (wake_result < 0 && !again && out.empty()) fail("read of the eventfd", -wake_result);
        return wake_result > 0;
    }

    long call_register(unsigned operation, const void* argument, unsigned count) const {
        return syscall(REGISTER_CALL, int(ring_), operation, argument, count);
    }

    bool update_files(uint32_t first, uint32_t count) {
        const FilesUpdate update{first, 0, address_of(files_.data() + first)};
        return files_known_ && call_register(REGISTER_FILES_UPDATE, &update, count) >= 0;
    }

    int slot_of_file(int fd) {
        if (!files_known_) return -1;
        auto found = std::find(files_.begin(), files_.end(), fd);
        if (found != files_.end()) return int(found - files_.begin());
        found = std::find(files_.begin(), files_.end(), -1);
        if (found == files_.end()) return -1;
        *found = fd;
        if (update_files(uint32_t(found - files_.begin()), 1)) return int(found - files_.begin());
        *found = -1;
        return -1;
    }

    int slot_of_buffer(const Piece& piece) const {
        for (size_t slot = 0; slot < buffers_.size(); slot++) {
            const uintptr_t start = address_of(buffers_[slot].iov_base);
            const uintptr_t end = start + buffers_[slot].iov_len, at = address_of(piece.data);
            if (at >= start && at + uint64_t(piece.bytes) <= end) return int(slot);
        }
        return -1;
    }

    int update_buffer(size_t slot) {
        const TableUpdate update{uint32_t(slot), 0, address_of(&buffers_[slot]), 0, 1, 0};
        return call_register(REGISTER_BUFFERS_UPDATE, &update, sizeof update) < 0 ? errno : 0;
    }

    Params params_{};
    Descriptor ring_, wake_;
    Mapping rings_, sqes_;
    uint32_t tail_ = 0;    // of the submission ring
    uint32_t unsent_ = 0;  // entries in it that the kernel has not taken yet
    size_t under_way_ = 0;
    int refusals_ = 0;  // of all that is unsent, in a row
    bool armed_ = false;  // the eventfd is being read
    bool files_known_ = false;
    std::array<int, FILES_MAX> files_;
    std::vector<iovec> buffers_;
};

}  // namespace

std::unique_ptr<Queue> open_io_uring(int depth) { return std::make_unique<IoUring>(depth); }

}  // namespace aio
