// Which kernels this machine can run.
#include "kernel.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace cpu_adam {
namespace {

#if defined(__x86_64__)
// The builtin also asks whether the operating system saves the wide registers.
bool has_avx512() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

bool has_avx2_and_f16c() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    return __builtin_cpu_supports("avx2") && __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
#endif

struct Found {
    const Kernel* kernels[3];
    int count = 0;

    Found() {
#if defined(__x86_64__)
        __builtin_cpu_init();
        if (has_avx512() && has_avx2_and_f16c()) kernels[count++] = &avx512::kernel;
        if (has_avx2_and_f16c()) kernels[count++] = &avx2::kernel;
#elif defined(__aarch64__)
        kernels[count++] = &neon::kernel;
#endif
        kernels[count++] = &portable::kernel;
    }
};

}  // namespace

const Kernel* const* kernels(int& count) {
    static const Found found;
    count = found.count;
    return found.kernels;
}

}  // namespace cpu_adam
