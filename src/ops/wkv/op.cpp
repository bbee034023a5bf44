#include "ops/wkv/op.h"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include "ops/check.h"
#include "ops/dispatch.h"
#include "ops/wkv/fused.h"

namespace headloom::ops {
namespace {

using at::Tensor;
using Result = std::tuple<Tensor, Tensor>;

constexpr const char* kOp = "wkv";

void check(const Tensor& k, const Tensor& v, const Tensor& rate, const Tensor& bonus,
           const WkvOptions& o) {
  TORCH_CHECK_VALUE(k.dim() == 3 && k.sym_size(1) >= 1, "wkv: k has shape ", k.sym_sizes(),
                    ", expected [B, T, C] with T of at least 1.");
  TORCH_CHECK_TYPE(k.is_floating_point(), "wkv: k has dtype ", k.scalar_type(),
                   ", expected a floating type.");
  const auto like_k = [&](const Tensor& t, const char* name) {
    check_shape(kOp, t, name, k.sym_sizes(), "[B, T, C]");
    check_dtype(kOp, t, name, k, "k");
  };
  like_k(v, "v");
  if (o.receptance.defined()) like_k(o.receptance, "receptance");
  const c10::SymInt batch = k.sym_size(0), length = k.sym_size(1), channels = k.sym_size(2);
  const auto parameter = [&](const Tensor& t, const char* name) {
    check_shape(kOp, t, name, {channels}, "[C]");
    check_device(kOp, t, name, k, "k");
    TORCH_CHECK_TYPE(t.is_floating_point(), "wkv: ", name, " has dtype ", t.scalar_type(),
                     ", expected a floating type.");
  };
  parameter(rate, "rate");
  parameter(bonus, "bonus");
  if (o.state.defined()) {
    check_shape(kOp, o.state, "state", {batch, 3, channels}, "[B, 3, C]");
    check_device(kOp, o.state, "state", k, "k");
    const auto wide = k.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    TORCH_CHECK_TYPE(o.state.scalar_type() == wide, "wkv: state has dtype ", o.state.scalar_type(),
                     ", expected ", wide, ".");
  }
  if (o.documents.defined()) {
    check_ids(kOp, o.documents, "documents", k, "k");
    check_shape(kOp, o.documents, "documents", {batch, length}, "[B, T]");
  }
  check_backend(kOp, o.backend);
}

// Composite: the reference is differentiable ATen code, the fused kernels an operator of their own
// below this one.
Result wkv_op(const Tensor& k, const Tensor& v, const Tensor& rate, const Tensor& bonus,
              const std::optional<Tensor>& receptance, const std::optional<Tensor>& state,
              const std::optional<Tensor>& documents, std::optional<std::string_view> backend) {
  WkvOptions o = {.receptance = receptance.value_or(Tensor()),
                  .state = state.value_or(Tensor()),
                  .documents = documents.value_or(Tensor()),
                  .backend = {}};
  if (backend) o.backend = std::string(*backend);
  check(k, v, rate, bonus, o);
  const char* reason = kernels_unsupported(k);
  if (!runs_fused(kOp, o.backend, reason)) return wkv_reference(k, v, rate, bonus, o);
  return wkv_fused(k, v, rate.to(at::kFloat), bonus.to(at::kFloat), o);
}

Result call(const Tensor& k, const Tensor& v, const Tensor& rate, const Tensor& bonus,
            const std::optional<Tensor>& receptance, const std::optional<Tensor>& state,
            const std::optional<Tensor>& documents, std::optional<std::string_view> backend) {
  static const auto op = dispatched<decltype(wkv_op)>("headloom::wkv");
  return op.call(k, v, rate, bonus, receptance, state, documents, backend);
}

// The sequences are cast to the autocast type; rates and states keep theirs.
Result wkv_autocast(const Tensor& k, const Tensor& v, const Tensor& rate, const Tensor& bonus,
                    const std::optional<Tensor>& receptance, const std::optional<Tensor>& state,
                    const std::optional<Tensor>& documents,
                    std::optional<std::string_view> backend) {
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::DispatchKey::AutocastCPU);
  const auto type = at::autocast::get_autocast_dtype(at::kCPU);
  const auto cast = [&](const Tensor& t) { return at::autocast::cached_cast(type, t, at::kCPU); };
  return call(cast(k), cast(v), rate, bonus,
              receptance ? std::optional<Tensor>(cast(*receptance)) : std::nullopt, state,
              documents, backend);
}

TORCH_LIBRARY_FRAGMENT(headloom, m) {
  m.def(
      "wkv(Tensor k, Tensor v, Tensor rate, Tensor bonus, Tensor? receptance=None, "
      "Tensor? state=None, Tensor? documents=None, str? backend=None) -> (Tensor output, Tensor "
      "state)",
      {at::Tag::pt2_compliant_tag});
}
TORCH_LIBRARY_IMPL(headloom, CompositeImplicitAutograd, m) { m.impl("wkv", wkv_op); }
TORCH_LIBRARY_IMPL(headloom, AutocastCPU, m) { m.impl("wkv", wkv_autocast); }

}  // namespace

Result wkv(const Tensor& k, const Tensor& v, const Tensor& rate, const Tensor& bonus,
           const WkvOptions& o) {
  return call(k, v, rate, bonus, optional_tensor(o.receptance), optional_tensor(o.state),
              optional_tensor(o.documents), o.backend);
}

}  // namespace headloom::ops
