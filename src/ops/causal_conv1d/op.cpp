#include "ops/causal_conv1d/op.h"

#include "ops/causal_conv1d/declaration.h"
#include "ops/documents.h"

namespace headloom::ops {

void CausalConv1d::check(const Arguments& a) {
  const Tensor &x = a.x, &weight = a.weight;
  const CausalConv1dOptions& o = a.options;
  const auto check_parameter = [&](const Tensor& t, const char* name) {
    TORCH_CHECK_TYPE(t.scalar_type() == x.scalar_type() ||
                         (t.scalar_type() == at::kFloat && x.scalar_type() != at::kDouble),
                     "causal_conv1d: ", name, " has dtype ", t.scalar_type(), ", expected ",
                     x.scalar_type(), " as x has, or float32 beside a narrower x.");
    check_device(kName, t, name, x, "x");
  };
  TORCH_CHECK_VALUE(x.dim() == 3 && x.sym_size(1) >= 1 && x.sym_size(2) >= 1,
                    "causal_conv1d: x has shape ", x.sym_sizes(),
                    ", expected [B, L, C] with L and C of at least 1.");
  check_floating(kName, x, "x");
  const c10::SymInt batch = x.sym_size(0), channels = x.sym_size(2);
  TORCH_CHECK_VALUE(weight.dim() == 2 && weight.sym_size(0) == channels && weight.sym_size(1) >= 1,
                    "causal_conv1d: weight has shape ", weight.sym_sizes(),
                    ", expected [C, W] with C = ", channels, " and W of at least 1.");
  check_parameter(weight, "weight");
  if (o.bias.defined()) {
    check_shape(kName, o.bias, "bias", {channels}, "[C]");
    check_parameter(o.bias, "bias");
  }
  if (o.state.defined()) {
    check_shape(kName, o.state, "state", {batch, weight.sym_size(1) - 1, channels},
                "[B, W - 1, C]");
    check_dtype(kName, o.state, "state", x, "x");
  }
  if (o.documents.defined()) check_documents(kName, o.documents, x, "x", "[B, L]");
}

// What runs along the sequence is cast to the autocast type; weights keep theirs.
void CausalConv1d::autocast(Arguments& a, const AutocastCast& cast) { cast(a.x, a.options.state); }

Tensor CausalConv1d::state_after(const Arguments& a) {
  const Tensor& x = a.x;
  const CausalConv1dOptions& o = a.options;
  const int64_t rows = fixed_size(a.weight, 1) - 1;
  const c10::SymInt length = x.sym_size(1);
  // A graph that is traced for any length takes all of x, as it must not ask how long that is.
  const c10::SymInt own = length.is_symbolic() ? length : length.min(rows);
  Tensor tail = x.narrow_symint(1, length - own, own);
  if (o.documents.defined() && rows > 0) {
    const Tensor changes = id_changes(o.documents.narrow_symint(1, length - own, own));
    // How many documents begin after this row.
    const Tensor past =
        at::constant_pad_nd(changes.to(at::kLong), {0, 1}).flip(1).cumsum(1).flip(1);
    tail = tail.masked_fill(past.ne(0).unsqueeze(-1), 0);  // though it were NaN
  }
  if (!own.is_symbolic() && own == rows) return tail.clone(at::MemoryFormat::Contiguous);
  // Rows from before x. Where they are known, no more than are kept: a state holds its memory.
  const int64_t earlier = own.is_symbolic() ? rows : rows - own.expect_int();
  const c10::SymInt from = earlier + own - rows;
  if (!o.state.defined()) {
    return at::constant_pad_nd(tail, {0, 0, earlier, 0}).narrow_symint(1, from, rows);
  }
  Tensor before = o.state.narrow(1, rows - earlier, earlier);
  if (o.documents.defined()) {
    const Tensor others = o.documents.ne(o.documents.narrow(1, 0, 1)).any(1);
    before = before.masked_fill(others.view({-1, 1, 1}), 0);
  }
  return at::cat({before, tail}, 1).narrow_symint(1, from, rows);
}

std::vector<Tensor> CausalConv1d::outputs(const Arguments& a, bool /*training*/) {
  return {contiguous_like(a.x)};
}

std::tuple<Tensor, Tensor> CausalConv1d::result(const Arguments& a, std::vector<Tensor> outputs) {
  return {std::move(outputs[0]), state_after(a)};
}

static const Define<CausalConv1d> causal_conv1d_operator;

std::tuple<Tensor, Tensor> causal_conv1d(const Tensor& x, const Tensor& weight,
                                         const CausalConv1dOptions& o) {
  return call<CausalConv1d>({x, weight, o}, o.backend);
}

}  // namespace headloom::ops
