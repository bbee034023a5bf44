#include <algorithm>

#include "ops/linear/declaration.h"

namespace headloom::ops {

Tensor Linear::reference(const Arguments& a) {
  const auto& [x, weight, scale, bias] = a;
  if (!scale.defined()) {
    return at::linear(x, weight.to(x.scalar_type()),
                      bias.defined() ? std::optional<Tensor>(bias) : std::nullopt);
  }
  if (weight.scalar_type() == at::kByte) {
    const Tensor wide = dequantized_int4(weight, scale, x.size(-1)).to(x.scalar_type());
    return at::linear(x, wide, bias.defined() ? std::optional<Tensor>(bias) : std::nullopt);
  }
  // int8 is exact in every floating type; the scale goes onto the sums, of which there are fewer.
  // In float16 these may be beyond the largest number, and a scale below the smallest.
  const auto type = x.scalar_type() == at::kHalf ? at::kFloat : x.scalar_type();
  const Tensor y = (at::linear(x.to(type), weight.to(type)) * scale.to(type)).to(x.scalar_type());
  return bias.defined() ? y + bias : y;
}

std::pair<Tensor, Tensor> quantized_int8(const Tensor& weight) {
  check_floating(Linear::kName, weight, "weight");
  TORCH_CHECK_VALUE(weight.dim() == 2 && weight.size(1) >= 1, "linear: a weight of shape ",
                    weight.sizes(),
                    " cannot be held as int8, expected [O, I] with I of at least 1.");
  const Tensor wide = weight.detach();
  const int64_t out = wide.size(0);
  const Tensor values = at::empty(wide.sizes(), wide.options().dtype(at::kChar));
  const Tensor scales = at::empty({out}, wide.options().dtype(at::kFloat));
  // Some rows at a time: what is between stays in the caches, and no memory is asked for anew.
  const int64_t rows = std::max<int64_t>((int64_t{1} << 18) / wide.size(1), 1);
  for (int64_t first = 0; first < out; first += rows) {
    const int64_t count = std::min(rows, out - first);
    const Tensor part = wide.narrow(0, first, count).to(at::kFloat);
    const Tensor largest = part.abs().amax(1, /*keepdim=*/true);
    TORCH_CHECK_VALUE(largest.isfinite().all().item<bool>(), "linear: a weight of shape ",
                      weight.sizes(),
                      " cannot be held as int8 because not all its values are finite.");
    // A row of zeros stays one with any scale.
    const Tensor scale = at::where(largest > 0, largest / 127, at::ones_like(largest));
    values.narrow(0, first, count).copy_((part / scale).round_().clamp_(-127, 127));
    scales.narrow(0, first, count).copy_(scale.squeeze(1));
  }
  return {values, scales};
}

}  // namespace headloom::ops
