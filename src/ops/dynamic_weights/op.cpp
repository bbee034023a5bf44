#include "ops/dynamic_weights/op.h"

#include <ATen/ATen.h>
#include <torch/library.h>

#include "ops/check.h"
#include "ops/dispatch.h"
#include "ops/dynamic_weights/fused.h"

namespace headloom::ops {
namespace {

using at::Tensor;

constexpr const char* kOp = "dynamic_weights";

void check(const Tensor& hidden, const Tensor& w2, int64_t rank,
           std::optional<std::string_view> backend) {
  TORCH_CHECK_TYPE(hidden.is_floating_point(), kOp, ": hidden has dtype ", hidden.scalar_type(),
                   ", expected a floating type.");
  TORCH_CHECK_TYPE(w2.is_floating_point(), kOp, ": w2 has dtype ", w2.scalar_type(),
                   ", expected a floating type.");
  TORCH_CHECK_VALUE(rank >= 1, kOp, ": rank is ", rank, ", expected at least 1.");
  TORCH_CHECK_VALUE(w2.dim() == 4 && w2.sym_size(3) > 0 && w2.sym_size(3) >= rank &&
                        w2.sym_size(3) % (2 * rank) == 0,
                    kOp, ": w2 has shape ", w2.sym_sizes(),
                    ", expected [S, g, I, 2 R n] with R = ", rank, ".");
  TORCH_CHECK_VALUE(
      hidden.dim() == 3 && hidden.sym_size(2) == w2.sym_size(0) * w2.sym_size(1) * w2.sym_size(2),
      kOp, ": hidden has shape ", hidden.sym_sizes(),
      ", expected [B, L, S g I] with [S, g, I] of w2 ", w2.sym_sizes(), ".");
  check_device(kOp, w2, "w2", hidden, "hidden");
  check_backend(kOp, backend);
}

std::vector<Tensor> dynamic_weights_op(const Tensor& hidden, const Tensor& w2, int64_t rank,
                                       std::optional<std::string_view> backend) {
  check(hidden, w2, rank, backend);
  if (!runs_fused(kOp, backend, dynamic_weights_unsupported(hidden, w2))) {
    return dynamic_weights_reference(hidden, w2, rank);
  }
  // [B, L, S, 2, R, H], from the start of its memory.
  const Tensor all = dynamic_weights_fused(hidden, w2, rank);
  const int64_t sides = w2.size(0);
  const c10::SymInt batch = all.sym_size(0), length = all.sym_size(1), heads = all.sym_size(4);
  const c10::SymInt half = rank * heads, line = 2 * sides * half;
  std::vector<Tensor> out;
  out.reserve(2 * sides);
  for (int64_t part = 0; part < 2; ++part) {
    for (int64_t s = 0; s < sides; ++s) {
      out.push_back(all.as_strided_symint({batch, length, rank, heads},
                                          {length * line, line, heads, 1}, (2 * s + part) * half));
    }
  }
  return out;
}

TORCH_LIBRARY_FRAGMENT(headloom, m) {
  m.def("dynamic_weights(Tensor hidden, Tensor w2, int rank, str? backend=None) -> Tensor[]",
        {at::Tag::pt2_compliant_tag});
}
TORCH_LIBRARY_IMPL(headloom, CompositeImplicitAutograd, m) {
  m.impl("dynamic_weights", dynamic_weights_op);
}

}  // namespace

std::vector<Tensor> dynamic_weights(const Tensor& hidden, const Tensor& w2, int64_t rank,
                                    const std::optional<std::string>& backend) {
  static const auto op = dispatched<decltype(dynamic_weights_op)>("headloom::dynamic_weights");
  return op.call(hidden, w2, rank,
                 backend ? std::optional<std::string_view>(*backend) : std::nullopt);
}

}  // namespace headloom::ops
