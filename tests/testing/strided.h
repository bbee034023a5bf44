// Tensors that do not lie in memory as one block. `Tensor::to` closes the gaps of what it converts,
// so a test that wants gaps in a type makes them in that type. What lies in the gaps is NaN, which
// shows in the result of whoever reads it.
#pragma once

#include <ATen/ATen.h>

#include <algorithm>
#include <limits>
#include <vector>

namespace headloom::test {

// The values of `t` in `type`, in the strides of `t`.
inline at::Tensor in_its_strides(const at::Tensor& t, at::ScalarType type) {
  int64_t last = 0;  // place of the last value
  for (int64_t d = 0; d < t.dim(); ++d) last += (t.size(d) - 1) * t.stride(d);
  const at::Tensor memory =
      at::full({std::max<int64_t>(last + 1, 0)}, std::numeric_limits<double>::quiet_NaN(),
               t.options().dtype(type));
  return memory.as_strided(t.sizes(), t.strides()).copy_(t.detach());
}

// The values of `t` in `type`, those of the last dimension side by side and a gap after each such
// row: kernels that read rows wherever they begin read these in place.
inline at::Tensor rows_apart(const at::Tensor& t, at::ScalarType type) {
  std::vector<int64_t> sizes = t.sizes().vec();
  sizes.back() += 3;
  return at::full(sizes, std::numeric_limits<double>::quiet_NaN(), t.options().dtype(type))
      .narrow(-1, 0, t.size(-1))
      .copy_(t.detach());
}

}  // namespace headloom::test
