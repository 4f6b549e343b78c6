#include "sweep.h"

#include <algorithm>
#include <vector>

#include "pool.h"

namespace cpu_adam {
namespace {

// Spans are cut at multiples of this, so that no group is cut and no two threads write to one cache
// line of a span that starts on one (but for lines of scales, a thousandth of the lines).
constexpr int64_t GRAIN_ELEMENTS = GROUP_ELEMENTS;
// A piece is large enough (some tens of microseconds) that taking one costs nothing; where there is
// much to do it is larger, as where one begins a processor has yet to see which way its arrays go
// (`compact` from memory: 0.86 of the stream by pieces of 256 grains, 0.93 by 2048). Each thread
// has some of them, to even out threads that are held up.
constexpr int64_t PIECE_GRAINS_LEAST = 256, PIECE_GRAINS_MOST = 2048, PIECES_PER_THREAD = 8;
constexpr int64_t PIECE_SUM_BLOCKS = 64;

int64_t grains(int64_t elements) { return (elements + GRAIN_ELEMENTS - 1) / GRAIN_ELEMENTS; }

// The spans of a table laid end to end and cut into pieces.
class Cuts {
public:
    explicit Cuts(const Table& table) : table_(table), starts_(size_t(table.count) + 1) {
        for (int64_t row = 0; row < table.count; row++)
            starts_[size_t(row) + 1] = starts_[size_t(row)] + grains(elements(row));
        const int64_t share = starts_.back() / (Pool::get().threads() * PIECES_PER_THREAD);
        piece_grains_ = std::clamp(share, PIECE_GRAINS_LEAST, PIECE_GRAINS_MOST);
    }

    int64_t pieces() const { return (starts_.back() + piece_grains_ - 1) / piece_grains_; }

    // Call `part(row, first, last)` for elements [first, last) of each span that lies in a piece.
    template <class Part> void parts(int64_t piece, const Part& part) const {
        const int64_t begin = piece * piece_grains_;
        const int64_t end = std::min(begin + piece_grains_, starts_.back());
        auto after = std::upper_bound(starts_.begin(), starts_.end(), begin);
        for (int64_t row = after - starts_.begin() - 1; row < table_.count; row++) {
            const int64_t start = starts_[size_t(row)];
            if (start >= end) break;
            int64_t first = std::max(begin - start, int64_t{0}) * GRAIN_ELEMENTS;
            int64_t last = std::min((end - start) * GRAIN_ELEMENTS, elements(row));
            if (first < last) part(row, first, last);
        }
    }

private:
    int64_t elements(int64_t row) const {
        return table_.rows[row * table_.columns + ELEMENTS_COLUMN];
    }

    const Table& table_;
    std::vector<int64_t> starts_;  // of each span, in grains
    int64_t piece_grains_;
};

// Bytes that the first `elements` of a span take of array `k`.
int64_t bytes_of(const Action& operation, int k, int64_t elements) {
    const int64_t per_item = operation.elements_per_item[k];
    return (elements + per_item - 1) / per_item * operation.bytes[k];
}

// Where the elements of a span from `first` on lie in array `k`.
Byte* array_at(const Action& operation, const Table& table, int64_t row, int k,
               int64_t first) {
    const int64_t* columns = table.rows + row * table.columns;
    return reinterpret_cast<Byte*>(columns[ADDRESS_COLUMNS + k]) + bytes_of(operation, k, first);
}

// The operation on elements [first, last) of one span.
void run_part(const Action& operation, const Table& table, int64_t row, int64_t first,
              int64_t last) {
    const int64_t* columns = table.rows + row * table.columns;
    Byte* arrays[ARRAYS_MAX];
    for (int k = 0; k < operation.arrays; k++)
        arrays[k] = array_at(operation, table, row, k, first);
    operation.call(arrays, last - first, columns[FIRST_COLUMN] + first,
                   table.factors + columns[FACTORS_COLUMN] * FACTORS);
}

}  // namespace

void sweep(const Action& operation, const Table& table) {
    const Cuts cuts(table);
    auto sweep_piece = [&](int64_t piece) {
        cuts.parts(piece, [&](int64_t row, int64_t first, int64_t last) {
            run_part(operation, table, row, first, last);
        });
    };
    Pool::get().run(cuts.pieces(), sweep_piece);
}

Nodes square_sums(const Kernel& kernel, Gradient dtype, const Byte* gradient, int64_t elements,
                  int64_t first) {
    const int64_t blocks = (elements + SUM_BLOCK_ELEMENTS - 1) / SUM_BLOCK_ELEMENTS;
    std::vector<double> sums(static_cast<size_t>(blocks));
    const int64_t pieces = (blocks + PIECE_SUM_BLOCKS - 1) / PIECE_SUM_BLOCKS;
    const int64_t piece_elements = PIECE_SUM_BLOCKS * SUM_BLOCK_ELEMENTS;
    Pool::get().run(pieces, [&](int64_t piece) {
        const int64_t start = piece * piece_elements;
        const int64_t count = std::min(piece_elements, elements - start);
        const Byte* from = gradient + start * kernel.gradient_bytes[dtype];
        kernel.block_sums[dtype](from, count, sums.data() + piece * PIECE_SUM_BLOCKS);
    });
    Nodes nodes, right;
    double* row = sums.data();
    for (int64_t level = 0, count = blocks; count > 0; level++, count /= 2, first /= 2) {
        if (first % 2) nodes.push_back({first++, level, *row++}), count--;
        if (count % 2) right.push_back({first + count - 1, level, row[count - 1]});
        for (int64_t i = 0; i < count / 2; i++) row[i] = row[2 * i] + row[2 * i + 1];
    }
    nodes.insert(nodes.end(), right.rbegin(), right.rend());
    return nodes;
}

}  // namespace cpu_adam
