// causal_conv1d on NVIDIA GPUs: which cases flash-linear-attention takes
// (python/headloom/gpu/libraries.py).
#include "ops/causal_conv1d/declaration.h"
#include "ops/cuda.h"

namespace headloom::ops {
namespace {

// Its kernels are unrolled over the taps, and the one of the state's gradient over pairs of taps.
constexpr int64_t kMaxFlaTaps = 8;

const char* fla_conv_reason(const CausalConv1d::Arguments& a) {
  if (const char* reason = fla_reason<CausalConv1d>(a)) return reason;
  return a.weight.sym_size(1) > kMaxFlaTaps ? "a filter has more than 8 taps" : nullptr;
}

const CudaKernels<CausalConv1d> causal_conv1d_cuda(
    {.limits = c10::str("up to ", kMaxFlaTaps, " taps and without documents, ",
                        "by flash-linear-attention"),
     .unsupported = fla_conv_reason});

}  // namespace
}  // namespace headloom::ops
