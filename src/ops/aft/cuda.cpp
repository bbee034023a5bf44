// aft on NVIDIA GPUs: which cases its kernels take (python/headloom/gpu/aft.py).
#include "ops/aft/declaration.h"
#include "ops/cuda.h"

namespace headloom::ops {
namespace {

const char* triton_reason(const Aft::Arguments& a) {
  if (const char* reason = triton_missing<Aft>(a)) return reason;
  if (!Aft::stateful(a.options)) return "only causal \"simple\" and \"local\" are fused";
  return a.q.sym_numel() == 0 ? "q is empty" : nullptr;
}

const CudaKernels<Aft> aft_cuda(
    {.limits = "causal simple and local, with Triton", .unsupported = triton_reason});

}  // namespace
}  // namespace headloom::ops
