// [Note: CRC32C]
// The CRC is the remainder of a polynomial over two elements: of the message times x^32, by P. Bits
// are reflected, as everywhere for this CRC: in 32 bits, bit 31 is the coefficient of x^0 and bit 0
// that of x^31. The *register* is the remainder so far; n more bytes of zeros multiply it by
// x^(8n). All below rests on that. Tables hold products of a byte by a power. Streams that a
// processor works on at once start from a register of 0; the register before each is multiplied by
// the power of its length and added. Folding multiplies bytes far ahead of the end by the power of
// a distance and adds them to the bytes that lie there, which leaves the remainder as it was.
//
// Sources: M. E. Kounavis and F. L. Berry, A systematic approach to building high performance
// software-based CRC generators, ISCC 2005 (eight tables); V. Gopal et al., Fast CRC computation
// for iSCSI polynomial using CRC32 instruction, Intel 2011 (three streams); V. Gopal et al., Fast
// CRC computation for generic polynomials using PCLMULQDQ instruction, Intel 2009 (folding).
#include "crc32c.h"

#include <bit>
#include <cstring>

#include "processor.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace cpu_adam {
namespace {

static_assert(std::endian::native == std::endian::little);

constexpr uint32_t POLYNOMIAL = 0x82F63B78;  // P without x^32, reflected
constexpr uint32_t ONE = 0x80000000, X = 0x40000000;

constexpr uint32_t times_x(uint32_t a) { return a >> 1 ^ (POLYNOMIAL & -(a & 1)); }

constexpr uint32_t product(uint32_t a, uint32_t b) {
    uint32_t sum = 0;
    for (int bit = 31; bit >= 0; bit--, b = times_x(b)) sum ^= b & -(a >> bit & 1);
    return sum;
}

// x^(2^k), as far as the bits of any number of bytes need.
struct Squares {
    uint32_t of[67] = {X};
    constexpr Squares() {
        for (int k = 1; k < 67; k++) of[k] = product(of[k - 1], of[k - 1]);
    }
};
constexpr Squares SQUARES;

// x^(number * 2^shift)
constexpr uint32_t power(uint64_t number, int shift = 0) {
    uint32_t made = ONE;
    for (int k = shift; number != 0; number >>= 1, k++)
        if (number & 1) made = product(made, SQUARES.of[k]);
    return made;
}

constexpr uint32_t power_of_bytes(uint64_t bytes) { return power(bytes, 3); }

// The lowest COUNT bytes of a word, as the first bytes of `bytes`, times the power of that length.
template <int COUNT> struct Tables {
    uint32_t of[COUNT][256] = {};

    explicit constexpr Tables(uint64_t bytes) {
        for (int k = 0; k < COUNT; k++) {
            const uint32_t factor = power_of_bytes(bytes - uint64_t(k));
            for (uint32_t bit = 1; bit < 256; bit *= 2) of[k][bit] = product(bit, factor);
            for (uint32_t i = 1; i < 256; i++) of[k][i] = of[k][i & (i - 1)] ^ of[k][i & -i];
        }
    }

    uint32_t operator()(uint64_t word) const {
        uint32_t sum = 0;
        for (int k = 0; k < COUNT; k++) sum ^= of[k][word >> 8 * k & 255];
        return sum;
    }
};

constexpr Tables<8> EIGHT{8};

uint64_t word_at(const Byte* data) {
    uint64_t word;
    std::memcpy(&word, data, sizeof word);
    return word;
}

uint32_t by_tables(uint32_t crc, const Byte* data, int64_t bytes) {
    crc = ~crc;
    for (; bytes >= 8; bytes -= 8, data += 8) crc = EIGHT(word_at(data) ^ crc);
    for (; bytes > 0; bytes--, data++) crc = EIGHT.of[7][(crc ^ *data) & 255] ^ crc >> 8;
    return ~crc;
}

#if defined(__x86_64__)
#if defined(__clang__)  // there the instruction is no part of SSE4.2
#define CRC_TARGET __attribute__((target("sse4.2,crc32")))
#else
#define CRC_TARGET __attribute__((target("sse4.2")))
#endif

CRC_TARGET inline uint32_t add_word(uint32_t crc, uint64_t word) {
    return uint32_t(_mm_crc32_u64(crc, word));
}
CRC_TARGET inline uint32_t add_byte(uint32_t crc, Byte byte) { return _mm_crc32_u8(crc, byte); }

bool has_instruction() { return processor().crc32; }

#elif defined(__aarch64__)
#define CRC_TARGET

// In assembler, since compilers do not agree on how to ask for the intrinsics of one function.
inline uint32_t add_word(uint32_t crc, uint64_t word) {
    asm(".arch_extension crc\n\tcrc32cx %w0, %w0, %1" : "+r"(crc) : "r"(word));
    return crc;
}
inline uint32_t add_byte(uint32_t crc, Byte byte) {
    asm(".arch_extension crc\n\tcrc32cb %w0, %w0, %w1" : "+r"(crc) : "r"(uint32_t(byte)));
    return crc;
}

bool has_instruction() {
#if defined(__ARM_FEATURE_CRC32)
    return true;
#elif defined(__linux__)
    return (getauxval(AT_HWCAP) & HWCAP_CRC32) != 0;
#else
    return false;
#endif
}
#endif

#if defined(CRC_TARGET)
// The instruction takes one cycle, its result comes after three: so three streams at once. What is
// done is taken off `data` and `bytes`.
template <int64_t STREAM_BYTES>
CRC_TARGET inline uint32_t add_streams(uint32_t crc, const Byte*& data, int64_t& bytes) {
    static constexpr Tables<4> PAST_STREAM{STREAM_BYTES};
    for (; bytes >= 3 * STREAM_BYTES; bytes -= 3 * STREAM_BYTES, data += 3 * STREAM_BYTES) {
        uint32_t second = 0, third = 0;
        for (int64_t i = 0; i < STREAM_BYTES; i += 8) {
            crc = add_word(crc, word_at(data + i));
            second = add_word(second, word_at(data + STREAM_BYTES + i));
            third = add_word(third, word_at(data + 2 * STREAM_BYTES + i));
        }
        crc = PAST_STREAM(PAST_STREAM(crc) ^ second) ^ third;
    }
    return crc;
}

CRC_TARGET inline uint32_t add_serially(uint32_t crc, const Byte* data, int64_t bytes) {
    for (; bytes >= 8; bytes -= 8, data += 8) crc = add_word(crc, word_at(data));
    for (; bytes > 0; bytes--, data++) crc = add_byte(crc, *data);
    return crc;
}

CRC_TARGET uint32_t by_instruction(uint32_t crc, const Byte* data, int64_t bytes) {
    crc = add_streams<4096>(~crc, data, bytes);
    crc = add_streams<256>(crc, data, bytes);
    return ~add_serially(crc, data, bytes);
}
#endif

#if defined(__x86_64__)
#define FOLD_TARGET __attribute__((target("sse4.2,avx512f,pclmul,vpclmulqdq")))

// What carries 16 bytes over a distance: a factor for the first 8, x^64 above the others, and one
// for those. The product of two reflected numbers of 64 bits is x too low in its 128.
template <uint64_t DISTANCE_BYTES> FOLD_TARGET inline __m512i factors() {
    constexpr uint64_t FIRST = uint64_t(power(8 * DISTANCE_BYTES + 63)) << 32;
    constexpr uint64_t SECOND = uint64_t(power(8 * DISTANCE_BYTES - 1)) << 32;
    return _mm512_set4_epi64(int64_t(SECOND), int64_t(FIRST), int64_t(SECOND), int64_t(FIRST));
}

FOLD_TARGET inline __m512i folded(__m512i x, __m512i factors, __m512i onto) {
    __m512i first = _mm512_clmulepi64_epi128(x, factors, 0x00);
    __m512i second = _mm512_clmulepi64_epi128(x, factors, 0x11);
    return _mm512_ternarylogic_epi64(first, second, onto, 0x96);  // the sum of the three
}

FOLD_TARGET uint32_t by_folding(uint32_t crc, const Byte* data, int64_t bytes) {
    constexpr int64_t VECTOR = 64, ALL = 4 * VECTOR;
    if (bytes < ALL) return ~add_serially(~crc, data, bytes);
    __m512i x[4];
    for (int k = 0; k < 4; k++) x[k] = _mm512_loadu_si512(data + k * VECTOR);
    x[0] = _mm512_xor_si512(x[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128(int(~crc))));
    const __m512i far = factors<ALL>(), near = factors<VECTOR>();
    for (data += ALL, bytes -= ALL; bytes >= ALL; data += ALL, bytes -= ALL)
        for (int k = 0; k < 4; k++)
            x[k] = folded(x[k], far, _mm512_loadu_si512(data + k * VECTOR));
    __m512i last = x[0];
    for (int k = 1; k < 4; k++) last = folded(last, near, x[k]);
    for (; bytes >= VECTOR; data += VECTOR, bytes -= VECTOR)
        last = folded(last, near, _mm512_loadu_si512(data));
    Byte left[VECTOR];
    _mm512_storeu_si512(left, last);
    return ~add_serially(add_serially(0, left, VECTOR), data, bytes);
}
#endif

}  // namespace

Crc32c crc32c_of([[maybe_unused]] const Kernel& kernel) {
#if defined(__x86_64__)
    if (&kernel == &avx512::kernel && processor().wide_products) return by_folding;
#endif
#if defined(CRC_TARGET)
    if (&kernel != &portable::kernel && has_instruction()) return by_instruction;
#endif
    return by_tables;
}

}  // namespace cpu_adam
