// The kernel for AVX2 and F16C.
#define CPU_ADAM_TARGET avx2
#define CPU_ADAM_LANES 8
#include "kernel.inc"
