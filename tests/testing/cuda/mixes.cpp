// A kernel of python/headloom/gpu/mixes*.cu as a function for ctypes. The file
// tests/python/cuda_emulation.py compiles this one with the constants that mixes.cu names, but for
// those that the kernels can also read from memory. -DMIXES is the path of its source.
#include "emulation.h"

namespace {

enum { IS_BF16, IS_CAUSAL, HAS_WINDOW, HAS_LENGTHS, HAS_DOCUMENTS, HAS_MASK, CONSTANTS };
int constants[CONSTANTS];

}  // namespace

#define BF16 constants[IS_BF16]
#define CAUSAL constants[IS_CAUSAL]
#define WINDOW constants[HAS_WINDOW]
#define LENGTHS constants[HAS_LENGTHS]
#define DOCUMENTS constants[HAS_DOCUMENTS]
#define MASK constants[HAS_MASK]

#include "instructions.h"
#include MIXES

namespace {

struct Launch {
  uint3 grid;
  unsigned order;  // of threads: 0 forwards, 1 backwards, others mixed
  size_t shared;   // bytes of a block
};

// An argument of a kernel, which is a pointer.
struct Argument {
  void* x;
  template <class T>
  operator T*() const {
    return static_cast<T*>(x);
  }
};

}  // namespace

extern "C" {

// Returns what went wrong, which is kept until the next call, or a null pointer.
const char* run(const Launch* launch, const int* given, const Call* call, const Argument* p) {
  static std::string error;
  memcpy(constants, given, sizeof(constants));
  error = emulation::run(THREADS, launch->grid, launch->shared, launch->order, [&] {
#ifdef TO
    mix(*call, p[0], p[1], p[2]);
#else
    mix_backward(*call, p[0], p[1], p[2], p[3], p[4], p[5], p[6], p[7]);
#endif
  });
  return error.empty() ? nullptr : error.c_str();
}

// What the kernels make of two numbers, and the first of two as they read it.
unsigned packed_values(int bfloat16, float first, float second) {
  BF16 = bfloat16;
  return packed(first, second);
}
float lower_value(int bfloat16, unsigned x) {
  BF16 = bfloat16;
  return lower(x);
}

}  // extern "C"
