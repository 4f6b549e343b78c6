// Vectors of the compiler (GCC and Clang), and the operations in which machines differ.
//
// Included by kernel.inc inside the namespace of an instruction set, so that no function compiled
// with one set's flags can be linked into another's code. For the same reason nothing here or in
// kernel.inc comes from the C++ library. What an x86 set has follows from its lanes (16: AVX-512,
// 8: AVX2 and F16C, 4: what the baseline has), not from flags that a user may have added.

#define INLINE static inline __attribute__((always_inline))
#define INLINE_METHOD inline __attribute__((always_inline))

// N numbers side by side. Comparing two vectors gives a mask, all ones or zeros in each lane.
template <int N> struct Of {
    typedef float F32 __attribute__((vector_size(4 * N)));
    typedef double F64 __attribute__((vector_size(8 * N)));
    typedef int32_t I32 __attribute__((vector_size(4 * N)));
    typedef uint32_t U32 __attribute__((vector_size(4 * N)));
    typedef uint16_t U16 __attribute__((vector_size(2 * N)));
    typedef int16_t I16 __attribute__((vector_size(2 * N)));
    typedef uint8_t U8 __attribute__((vector_size(N)));
    typedef int8_t I8 __attribute__((vector_size(N)));
};

constexpr int LANES = CPU_ADAM_LANES;

using F32 = Of<LANES>::F32;
using U32 = Of<LANES>::U32;
using I32 = Of<LANES>::I32;
using U16 = Of<LANES>::U16;
using I16 = Of<LANES>::I16;
using U8 = Of<LANES>::U8;
using I8 = Of<LANES>::I8;

template <class V> INLINE V load(const Byte* from) {
    V v;
    __builtin_memcpy(&v, from, sizeof(V));
    return v;
}

template <class V> INLINE void store(Byte* to, V v) { __builtin_memcpy(to, &v, sizeof(V)); }

INLINE F32 broadcast(float x) { return x - F32{}; }  // 0 would lose the sign of -0 if it were added

INLINE F32 floats(U32 bits) { return (F32)bits; }
INLINE U32 bits_of(F32 x) { return (U32)x; }

// A mask is all ones or zeros in each lane.
INLINE I32 is_nan(F32 x) { return (I32)(x != x); }
INLINE U32 choose(I32 mask, U32 yes, U32 no) { return mask ? yes : no; }

#if defined(__SSE2__) && CPU_ADAM_LANES == 4
INLINE __m128i sse_half(U16 x) {
    int64_t bits;
    __builtin_memcpy(&bits, &x, sizeof bits);
    return _mm_cvtsi64_si128(bits);
}
INLINE U16 sse_low(__m128i x) {
    int64_t bits = _mm_cvtsi128_si64(x);
    U16 low;
    __builtin_memcpy(&low, &bits, sizeof low);
    return low;
}
#endif

// 16-bit integers to 32-bit ones: as the low half, signed as the low half, as the high half.
template <int N> INLINE typename Of<N>::U32 widen(typename Of<N>::U16 x) {
    using U = typename Of<N>::U32;
#if CPU_ADAM_LANES == 16
    if constexpr (N == 16) return (U)_mm512_cvtepu16_epi32((__m256i)x);
#endif
#if CPU_ADAM_LANES >= 8
    if constexpr (N == 8) return (U)_mm256_cvtepu16_epi32((__m128i)x);
#endif
    return __builtin_convertvector(x, U);
}
INLINE U32 widen_signed(U16 x) {
#if CPU_ADAM_LANES == 16
    return (U32)_mm512_cvtepi16_epi32((__m256i)x);
#elif CPU_ADAM_LANES >= 8
    return (U32)_mm256_cvtepi16_epi32((__m128i)x);
#elif defined(__SSE2__)
    __m128i low = sse_half(x);
    return (U32)_mm_srai_epi32(_mm_unpacklo_epi16(low, low), 16);
#else
    return (U32)__builtin_convertvector((I16)x, I32);
#endif
}
template <int N> INLINE typename Of<N>::U32 widen_high(typename Of<N>::U16 x) {
#if defined(__SSE2__) && CPU_ADAM_LANES == 4
    if constexpr (N == 4) return (U32)_mm_unpacklo_epi16(_mm_setzero_si128(), sse_half(x));
#endif
    return widen<N>(x) << 16;
}

