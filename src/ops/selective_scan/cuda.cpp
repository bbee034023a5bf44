// selective_scan on NVIDIA GPUs: which cases mamba-ssm takes (python/headloom/gpu/libraries.py).
#include "ops/cuda.h"
#include "ops/selective_scan/declaration.h"

namespace headloom::ops {
namespace {

const char* mamba_reason(const SelectiveScan::Arguments& a) {
  if (!has_cuda_kernels<SelectiveScan>()) {
    return "the kernels for NVIDIA GPUs are those of mamba-ssm, which Python must find";
  }
  if (a.options.documents.defined()) return "mamba-ssm has no documents in a batch";
  if (a.options.state.defined()) return "mamba-ssm has no state before the first position";
  if (a.A.sym_size(1) > 256) return "mamba-ssm has at most 256 states a channel";
  return nullptr;
}

const CudaKernels<SelectiveScan> selective_scan_cuda(
    {.limits = "without documents and initial state, by mamba-ssm", .unsupported = mamba_reason});

}  // namespace
}  // namespace headloom::ops
