// The kernels of a device: the arithmetic of operations.inc, a number at a time. The script
// benchmarks/gpu/make_ptx.py compiles them to PTX (`--fmad=false`, IEEE division and roots), the
// tests to C++, which runs the blocks of a launch one after the other and is held to the reference
// bit for bit.
//
// [Note: Threads and lanes]
// Rules by elements need nothing of the thread beside them. Groups and sums are done by warps of
// 32, which hand each other numbers; `each_lane` is what all threads of a warp do between. A thread
// holds what is its own (an array of one); in C++ the warp is one thread, which holds all 32.

#include "table.cuh"

namespace cpu_adam {
namespace device {
namespace {

#include "scalar.cuh"
#include "../operations.inc"

constexpr int THREADS = 256, WARP = 32;  // of a block, of a warp
constexpr int HELD = GROUP_ELEMENTS / WARP;  // elements of a group that a thread has

#if defined(__CUDACC_RTC__)
constexpr int LANES_HELD = 1;
#define KERNEL(name) extern "C" __global__ void name(const __grid_constant__ DeviceTable table)
INLINE int64_t block() { return blockIdx.x; }
INLINE int64_t blocks() { return gridDim.x; }
INLINE int row_number() { return int(blockIdx.y); }
template <class Work> INLINE void each_thread(const Work& work) { work(int(threadIdx.x)); }
template <class Work> INLINE void each_warp(const Work& work) { work(int(threadIdx.x) / WARP); }
template <class Work> INLINE void each_lane(const Work& work) { work(int(threadIdx.x) % WARP, 0); }
INLINE uint32_t largest(const uint32_t* held) {
    uint32_t x = *held;
#pragma unroll
    for (int way = WARP / 2; way > 0; way /= 2) {
        const uint32_t other = __shfl_xor_sync(0xFFFFFFFFu, x, way);
        x = other > x ? other : x;
    }
    return x;
}
// The halving tree over a warp, for its first lane.
INLINE double tree(double* held) {
#pragma unroll
    for (int half = WARP / 2; half > 0; half /= 2)
        *held = *held + __shfl_down_sync(0xFFFFFFFFu, *held, half);
    return *held;
}
#else
constexpr int LANES_HELD = WARP;
struct At {
    int64_t block, blocks, row;
};
static thread_local At at;
#define EXPORTED extern "C" __attribute__((visibility("default")))
#define KERNEL(name) EXPORTED void name(const DeviceTable& table)
INLINE int64_t block() { return at.block; }
INLINE int64_t blocks() { return at.blocks; }
INLINE int row_number() { return int(at.row); }
template <class Work> INLINE void each_thread(const Work& work) {
    for (int thread = 0; thread < THREADS; thread++) work(thread);
}
template <class Work> INLINE void each_warp(const Work& work) {
    for (int warp = 0; warp < THREADS / WARP; warp++) work(warp);
}
template <class Work> INLINE void each_lane(const Work& work) {
    for (int lane = 0; lane < WARP; lane++) work(lane, lane);
}
INLINE uint32_t largest(const uint32_t* held) {
    uint32_t x = 0;
    for (int lane = 0; lane < WARP; lane++) x = held[lane] > x ? held[lane] : x;
    return x;
}
INLINE double tree(double* held) {
    for (int half = WARP / 2; half > 0; half /= 2)
        for (int lane = 0; lane < half; lane++) held[lane] = held[lane] + held[lane + half];
    return held[0];
}
#endif

// A loop over constants, unrolled.
template <int I> struct Constant {
    constexpr operator int() const { return I; }
};
template <int COUNT, int I = 0, class F> INLINE void each_of(const F& f) {
    if constexpr (I < COUNT) {
        f(Constant<I>());
        each_of<COUNT, I + 1>(f);
    }
}

// -- by elements ----------------------------------------------------------------------------------

// A number of some bytes in memory, which lies at a multiple of them.
template <int BYTES> struct Sized;
template <> struct Sized<1> { using Number = Byte; };
template <> struct Sized<2> { using Number = U16; };
template <> struct Sized<4> { using Number = U32; };
template <int BYTES> INLINE auto& number_at(Byte* array, int64_t i) {
    return reinterpret_cast<typename Sized<BYTES>::Number*>(array)[i];
}

template <int G> INLINE F32 gradient_of(Byte* array, int64_t i) {
    const auto x = number_at<GRADIENT_BYTES[G]>(array, i);
    if constexpr (G == FLOAT32) return floats(x);
    else return G == FLOAT16 ? half_to_float(x) : floats(InOrder::widen_high(x));
}
INLINE F32 gradient_at(int dtype, Byte* array, int64_t i) {
    if (dtype == FLOAT32) return gradient_of<FLOAT32>(array, i);
    return dtype == FLOAT16 ? gradient_of<FLOAT16>(array, i) : gradient_of<BFLOAT16>(array, i);
}

INLINE Byte* array(const DeviceRow& row, int k) { return reinterpret_cast<Byte*>(row.arrays[k]); }

// The factors of a row, in registers.
struct Factors {
    float of[FACTORS];

