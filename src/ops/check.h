// Argument checks every operator makes. `op` and `name` begin the sentence: "retention: k has ...";
// `leader` is the name of `q`, the argument the others follow.
// Sizes stay symbolic so that torch.compile does not specialise on them.
#pragma once

#include <ATen/OpMathType.h>
#include <ATen/core/Tensor.h>

#include <optional>
#include <sstream>
#include <string>

namespace headloom::ops {

// The size of a dimension that is a constant of the caller's program, as the number of heads is.
// Under torch.compile, size() would make constants of the tensor's other dimensions too.
inline int64_t fixed_size(const at::Tensor& t, int64_t dim) {
  return t.sym_size(dim).guard_int(__FILE__, __LINE__);
}

// Whether `t` is an ordinary tensor: not sparse, not nested, not in a layout of oneDNN's.
inline bool is_dense(const at::Tensor& t) { return t.layout() == at::kStrided && !t.is_nested(); }

// What a refusal of another tensor says about it.
inline std::string not_dense(const at::Tensor& t) {
  if (t.layout() == at::kJagged || t.is_nested()) {
    return "is a nested tensor, expected a dense one, as torch.nested.to_padded_tensor() makes it";
  }
  std::ostringstream layout;
  layout << t.layout();
  return "has the layout " + layout.str() + ", expected a dense tensor, as to_dense() makes it";
}

inline void check_dense(const char* op, const at::Tensor& t, const char* name) {
  TORCH_CHECK_TYPE(is_dense(t), op, ": ", name, " ", not_dense(t), ".");
}

// `legend` names the sizes expected: "[B, T, H, D]".
inline void check_shape(const char* op, const at::Tensor& t, const std::string& name,
                        c10::SymIntArrayRef expected, const char* legend) {
  bool same = t.dim() == static_cast<int64_t>(expected.size());
  for (int64_t i = 0; same && i < t.dim(); ++i) same = t.sym_size(i) == expected[i];
  TORCH_CHECK_VALUE(same, op, ": ", name, " has shape ", t.sym_sizes(), ", expected ", legend,
                    " = ", expected, ".");
}

inline void check_device(const char* op, const at::Tensor& t, const std::string& name,
                         const at::Tensor& q, const char* leader = "q") {
  TORCH_CHECK_VALUE(t.device() == q.device(), op, ": ", name, " is on ", t.device(), ", expected ",
                    q.device(), " as ", leader, " is.");
}

inline void check_dtype(const char* op, const at::Tensor& t, const std::string& name,
                        const at::Tensor& q, const char* leader = "q") {
  TORCH_CHECK_TYPE(t.scalar_type() == q.scalar_type(), op, ": ", name, " has dtype ",
                   t.scalar_type(), ", expected ", q.scalar_type(), " as ", leader, " has.");
  check_device(op, t, name, q, leader);
}

// Weights of x's type, or float32 ones, which are rounded to a narrower type of x.
inline void check_weight_dtype(const char* op, const at::Tensor& weight, const at::Tensor& x,
                               const char* leader) {
  const bool rounded = weight.scalar_type() == at::kFloat &&
                       (x.scalar_type() == at::kBFloat16 || x.scalar_type() == at::kHalf);
  if (rounded) return check_device(op, weight, "weight", x, leader);
  check_dtype(op, weight, "weight", x, leader);
}

inline void check_floating(const char* op, const at::Tensor& t, const std::string& name) {
  TORCH_CHECK_TYPE(t.is_floating_point(), op, ": ", name, " has dtype ", t.scalar_type(),
                   ", expected a floating type.");
}

inline void check_ids(const char* op, const at::Tensor& t, const char* name, const at::Tensor& q,
                      const char* leader = "q") {
  TORCH_CHECK_TYPE(t.scalar_type() == at::kLong, op, ": ", name, " has dtype ", t.scalar_type(),
                   ", expected int64.");
  check_device(op, t, name, q, leader);
}

// Ids of documents, one for each position of q [B, T, ...].
inline void check_documents(const char* op, const at::Tensor& t, const at::Tensor& q,
                            const char* leader = "q", const char* legend = "[B, T]") {
  check_ids(op, t, "documents", q, leader);
  check_shape(op, t, "documents", {q.sym_size(0), q.sym_size(1)}, legend);
}

// A recurrent state has the type that sums over q's are computed in.
inline void check_state(const char* op, const at::Tensor& t, c10::SymIntArrayRef expected,
                        const char* legend, const at::Tensor& q, const char* leader = "q") {
  check_shape(op, t, "state", expected, legend);
  check_device(op, t, "state", q, leader);
  const at::ScalarType type = at::toOpMathType(q.scalar_type());
  TORCH_CHECK_TYPE(t.scalar_type() == type, op, ": state has dtype ", t.scalar_type(),
                   ", expected ", type, ".");
}

inline void check_backend(const char* op, std::optional<std::string_view> backend) {
  TORCH_CHECK_VALUE(!backend || *backend == "reference" || *backend == "fused", op,
                    ": backend is \"", backend.value_or(""),
                    "\", expected None, \"reference\" or \"fused\".");
}

}  // namespace headloom::ops
