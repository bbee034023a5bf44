// wkv on NVIDIA GPUs: which cases flash-linear-attention takes (python/headloom/gpu/libraries.py).
#include "ops/cuda.h"
#include "ops/wkv/declaration.h"

namespace headloom::ops {
namespace {

const char* fla_reason(const Wkv::Arguments& a) {
  if (!has_cuda_kernels<Wkv>()) return kNeedsFla;
  if (a.options.documents.defined()) return "flash-linear-attention has no documents in a batch";
  return nullptr;
}

const CudaKernels<Wkv> wkv_cuda(
    {.limits = "without documents, by flash-linear-attention", .unsupported = fla_reason});

}  // namespace
}  // namespace headloom::ops
