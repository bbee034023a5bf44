// causal_conv1d on its CPU kernels.
#include "ops/cpu.h"
#include "ops/causal_conv1d/declaration.h"
#include "ops/causal_conv1d/kernel.h"

namespace headloom::ops {
namespace {

struct CausalConv1dCall : Held {
  causal_conv1d_kernel::Args args;
  int64_t workers = 1;

  explicit CausalConv1dCall(const CausalConv1d::Arguments& a) {
    args.B = a.x.size(0);
    args.L = a.x.size(1);
    args.C = a.x.size(2);
    args.taps = a.weight.size(1);
    args.type = kernel_type(a.x);
    args.silu = a.options.silu;
    args.x = sequence(a.x);
    args.weight = floats(a.weight.flip(1).t());
    args.bias = floats(a.options.bias);
    args.state = whole(a.options.state);
    args.documents = whole<int64_t>(a.options.documents);
    workers = std::min(thread_count(), std::max<int64_t>(args.B * args.L, 1));
  }
  void run(bool backward) const {
    static causal_conv1d_kernel::Run* const kernel = HL_CHOOSE(causal_conv1d_kernel::run);
    const Tensor scratch = at::empty({workers, backward ? args.taps * args.C : 0}, at::kFloat);
    float* const data = scratch.data_ptr<float>();
    for_each_share(args.B * args.L, workers, [&](int64_t worker, int64_t begin, int64_t end) {
      kernel(args, {.backward = backward,
                    .worker = worker,
                    .begin = begin,
                    .end = end,
                    .scratch = data + worker * scratch.stride(0)});
    });
  }
};

const char* unsupported(const CausalConv1d::Arguments& a) {
  return a.weight.size(1) > causal_conv1d_kernel::kMaxTaps ? "a filter has more than 8 taps"
                                                           : nullptr;
}

std::vector<Tensor> forward(const CausalConv1d::Arguments& a, bool training) {
  CausalConv1dCall call(a);
  std::vector<Tensor> y = CausalConv1d::outputs(a, training);
  call.args.out = y[0].data_ptr();
  call.run(false);
  return y;
}

void backward(const CausalConv1d::Arguments& a, Backward<CausalConv1d>& b) {
  CausalConv1dCall call(a);
  const auto real = a.x.options().dtype(at::kFloat);
  const Tensor grad_weight = at::zeros({call.workers, call.args.taps, call.args.C}, real);
  const Tensor grad_bias = at::zeros({call.workers, call.args.C}, real);
  b.gradients.x = contiguous_like(a.x);
  call.args.grad_out = call.sequence(b.grads[0]);
  call.args.grad_x = b.gradients.x.data_ptr();
  call.args.grad_weight = grad_weight.data_ptr<float>();
  call.args.grad_bias = grad_bias.data_ptr<float>();
  if (a.options.state.defined()) {
    b.gradients.options.state = contiguous_like(a.options.state);
    call.args.grad_state = b.gradients.options.state.data_ptr();
  }
  call.run(true);
  b.gradients.weight = grad_weight.sum(0).t().flip(1);
  b.gradients.options.bias = grad_bias.sum(0);
}

const Kernels<CausalConv1d> causal_conv1d_cpu({.limits = "up to 8 taps",
                                               .unsupported = unsupported,
                                               .forward = forward,
                                               .backward = backward});

}  // namespace
}  // namespace headloom::ops
