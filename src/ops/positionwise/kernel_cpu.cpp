// Compiled once for each instruction set, with CPU_CAPABILITY its name.
#include "ops/kernel/functions.h"
#include "ops/positionwise/kernel.h"

namespace headloom::ops::positionwise_kernel {
namespace {

// --- RMS norm ---

HL_INLINE vf scale_of(const NormArgs& a, int64_t i) {
  return a.scale == nullptr ? bcast(1.0f) : load_some(a.scale + i, a.width - i);
}

template <typename T>
HL_INLINE float inverse_norm(const T* x, int64_t width, float eps) {
  // Four sums: one would wait for itself.
  vf sums[4] = {zero(), zero(), zero(), zero()};
  int64_t i = 0;
  for (; i + 4 * VL <= width; i += 4 * VL) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const vf v = load(x + i + j * VL);
      sums[j] = fma(v, v, sums[j]);
    }
  }
  for (; i < width; i += VL) {
    const vf v = load_some(x + i, width - i);
    sums[0] = fma(v, v, sums[0]);
  }
  const float squares = hsum((sums[0] + sums[1]) + (sums[2] + sums[3]));
  return 1 / __builtin_sqrtf(squares / static_cast<float>(width) + eps);
}

template <typename T>
void norm_forward(const NormArgs& a, int64_t row) {
  const T* x = static_cast<const T*>(a.x) + row * a.width;
  T* y = static_cast<T*>(a.y) + row * a.width;
  const vf inverse = bcast(inverse_norm(x, a.width, a.eps));
  for (int64_t i = 0; i < a.width; i += VL) {
    const int64_t left = a.width - i;
    store_some(y + i, inverse * load_some(x + i, left) * scale_of(a, i), left);
  }
}

// With n = x / norm and d = scale dy: dx = (d - n mean(d n)) / norm, dscale = sum over rows of dy
// n.
template <typename T>
void norm_backward(const NormArgs& a, int64_t row) {
  const T* x = static_cast<const T*>(a.x) + row * a.width;
  const T* grad = static_cast<const T*>(a.grad) + row * a.width;
  T* grad_x = static_cast<T*>(a.grad_x) + row * a.width;
  const vf inverse = bcast(inverse_norm(x, a.width, a.eps));
  vf sum = zero();
  for (int64_t i = 0; i < a.width; i += VL) {
    const int64_t left = a.width - i;
    const vf product = load_some(grad + i, left) * (inverse * load_some(x + i, left));
    sum = fma(product, scale_of(a, i), sum);
    if (a.grad_scale != nullptr) {
      store_some(a.grad_scale + i, load_some(a.grad_scale + i, left) + product, left);
    }
  }
  const vf mean = bcast(hsum(sum) / static_cast<float>(a.width));
  for (int64_t i = 0; i < a.width; i += VL) {
    const int64_t left = a.width - i;
    const vf direct = load_some(grad + i, left) * scale_of(a, i);
    const vf normed = inverse * load_some(x + i, left);
    store_some(grad_x + i, inverse * (direct - normed * mean), left);
  }
}

template <typename T>
void norm_rows(const NormArgs& a, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    if (a.grad != nullptr) {
      norm_backward<T>(a, row);
    } else {
      norm_forward<T>(a, row);
    }
  }
}

// --- Rotary positions ---

template <typename T>
HL_INLINE void turn_halves(const T* x, const float* cos, const float* sin, float sign,
                           int64_t pairs, T* y) {
  for (int64_t i = 0; i < pairs; i += VL) {
    const int64_t left = pairs - i;
    const vf c = load_some(cos + i, left), s = bcast(sign) * load_some(sin + i, left);
    const vf a = load_some(x + i, left), b = load_some(x + pairs + i, left);
    store_some(y + i, fma(a, c, zero() - b * s), left);
    store_some(y + pairs + i, fma(b, c, a * s), left);
  }
}

// turn_halves where one vector has both halves of kHeads heads, with c = [cos, cos] and s = [-sin,
// sin] for each.
template <int kHeads, typename T>
HL_INLINE void turn_vector(const T* x, vf c, vf s, T* y) {
  const vf both = load(x), swapped = kHeads == 1 ? swap_halves(both) : swap_quarters(both);
  store(y, fma(both, c, swapped * s));
}

template <typename T>
HL_INLINE void turn_neighbours(const T* x, const float* cos, const float* sin, float sign,
                               int64_t pairs, T* y) {
  for (int64_t i = 0; i < pairs; ++i) {
    const float a = widen(x[2 * i]), b = widen(x[2 * i + 1]), s = sign * sin[i];
    narrow(a * cos[i] - b * s, y + 2 * i);
    narrow(b * cos[i] + a * s, y + 2 * i + 1);
  }
}

constexpr int64_t kRowsAhead = 8;
constexpr int64_t kLine = 64;  // bytes of a line of the caches

