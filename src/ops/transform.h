// Whether a call runs inside a transform of torch.func (grad, vmap), which refuses autograd
// functions written in C++: such calls go to an operator's reference.
#pragma once

#include <c10/core/impl/LocalDispatchKeySet.h>

namespace headloom::ops {

inline bool in_transform() {
  using c10::DispatchKey;
  static const c10::DispatchKeySet keys({DispatchKey::FuncTorchDynamicLayerFrontMode,
                                         DispatchKey::FuncTorchDynamicLayerBackMode,
                                         DispatchKey::FuncTorchVmapMode});
  return c10::impl::tls_local_dispatch_key_set().included_.has_any(keys);
}

}  // namespace headloom::ops
