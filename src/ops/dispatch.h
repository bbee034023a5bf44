// How operators reach one another through the dispatcher, and what no fused kernel runs.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <optional>

namespace headloom::ops {

// The operator "headloom::name", of which F is the signature: decltype(a kernel of it). Finding it
// takes a while; keep it in a static.
template <typename F>
auto dispatched(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<F>();
}

inline std::optional<at::Tensor> optional_tensor(const at::Tensor& t) {
  return t.defined() ? std::optional<at::Tensor>(t) : std::nullopt;
}

// Fresh memory of t's sizes and type, contiguous whatever t's strides are.
inline at::Tensor contiguous_like(const at::Tensor& t) {
  return at::empty_symint(t.sym_sizes(), t.options().memory_format(at::MemoryFormat::Contiguous));
}

// Whether a call runs inside a transform of torch.func (grad, vmap), which refuses autograd
// functions written in C++: such calls go to an operator's reference.
inline bool in_transform() {
  using c10::DispatchKey;
  static const c10::DispatchKeySet keys({DispatchKey::FuncTorchDynamicLayerFrontMode,
                                         DispatchKey::FuncTorchDynamicLayerBackMode,
                                         DispatchKey::FuncTorchVmapMode});
  return c10::impl::tls_local_dispatch_key_set().included_.has_any(keys);
}

// Why no fused kernel takes a call whose leading argument is t; null if one may.
inline const char* kernels_unsupported(const at::Tensor& t) {
  if (in_transform()) return "it runs inside a transform of torch.func";
  if (!t.device().is_cpu()) return "there is no fused kernel for this device";
  if (t.scalar_type() != at::kFloat && t.scalar_type() != at::kBFloat16) {
    return "the fused kernels take float32 and bfloat16 only";
  }
  return nullptr;
}

}  // namespace headloom::ops
