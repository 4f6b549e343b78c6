// Operations on whole tables and tensors, by all threads: see [Note: The way of the data].
#pragma once

#include "kernel.h"

namespace cpu_adam {

// Spans of one operation, as rows of integers: number of elements, index of the row of factors,
// where the span starts in its parameter, then an address for each array of the operation.
struct Table {
    const int64_t* rows;
    int64_t count;
    int64_t columns;
    const float* factors;  // rows of FACTORS
};
constexpr int ELEMENTS_COLUMN = 0, FACTORS_COLUMN = 1, FIRST_COLUMN = 2, ADDRESS_COLUMNS = 3;

void sweep(const Action& operation, const Table& table);

// The sum of squares of a gradient, in the order that cpu_adam/reference.py defines.
double sum_of_squares(const Kernel& kernel, Gradient dtype, const Byte* gradient, int64_t elements);

}  // namespace cpu_adam
