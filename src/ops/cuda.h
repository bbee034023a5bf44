// Kernels for NVIDIA GPUs: the Python package registers them with the dispatcher where what they
// are written in is installed (python/headloom/gpu). Here is how an operator says which cases they
// take.
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

// A launch has so many blocks in its second and in its third direction.
constexpr int64_t kMaxCudaBlocks = 65535;

// Why an operator whose kernels are written in Triton runs by its reference, or null.
template <typename Op>
const char* triton_missing(const typename Op::Arguments& /*a*/) {
  return has_cuda_kernels<Op>()
             ? nullptr
             : "the kernels for NVIDIA GPUs need Python and Triton (pip install triton)";
}

// Kernels in Triton of which a program has whole rows of x in its registers.
template <typename Op>
Kernel<Op> triton_rows() {
  constexpr int64_t kMost = 8192;  // longer rows leave a thread too few registers
  return {.limits = c10::str("rows of up to ", kMost, " values, with Triton"),
          .unsupported = [](const typename Op::Arguments& a) -> const char* {
            if (const char* reason = triton_missing<Op>(a)) return reason;
            return a.x.sym_size(-1) > kMost ? "rows have more than 8192 values" : nullptr;
          }};
}

// Why flash-linear-attention does not take a case, for the operators whose kernels are its own
// (python/headloom/gpu/libraries.py), or null.
template <typename Op>
const char* fla_reason(const typename Op::Arguments& a) {
  if (!has_cuda_kernels<Op>()) {
    return "the kernels for NVIDIA GPUs are those of flash-linear-attention, of which Python must "
           "find 0.6.0 or newer";
  }
  if constexpr (requires { a.options.form; }) {
    if (a.options.form != "chunkwise") return "flash-linear-attention has no other form for it";
    const auto precision = at::globalContext().float32Precision(at::Float32Backend::CUDA,
                                                                at::Float32Op::MATMUL);
    if (a.q.scalar_type() == at::kFloat && precision != at::Float32Precision::TF32) {
      return "flash-linear-attention multiplies float32 in TF32, which "
             "torch.backends.cuda.matmul.allow_tf32 forbids";
    }
  }
  if (a.options.documents.defined()) return "flash-linear-attention has no documents in a batch";
  return nullptr;
}

}  // namespace headloom::ops
