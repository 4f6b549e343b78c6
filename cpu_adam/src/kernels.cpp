// Which kernels this machine can run: on x86 without SSE4.1 none.
#include "kernel.h"
#include "processor.h"

namespace cpu_adam {

const Kernel* const* kernels(int& count) {
    static const Kernel* found[3];
    static const int all = [] {
        int some = 0;
#if defined(__x86_64__)
        if (processor().avx512) found[some++] = &avx512::kernel;
        if (processor().avx2_and_f16c) found[some++] = &avx2::kernel;
        if (processor().sse4_1) found[some++] = &portable::kernel;
#else
#if defined(__aarch64__)
        found[some++] = &neon::kernel;
#endif
        found[some++] = &portable::kernel;
#endif
        return some;
    }();
    count = all;
    return found;
}

}  // namespace cpu_adam
