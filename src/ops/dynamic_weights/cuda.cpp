// dynamic_weights on NVIDIA GPUs: its kernels take every case
// (python/headloom/gpu/dynamic_weights.py).
#include "ops/cuda.h"
#include "ops/dynamic_weights/declaration.h"

namespace headloom::ops {

const CudaKernels<DynamicWeights> dynamic_weights_cuda(
    {.limits = "with Triton", .unsupported = triton_missing<DynamicWeights>});

}  // namespace headloom::ops
