// Compiled once for each instruction set, with CPU_CAPABILITY its name.
#include "ops/gated_norm/kernel.h"
#include "ops/kernel/functions.h"

namespace headloom::ops::gated_norm_kernel {
namespace {

template <typename T>
HL_INLINE float inverse_norm(const T* x, int64_t width, float eps) {
  vf sum = zero();
  for (int64_t i = 0; i < width; i += VL) {
    const vf v = load_some(x + i, width - i);
    sum = fma(v, v, sum);
  }
  return 1 / __builtin_sqrtf(hsum(sum) / static_cast<float>(width) + eps);
}

template <typename T>
void forward(const Args& a, int64_t row) {
  const int64_t from = row * a.width;
  const T *x = static_cast<const T*>(a.x) + from, *gate = static_cast<const T*>(a.gate) + from;
  T* y = static_cast<T*>(a.y) + from;
  const vf scale = bcast(inverse_norm(x, a.width, a.eps[row]));
  for (int64_t i = 0; i < a.width; i += VL) {
    const int64_t left = a.width - i;
    const vf g = load_some(gate + i, left);
    store_some(y + i, g * vsigmoid(g) * (scale * load_some(x + i, left)), left);
  }
}

template <typename T>
void backward(const Args& a, int64_t row) {
  const int64_t from = row * a.width;
  const T *x = static_cast<const T*>(a.x) + from, *gate = static_cast<const T*>(a.gate) + from;
  const T* grad = static_cast<const T*>(a.grad) + from;
  T *grad_x = static_cast<T*>(a.grad_x) + from, *grad_gate = static_cast<T*>(a.grad_gate) + from;
  const float inverse = inverse_norm(x, a.width, a.eps[row]);
  const vf scale = bcast(inverse);
  vf sum = zero();  // of grad y
  for (int64_t i = 0; i < a.width; i += VL) {
    const int64_t left = a.width - i;
    const vf g = load_some(gate + i, left), dy = load_some(grad + i, left);
    const vf normed = scale * load_some(x + i, left);
    const vf sigmoid = vsigmoid(g);
    sum = fma(dy * normed, g * sigmoid, sum);
    store_some(grad_gate + i, dy * normed * silu_slope(g, sigmoid), left);
  }
  const vf mean = bcast(hsum(sum) / static_cast<float>(a.width));
  for (int64_t i = 0; i < a.width; i += VL) {
    const int64_t left = a.width - i;
    const vf g = load_some(gate + i, left), dy = load_some(grad + i, left);
    const vf normed = scale * load_some(x + i, left);
    store_some(grad_x + i, scale * (dy * (g * vsigmoid(g)) - normed * mean), left);
  }
}

template <typename T>
void run(const Args& a, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    if (a.grad != nullptr) {
      backward<T>(a, row);
    } else {
      forward<T>(a, row);
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

}  // namespace headloom::ops::gated_norm_kernel
