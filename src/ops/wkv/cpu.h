// The CPU kernels of wkv, which aft's causal "simple" also runs on.
#pragma once

#include "ops/wkv/declaration.h"

namespace headloom::ops {

std::vector<Tensor> wkv_forward_cpu(const Wkv::Arguments& a, bool training);
void wkv_backward_cpu(const Wkv::Arguments& a, Backward<Wkv>& b);

}  // namespace headloom::ops
