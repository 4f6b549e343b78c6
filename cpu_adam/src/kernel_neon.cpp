// The kernel for NEON.
#define CPU_ADAM_TARGET neon
#define CPU_ADAM_LANES 4
#include "kernel.inc"
