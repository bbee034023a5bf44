// dynamic_weights on its CPU kernels.
#include "ops/cpu.h"
#include "ops/dynamic_weights/declaration.h"
#include "ops/dynamic_weights/kernel.h"
#include "ops/linear/op.h"

namespace headloom::ops {
namespace {

const char* unsupported(const DynamicWeights::Arguments& a) {
  // Asked for their number, a graph that is traced for any would be bound to the answer.
  if (a.hidden.unsafeGetTensorImpl()->has_symbolic_sizes_strides()) {
    return "a graph for any number of rows has them by the definition";
  }
  if (a.hidden.size(0) * a.hidden.size(1) > kStreamedRows) return "there are more than 16 rows";
  if (a.w2.sym_size(3) > dynamic_weights_kernel::kMostWeights) {
    return "a group has more than 1024 weights";
  }
  return nullptr;
}

std::vector<Tensor> forward(const DynamicWeights::Arguments& a, bool training) {
  static dynamic_weights_kernel::Run* const kernel = HL_CHOOSE(dynamic_weights_kernel::run);
  Held held;
  std::vector<Tensor> y = DynamicWeights::outputs(a, training);
  kernel({.sides = a.w2.size(0),
          .groups = a.w2.size(1),
          .inner = a.w2.size(2),
          .rank = a.rank,
          .heads = a.w2.size(3) / (2 * a.rank),
          .type = kernel_type(a.hidden),
          .hidden = held.whole(a.hidden),
          .w2 = held.floats(a.w2),
          .y = y[0].data_ptr()},
         0, a.hidden.size(0) * a.hidden.size(1));
  return y;
}

const Kernels<DynamicWeights> dynamic_weights_cpu(
    {.limits = c10::str("up to ", kStreamedRows, " rows, where no gradient is wanted"),
     .unsupported = unsupported,
     .forward = forward});

}  // namespace
}  // namespace headloom::ops
