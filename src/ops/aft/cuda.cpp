// aft on NVIDIA GPUs: which cases its kernels take (python/headloom/gpu/aft.py).
#include "ops/aft/declaration.h"
#include "ops/cuda.h"

namespace headloom::ops {
namespace {

const char* triton_reason(const Aft::Arguments& a) {
  if (const char* reason = triton_missing<Aft>(a)) return reason;
  if (!Aft::stateful(a.options)) return "only causal \"simple\" and \"local\" are fused";
  if (a.q.sym_numel() == 0) return "q is empty";
  // A block has 32 positions, of the bias's columns too.
  const auto positions =
      a.q.sym_size(1) + (a.options.bias.defined() ? a.options.bias.sym_size(1) : 0);
  if (TORCH_GUARD_OR_FALSE(positions.sym_gt(32 * (kMaxCudaBlocks - 1)))) {
    return "the sequence has more blocks of positions than a launch";
  }
  return TORCH_GUARD_OR_FALSE(a.q.sym_size(0).sym_gt(kMaxCudaBlocks))
             ? "the batch has more sequences than a launch has blocks"
             : nullptr;
}

const CudaKernels<Aft> aft_cuda(
    {.limits = "causal simple and local, with Triton", .unsupported = triton_reason});

}  // namespace
}  // namespace headloom::ops
