#include "ops/aft/op.h"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include "ops/aft/conv.h"
#include "ops/aft/fused.h"
#include "ops/check.h"
#include "ops/dispatch.h"
#include "ops/wkv/fused.h"

namespace headloom::ops {
namespace {

using at::Tensor;
using Optional = std::optional<Tensor>;
using Result = std::tuple<Tensor, Tensor>;

constexpr const char* kOp = "aft";

bool stateful(const AftOptions& o) { return o.causal && (o.form == "simple" || o.form == "local"); }

void check_bias(const Tensor& q, const AftOptions& o) {
  if (o.form == "simple") {
    TORCH_CHECK_VALUE(!o.bias.defined(), "aft: bias is given, but form \"simple\" has none.");
    return;
  }
  TORCH_CHECK_VALUE(o.bias.defined() && o.bias.dim() == 2, "aft: bias has shape ",
                    o.bias.defined() ? c10::str(o.bias.sym_sizes()) : "none", ", form \"", o.form,
                    "\" expects ",
                    o.form == "full"    ? "[L, L]"
                    : o.form == "local" ? "[L, W]"
                                        : "[H, W]",
                    ".");
  TORCH_CHECK_TYPE(o.bias.is_floating_point(), "aft: bias has dtype ", o.bias.scalar_type(),
                   ", expected a floating type.");
  check_device(kOp, o.bias, "bias", q);
  const c10::SymInt rows = o.bias.sym_size(0), columns = o.bias.sym_size(1);
  if (o.form == "conv") {
    TORCH_CHECK_VALUE(rows >= 1 && q.sym_size(2) % rows == 0, "aft: bias has ", rows,
                      " heads, expected a divisor of the ", q.sym_size(2), " channels.");
  } else {
    // Without a sum that could overflow.
    TORCH_CHECK_VALUE(rows - q.sym_size(1) >= o.offset, "aft: bias is for ", rows,
                      " positions, but the sequence has ", q.sym_size(1),
                      o.offset > 0 ? c10::str(" from offset ", o.offset, " on") : "", ".");
  }
  if (o.form == "full") {
    TORCH_CHECK_VALUE(columns == rows, "aft: bias has shape ", o.bias.sym_sizes(),
                      ", form \"full\" expects [L, L].");
  } else {
    TORCH_CHECK_VALUE(columns >= 1 && (o.causal || columns % 2 == 1), "aft: bias has ", columns,
                      " columns, expected ",
                      o.causal ? "at least 1." : "an odd number, 2W - 1, where it is not causal.");
  }
}

void check(const Tensor& q, const Tensor& k, const Tensor& v, const AftOptions& o) {
  TORCH_CHECK_VALUE(q.dim() == 3 && q.sym_size(1) >= 1, "aft: q has shape ", q.sym_sizes(),
                    ", expected [B, T, C] with T of at least 1.");
  TORCH_CHECK_TYPE(q.is_floating_point(), "aft: q has dtype ", q.scalar_type(),
                   ", expected a floating type.");
  check_shape(kOp, k, "k", q.sym_sizes(), "[B, T, C]");
  check_dtype(kOp, k, "k", q);
  check_shape(kOp, v, "v", q.sym_sizes(), "[B, T, C]");
  check_dtype(kOp, v, "v", q);
  TORCH_CHECK_VALUE(o.form == "simple" || o.form == "local" || o.form == "full" || o.form == "conv",
                    "aft: form is \"", o.form,
                    "\", expected \"simple\", \"local\", \"full\" or \"conv\".");
  TORCH_CHECK_VALUE(o.offset >= 0, "aft: offset is ", o.offset, ", expected at least 0.");
  check_bias(q, o);
  const c10::SymInt batch = q.sym_size(0), length = q.sym_size(1);
  if (o.lengths.defined()) {
    check_ids(kOp, o.lengths, "lengths", q);
    check_shape(kOp, o.lengths, "lengths", {batch}, "[B]");
  }
  if (o.documents.defined()) {
    check_ids(kOp, o.documents, "documents", q);
    check_shape(kOp, o.documents, "documents", {batch, length}, "[B, T]");
  }
  if (o.state.defined()) {
    TORCH_CHECK_VALUE(stateful(o),
                      "aft: state is given, but only causal \"simple\" and \"local\" "
                      "have one.");
    const c10::SymInt rows = o.form == "simple" ? c10::SymInt(3) : 2 * o.bias.sym_size(1) + 1;
    check_shape(kOp, o.state, "state", {batch, rows, q.sym_size(2)}, "[B, 3 + 2(W - 1), C]");
    check_device(kOp, o.state, "state", q);
    const auto wide = q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    TORCH_CHECK_TYPE(o.state.scalar_type() == wide, "aft: state has dtype ", o.state.scalar_type(),
                     ", expected ", wide, ".");
  }
  check_backend(kOp, o.backend);
}

Result aft_op(const Tensor& q, const Tensor& k, const Tensor& v, std::string_view form,
              const Optional& bias, bool causal, const Optional& lengths, const Optional& documents,
              const Optional& state, int64_t offset, std::optional<std::string_view> backend) {
  AftOptions o;
  o.form = std::string(form);
  o.bias = bias.value_or(Tensor());
  o.causal = causal;
  o.lengths = lengths.value_or(Tensor());
  o.documents = documents.value_or(Tensor());
  o.state = state.value_or(Tensor());
  o.offset = offset;
  if (backend) o.backend = std::string(*backend);
  check(q, k, v, o);
  const char* reason =
      stateful(o) ? kernels_unsupported(q) : "only causal \"simple\" and \"local\" are fused";
  const bool fused = runs_fused(kOp, o.backend, reason);
  if (o.form == "conv" && !o.documents.defined() && o.backend != "reference") {
    return aft_conv(q, k, v, o);
  }
  if (!fused) return aft_reference(q, k, v, o);
  if (o.form == "local") return aft_local_fused(q, k, v, o);
  // Without decay and bonus wkv is the causal AFT-simple.
  const Tensor none = at::zeros_symint({q.sym_size(2)}, q.options().dtype(at::kFloat));
  WkvOptions w;
  w.receptance = q;
  w.state = o.state;
  w.documents = o.documents;
  return wkv_fused(k, v, none, none, w);
}

Result call(const Tensor& q, const Tensor& k, const Tensor& v, std::string_view form,
            const Optional& bias, bool causal, const Optional& lengths, const Optional& documents,
            const Optional& state, int64_t offset, std::optional<std::string_view> backend) {
  static const auto op = dispatched<decltype(aft_op)>("headloom::aft");
  return op.call(q, k, v, form, bias, causal, lengths, documents, state, offset, backend);
}

// The sequences are cast to the autocast type; the bias and states keep theirs.
Result aft_autocast(const Tensor& q, const Tensor& k, const Tensor& v, std::string_view form,
                    const Optional& bias, bool causal, const Optional& lengths,
                    const Optional& documents, const Optional& state, int64_t offset,
                    std::optional<std::string_view> backend) {
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::DispatchKey::AutocastCPU);
  const auto type = at::autocast::get_autocast_dtype(at::kCPU);
  const auto cast = [&](const Tensor& t) { return at::autocast::cached_cast(type, t, at::kCPU); };
  return call(cast(q), cast(k), cast(v), form, bias, causal, lengths, documents, state, offset,
              backend);
}

TORCH_LIBRARY_FRAGMENT(headloom, m) {
  m.def(
      "aft(Tensor q, Tensor k, Tensor v, str form=\"simple\", Tensor? bias=None, bool causal=True, "
      "Tensor? lengths=None, Tensor? documents=None, Tensor? state=None, int offset=0, str? "
      "backend=None) -> (Tensor output, Tensor state)",
      {at::Tag::pt2_compliant_tag});
}
TORCH_LIBRARY_IMPL(headloom, CompositeImplicitAutograd, m) { m.impl("aft", aft_op); }
TORCH_LIBRARY_IMPL(headloom, AutocastCPU, m) { m.impl("aft", aft_autocast); }

}  // namespace

Result aft(const Tensor& q, const Tensor& k, const Tensor& v, const AftOptions& o) {
  return call(q, k, v, o.form, optional_tensor(o.bias), o.causal, optional_tensor(o.lengths),
              optional_tensor(o.documents), optional_tensor(o.state), o.offset, o.backend);
}

}  // namespace headloom::ops
