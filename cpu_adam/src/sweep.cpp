#include "sweep.h"

#include <algorithm>
#include <bit>
#include <vector>

#include "pool.h"

namespace cpu_adam {
namespace {

// Spans are cut at multiples of this, so that no group is cut and no two threads write to one cache
// line of a span that starts on one (but for lines of scales, a thousandth of the lines).
constexpr int64_t GRAIN_ELEMENTS = GROUP_ELEMENTS;
// A piece is small enough to even out threads that are held up, and large enough (some tens of
// microseconds) that taking one costs nothing.
constexpr int64_t PIECE_GRAINS = 256;
constexpr int64_t PIECE_SUM_BLOCKS = 64;

int64_t grains(int64_t elements) { return (elements + GRAIN_ELEMENTS - 1) / GRAIN_ELEMENTS; }

// The operation on elements [first, last) of one span.
void run_part(const Action& operation, const Table& table, int64_t row, int64_t first,
              int64_t last) {
    const int64_t* columns = table.rows + row * table.columns;
    Byte* arrays[ARRAYS_MAX];
    for (int k = 0; k < operation.arrays; k++) {
        arrays[k] = reinterpret_cast<Byte*>(columns[ADDRESS_COLUMNS + k]) +
                    first / operation.elements_per_item[k] * operation.bytes[k];
    }
    operation.call(arrays, last - first, columns[FIRST_COLUMN] + first,
                   table.factors + columns[FACTORS_COLUMN] * FACTORS);
}

}  // namespace

void sweep(const Action& operation, const Table& table) {
    // Where each span starts when all lie end to end, in grains.
    std::vector<int64_t> starts(size_t(table.count) + 1);
    for (int64_t row = 0; row < table.count; row++) {
        int64_t elements = table.rows[row * table.columns + ELEMENTS_COLUMN];
        starts[size_t(row) + 1] = starts[size_t(row)] + grains(elements);
    }
    const int64_t pieces = (starts.back() + PIECE_GRAINS - 1) / PIECE_GRAINS;
    Pool::get().run(pieces, [&](int64_t piece) {
        const int64_t begin = piece * PIECE_GRAINS;
        const int64_t end = std::min(begin + PIECE_GRAINS, starts.back());
        auto after = std::upper_bound(starts.begin(), starts.end(), begin);
        for (int64_t row = after - starts.begin() - 1; row < table.count; row++) {
            const int64_t start = starts[size_t(row)];
            if (start >= end) break;
            int64_t elements = table.rows[row * table.columns + ELEMENTS_COLUMN];
            int64_t first = std::max(begin - start, int64_t{0}) * GRAIN_ELEMENTS;
            int64_t last = std::min((end - start) * GRAIN_ELEMENTS, elements);
            if (first < last) run_part(operation, table, row, first, last);
        }
    });
}

double sum_of_squares(const Kernel& kernel, Gradient dtype, const Byte* gradient,
                      int64_t elements) {
    if (elements == 0) return 0.0;
    const int64_t blocks = (elements + SUM_BLOCK_ELEMENTS - 1) / SUM_BLOCK_ELEMENTS;
    std::vector<double> sums(std::bit_ceil(size_t(blocks)));
    const int64_t pieces = (blocks + PIECE_SUM_BLOCKS - 1) / PIECE_SUM_BLOCKS;
    const int64_t piece_elements = PIECE_SUM_BLOCKS * SUM_BLOCK_ELEMENTS;
    Pool::get().run(pieces, [&](int64_t piece) {
        const int64_t first = piece * piece_elements;
        const int64_t count = std::min(piece_elements, elements - first);
        const Byte* from = gradient + first * kernel.gradient_bytes[dtype];
        kernel.block_sums[dtype](from, count, sums.data() + piece * PIECE_SUM_BLOCKS);
    });
    for (size_t half = sums.size() / 2; half > 0; half /= 2)
        for (size_t i = 0; i < half; i++) sums[i] = sums[i] + sums[i + half];
    return sums[0];
}

}  // namespace cpu_adam
