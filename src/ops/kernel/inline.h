// No torch.
#pragma once

// Every function in a header of the kernels: a weak copy built for one
// instruction set must not be picked by the linker for another.
#define HL_INLINE inline __attribute__((always_inline))

// The name of this build of a kernel: HL_KERNEL(run) is run_AVX2 where CPU_CAPABILITY is AVX2.
#define HL_PASTE_NAMES(a, b) a##_##b
#define HL_PASTE(a, b) HL_PASTE_NAMES(a, b)
#define HL_KERNEL(name) HL_PASTE(name, CPU_CAPABILITY)
