// The kernel for SSSE3 and SSE4.1 on x86, elsewhere for whatever the compiler's baseline has.
#define CPU_ADAM_TARGET portable
#define CPU_ADAM_LANES 4
#include "kernel.inc"
