// gated_norm on NVIDIA GPUs: which cases its kernels take (python/headloom/gpu/gated_norm.py).
#include "ops/cuda.h"
#include "ops/gated_norm/declaration.h"

namespace headloom::ops {
namespace {

// Longer rows leave a thread too few registers.
constexpr int64_t kMaxTritonWidth = 8192;

const char* triton_reason(const GatedNorm::Arguments& a) {
  if (const char* reason = triton_missing<GatedNorm>(a)) return reason;
  return a.x.sym_size(-1) > kMaxTritonWidth ? "rows have more than 8192 values" : nullptr;
}

const CudaKernels<GatedNorm> gated_norm_cuda(
    {.limits = c10::str("rows of up to ", kMaxTritonWidth, " values, with Triton"),
     .unsupported = triton_reason});

}  // namespace
}  // namespace headloom::ops