// The low and the high halves of 32-bit integers.
INLINE U16 low_half(U32 x) {
#if CPU_ADAM_LANES == 16
    return (U16)_mm512_cvtepi32_epi16((__m512i)x);
#elif CPU_ADAM_LANES >= 8
    // Low halves of each 128-bit lane side by side, then the two lanes.
    const __m128i half = _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, -1, -1, -1, -1, -1, -1, -1, -1);
    __m256i packed = _mm256_shuffle_epi8((__m256i)x, _mm256_broadcastsi128_si256(half));
    return (U16)_mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08));
#elif defined(__SSE2__)
    __m128i pairs = _mm_shufflelo_epi16((__m128i)x, 0x08);
    pairs = _mm_shuffle_epi32(_mm_shufflehi_epi16(pairs, 0x08), 0x08);
    return sse_low(pairs);
#else
    return __builtin_convertvector(x, U16);
#endif
}
INLINE U16 high_half(U32 x) {
#if defined(__SSE2__) && CPU_ADAM_LANES == 4
    __m128i high = _mm_srai_epi32((__m128i)x, 16);
    return sse_low(_mm_packs_epi32(high, high));  // saturates nothing
#else
    return low_half(x >> 16);
#endif
}

// Bytes to 32-bit integers, signed or not.
INLINE I32 widen_signed(I8 x) {
#if CPU_ADAM_LANES == 16
    return (I32)_mm512_cvtepi8_epi32((__m128i)x);
#elif CPU_ADAM_LANES >= 8
    return (I32)_mm256_cvtepi8_epi32(_mm_cvtsi64_si128((int64_t)x));
#elif defined(__SSE2__)
    __m128i bytes = _mm_cvtsi32_si128((int32_t)x);
    bytes = _mm_unpacklo_epi8(bytes, bytes);
    return (I32)_mm_srai_epi32(_mm_unpacklo_epi16(bytes, bytes), 24);
#else
    return __builtin_convertvector(x, I32);
#endif
}
INLINE I32 widen(U8 x) {
#if CPU_ADAM_LANES == 16
    return (I32)_mm512_cvtepu8_epi32((__m128i)x);
#elif CPU_ADAM_LANES >= 8
    return (I32)_mm256_cvtepu8_epi32(_mm_cvtsi64_si128((int64_t)x));
#elif defined(__SSE2__)
    const __m128i zero = _mm_setzero_si128();
    __m128i halves = _mm_unpacklo_epi8(_mm_cvtsi32_si128((int32_t)x), zero);
    return (I32)_mm_unpacklo_epi16(halves, zero);
#else
    return __builtin_convertvector(x, I32);
#endif
}
// Four vectors of integers that fit a byte as the bytes of one.
using Bytes = typename Of<4 * LANES>::U8;
template <bool SIGNED> INLINE Bytes packed(const I32* x) {
#if CPU_ADAM_LANES == 16
    // Each instruction packs within 128 bits: then each has four bytes of each vector.
    const __m512i order =
        _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    __m512i low = _mm512_packs_epi32((__m512i)x[0], (__m512i)x[1]);
    __m512i high = _mm512_packs_epi32((__m512i)x[2], (__m512i)x[3]);
    __m512i all = SIGNED ? _mm512_packs_epi16(low, high) : _mm512_packus_epi16(low, high);
    return (Bytes)_mm512_permutexvar_epi32(order, all);
#elif CPU_ADAM_LANES >= 8
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    __m256i low = _mm256_packs_epi32((__m256i)x[0], (__m256i)x[1]);
    __m256i high = _mm256_packs_epi32((__m256i)x[2], (__m256i)x[3]);
    __m256i all = SIGNED ? _mm256_packs_epi16(low, high) : _mm256_packus_epi16(low, high);
    return (Bytes)_mm256_permutevar8x32_epi32(all, order);
#elif defined(__SSE2__)
    __m128i low = _mm_packs_epi32((__m128i)x[0], (__m128i)x[1]);
    __m128i high = _mm_packs_epi32((__m128i)x[2], (__m128i)x[3]);
    return (Bytes)(SIGNED ? _mm_packs_epi16(low, high) : _mm_packus_epi16(low, high));
#else
    U8 parts[4];
    for (int i = 0; i < 4; i++) parts[i] = __builtin_convertvector((U32)x[i], U8);
    Bytes all;
    __builtin_memcpy(&all, parts, sizeof all);
    return all;
#endif
}

