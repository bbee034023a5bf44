#include "ops/wkv/cpu.h"

#include "ops/cpu.h"
#include "ops/wkv/kernel.h"

namespace headloom::ops {
namespace {

struct WkvCall : Held {
  wkv_kernel::Args args;

  explicit WkvCall(const Wkv::Arguments& a) {
    args.B = a.k.size(0);
    args.T = a.k.size(1);
    args.C = a.k.size(2);
    args.type = kernel_type(a.k);
    args.k = sequence(a.k);
    args.v = sequence(a.v);
    args.r = sequence(a.options.receptance);
    args.decay = floats(a.rate);
    args.bonus = floats(a.bonus);
    args.state = whole<float>(a.options.state);
    args.documents = whole<int64_t>(a.options.documents);
  }

  // All channels of all batch elements, in as many tasks as there are threads or more.
  void run(wkv_kernel::Run* kernel, int64_t scratch) const {
    using wkv_kernel::kChannels;
    const int64_t groups = (args.C + kChannels - 1) / kChannels;
    const int64_t parts =
        std::min(groups, (thread_count() + args.B - 1) / std::max<int64_t>(args.B, 1));
    const auto work = [&](int64_t, int64_t begin, int64_t end) {
      const Tensor own = at::detail::empty_cpu({scratch}, at::kFloat);
      for (int64_t i = begin; i < end; ++i) {
        const int64_t part = i % parts;
        const auto channel = [&](int64_t p) {
          return std::min(groups * p / parts * kChannels, args.C);
        };
        kernel(args, {i / parts, channel(part), channel(part + 1), own.data_ptr<float>()});
      }
    };
    for_each_share(args.B * parts, std::min(args.B * parts, thread_count()), work);
  }
};

// Here and not in wkv's own checks, which also see tensors that have no values. NaN passes, to be
// seen in the output.
void check_rate(const wkv_kernel::Args& a) {
  const float* const end = a.decay + a.C;
  const float* const found = std::find_if(a.decay, end, [](float w) { return w < 0; });
  TORCH_CHECK_VALUE(found == end, "wkv: rate is ", *found, " for channel ", found - a.decay,
                    ", expected at least 0: exp(time_decay), not RWKV's time_decay itself.");
}

}  // namespace

std::vector<Tensor> wkv_forward_cpu(const Wkv::Arguments& a, bool training) {
  WkvCall call(a);
  check_rate(call.args);
  std::vector<Tensor> out = Wkv::outputs(a, training);
  call.args.out = out[0].data_ptr();
  call.args.end = out[1].data_ptr<float>();
  if (training) call.args.checkpoints_out = out[2].data_ptr<float>();
  call.run(HL_CHOOSE(wkv_kernel::wkv_forward), 0);
  return out;
}

void wkv_backward_cpu(const Wkv::Arguments& a, Backward<Wkv>& b) {
  WkvCall call(a);
  wkv_kernel::Args& args = call.args;
  const Tensor rates = contiguous_float({args.B, 2, args.C}, a.k);
  args.checkpoints = call.whole<float>(b.kept[0]);
  args.grad_out = call.sequence(b.grads[0]);
  args.grad_end = call.whole<float>(b.grads[1]);
  b.gradients.k = contiguous_like(a.k);
  b.gradients.v = contiguous_like(a.v);
  b.gradients.options.state = contiguous_float({args.B, 3, args.C}, a.k);
  args.grad_k = b.gradients.k.data_ptr();
  args.grad_v = b.gradients.v.data_ptr();
  args.grad_state = b.gradients.options.state.data_ptr<float>();
  args.grad_rates = rates.data_ptr<float>();
  if (a.options.receptance.defined()) {
    b.gradients.options.receptance = contiguous_like(a.k);
    args.grad_r = b.gradients.options.receptance.data_ptr();
  }
  call.run(HL_CHOOSE(wkv_kernel::wkv_backward), wkv_kernel::kScratch);
  b.gradients.rate = rates.select(1, 0).sum(0);
  b.gradients.bonus = rates.select(1, 1).sum(0);
}

static const Kernels<Wkv> wkv_cpu({.forward = wkv_forward_cpu, .backward = wkv_backward_cpu});

}  // namespace headloom::ops
