// What a launch of a device's kernel is handed.
//
// [Note: Launches]
// A kernel has one argument, a DeviceTable by value: the bytes that C++ fills in, or
// what tests pack. The driver copies it with the launch, so no memory on the device is taken for
// it and nothing need outlive the call:
//
//     cuModuleLoadData(&module, ptx)                 once per context: cpu_adam/device.ptx and a NUL
//     cuModuleGetFunction(&kernel, module, entry)    once per entry
//     void* arguments[] = {&table};
//     cuLaunchKernel(kernel, columns, rows, 1, 256, 1, 1, 0, stream, arguments, NULL)
//
// An entry has the name of its operation (kernel.h), for gradients of any dtype. Row `y` of the
// grid works on row `y` of the table. Its blocks, any number of them, share the elements, to the
// same bits; a block for each 1024 elements, and 4096 columns at most, keep any device busy. The
// arrays of a row are those of the operation on the CPU (gradient, weight, the slots of the record),
// each at a multiple of the size of its items. A row of `compact` starts with a group. Beside the
// operations there is
//
//     squares_of_blocks    arrays: gradient; a float64 for each 1024 elements, the sum of their
//                          squares. A block for each 8192 elements will do.
//
// whose sums are the leaves of the sum of squares as reference.py defines it.
#pragma once

#include "../kernel.h"

namespace cpu_adam {

// Elements that are updated together, and what by.
struct DeviceRow {
    int64_t elements;
    int64_t first;               // where they start in their parameter
    int64_t arrays[ARRAYS_MAX];  // addresses
    float factors[FACTORS];      // a row of these, see rules.inc
};

// As many as the 4096 bytes hold that any kernel may be handed.
constexpr int DEVICE_ROWS = 30;
struct DeviceTable {
    int32_t gradient;  // their dtype
    int32_t count;     // of rows
    DeviceRow rows[DEVICE_ROWS];
};

}  // namespace cpu_adam