INLINE F32 to_float(I32 x) { return __builtin_convertvector(x, F32); }
INLINE U32 lane_numbers() {
    U32 numbers = {};
    for (int i = 0; i < LANES; i++) numbers[i] = uint32_t(i);
    return numbers;
}

template <class V> INLINE V larger(V a, V b) { return a > b ? a : b; }
template <int N = LANES> INLINE uint32_t largest(typename Of<N>::U32 x) {
    if constexpr (N == 1) {
        return x[0];
    } else {
        typename Of<N / 2>::U32 halves[2];
        __builtin_memcpy(halves, &x, sizeof x);
        return largest<N / 2>(larger(halves[0], halves[1]));
    }
}

// The nearest integers, ties to even; anything for what is not finite or is above 2**23.
INLINE I32 rounded(F32 x) {
#if CPU_ADAM_LANES == 16
    return (I32)_mm512_cvtps_epi32((__m512)x);
#elif CPU_ADAM_LANES >= 8
    return (I32)_mm256_cvtps_epi32((__m256)x);
#elif defined(__SSE2__)
    return (I32)_mm_cvtps_epi32((__m128)x);
#else
    F32 power = floats((bits_of(x) & 0x80000000u) | 0x4B000000u);  // 2**23 with the sign of x
    return __builtin_convertvector(x + power - power, I32);        // up to 2**23
#endif
}

// The square root, correctly rounded.
INLINE F32 square_root(F32 x) {
#if CPU_ADAM_LANES == 16
    return (F32)_mm512_sqrt_ps((__m512)x);
#elif CPU_ADAM_LANES >= 8
    return (F32)_mm256_sqrt_ps((__m256)x);
#elif defined(__SSE2__)
    return (F32)_mm_sqrt_ps((__m128)x);
#else
    F32 root;
    for (int i = 0; i < LANES; i++) root[i] = __builtin_sqrtf(x[i]);
    return root;
#endif
}

// The lanes of a vector in float64: two vectors.
struct Doubles {
    Of<LANES / 2>::F64 low, high;
};
INLINE Doubles doubles(F32 x) {
    using D = Of<LANES / 2>::F64;
#if CPU_ADAM_LANES == 16
    __m256 high = _mm512_extractf32x8_ps((__m512)x, 1);
    return {(D)_mm512_cvtps_pd(_mm512_castps512_ps256((__m512)x)), (D)_mm512_cvtps_pd(high)};
#elif CPU_ADAM_LANES >= 8
    __m128 high = _mm256_extractf128_ps((__m256)x, 1);
    return {(D)_mm256_cvtps_pd(_mm256_castps256_ps128((__m256)x)), (D)_mm256_cvtps_pd(high)};
#elif defined(__SSE2__)
    __m128 high = _mm_movehl_ps((__m128)x, (__m128)x);
    return {(D)_mm_cvtps_pd((__m128)x), (D)_mm_cvtps_pd(high)};
#else
    Doubles wide;
    for (int i = 0; i < LANES / 2; i++) wide.low[i] = x[i], wide.high[i] = x[LANES / 2 + i];
    return wide;
#endif
}

// float16 to float32, exact.
template <int N> INLINE typename Of<N>::F32 half_to_float(typename Of<N>::U16 x) {
    using F = typename Of<N>::F32;
    using U = typename Of<N>::U32;
#if CPU_ADAM_LANES == 16
    if constexpr (N == 16) return (F)_mm512_cvtph_ps((__m256i)x);
#endif
#if CPU_ADAM_LANES >= 8
    if constexpr (N == 8) return (F)_mm256_cvtph_ps((__m128i)x);
#endif
    // Move exponent and fraction to their places, then correct the exponent's bias by a product
    // that is exact, also for the subnormals. Infinity and NaN get the largest exponent.
    U wide = widen<N>(x);
    U magnitude = (wide & 0x7FFFu) << 13;
    U bits = (U)((F)magnitude * 0x1p112f);
    U special = (U)(magnitude >= (0x7C00u << 13)) & 0x7F800000u;
    return (F)(bits | special | ((wide & 0x8000u) << 16));
}
