// The positionwise operators on NVIDIA GPUs: which cases their kernels take (rms_norm.py, rotary.py
// and swiglu.py of python/headloom/gpu). The definition of gelu_tanh is one kernel of PyTorch's.
#include "ops/cuda.h"
#include "ops/positionwise/declaration.h"

namespace headloom::ops {
namespace {

// Longer rows leave a thread too few registers.
constexpr int64_t kMaxNormWidth = 8192;

const char* norm_reason(const RmsNorm::Arguments& a) {
  if (const char* reason = triton_missing<RmsNorm>(a)) return reason;
  return a.x.sym_size(-1) > kMaxNormWidth ? "rows have more than 8192 values" : nullptr;
}

const CudaKernels<RmsNorm> rms_norm_cuda(
    {.limits = c10::str("rows of up to ", kMaxNormWidth, " values, with Triton"),
     .unsupported = norm_reason});
const CudaKernels<Rotary> rotary_cuda(
    {.limits = "with Triton", .unsupported = triton_missing<Rotary>});
const CudaKernels<Swiglu> swiglu_cuda(
    {.limits = "with Triton", .unsupported = triton_missing<Swiglu>});

}  // namespace
}  // namespace headloom::ops
