#include "mixers/check.h"

#include <c10/core/impl/LocalDispatchKeySet.h>

#include "core/error.h"
#include "ops/check.h"

namespace headloom {
namespace {

const c10::DispatchKeySet& modes() {
  using c10::DispatchKey;
  static const c10::DispatchKeySet keys(
      {DispatchKey::Python, DispatchKey::PythonTLSSnapshot, DispatchKey::PreDispatch,
       DispatchKey::Functionalize, DispatchKey::FuncTorchDynamicLayerFrontMode,
       DispatchKey::FuncTorchDynamicLayerBackMode, DispatchKey::FuncTorchBatched,
       DispatchKey::FuncTorchVmapMode, DispatchKey::FuncTorchGradWrapper});
  return keys;
}

}  // namespace

bool is_transforming() {
  return c10::impl::tls_local_dispatch_key_set().included_.has_any(modes());
}

bool is_transformed(const Tensor& t) { return t.defined() && t.key_set().has_any(modes()); }

bool has_numbers(const Tensor& t) { return !is_transforming() && !is_transformed(t) && t.is_cpu(); }

void check_dense(const Module& module, const char* name, const Tensor& t) {
  if (!ops::is_dense(t)) usage_error(module.what(), ": ", name, " ", ops::not_dense(t), ".");
}

void check_features(const Module& module, const char* name, const Tensor& t, int64_t width) {
  if (!t.defined())
    usage_error(module.what(), ": ", name, " is missing, expected a tensor [B, T, width].");
  check_dense(module, name, t);
  if (t.dim() != 3 || t.sym_size(2) != width) {
    usage_error(module.what(), ": ", name, " must be [B, T, width = ", width, "]; it is ",
                t.sym_sizes(), ".");
  }
  if (t.sym_size(1) == 0) {
    usage_error(module.what(), ": ", name,
                " must have at least one position (T of [B, T, width]); it is ", t.sym_sizes(),
                ".");
  }
  if (!t.is_floating_point()) {
    usage_error(module.what(), ": ", name, " must be of a floating type; it is ", t.scalar_type(),
                ".");
  }
}

void check_ids(const Module& module, const char* name, const Tensor& t,
               c10::SymIntArrayRef expected, const char* legend, const Tensor& x) {
  check_dense(module, name, t);
  if (t.sym_sizes() != expected) {
    usage_error(module.what(), ": ", name, " must be ", legend, " = ", expected, "; it is ",
                t.sym_sizes(), ".");
  }
  if (t.scalar_type() != at::kLong) {
    usage_error(module.what(), ": ", name, " must be int64 (torch.long); it is ", t.scalar_type(),
                ".");
  }
  if (t.device() != x.device()) {
    usage_error(module.what(), ": ", name, " must be on ", x.device(),
                " as the input is; it is on ", t.device(), ".");
  }
}

void check_lengths(const Module& module, const char* name, const Tensor& lengths, const Tensor& x) {
  check_ids(module, name, lengths, {x.sym_size(0)}, "[B]", x);
  if (!has_numbers(lengths) || lengths.numel() == 0) return;
  const auto [low, high] = at::aminmax(lengths);
  const int64_t least = low.item<int64_t>(), most = high.item<int64_t>();
  if (least < 0 || most > x.size(1)) {
    usage_error(module.what(), ": ", name, " must be from 0 to the ", x.size(1),
                " positions that there are; one is ", least < 0 ? least : most, ".");
  }
}

}  // namespace headloom
