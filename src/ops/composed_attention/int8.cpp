#include "ops/composed_attention/int8.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <cmath>
#include <limits>

namespace headloom::ops {
namespace {

using at::Tensor;

// One head's values as codes; returns its scale.
template <typename T>
float quantize_head(const T* from, int64_t size, int8_t* codes) {
  float largest = 0;
  bool finite = true;
  for (int64_t d = 0; d < size; ++d) {
    const float magnitude = std::abs(static_cast<float>(from[d]));
    finite = finite && magnitude <= std::numeric_limits<float>::max();
    largest = magnitude > largest ? magnitude : largest;
  }
  // Below, the scale's inverse is not finite.
  if (!finite || largest < 1e-35f) {
    std::fill(codes, codes + size, int8_t{0});
    return finite ? 0 : std::numeric_limits<float>::quiet_NaN();
  }
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: its sum with a number is rounded to a whole
  const float inverse = 127 / largest;
  for (int64_t d = 0; d < size; ++d) {
    const float whole = static_cast<float>(from[d]) * inverse + kRound - kRound;
    codes[d] = static_cast<int8_t>(static_cast<int32_t>(whole));
  }
  return largest / 127;
}

template <typename T>
void quantize_all(const Tensor& t, int8_t* codes, float* scales) {
  const T* const data = t.const_data_ptr<T>();
  const int64_t n = t.size(1), heads = t.size(2), size = t.size(3);
  at::parallel_for(0, t.size(0) * n, 64, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const T* const from = data + i / n * t.stride(0) + i % n * t.stride(1);
      for (int64_t g = 0; g < heads; ++g) {
        const int64_t head = i * heads + g;
        scales[head] = quantize_head(from + g * t.stride(2), size, codes + head * size);
      }
    }
  });
}

// The same in ATen, for other devices.
std::pair<Tensor, Tensor> quantized_by_aten(const Tensor& t) {
  const Tensor wide = t.to(at::kFloat), largest = wide.abs().amax(-1);
  const Tensor finite = largest.isfinite(), used = finite.logical_and(largest.ge(1e-35));
  const Tensor zero = at::zeros({}, wide.options());
  const Tensor codes = at::where(used.unsqueeze(-1), wide * (127 / largest).unsqueeze(-1), zero);
  const Tensor scales = at::where(used, largest / 127, zero);
  return {codes.round().to(at::kChar),
          scales.masked_fill(finite.logical_not(), std::numeric_limits<double>::quiet_NaN())};
}

}  // namespace

std::pair<Tensor, Tensor> quantized_heads(const Tensor& t) {
  if (!t.is_cpu()) return quantized_by_aten(t.detach());
  const bool direct = t.scalar_type() == at::kFloat || t.scalar_type() == at::kBFloat16;
  const Tensor at_hand = direct ? t : t.to(at::kFloat);
  const Tensor from = at_hand.stride(3) == 1 ? at_hand : at_hand.contiguous();
  const auto options = from.options().requires_grad(false);
  Tensor codes =
      at::empty(from.sizes(), options.dtype(at::kChar).memory_format(at::MemoryFormat::Contiguous));
  Tensor scales = at::empty({from.size(0), from.size(1), from.size(2)}, options.dtype(at::kFloat));
  if (from.scalar_type() == at::kBFloat16) {
    quantize_all<c10::BFloat16>(from, codes.data_ptr<int8_t>(), scales.data_ptr<float>());
  } else {
    quantize_all<float>(from, codes.data_ptr<int8_t>(), scales.data_ptr<float>());
  }
  return {codes, scales};
}

Tensor dequantized_heads(const Tensor& values, const Tensor& scale, at::ScalarType type) {
  return (values.to(at::kFloat) * scale.unsqueeze(-1)).to(type);
}

}  // namespace headloom::ops
