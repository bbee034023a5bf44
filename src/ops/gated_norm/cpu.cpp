// gated_norm on its CPU kernels.
#include "ops/cpu.h"
#include "ops/gated_norm/declaration.h"
#include "ops/gated_norm/kernel.h"

namespace headloom::ops {
namespace {

void run(gated_norm_kernel::Args args, const GatedNorm::Arguments& a) {
  Held held;
  args.width = a.x.size(-1);
  args.type = kernel_type(a.x);
  args.x = held.whole(a.x);
  args.gate = held.whole(a.gate);
  args.eps = held.whole<float>(a.eps);
  TORCH_CHECK(a.eps.numel() * args.width == a.x.numel(), "gated_norm: eps has ", a.eps.numel(),
              " values, expected one for each row of x, ", a.x.sizes(), ".");
  static gated_norm_kernel::Run* const kernel = HL_CHOOSE(gated_norm_kernel::run);
  at::parallel_for(0, a.eps.numel(), std::max<int64_t>(1, 4096 / args.width),
                   [&](int64_t begin, int64_t end) { kernel(args, begin, end); });
}

std::vector<Tensor> forward(const GatedNorm::Arguments& a, bool training) {
  std::vector<Tensor> y = GatedNorm::outputs(a, training);
  gated_norm_kernel::Args args{};
  args.y = y[0].data_ptr();
  run(args, a);
  return y;
}

void backward(const GatedNorm::Arguments& a, Backward<GatedNorm>& b) {
  const Tensor grad = b.grads[0].contiguous();
  b.gradients.x = contiguous_like(a.x);
  b.gradients.gate = contiguous_like(a.gate);
  gated_norm_kernel::Args args{};
  args.grad = grad.const_data_ptr();
  args.grad_x = b.gradients.x.data_ptr();
  args.grad_gate = b.gradients.gate.data_ptr();
  run(args, a);
}

const Kernels<GatedNorm> gated_norm_cpu({.forward = forward, .backward = backward});

}  // namespace
}  // namespace headloom::ops
