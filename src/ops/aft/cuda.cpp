// aft on NVIDIA GPUs: which cases its kernels take (python/headloom/gpu/aft.py).
#include "ops/aft/declaration.h"
#include "ops/cuda.h"

namespace headloom::ops {
namespace {

const char* triton_reason(const Aft::Arguments& a) {
  if (const char* reason = triton_missing<Aft>()) return reason;
  return Aft::stateful(a.options) ? nullptr : "only causal \"simple\" and \"local\" are fused";
}

const CudaKernels<Aft> aft_cuda(
    {.limits = "causal simple and local, with Triton", .unsupported = triton_reason});

}  // namespace
}  // namespace headloom::ops
