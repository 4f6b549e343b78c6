// The kernel for whatever the compiler's baseline has.
#define CPU_ADAM_TARGET portable
#define CPU_ADAM_LANES 4
#include "kernel.inc"