template <typename T>
void rotary_rows(const RotaryArgs& a, int64_t begin, int64_t end) {
  const float sign = a.back ? -1.0f : 1.0f;
  const bool one_vector = !a.interleaved && 2 * a.pairs == VL;
  const bool two_heads = !a.interleaved && 4 * a.pairs == VL && a.width == 2 * a.pairs &&
                         a.x.head == a.width && a.heads % 2 == 0;
  int64_t b = begin / a.length, t = begin % a.length;
  for (int64_t row = begin; row < end; ++row, ++t) {
    if (t == a.length) {
      ++b;
      t = 0;
    }
    const int64_t table = b * a.table_stride[0] + t * a.table_stride[1];
    const float *cos = a.cos + table, *sin = a.sin + table;
    vf c = zero(), s = zero();
    if (one_vector || two_heads) {
      c = load_part(cos, a.pairs);
      s = bcast(sign) * load_part(sin, a.pairs);
      if (two_heads) {
        c = c + swap_quarters(c);
        s = swap_quarters(s) - s;
        s = s + swap_halves(s);
      } else {
        s = swap_halves(s) - s;
      }
      c = c + swap_halves(c);
    }
    if (two_heads) {
      const T* x = a.x.row<T>(b, t, 0);
      T* y = static_cast<T*>(a.y) + row * a.heads * a.width;
      for (int64_t i = 0; i < a.heads * a.width; i += VL) {
        __builtin_prefetch(x + kRowsAhead * a.x.time + i);
        turn_vector<2>(x + i, c, s, y + i);
      }
      continue;
    }
    for (int64_t h = 0; h < a.heads; ++h) {
      const T* x = a.x.row<T>(b, t, h);
      T* y = static_cast<T*>(a.y) + (row * a.heads + h) * a.width;
      // Queries and keys are often parts of longer rows, which processors do not foresee.
      for (int64_t i = 0; i < a.width; i += kLine / sizeof(T)) {
        __builtin_prefetch(x + kRowsAhead * a.x.time + i);
      }
      if (one_vector) {
        turn_vector<1>(x, c, s, y);
      } else if (a.interleaved) {
        turn_neighbours(x, cos, sin, sign, a.pairs, y);
      } else {
        turn_halves(x, cos, sin, sign, a.pairs, y);
      }
      for (int64_t i = 2 * a.pairs; i < a.width; ++i) y[i] = x[i];
    }
  }
}

// --- The gate of SwiGLU ---

template <typename T>
void gate_rows(const GateArgs& a, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const T *g = static_cast<const T*>(a.x) + 2 * row * a.width, *u = g + a.width;
    if (a.grad == nullptr) {
      T* y = static_cast<T*>(a.y) + row * a.width;
      for (int64_t i = 0; i < a.width; i += VL) {
        const int64_t left = a.width - i;
        const vf gate = load_some(g + i, left);
        store_some(y + i, gate * vsigmoid(gate) * load_some(u + i, left), left);
      }
      continue;
    }
    const T* grad = static_cast<const T*>(a.grad) + row * a.width;
    T *grad_g = static_cast<T*>(a.grad_x) + 2 * row * a.width, *grad_u = grad_g + a.width;
    for (int64_t i = 0; i < a.width; i += VL) {
      const int64_t left = a.width - i;
      const vf gate = load_some(g + i, left), s = vsigmoid(gate), dy = load_some(grad + i, left);
      store_some(grad_g + i, dy * load_some(u + i, left) * silu_slope(gate, s), left);
      store_some(grad_u + i, dy * gate * s, left);
    }
  }
}

// --- GELU ---

// With z = 2 u and s = sigmoid(z): y = x s, dy/dx = s + x s (1 - s) dz/dx.
template <typename T>
void gelu_values(const GeluArgs& a, int64_t begin, int64_t end) {
  const vf scale = bcast(1.5957691216057308f);  // 2 sqrt(2 / pi)
  const vf cubic = bcast(1.5957691216057308f * 0.044715f);
  const vf slope = bcast(3 * 1.5957691216057308f * 0.044715f);
  const T* const x = static_cast<const T*>(a.x);
  for (int64_t i = begin; i < end; i += VL) {
    const int64_t left = end - i;
    const vf v = load_some(x + i, left), square = v * v;
    const vf s = vsigmoid(v * fma(cubic, square, scale));
    if (a.grad == nullptr) {
      store_some(static_cast<T*>(a.y) + i, v * s, left);
      continue;
    }
    const vf around = v * s * (bcast(1.0f) - s) * fma(slope, square, scale);
    const vf grad = load_some(static_cast<const T*>(a.grad) + i, left);
    store_some(static_cast<T*>(a.grad_x) + i, grad * (s + around), left);
  }
}

}  // namespace

void HL_KERNEL(gelu_tanh)(const GeluArgs& args, int64_t begin, int64_t end) {
  args.type == Type::kBFloat16 ? gelu_values<BFloat16>(args, begin, end)
                               : gelu_values<float>(args, begin, end);
}

void HL_KERNEL(norm)(const NormArgs& args, int64_t begin, int64_t end) {
  args.type == Type::kBFloat16 ? norm_rows<BFloat16>(args, begin, end)
                               : norm_rows<float>(args, begin, end);
}

void HL_KERNEL(rotary)(const RotaryArgs& args, int64_t begin, int64_t end) {
  args.type == Type::kBFloat16 ? rotary_rows<BFloat16>(args, begin, end)
                               : rotary_rows<float>(args, begin, end);
}

void HL_KERNEL(gate)(const GateArgs& args, int64_t begin, int64_t end) {
  args.type == Type::kBFloat16 ? gate_rows<BFloat16>(args, begin, end)
                               : gate_rows<float>(args, begin, end);
}

}  // namespace headloom::ops::positionwise_kernel
