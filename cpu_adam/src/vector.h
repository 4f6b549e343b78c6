// Vectors of the compiler (GCC and Clang), and the operations in which machines differ.
//
// Included by kernel.inc inside the namespace of an instruction set, so that no function compiled
// with one set's flags can be linked into another's code. For the same reason nothing here or in
// kernel.inc comes from the C++ library. What an x86 set has follows from its lanes (16: AVX-512,
// 8: AVX2 and F16C, 4: SSSE3 and SSE4.1), not from flags that a user may have added; without those
// of its file (for any processor) the same is done in the compiler's vectors alone.
//
// [Note: Pairs]
// Rules work on two registers side by side. Their 16-bit numbers fill one register: a whole one is
// loaded and stored, and one permutation of its words makes each of the two, or less: see
// [Note: Order]. And what is done to one does not wait for the other.

#define INLINE static inline __attribute__((always_inline))
#define INLINE_METHOD inline __attribute__((always_inline))

// A loop over constants, from 0 on: what it fills is in registers, where they are enough, as it is
// no array even to the compiler's first passes (loops unrolled by a later one are fragile: twice
// the instructions, where what they fill is a structure's half).
template <int I> struct Constant {
    constexpr operator int() const { return I; }
};
template <int COUNT, int I = 0, class F> INLINE void each_of(const F& f) {
    if constexpr (I < COUNT) {
        f(Constant<I>{});
        each_of<COUNT, I + 1>(f);
    }
}
#define EACH(i) [&](auto i) __attribute__((always_inline))

constexpr int LANES = CPU_ADAM_LANES;  // 32-bit numbers in a register
constexpr int WIDTH = 2 * LANES;       // in a pair of them

// Whether it is x86's narrowest set, which has sixteen registers, and overwrites what it works on.
#if CPU_ADAM_LANES == 4 && defined(__SSE4_1__)
constexpr bool SSE4 = true;
#else
constexpr bool SSE4 = false;
#endif

// The same address, unknown to the compiler where registers are few: it loads from there again,
// and does not store what it has loaded for when it may be needed.
template <class T> INLINE T* unknown(T* address) {
#if CPU_ADAM_LANES == 4 && defined(__SSE4_1__)
    asm("" : "+r"(address));
#endif
    return address;
}

// N numbers side by side. Comparing two of these gives a mask, all ones or zeros in each lane.
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

template <class T> struct Pair {
    T low, high;
};

#define CPU_ADAM_OPERATOR(op)                                                            \
    template <class T> INLINE Pair<T> operator op(Pair<T> a, Pair<T> b) {                \
        return {a.low op b.low, a.high op b.high};                                       \
    }                                                                                    \
    template <class T, class Scalar> INLINE Pair<T> operator op(Pair<T> a, Scalar b) {   \
        return {a.low op b, a.high op b};                                                \
    }
CPU_ADAM_OPERATOR(+)
CPU_ADAM_OPERATOR(-)
CPU_ADAM_OPERATOR(*)
CPU_ADAM_OPERATOR(/)
CPU_ADAM_OPERATOR(&)
CPU_ADAM_OPERATOR(|)
CPU_ADAM_OPERATOR(^)
CPU_ADAM_OPERATOR(<<)
CPU_ADAM_OPERATOR(>>)

using Floats = Of<LANES>::F32;  // one register
using Words = Of<LANES>::U32;
using Masks = Of<LANES>::I32;

using F32 = Pair<Floats>;
using U32 = Pair<Words>;
using I32 = Pair<Masks>;
using F64 = Pair<Pair<Of<LANES / 2>::F64>>;
using U16 = Of<WIDTH>::U16;
using I16 = Of<WIDTH>::I16;
using U8 = Of<WIDTH>::U8;
using I8 = Of<WIDTH>::I8;

