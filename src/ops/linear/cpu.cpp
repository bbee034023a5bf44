// linear on its CPU kernels.
#include "ops/cpu.h"
#include "ops/linear/declaration.h"
#include "ops/linear/int4_cpu.h"
#include "ops/linear/kernel.h"

namespace headloom::ops {
namespace {

const char* unsupported(const Linear::Arguments& a) {
  if (a.weight.scalar_type() == at::kByte) return nullptr;
  const bool few = a.x.sym_numel() <= a.weight.sym_size(1) * kStreamedRows;
  return few ? nullptr : "there are more than 16 rows";
}

std::vector<Tensor> forward(const Linear::Arguments& a, bool training) {
  if (a.weight.scalar_type() == at::kByte) return int4_forward(a);
  static linear_kernel::Run* const kernel = HL_CHOOSE(linear_kernel::run);
  Held held;
  std::vector<Tensor> y = Linear::outputs(a, training);
  const int64_t in = a.weight.size(1), out = a.weight.size(0);
  const linear_kernel::Args args{.rows = out > 0 ? y[0].numel() / out : 0,
                                 .in = in,
                                 .type = kernel_type(a.x),
                                 .weight_type = kernel_type(a.weight),
                                 .x = held.whole(a.x),
                                 .weight = held.whole(a.weight),
                                 .scale = held.whole<float>(a.scale),
                                 .bias = held.whole(a.bias),
                                 .out = out,
                                 .y = y[0].data_ptr()};
  for_runs_of_outputs(out, in * a.weight.element_size(),
                      [&](int64_t begin, int64_t end) { kernel(args, begin, end); });
  return y;
}

const Kernels<Linear> linear_cpu(
    {.limits = c10::str("int8 weights too, up to ", kStreamedRows,
                        " rows, and weights of four bits, where no gradient is wanted"),
     .unsupported = unsupported,
     .forward = forward});

}  // namespace
}  // namespace headloom::ops
