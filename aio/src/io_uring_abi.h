// The kernel's interface to io_uring, as far as it is used here (include/uapi/linux/io_uring.h).
// Declared anew because builds are made against headers older than the kernels they run on.
#pragma once

#include <cstdint>

namespace aio::uring {

constexpr long SETUP_CALL = 425, ENTER_CALL = 426;  // on every architecture

// Flags of set-up and features found. DEFER_TASKRUN: Linux 6.1, COOP_TASKRUN: 5.19.
constexpr uint32_t SETUP_COOP_TASKRUN = 1u << 8, SETUP_SINGLE_ISSUER = 1u << 12,
                   SETUP_DEFER_TASKRUN = 1u << 13;
constexpr uint32_t FEATURE_SINGLE_MMAP = 1u << 0, FEATURE_NODROP = 1u << 1,
                   FEATURE_EXT_ARG = 1u << 8, FEATURE_NO_IOWAIT = 1u << 17;

constexpr uint32_t ENTER_GETEVENTS = 1u << 0, ENTER_EXT_ARG = 1u << 3, ENTER_NO_IOWAIT = 1u << 7;

constexpr uint8_t OP_READ = 22, OP_WRITE = 23;

constexpr uint64_t OFFSET_OF_RINGS = 0, OFFSET_OF_SQES = 0x10000000;

struct Sqe {
    uint8_t opcode, flags;
    uint16_t ioprio;
    int32_t fd;
    uint64_t offset, address;
    uint32_t length, rw_flags;
    uint64_t user_data;
    uint16_t buffer_index, personality;
    int32_t splice_fd;
    uint64_t unused[2];
};
static_assert(sizeof(Sqe) == 64);

struct Cqe {
    uint64_t user_data;
    int32_t result;
    uint32_t flags;
};
static_assert(sizeof(Cqe) == 16);

struct SqOffsets {
    uint32_t head, tail, mask, entries, flags, dropped, array, unused;
    uint64_t user_address;
};

struct CqOffsets {
    uint32_t head, tail, mask, entries, overflow, cqes, flags, unused;
    uint64_t user_address;
};

struct Params {
    uint32_t sq_entries, cq_entries, flags, sq_thread_cpu, sq_thread_idle, features, wq_fd;
    uint32_t unused[3];
    SqOffsets sq;
    CqOffsets cq;
};
static_assert(sizeof(Params) == 120);

struct KernelTimespec {
    int64_t seconds;
    long long nanoseconds;
};

struct WaitArgument {
    uint64_t signals;
    uint32_t signals_bytes, unused;
    uint64_t timespec;
};
static_assert(sizeof(WaitArgument) == 24);

}  // namespace aio::uring