template <class V> INLINE V load(const Byte* from) {
    if constexpr (requires(V v) { v.low; }) {
        using T = decltype(V::low);
        return {load<T>(from), load<T>(from + sizeof(T))};
    } else {
        V v;
        __builtin_memcpy(&v, from, sizeof v);
        return v;
    }
}
template <class V> INLINE void store(Byte* to, V v) {
    if constexpr (requires { v.low; }) {
        store(to, v.low);
        store(to + sizeof v.low, v.high);
    } else {
        __builtin_memcpy(to, &v, sizeof v);
    }
}

INLINE F32 broadcast(float x) {
    Floats all = x - Floats{};  // 0 would lose the sign of -0 if it were added
    return {all, all};
}
INLINE U32 broadcast(uint32_t x) {
    Words all = Words{} + x;
    return {all, all};
}

INLINE F32 floats(U32 bits) { return {(Floats)bits.low, (Floats)bits.high}; }
INLINE U32 bits_of(F32 x) { return {(Words)x.low, (Words)x.high}; }

// As many 32-bit numbers as a pair has, and the first `count` of as many floats, the others 0.
template <class V, class T> INLINE V get(const T* from) {
    return load<V>(reinterpret_cast<const Byte*>(from));
}
template <class V, class T> INLINE void put(T* to, V v) { store(reinterpret_cast<Byte*>(to), v); }
INLINE F32 some_floats(const Byte* from, int count) {
    if (count == WIDTH) return load<F32>(from);
    float some[WIDTH] = {};
    __builtin_memcpy(some, from, size_t(count) * sizeof(float));
    return get<F32>(some);
}

INLINE I32 equal(F32 a, F32 b) { return {(Masks)(a.low == b.low), (Masks)(a.high == b.high)}; }
template <class V> INLINE I32 less(V a, V b) {
    return {(Masks)(a.low < b.low), (Masks)(a.high < b.high)};
}
INLINE U32 choose(I32 mask, U32 yes, U32 no) {
    return {mask.low ? yes.low : no.low, mask.high ? yes.high : no.high};
}
INLINE bool any_nan(F32 x) {
#if CPU_ADAM_LANES == 16
    return _mm512_cmp_ps_mask((__m512)x.low, (__m512)x.high, _CMP_UNORD_Q) != 0;
#elif CPU_ADAM_LANES >= 8
    return _mm256_movemask_ps(_mm256_cmp_ps((__m256)x.low, (__m256)x.high, _CMP_UNORD_Q)) != 0;
#elif defined(__SSE4_1__)
    return _mm_movemask_ps(_mm_cmpunord_ps((__m128)x.low, (__m128)x.high)) != 0;
#else
    Masks nan = (Masks)(x.low != x.low) | (Masks)(x.high != x.high);
    uint64_t halves[2];
    __builtin_memcpy(halves, &nan, sizeof halves);
    return (halves[0] | halves[1]) != 0;
#endif
}

// [Note: Bytes of two pairs]
// Bytes of two pairs fill a register. x86 makes them of 16-bit numbers, and these of bytes, within
// 128 bits: so bytes lie `apart` (each 128 bits have eight of each pair) where they were just made
// or are to be made words of, and are put in the order of memory by a permutation.
using Bytes = Of<2 * WIDTH>::U8;
using SignedBytes = Of<2 * WIDTH>::I8;

