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
constexpr uint64_t WAKE = 0;           // user data of the read of the eventfd: no piece is there
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

// [Note: A ring without its descriptor]
// Anybody may close any descriptor, and transfers go on without it. So the thread asks for its ring
// by an index that the kernel keeps for it alone (Linux 5.18). Where there is none, nothing can be
// asked of a ring whose descriptor is lost; but the mappings keep it alive, and what is over is
// still told in them. With DEFER_TASKRUN it would not be, as the kernel then does that work only
// where it is asked: so that is taken only where there is an index.
class Ring {
public:
    // With the best that this kernel has: with DEFER_TASKRUN it interrupts nobody, and does its own
    // work in the one thread that asks for results.
    Ring(unsigned entries, Params& params) : fd_(open(entries, params, index_)) {
        registers_by_index_ = index_ >= 0 && params.features & FEATURE_RING_BY_INDEX;
    }
    Ring(const Ring&) = delete;
    ~Ring() {
        const RingUpdate mine{uint32_t(index_), 0, 0};
        if (index_ >= 0) call_register(UNREGISTER_RING_FDS, &mine, 1);
    }
    int descriptor() const { return fd_; }

    // Sends entries and, where `awaited` is 1, waits for a result, at most so long. As the kernel:
    // entries taken, or -1 and errno.
    long enter(uint32_t entries, uint32_t awaited, uint32_t flags, int64_t wait_ns) const {
        KernelTimespec span{wait_ns / 1'000'000'000, wait_ns % 1'000'000'000};
        WaitArgument argument{0, 0, 0, wait_ns == FOREVER ? 0 : address_of(&span)};
        flags |= ENTER_GETEVENTS | ENTER_EXT_ARG | (index_ >= 0 ? ENTER_REGISTERED_RING : 0);
        return syscall(ENTER_CALL, index_ >= 0 ? index_ : int(fd_), entries, awaited, flags,
                       &argument, sizeof argument);
    }

    long call_register(unsigned operation, const void* argument, unsigned count) const {
        const unsigned how = registers_by_index_ ? REGISTER_BY_INDEX : 0;
        return syscall(REGISTER_CALL, registers_by_index_ ? index_ : int(fd_), operation | how,
                       argument, count);
    }

private:
    static int open(unsigned entries, Params& params, int& index) {
        for (uint32_t flags : {SETUP_SINGLE_ISSUER | SETUP_DEFER_TASKRUN, SETUP_COOP_TASKRUN, 0u}) {
            params = Params{};
            params.flags = flags;
            const int fd = int(syscall(SETUP_CALL, entries, &params));
            if (fd < 0 && errno == EINVAL) continue;
            if (fd < 0) break;
            RingUpdate mine{ANY_INDEX, 0, uint64_t(fd)};
            if (syscall(REGISTER_CALL, fd, REGISTER_RING_FDS, &mine, 1) == 1)
                index = int(mine.index);
            if (index >= 0 || (flags & SETUP_DEFER_TASKRUN) == 0) return fd;
            close(fd);
        }
        fail("io_uring_setup");
    }

    int index_ = -1;  // of the ring, in the thread that opened it
    bool registers_by_index_ = false;
    Descriptor fd_;
};

class IoUring final : public Queue {
public:
    explicit IoUring(int depth)
        : ring_(unsigned(depth) + 1, params_),  // one more: the eventfd
          wake_(eventfd(0, EFD_CLOEXEC)),
          rings_(ring_.descriptor(), OFFSET_OF_RINGS, checked_bytes()),
          sqes_(ring_.descriptor(), OFFSET_OF_SQES, params_.sq_entries * sizeof(Sqe)) {
        if (wake_ < 0) fail("eventfd");
        uint32_t* array = rings_.at<uint32_t>(params_.sq.array);
        for (uint32_t i = 0; i < params_.sq_entries; i++) array[i] = i;
        files_.fill(-1);
        files_known_ = ring_.call_register(REGISTER_FILES, files_.data(), FILES_MAX) == 0;
    }

