// What a kernel is: functions over arrays, compiled once per instruction set from kernel.inc.
//
// [Note: The way of the data]
// An operation (one update rule, one state format, one gradient dtype) goes element by element, or
// group by group, over a fixed number of arrays: the gradient, the weight, the slots of the record.
// A *span* is one address for each of them and a number of elements. A *table* is any number of
// spans and the factors (scalars) that they use. `sweep` lays the spans of a table end to end, cuts
// the whole into pieces and hands the pieces to the threads of the pool; a thread calls the
// operation on the part of a span that lies in its piece; the operation goes through it vector by
// vector, each byte read and written once. No group depends on another, so neither the cuts nor the
// threads can change a bit.
//
// Adding an optimizer or a state format is a rule in rules.inc or units.inc, a name in OPERATIONS
// below and a row of the table at the end of kernel.inc, and of that of device/device.cu.
#pragma once

#include <cstddef>
#include <cstdint>

namespace cpu_adam {

using Byte = unsigned char;

// Most arrays that an operation may have: gradient, weight and five slots.
constexpr int ARRAYS_MAX = 7;
// Numbers in a row of factors.
constexpr int FACTORS = 16;
// Elements that share an item of some arrays: spans of an operation with such arrays start and are
// cut at multiples of this, counted from the first element of the parameter.
constexpr int GROUP_ELEMENTS = 128;
// Elements of one inner tree of the sum of squares. Part of its definition.
constexpr int64_t SUM_BLOCK_ELEMENTS = 1024;

// The dtype of a gradient, in the order of the tables below.
enum Gradient : int { BFLOAT16, FLOAT16, FLOAT32, GRADIENTS };

// An update has the name of its state format.
constexpr const char* OPERATIONS[] = {
    "exact", "fp32", "compact", "lion_exact", "lion_fp32", "sgd_exact", "sgd_fp32",
    "accumulate_float32", "accumulate_bfloat16", "split", "join",
};
constexpr int OPERATIONS_COUNT = sizeof(OPERATIONS) / sizeof(*OPERATIONS);

// One operation: `call` on `elements` of each of `arrays` arrays of `bytes` per item, where an item
// is for one element or for a group. Arrays need no alignment, and do not overlap. `call` is null
// for a gradient dtype that is not served.
struct Action {
    void (*call)(Byte* const* arrays, int64_t elements, int64_t first_element,
                 const float* factors);
    int arrays;
    int bytes[ARRAYS_MAX];
    int elements_per_item[ARRAYS_MAX];
};

// One operation for each dtype of the gradient; one without a gradient lies under BFLOAT16.
struct Row {
    Action of[GRADIENTS];
};

// Sums of the squares of the blocks of `gradient`, to `sums`; the last block may be short.
using BlockSums = void (*)(const Byte* gradient, int64_t elements, double* sums);

// All of one instruction set.
struct Kernel {
    const char* name;
    Row operations[OPERATIONS_COUNT];
    BlockSums block_sums[GRADIENTS];
    int gradient_bytes[GRADIENTS];
};

#if defined(__x86_64__)
namespace avx512 {
extern const Kernel kernel;
}
namespace avx2 {
extern const Kernel kernel;
}
#elif defined(__aarch64__)
namespace neon {
extern const Kernel kernel;
}
#endif
namespace portable {
extern const Kernel kernel;
}

// The kernels that this machine can run, the best first; `count` is set to their number, which may
// be 0.
const Kernel* const* kernels(int& count);

}  // namespace cpu_adam
