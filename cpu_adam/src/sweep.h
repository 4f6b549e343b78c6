// Operations on whole tables and tensors, by all threads: see [Note: The way of the data].
#pragma once

#include <tuple>
#include <vector>

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

// Subtrees of a sum of squares (index, level, sum), as cpu_adam/reference.py has them: the largest
// of part of a parameter, which starts with its leaf `first`.
using Nodes = std::vector<std::tuple<int64_t, int, double>>;
Nodes square_sums(const Kernel& kernel, Gradient dtype, const Byte* gradient, int64_t elements,
                  int64_t first);

}  // namespace cpu_adam
