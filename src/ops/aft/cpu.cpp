// aft on CPU kernels: causal "local" on its own, causal "simple" on those of wkv.
#include "ops/cpu.h"
#include "ops/aft/declaration.h"
#include "ops/aft/kernel.h"
#include "ops/wkv/cpu.h"
#include "ops/wkv/kernel.h"

namespace headloom::ops {
namespace {

// Weights beyond e^20 or below e^-20 would use up float32's range together with the keys.
constexpr double kMildest = 20;

// Without decay and bonus wkv is the causal "simple", and its outputs are aft's.
static_assert(wkv_kernel::kChunk == aft_kernel::kChunk);
Wkv::Arguments as_wkv(const Aft::Arguments& a) {
  const Tensor none = at::zeros({a.q.size(2)}, a.q.options().dtype(at::kFloat));
  return {a.k,
          a.v,
          none,
          none,
          {.receptance = a.q,
           .state = a.options.state,
           .documents = a.options.documents,
           .backend = {}}};
}

// The kernels of "local".
struct AftCall : Held {
  aft_kernel::Args args;

  explicit AftCall(const Aft::Arguments& a) {
    const Tensor bias = a.options.bias.to(at::kFloat);
    args.B = a.q.size(0);
    args.T = a.q.size(1);
    args.C = a.q.size(2);
    args.W = bias.size(1);
    args.type = kernel_type(a.q);
    args.q = sequence(a.q);
    args.k = sequence(a.k);
    args.v = sequence(a.v);
    args.bias = whole<float>(bias);
    args.weight = whole<float>(bias.exp());
    args.mild = bias.abs().max().item<float>() <= kMildest;
    args.bias_size = bias.numel();
    args.offset = a.options.offset;
    args.state = whole<float>(a.options.state);
    args.documents = whole<int64_t>(a.options.documents);
  }

  int64_t groups() const { return (args.C + aft_kernel::kChannels - 1) / aft_kernel::kChannels; }
  int64_t workers() const { return std::clamp<int64_t>(args.B * groups(), 1, thread_count()); }

  void run(aft_kernel::Run* kernel, bool backward) const {
    const auto work = [&](int64_t worker, int64_t begin, int64_t end) {
      const Tensor scratch =
          at::detail::empty_cpu({aft_kernel::scratch_size(args.W, backward)}, at::kFloat);
      for (int64_t i = begin; i < end; ++i) {
        kernel(args, {i / groups(), i % groups() * aft_kernel::kChannels, worker,
                      scratch.data_ptr<float>()});
      }
    };
    for_each_share(args.B * groups(), workers(), work);
  }
};

const char* unsupported(const Aft::Arguments& a) {
  return Aft::stateful(a.options) ? nullptr : "only causal \"simple\" and \"local\" are fused";
}

std::vector<Tensor> forward(const Aft::Arguments& a, bool training) {
  if (a.options.form == "simple") return wkv_forward_cpu(as_wkv(a), training);
  AftCall call(a);
  std::vector<Tensor> out = Aft::outputs(a, training);
  call.args.out = out[0].data_ptr();
  call.args.end = out[1].data_ptr<float>();
  if (training) call.args.checkpoints_out = out[2].data_ptr<float>();
  call.run(HL_CHOOSE(aft_kernel::aft_forward), false);
  return out;
}

void backward_simple(const Aft::Arguments& a, Backward<Aft>& b) {
  Backward<Wkv> w{.grads = b.grads, .kept = b.kept, .gradients = {}};
  wkv_backward_cpu(as_wkv(a), w);
  b.gradients = {w.gradients.options.receptance, w.gradients.k, w.gradients.v, {}};
  b.gradients.options.state = w.gradients.options.state;
}

void backward(const Aft::Arguments& a, Backward<Aft>& b) {
  if (a.options.form == "simple") return backward_simple(a, b);
  AftCall call(a);
  aft_kernel::Args& args = call.args;
  const Tensor& bias = a.options.bias;
  const Tensor sums =
      at::zeros({call.workers(), bias.size(0), bias.size(1)}, bias.options().dtype(at::kFloat));
  args.checkpoints = call.whole<float>(b.kept[0]);
  args.grad_out = call.sequence(b.grads[0]);
  args.grad_end = call.whole<float>(b.grads[1]);
  b.gradients.q = contiguous_like(a.q);
  b.gradients.k = contiguous_like(a.k);
  b.gradients.v = contiguous_like(a.v);
  args.grad_q = b.gradients.q.data_ptr();
  args.grad_k = b.gradients.k.data_ptr();
  args.grad_v = b.gradients.v.data_ptr();
  args.grad_bias = sums.data_ptr<float>();
  if (a.options.state.defined()) {
    b.gradients.options.state = contiguous_like(a.options.state);
    args.grad_state = b.gradients.options.state.data_ptr<float>();
  }
  call.run(HL_CHOOSE(aft_kernel::aft_backward), true);
  b.gradients.options.bias = sums.sum(0);
}

const Kernels<Aft> aft_cpu({.limits = "causal simple and local",
                            .unsupported = unsupported,
                            .forward = forward,
                            .backward = backward});

}  // namespace
}  // namespace headloom::ops
