// gated_norm on NVIDIA GPUs: which cases its kernels take (python/headloom/gpu/gated_norm.py).
#include "ops/cuda.h"
#include "ops/gated_norm/declaration.h"

namespace headloom::ops {

const CudaKernels<GatedNorm> gated_norm_cuda(triton_rows<GatedNorm>());

}  // namespace headloom::ops