    ~IoUring() override {
        // At once: the kernel takes a ring apart in its own time, and not before a child that was
        // forked with it ends.
        files_.fill(-1);
        update_files(0, FILES_MAX);
        if (!buffers_.empty()) ring_.call_register(UNREGISTER_BUFFERS, nullptr, 0);
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
        const bool idle = under_way_ == 0 && params_.features & FEATURE_NO_IOWAIT;
        std::atomic_ref(*rings_.at<uint32_t>(params_.sq.tail))
            .store(tail_, std::memory_order_release);
        const long sent = ring_.enter(unsent_, waits ? 1 : 0, idle ? ENTER_NO_IOWAIT : 0, wait_ns);
        const int code = sent < 0 ? errno : 0;
        if (sent > 0) unsent_ -= uint32_t(sent);
        bool woken = drain(out);
        const bool refused = code == EAGAIN || code == EBUSY;
        // These leave everything as it is for the next call.
        const bool passes = code == EINTR || code == ETIME || refused;
        if (code != 0 && !passes && out.empty()) fail("io_uring_enter", code);
        if (code == ETIME && !wake_.is_ours()) fail("the eventfd", EBADF);
        if (refused && out.empty()) {  // so that each piece is tried anew, which has its limit
            rest();
            woken = drain(out);
            take_back([&](Piece* piece) { out.push_back({piece, -EAGAIN}); });
        }
        return woken;
    }

    void quiesce() override {
        take_back([](Piece*) {});
        const auto over = [](Piece*, int32_t) {};
        for (take(over); under_way_ > 0; take(over)) rest();
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
            if (ring_.call_register(REGISTER_BUFFERS2, &table, sizeof table) != 0) return errno;
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

    // Waits a moment for something to be over, without sending anything.
    void rest() const {
        const timespec span{0, PAUSE_NS};
        if (ring_.enter(0, 1, 0, PAUSE_NS) < 0 && errno != ETIME) nanosleep(&span, nullptr);
    }

    Sqe& sqe_at(uint32_t position) const {
        return sqes_.at<Sqe>()[position & (params_.sq_entries - 1)];
    }

    // Takes back what the kernel has not taken, and tells `each` the pieces.
    template <class Each> void take_back(Each each) {
        for (; unsent_ > 0; unsent_--, tail_--) {
            const uint64_t data = sqe_at(tail_ - 1).user_data;
            if (data == WAKE) {
                armed_ = false;
                continue;
            }
            each(reinterpret_cast<Piece*>(uintptr_t(data)));
            under_way_--;
        }
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
        if (!wake_.is_ours()) fail("the eventfd", EBADF);  // not to read what others have there
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

    // Takes what is over; whether the eventfd was read, which is `wake`.
    bool drain(std::vector<Completion>& out) {
        out.reserve(out.size() + under_way_);  // no end is lost for want of memory
        const int wake_result = take([&](Piece* piece, int32_t result) {
            out.push_back({piece, result});
        });
        const bool again = wake_result == -EINTR || wake_result == -EAGAIN;
        if (wake_result < 0 && !again && out.empty()) fail("read of the eventfd", -wake_result);
        return wake_result > 0;
    }

    bool update_files(uint32_t first, uint32_t count) {
        const FilesUpdate update{first, 0, address_of(files_.data() + first)};
        return files_known_ && ring_.call_register(REGISTER_FILES_UPDATE, &update, count) >= 0;
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
        const long taken = ring_.call_register(REGISTER_BUFFERS_UPDATE, &update, sizeof update);
        return taken < 0 ? errno : 0;
    }

    Params params_{};
    Ring ring_;
    Descriptor wake_;
    Mapping rings_, sqes_;
    uint32_t tail_ = 0;    // of the submission ring
    uint32_t unsent_ = 0;  // entries in it that the kernel has not taken yet
    size_t under_way_ = 0;
    bool armed_ = false;  // the eventfd is being read
    bool files_known_ = false;
    std::array<int, FILES_MAX> files_;
    std::vector<iovec> buffers_;
};

}  // namespace

std::unique_ptr<Queue> open_io_uring(int depth) { return std::make_unique<IoUring>(depth); }

}  // namespace aio
