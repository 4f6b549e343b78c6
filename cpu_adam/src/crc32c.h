// CRC32C (Castagnoli; RFC 3720, section 12.1) of bytes in memory.
#pragma once

#include "kernel.h"

namespace cpu_adam {

// The CRC32C of some bytes followed by `bytes` at `data`, where `crc` is that of what came before
// (0 of nothing).
using Crc32c = uint32_t (*)(uint32_t crc, const Byte* data, int64_t bytes);

// The function that goes with a kernel: of the kernel's instruction set where the processor has
// what it needs beyond that, and the portable one elsewhere. All give the same number.
Crc32c crc32c_of(const Kernel& kernel);

}  // namespace cpu_adam