    INLINE_METHOD explicit Factors(const DeviceRow& row) {
        for (int i = 0; i < FACTORS; i++) of[i] = row.factors[i];
    }
};

// Copies of an element's numbers, in registers: a rule works on these. The gradient is of float32,
// but for a rule that is for another one (RAW).
template <class Rule, bool RAW = false> struct Element {
    alignas(4) Byte numbers[ARRAYS_MAX][4];

    // at: set to where they are. (Addresses of its own in it would keep it out of registers.)
    INLINE_METHOD Element(const DeviceRow& row, int gradient, int64_t i, Byte** at) {
        each_of<arrays_of<Rule>()>([&](auto k) {
            at[k] = numbers[k];
            if constexpr (k == 0 && !RAW) store(at[k], gradient_at(gradient, array(row, k), i));
            else if constexpr (elements_per_item<Rule>(k) == 1)
                store(at[k], number_at<Rule::BYTES[k]>(array(row, k), i));
        });
    }
    INLINE_METHOD void put(const DeviceRow& row, int64_t i) const {
        each_of<arrays_of<Rule>(), Rule::INPUTS>([&](auto k) {
            if constexpr (elements_per_item<Rule>(k) == 1) {
                auto& there = number_at<Rule::BYTES[k]>(array(row, k), i);
                there = load<typename Sized<Rule::BYTES[k]>::Number>(numbers[k]);
            }
        });
    }
};

template <class Rule, bool RAW = false>
INLINE void by_elements(const DeviceTable& table, const DeviceRow& row, const float* factors) {
    const Rule rule(factors);
    each_thread([&](int thread) {
#pragma unroll 1
        for (int64_t i = block() * THREADS + thread; i < row.elements; i += blocks() * THREADS) {
            Byte* at[arrays_of<Rule>()];
            Element<Rule, RAW> x(row, table.gradient, i, at);
            rule.second(at, rule.first(at));
            x.put(row, i);
        }
    });
}

template <template <class, bool> class Rule, class Arrays>
INLINE void decayed(const DeviceTable& table, const DeviceRow& row, const float* factors) {
    if (factors[DECAY_L2] != 0.0f) by_elements<Rule<Arrays, true>>(table, row, factors);
    else by_elements<Rule<Arrays, false>>(table, row, factors);
}

template <template <int, int...> class Arrays>
INLINE void sgd(const DeviceTable& table, const DeviceRow& row, const float* factors) {
    if (factors[KEPT] != 0.0f) decayed<Sgd, Arrays<FLOAT32, 4>>(table, row, factors);
    else decayed<Sgd, Arrays<FLOAT32>>(table, row, factors);
}

// -- by groups ------------------------------------------------------------------------------------

INLINE F32 level(const Momentum&, Byte code, uint32_t past) {
    const U32 magnitude = code & (Momentum::SIGN - 1u);
    if (magnitude == 0 || !past) return 0.0f;
    return floats((magnitude * STEP + Momentum::FIRST) << 16 | (code & U32(Momentum::SIGN)) << 24);
}
INLINE F32 level(const Variance&, Byte code, uint32_t past) {
    return past ? floats((U32(code) * STEP + Variance::FIRST) << 16) : 0.0f;
}

// The upper half of a number's magnitude, dithered.
INLINE uint32_t half_of(F32 x, uint32_t dither) {
    return any_nan(x) ? NOT_FINITE * BINADE : ((bits_of(x) & 0x7FFFFFFFu) + dither) >> 16;
}
INLINE uint32_t larger(uint32_t a, uint32_t b) { return a > b ? a : b; }
// How many codes that is above the least one, in a group whose largest is in the binade `top`.
template <class Code> INLINE int steps_above(uint32_t half, uint32_t top) {
    return (int(half) - (int(top) - (Code::EXPONENTS - 1)) * BINADE) >> STEP_BITS;
}
INLINE Byte momentum_code(uint32_t half, uint32_t top, F32 x, int threshold) {
    const int steps = steps_above<Momentum>(half, top), code = steps > 1 ? steps : 1;
    return Byte((steps < threshold ? 0 : code) | (bits_of(x) >> 24 & Momentum::SIGN));
}
INLINE Byte variance_code(uint32_t half, uint32_t top) {
    const int steps = steps_above<Variance>(half, top);
    return Byte(steps > 0 ? steps : 0);
}

// A group by a warp: the elements of a lane lie a warp apart.
template <class Rule>
INLINE void group(const DeviceTable& table, const DeviceRow& row, const Rule& rule,
                  int64_t number) {
    F32& m_scale = reinterpret_cast<F32*>(array(row, Rule::M_SCALE))[number];
    F32& v_scale = reinterpret_cast<F32*>(array(row, Rule::V_SCALE))[number];
    typename Rule::Groups found(rule, m_scale, v_scale);
    const uint32_t hash =
        Dither::hash(uint64_t(row.first / GROUP_ELEMENTS + number), rule.step);
    const int64_t first = number * GROUP_ELEMENTS;
    F32 m[LANES_HELD][HELD], v[LANES_HELD][HELD];
    uint32_t m_half[LANES_HELD][HELD], v_half[LANES_HELD][HELD];
    uint32_t m_top[LANES_HELD], v_top[LANES_HELD];
    each_lane([&](int lane, int held) {
        m_top[held] = v_top[held] = 0;
        each_of<HELD>([&](auto j) {
            const int64_t place = lane + j * WARP, i = first + place;
            if (i >= row.elements) return;
            Byte* at[arrays_of<Rule>()];
            Element<Rule> x(row, table.gradient, i, at);
            F32 &m_here = m[held][j], &v_here = v[held][j];
            m_here = level(Momentum(), *at[Rule::M], found.m_past[0]);
            v_here = level(Variance(), *at[Rule::V], found.v_past[0]);
            rule.moments(at, found, 0, m_here, v_here);
            const F32 by = Rule::quotient(found, 0, m_here, square_root(v_here));
            Rule::keep(at, rule.stepped(Rule::master(at), by));
            const uint32_t dither = DITHER.even[place] ^ (hash & 0xFFFFFu);
            m_top[held] = larger(m_half[held][j] = half_of(m_here, dither), m_top[held]);
            v_top[held] = larger(v_half[held][j] = half_of(v_here, dither), v_top[held]);
            x.put(row, i);
        });
    });
    found.m_top[0] = largest(m_top) / BINADE, found.v_top[0] = largest(v_top) / BINADE;
    const F32 m_new = found.m_scale(), v_new = found.v_scale();
    each_lane([&](int lane, int held) {
        each_of<HELD>([&](auto j) {
            const int64_t place = lane + j * WARP, i = first + place;
            if (i >= row.elements) return;
            const int threshold = DITHER.thresholds[(hash >> 24) % GROUP_ELEMENTS + place];
            const F32 x = m[held][j];
            const Byte m_code = momentum_code(m_half[held][j], found.m_top[0], x, threshold);
            const Byte v_code = variance_code(v_half[held][j], found.v_top[0]);
            array(row, Rule::M)[i] = m_new > 0.0f ? m_code : Byte(0);
            array(row, Rule::V)[i] = v_new > 0.0f ? v_code : Byte(0);
        });
        if (lane == 0) m_scale = m_new, v_scale = v_new;
    });
}

template <class Rule>
INLINE void by_warps(const DeviceTable& table, const DeviceRow& row, const float* factors) {
    constexpr int64_t WARPS = THREADS / WARP;
    const Rule rule(factors);
    const int64_t groups = (row.elements + GROUP_ELEMENTS - 1) / GROUP_ELEMENTS;
    each_warp([&](int warp) {
#pragma unroll 1
        for (int64_t i = block() * WARPS + warp; i < groups; i += blocks() * WARPS)
            group(table, row, rule, i);
    });
}
INLINE void by_groups(const DeviceTable& table, const DeviceRow& row, const float* factors) {
    using Arrays = Compact<FLOAT32>;
    if (factors[DECAY_L2] != 0.0f) by_warps<AdamUnits<Arrays, true>>(table, row, factors);
    else by_warps<AdamUnits<Arrays, false>>(table, row, factors);
}

// -- sums of squares ------------------------------------------------------------------------------

// Arrays: gradient, the sums of its blocks, each by a warp.
template <int G> INLINE void squares(const DeviceRow& row) {
    constexpr int64_t WARPS = THREADS / WARP;
    const int64_t count = (row.elements + SUM_BLOCK_ELEMENTS - 1) / SUM_BLOCK_ELEMENTS;
    double* const sums = reinterpret_cast<double*>(row.arrays[1]);
    each_warp([&](int warp) {
#pragma unroll 1
        for (int64_t i = block() * WARPS + warp; i < count; i += blocks() * WARPS) {
            double of[LANES_HELD];
            each_lane([&](int lane, int held) {
                const int64_t first = i * SUM_BLOCK_ELEMENTS + lane, left = row.elements - first;
                Byte* const here = array(row, 0) + first * GRADIENT_BYTES[G];
                auto at = [&](int64_t k) {
                    return double(k < left ? gradient_of<G>(here, k) : 0.0f);
                };
                of[held] = 0.0;  // which changes no sum of squares
#pragma unroll 1
                for (int half = 0; half < 2; half++)  // half as much code
                    of[held] = of[held] + squares_tree<2 * WARP>(half * WARP, at);
            });
            const double sum = tree(of);
            each_lane([&](int lane, int) {
                if (lane == 0) sums[i] = sum;
            });
        }
    });
}

}  // namespace

// The operations of kernel.h, by name.
#define OPERATION(name, ...)                             \
    KERNEL(name) {                                       \
        const DeviceRow& row = table.rows[row_number()]; \
        const Factors factors(row);                      \
        __VA_ARGS__(table, row, factors.of);             \
    }
OPERATION(exact, decayed<Adam, Exact<FLOAT32, 4, 4>>)
OPERATION(fp32, decayed<Adam, Fp32<FLOAT32, 4, 4>>)
OPERATION(compact, by_groups)
OPERATION(lion_exact, by_elements<Lion<Exact<FLOAT32, 4>>>)
OPERATION(lion_fp32, by_elements<Lion<Fp32<FLOAT32, 4>>>)
OPERATION(sgd_exact, sgd<Exact>)
OPERATION(sgd_fp32, sgd<Fp32>)
OPERATION(accumulate_float32, by_elements<AccumulateFloat32<FLOAT32>>)
OPERATION(accumulate_bfloat16, by_elements<AccumulateBfloat16, true>)
OPERATION(split, by_elements<Split, true>)
OPERATION(join, by_elements<Join, true>)

KERNEL(squares_of_blocks) {
    const DeviceRow& row = table.rows[row_number()];
    if (table.gradient == FLOAT32) squares<FLOAT32>(row);
    else if (table.gradient == FLOAT16) squares<FLOAT16>(row);
    else squares<BFLOAT16>(row);
}

}  // namespace device
}  // namespace cpu_adam

#if !defined(__CUDACC_RTC__)
// A launch: the blocks of a grid of so many columns and rows, one after the other.
EXPORTED void run_blocks(void (*kernel)(const cpu_adam::DeviceTable&), int64_t columns,
                         int64_t rows, const cpu_adam::DeviceTable* table) {
    using cpu_adam::device::at;
    for (at.row = 0; at.row < rows; at.row++)
        for (at.blocks = columns, at.block = 0; at.block < columns; at.block++) kernel(*table);
}
#endif
