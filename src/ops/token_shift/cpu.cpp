// token_shift on its CPU kernels.
#include "ops/cpu.h"
#include "ops/token_shift/declaration.h"
#include "ops/token_shift/kernel.h"

namespace headloom::ops {
namespace {

using token_shift_kernel::kMixes;

struct TokenShiftCall : Held {
  token_shift_kernel::Args args;

  explicit TokenShiftCall(const TokenShift::Arguments& a) {
    args.B = a.x.size(0);
    args.T = a.x.size(1);
    args.C = a.x.size(2);
    args.N = a.mix.size(0);
    args.type = kernel_type(a.x);
    args.x = sequence(a.x);
    args.mix = floats(a.mix);
    args.last = whole(a.options.last);
    args.documents = whole<int64_t>(a.options.documents);
  }
  void run(token_shift_kernel::Run* kernel, int64_t workers) const {
    for_each_share(args.B * args.T, workers, [&](int64_t worker, int64_t begin, int64_t end) {
      kernel(args, {begin, end, worker});
    });
  }
};

// Workers for what is a pass over memory: none for less than a page or two.
int64_t workers_for(const Tensor& x) {
  return std::clamp<int64_t>(x.numel() / 4096, 1, thread_count());
}

const char* unsupported(const TokenShift::Arguments& a) {
  return a.mix.size(0) > kMixes ? "there are more than 4 mixes" : nullptr;
}

std::vector<Tensor> forward(const TokenShift::Arguments& a, bool training) {
  TokenShiftCall call(a);
  std::vector<Tensor> out = TokenShift::outputs(a, training);
  for (size_t i = 0; i < out.size(); ++i) call.args.out[i] = out[i].data_ptr();
  call.run(HL_CHOOSE(token_shift_kernel::token_shift_forward), workers_for(a.x));
  return out;
}

void backward(const TokenShift::Arguments& a, Backward<TokenShift>& b) {
  TokenShiftCall call(a);
  const int64_t workers = workers_for(a.x);
  const Tensor sums =
      at::zeros({workers, a.mix.size(0), a.mix.size(1)}, a.x.options().dtype(at::kFloat));
  for (size_t i = 0; i < b.grads.size(); ++i) call.args.grad_out[i] = call.sequence(b.grads[i]);
  b.gradients.x = contiguous_like(a.x);
  call.args.grad_x = b.gradients.x.data_ptr();
  call.args.grad_mix = sums.data_ptr<float>();
  if (a.options.last.defined()) {
    b.gradients.options.last = contiguous_like(a.options.last);
    call.args.grad_last = b.gradients.options.last.data_ptr();
  }
  call.run(HL_CHOOSE(token_shift_kernel::token_shift_backward), workers);
  b.gradients.mix = sums.sum(0);
}

const Kernels<TokenShift> token_shift_cpu({.limits = "up to 4 mixes",
                                           .unsupported = unsupported,
                                           .forward = forward,
                                           .backward = backward});

}  // namespace
}  // namespace headloom::ops
