// The floating point state of a thread: which results are flushed to zero, and how it rounds.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace cpu_adam {

// While one exists, its thread rounds to nearest and keeps subnormal numbers (no FTZ, no DAZ), as
// the definition of the results asks; what the thread had before comes back with its end.
class FloatState {
public:
#if defined(__x86_64__)
    FloatState() : before_(_mm_getcsr()) { _mm_setcsr(0x1F80); }  // the state after a reset
    ~FloatState() { _mm_setcsr(before_); }

private:
    unsigned before_;
#elif defined(__aarch64__)
    FloatState() {
        asm volatile("mrs %0, fpcr" : "=r"(before_));
        asm volatile("msr fpcr, %0" : : "r"(uint64_t{0}));
    }
    ~FloatState() { asm volatile("msr fpcr, %0" : : "r"(before_)); }

private:
    uint64_t before_;
#else
    FloatState() {}
    ~FloatState() {}

private:
#endif
    FloatState(const FloatState&) = delete;
    FloatState& operator=(const FloatState&) = delete;
};

}  // namespace cpu_adam
