// Compiled once for each instruction set, with CPU_CAPABILITY its name.
#include "ops/kernel/functions.h"
#include "ops/moe/kernel.h"

namespace headloom::ops::moe_kernel {
namespace {

template <typename T>
void activate(const Args& s, int64_t row) {
  const T* g = static_cast<const T*>(s.h) + row * 2 * s.width;
  T* a = static_cast<T*>(s.a) + row * s.width;
  for (int64_t i = 0; i < s.width; i += VL) {
    const int64_t left = s.width - i;
    const vf x = load_some(g + i, left);
    store_some(a + i, x * vsigmoid(x) * load_some(g + s.width + i, left), left);
  }
}

template <typename T>
void backward(const Args& s, int64_t row) {
  const T* g = static_cast<const T*>(s.h) + row * 2 * s.width;
  T* grad_g = static_cast<T*>(s.grad_h) + row * 2 * s.width;
  T* a = static_cast<T*>(s.a) + row * s.width;
  const vf weight = bcast(s.weight[row]);
  vf sum = zero();
  for (int64_t i = 0; i < s.width; i += VL) {
    const int64_t left = s.width - i;
    const vf x = load_some(g + i, left), u = load_some(g + s.width + i, left);
    const vf grad = load_some(a + i, left);
    const vf sigmoid = vsigmoid(x);
    const vf silu = x * sigmoid;
    const vf value = silu * u;
    sum = fma(grad, value, sum);
    const vf weighted = weight * grad;
    store_some(grad_g + i, weighted * u * silu_slope(x, sigmoid), left);
    store_some(grad_g + s.width + i, weighted * silu, left);
    store_some(a + i, weight * value, left);
  }
  s.grad_weight[row] = hsum(sum);
}

template <typename T>
void gather(const Args& s, int64_t row) {
  std::memcpy(static_cast<T*>(s.out) + row * s.width,
              static_cast<const T*>(s.rows) + s.index[row] * s.width,
              static_cast<size_t>(s.width) * sizeof(T));
}

template <typename T>
void combine(const Args& s, int64_t token) {
  const int64_t* index = s.index + token * s.choices;
  const float* weight = s.weight ? s.weight + token * s.choices : nullptr;
  T* out = static_cast<T*>(s.out) + token * s.width;
  for (int64_t i = 0; i < s.width; i += VL) {
    const int64_t left = s.width - i;
    vf sum = zero();
    for (int64_t j = 0; j < s.choices; ++j) {
      const vf x = load_some(static_cast<const T*>(s.rows) + index[j] * s.width + i, left);
      sum = weight ? fma(bcast(weight[j]), x, sum) : sum + x;
    }
    store_some(out + i, sum, left);
  }
}

template <typename T>
void run(const Args& args, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    switch (args.step) {
      case Step::kActivate:
        activate<T>(args, i);
        break;
      case Step::kBackward:
        backward<T>(args, i);
        break;
      case Step::kGather:
        gather<T>(args, i);
        break;
      case Step::kCombine:
        combine<T>(args, i);
        break;
    }
  }
}

}  // namespace

void HL_KERNEL(run)(const Args& args, int64_t begin, int64_t end) {
  if (args.type == Type::kBFloat16) {
    run<BFloat16>(args, begin, end);
  } else {
    run<float>(args, begin, end);
  }
}

}  // namespace headloom::ops::moe_kernel