INLINE Bytes apart(Bytes x) {
#if CPU_ADAM_LANES == 16
    const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
    return (Bytes)_mm512_permutexvar_epi64(order, (__m512i)x);
#elif CPU_ADAM_LANES >= 8
    return (Bytes)_mm256_permute4x64_epi64((__m256i)x, 0xD8);
#else
    return x;
#endif
}
INLINE Bytes in_order(Bytes x) {
#if CPU_ADAM_LANES == 16
    const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
    return (Bytes)_mm512_permutexvar_epi64(order, (__m512i)x);
#else
    return apart(x);
#endif
}
// The 16-bit numbers of two pairs from their bytes, which lie apart.
INLINE Pair<U16> joined(Bytes low, Bytes high) {
#if CPU_ADAM_LANES == 16
    return {(U16)_mm512_unpacklo_epi8((__m512i)low, (__m512i)high),
            (U16)_mm512_unpackhi_epi8((__m512i)low, (__m512i)high)};
#elif CPU_ADAM_LANES >= 8
    return {(U16)_mm256_unpacklo_epi8((__m256i)low, (__m256i)high),
            (U16)_mm256_unpackhi_epi8((__m256i)low, (__m256i)high)};
#elif defined(__SSE4_1__)
    return {(U16)_mm_unpacklo_epi8((__m128i)low, (__m128i)high),
            (U16)_mm_unpackhi_epi8((__m128i)low, (__m128i)high)};
#elif defined(__aarch64__)
    return {(U16)vzip1q_u8((uint8x16_t)low, (uint8x16_t)high),
            (U16)vzip2q_u8((uint8x16_t)low, (uint8x16_t)high)};
#else
    U8 lows[2], highs[2];
    __builtin_memcpy(lows, &low, sizeof low);
    __builtin_memcpy(highs, &high, sizeof high);
    auto both = [](U8 a, U8 b) {
        return __builtin_convertvector(a, U16) | __builtin_convertvector(b, U16) << 8;
    };
    return {both(lows[0], highs[0]), both(lows[1], highs[1])};
#endif
}
// 16-bit numbers below 256 as bytes that lie apart; anything for others.
INLINE Bytes packed(Pair<U16> x) {
#if CPU_ADAM_LANES == 16
    return (Bytes)_mm512_packus_epi16((__m512i)x.low, (__m512i)x.high);
#elif CPU_ADAM_LANES >= 8
    return (Bytes)_mm256_packus_epi16((__m256i)x.low, (__m256i)x.high);
#elif defined(__SSE4_1__)
    return (Bytes)_mm_packus_epi16((__m128i)x.low, (__m128i)x.high);
#elif defined(__aarch64__)
    return (Bytes)vuzp1q_u8((uint8x16_t)x.low, (uint8x16_t)x.high);
#else
    U8 parts[2] = {__builtin_convertvector(x.low, U8), __builtin_convertvector(x.high, U8)};
    return load<Bytes>(reinterpret_cast<const Byte*>(parts));
#endif
}
// Signed ones, the nearest there is: the sign stays.
INLINE SignedBytes nearest(Pair<I16> x) {
#if CPU_ADAM_LANES == 16
    return (SignedBytes)_mm512_packs_epi16((__m512i)x.low, (__m512i)x.high);
#elif CPU_ADAM_LANES >= 8
    return (SignedBytes)_mm256_packs_epi16((__m256i)x.low, (__m256i)x.high);
#elif defined(__SSE4_1__)
    return (SignedBytes)_mm_packs_epi16((__m128i)x.low, (__m128i)x.high);
#elif defined(__aarch64__)
    return (SignedBytes)vqmovn_high_s16(vqmovn_s16((int16x8_t)x.low), (int16x8_t)x.high);
#else
    const I16 least = I16{} - int16_t(128), most = I16{} + int16_t(127);
    auto one = [&](I16 a) {
        a = a < least ? least : a;
        return __builtin_convertvector(a > most ? most : a, I8);
    };
    I8 parts[2] = {one(x.low), one(x.high)};
    return load<SignedBytes>(reinterpret_cast<const Byte*>(parts));
#endif
}

