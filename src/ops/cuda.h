// Kernels for NVIDIA GPUs: the Python package registers them with the dispatcher where what they are
// written in is installed (python/headloom/gpu). Here is how an operator says which cases they take.
#pragma once

#include "ops/operator.h"

namespace headloom::ops {

// Whether X_fused has kernels for NVIDIA GPUs.
template <typename Op>
bool has_cuda_kernels() {
  static const c10::OperatorHandle fused = c10::Dispatcher::singleton().findSchemaOrThrow(
      (std::string("headloom::") + Op::kName + "_fused").c_str(), "");
  return fused.hasKernelForDispatchKey(c10::DispatchKey::CUDA);
}

// `const CudaKernels<Op> x_cuda({.limits = ..., .unsupported = ...})`, without `forward` and
// `backward`: the dispatcher has them.
template <typename Op>
struct CudaKernels {
  explicit CudaKernels(Kernel<Op> kernel) {
    kernel.device = c10::kCUDA;
    kernel.types = {at::kFloat, at::kHalf, at::kBFloat16};
    detail::kernels<Op>().push_back(std::move(kernel));
  }
};

// For the operators whose kernels are those of other packages.
constexpr const char* kNeedsFla =
    "the kernels for NVIDIA GPUs are those of flash-linear-attention, which Python must find";
constexpr const char* kNeedsMamba =
    "the kernels for NVIDIA GPUs are those of mamba-ssm, which Python must find";

}  // namespace headloom::ops
