// wkv on NVIDIA GPUs.
#include "ops/cuda.h"
#include "ops/wkv/declaration.h"

namespace headloom::ops {

static const CudaKernels<Wkv> wkv_cuda({.limits = "without documents, by flash-linear-attention",
                                        .unsupported = fla_reason<Wkv>});

}  // namespace headloom::ops