template <class V> INLINE V larger(V a, V b) { return a > b ? a : b; }
// The largest of numbers from 0 on.
template <int N> INLINE int16_t largest_of(typename Of<N>::I16 x) {
    if constexpr (N == 1) {
        return x[0];
#if defined(__SSE4_1__)
    } else if constexpr (N == 8) {
        __m128i least = _mm_minpos_epu16(_mm_xor_si128((__m128i)x, _mm_set1_epi16(-1)));
        return int16_t(~_mm_cvtsi128_si32(least));
#endif
    } else {
        typename Of<N / 2>::I16 halves[2];
        __builtin_memcpy(halves, &x, sizeof x);
        return largest_of<N / 2>(larger(halves[0], halves[1]));
    }
}
INLINE int16_t largest(I16 x) { return largest_of<WIDTH>(x); }
// The numbers where a comparison holds, else 0.
INLINE SignedBytes only(SignedBytes mask, SignedBytes x) { return mask ? x : SignedBytes{}; }
// The bytes where others have one of some bits (of the lower seven), else 0.
INLINE Bytes only_where(Bytes others, uint8_t some, Bytes x) {
    Bytes bits = Bytes{} + some;
#if CPU_ADAM_LANES == 16
    __mmask64 mask = _mm512_test_epi8_mask((__m512i)others, (__m512i)bits);
    return (Bytes)_mm512_maskz_mov_epi8(mask, (__m512i)x);
#elif CPU_ADAM_LANES >= 8
    return (Bytes)_mm256_sign_epi8((__m256i)x, (__m256i)(others & bits));
#elif defined(__SSE4_1__)
    return (Bytes)_mm_sign_epi8((__m128i)x, (__m128i)(others & bits));
#else
    return (others & bits) != 0 ? x : Bytes{};
#endif
}
#if defined(__SSE4_1__)
// What a table of 16 bytes has for each number below 16.
INLINE Bytes looked_up(const uint8_t* table, Bytes x) {
    __m128i of = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
#if CPU_ADAM_LANES == 16
    return (Bytes)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(of), (__m512i)x);
#elif CPU_ADAM_LANES >= 8
    return (Bytes)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(of), (__m256i)x);
#else
    return (Bytes)_mm_shuffle_epi8(of, (__m128i)x);
#endif
}
#endif
// How far numbers are above another, 0 for those below.
INLINE U16 above(U16 x, uint16_t base) {
    U16 all = U16{} + base;
#if CPU_ADAM_LANES == 16
    return (U16)_mm512_subs_epu16((__m512i)x, (__m512i)all);
#elif CPU_ADAM_LANES >= 8
    return (U16)_mm256_subs_epu16((__m256i)x, (__m256i)all);
#elif defined(__SSE4_1__)
    return (U16)_mm_subs_epu16((__m128i)x, (__m128i)all);
#else
    return x > all ? x - all : U16{};
#endif
}

// The square root, correctly rounded.
INLINE Floats square_root(Floats x) {
#if CPU_ADAM_LANES == 16
    return (Floats)_mm512_sqrt_ps((__m512)x);
#elif CPU_ADAM_LANES >= 8
    return (Floats)_mm256_sqrt_ps((__m256)x);
#elif defined(__SSE4_1__)
    return (Floats)_mm_sqrt_ps((__m128)x);
#else
    Floats root;
    for (int i = 0; i < LANES; i++) root[i] = __builtin_sqrtf(x[i]);
    return root;
#endif
}
INLINE F32 square_root(F32 x) { return {square_root(x.low), square_root(x.high)}; }

INLINE Pair<Of<LANES / 2>::F64> doubles(Floats x) {
    using D = Of<LANES / 2>::F64;
#if CPU_ADAM_LANES == 16
    __m256 high = _mm512_extractf32x8_ps((__m512)x, 1);
    return {(D)_mm512_cvtps_pd(_mm512_castps512_ps256((__m512)x)), (D)_mm512_cvtps_pd(high)};
#elif CPU_ADAM_LANES >= 8
    __m128 high = _mm256_extractf128_ps((__m256)x, 1);
    return {(D)_mm256_cvtps_pd(_mm256_castps256_ps128((__m256)x)), (D)_mm256_cvtps_pd(high)};
#elif defined(__SSE4_1__)
    __m128 high = _mm_movehl_ps((__m128)x, (__m128)x);
    return {(D)_mm_cvtps_pd((__m128)x), (D)_mm_cvtps_pd(high)};
#else
    Pair<D> wide = {};
    for (int i = 0; i < LANES / 2; i++) wide.low[i] = x[i], wide.high[i] = x[LANES / 2 + i];
    return wide;
#endif
}
INLINE F64 doubles(F32 x) { return {doubles(x.low), doubles(x.high)}; }
