// retention on NVIDIA GPUs: which cases flash-linear-attention takes (python/headloom/gpu/libraries.py).
#include "ops/cuda.h"
#include "ops/retention/declaration.h"

namespace headloom::ops {
namespace {

const char* fla_reason(const Retention::Arguments& a) {
  if (!has_cuda_kernels<Retention>()) return kNeedsFla;
  if (a.options.form != "chunkwise") return "flash-linear-attention has no other form for it";
  if (a.options.documents.defined()) return "flash-linear-attention has no documents in a batch";
  return nullptr;
}

const CudaKernels<Retention> retention_cuda(
    {.limits = "chunkwise and without documents, by flash-linear-attention",
     .unsupported = fla_reason});

}  // namespace
}  // namespace headloom::ops
