// The kernel for AVX-512 (F, BW, DQ, VL).
#define CPU_ADAM_TARGET avx512
#define CPU_ADAM_LANES 16
#include "kernel.inc"
