// Argument checks every operator makes. `op` and `name` begin the sentence: "retention: k has ...".
// Sizes stay symbolic so that torch.compile does not specialise on them.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

namespace headloom::ops {

// `legend` names the sizes expected: "[B, T, H, D]".
inline void check_shape(const char* op, const at::Tensor& t, const std::string& name,
                        c10::SymIntArrayRef expected, const char* legend) {
  bool same = t.dim() == static_cast<int64_t>(expected.size());
  for (int64_t i = 0; same && i < t.dim(); ++i) same = t.sym_size(i) == expected[i];
  TORCH_CHECK_VALUE(same, op, ": ", name, " has shape ", t.sym_sizes(), ", expected ", legend,
                    " = ", expected, ".");
}

inline void check_device(const char* op, const at::Tensor& t, const std::string& name,
                         const at::Tensor& q) {
  TORCH_CHECK_VALUE(t.device() == q.device(), op, ": ", name, " is on ", t.device(), ", expected ",
                    q.device(), " as q is.");
}

inline void check_dtype(const char* op, const at::Tensor& t, const std::string& name,
                        const at::Tensor& q) {
  TORCH_CHECK_TYPE(t.scalar_type() == q.scalar_type(), op, ": ", name, " has dtype ",
                   t.scalar_type(), ", expected ", q.scalar_type(), " as q has.");
  check_device(op, t, name, q);
}

inline void check_ids(const char* op, const at::Tensor& t, const char* name, const at::Tensor& q) {
  TORCH_CHECK_TYPE(t.scalar_type() == at::kLong, op, ": ", name, " has dtype ", t.scalar_type(),
                   ", expected int64.");
  check_device(op, t, name, q);
}

}  // namespace headloom::ops
