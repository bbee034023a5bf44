// The positionwise operators on NVIDIA GPUs: which cases their kernels take (rms_norm.py, rotary.py
// and swiglu.py of python/headloom/gpu). The definition of gelu_tanh is one kernel of PyTorch's.
#include "ops/cuda.h"
#include "ops/positionwise/declaration.h"

namespace headloom::ops {
namespace {

const CudaKernels<RmsNorm> rms_norm_cuda(triton_rows<RmsNorm>());
const CudaKernels<Rotary> rotary_cuda(
    {.limits = "with Triton", .unsupported = triton_missing<Rotary>});
const CudaKernels<Swiglu> swiglu_cuda(
    {.limits = "with Triton", .unsupported = triton_missing<Swiglu>});

}  // namespace
}  // namespace headloom::ops
