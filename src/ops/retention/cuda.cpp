// retention on NVIDIA GPUs.
#include "ops/cuda.h"
#include "ops/retention/declaration.h"

namespace headloom::ops {

static const CudaKernels<Retention> retention_cuda(
    {.limits = "chunkwise, without documents, float32 only where TF32 is allowed, by "
                "flash-linear-attention",
     .unsupported = fla_reason<Retention>});

}  // namespace headloom::ops
