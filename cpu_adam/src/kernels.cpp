// Which kernels this machine can run: on x86 without SSE4.1 none.
#include "kernel.h"
#include "processor.h"

namespace cpu_adam {
namespace {

struct Found {
    const Kernel* kernels[3];
    int count = 0;

    Found() {
#if defined(__x86_64__)
        if (processor().avx512) kernels[count++] = &avx512::kernel;
        if (processor().avx2_and_f16c) kernels[count++] = &avx2::kernel;
        if (processor().sse4_1) kernels[count++] = &portable::kernel;
#else
#if defined(__aarch64__)
        kernels[count++] = &neon::kernel;
#endif
        kernels[count++] = &portable::kernel;
#endif
    }
};

}  // namespace

const Kernel* const* kernels(int& count) {
    static const Found found;
    count = found.count;
    return found.kernels;
}

}  // namespace cpu_adam
