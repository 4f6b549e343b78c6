// The words of vector.h and order.inc for one number at a time, as a thread of a device has it:
// what is there a pair of registers is here a number.

#if defined(__CUDACC_RTC__)
#define INLINE __forceinline__
#define INLINE_METHOD __forceinline__
#define COPY_BYTES memcpy
#else
#define INLINE static inline
#define INLINE_METHOD inline
#define COPY_BYTES __builtin_memcpy
#endif

constexpr int WIDTH = 1;

using F32 = float;
using U32 = uint32_t;
using U16 = uint16_t;
using I32 = bool;  // what a comparison gives

template <class V> INLINE V load(const Byte* from) {
    V v;
    COPY_BYTES(&v, from, sizeof v);
    return v;
}
template <class V> INLINE void store(Byte* to, V v) { COPY_BYTES(to, &v, sizeof v); }
template <class V, class T> INLINE V get(const T* from) { return *from; }
template <class V, class T> INLINE void put(T* to, V v) { *to = v; }

INLINE F32 broadcast(float x) { return x; }
INLINE U32 broadcast(uint32_t x) { return x; }
INLINE F32 floats(U32 bits) { return load<F32>(reinterpret_cast<const Byte*>(&bits)); }
INLINE U32 bits_of(F32 x) { return load<U32>(reinterpret_cast<const Byte*>(&x)); }

INLINE bool equal(F32 a, F32 b) { return a == b; }
template <class V> INLINE bool less(V a, V b) { return a < b; }
INLINE U32 choose(bool mask, U32 yes, U32 no) { return mask ? yes : no; }
INLINE bool any_nan(F32 x) { return x != x; }

// The square root, correctly rounded.
INLINE F32 square_root(F32 x) {
#if defined(__CUDACC_RTC__)
    return __fsqrt_rn(x);
#else
    return __builtin_sqrtf(x);
#endif
}

struct InOrder {
    static constexpr uint32_t place(uint32_t at) { return at; }
    INLINE_METHOD static F32 loaded(F32 x) { return x; }
    INLINE_METHOD static U32 sum(U16 high, U16 low) {
        return (U32(high) << 16) + U32(int16_t(low));
    }
    INLINE_METHOD static U32 widen_high(U16 x) { return U32(x) << 16; }
    INLINE_METHOD static U16 low_half(U32 x) { return U16(x); }
    INLINE_METHOD static U16 high_half(U32 x) { return U16(x >> 16); }
};
using ByParity = InOrder;

// float16 to float32, exact: as order.inc has it.
INLINE F32 half_to_float(U16 x) {
    const U32 bits = (x & 0x7FFFu) << 13, special = bits >= (0x7C00u << 13) ? 0x7F800000u : 0u;
    return floats(bits_of(floats(bits) * 0x1p112f) | special | (x & 0x8000u) << 16);
}
