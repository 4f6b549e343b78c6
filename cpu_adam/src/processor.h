// What this x86 processor can do and its operating system saves, asked of the processor itself:
// __builtin_cpu_supports says what the compiler's runtime knows, and Zig's knows of nothing.
#pragma once

#if defined(__x86_64__)
#include <cpuid.h>

namespace cpu_adam {

struct Processor {
    bool crc32 = false, wide_products = false;
    bool sse4_1 = false, avx2_and_f16c = false, avx512 = false;

    Processor() {
        unsigned a, b, c, d, leaf7_b, leaf7_c;
        if (!__get_cpuid(1, &a, &b, &c, &d)) return;
        crc32 = c & bit_SSE4_2;
        sse4_1 = (c & bit_SSSE3) && (c & bit_SSE4_1);
        if (!(c & bit_OSXSAVE) || !__get_cpuid_count(7, 0, &a, &leaf7_b, &leaf7_c, &d)) return;
        unsigned saved, high;
        __asm__("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
        constexpr unsigned YMM = 0x06, ZMM = 0xe6;  // registers of XCR0, with all that they extend
        constexpr unsigned AVX512 = bit_AVX512F | bit_AVX512BW | bit_AVX512DQ | bit_AVX512VL;
        avx2_and_f16c = (saved & YMM) == YMM && (leaf7_b & bit_AVX2) && (c & bit_F16C);
        avx512 = avx2_and_f16c && (saved & ZMM) == ZMM && (leaf7_b & AVX512) == AVX512;
        wide_products = avx512 && crc32 && (c & bit_PCLMUL) && (leaf7_c & bit_VPCLMULQDQ);
    }
};

inline const Processor& processor() {
    static const Processor found;
    return found;
}

}  // namespace cpu_adam
#endif
