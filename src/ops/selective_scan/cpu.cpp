// selective_scan on its CPU kernels.
#include "ops/cpu.h"
#include "ops/selective_scan/declaration.h"
#include "ops/selective_scan/kernel.h"

namespace headloom::ops {
namespace {

Tensor by_group(const Tensor& t) { return t.dim() == 3 ? t.unsqueeze(2) : t; }

struct SelectiveScanCall : Held {
  selective_scan_kernel::Args args;

  explicit SelectiveScanCall(const SelectiveScan::Arguments& given) {
    const SelectiveScanOptions& o = given.options;
    selective_scan_kernel::Args& a = args;
    a.B = given.u.size(0);
    a.L = given.u.size(1);
    a.channels = given.u.size(2);
    a.states = given.A.size(1);
    a.type = kernel_type(given.u);
    a.softplus = o.delta_softplus;
    a.u = sequence(given.u);
    a.delta = sequence(given.delta);
    a.z = sequence(o.z);
    a.A = floats(given.A.t());
    a.D = floats(o.D);
    a.bias = floats(o.delta_bias);
    a.constant_b = given.B.dim() == 2;
    a.constant_c = given.C.dim() == 2;
    // Groups of 1 and of G channels go together as G.
    const Tensor b = by_group(given.B), c = by_group(given.C);
    a.groups = std::max(a.constant_b ? 1 : b.size(2), a.constant_c ? 1 : c.size(2));
    const auto along = [&](const Tensor& t) {
      if (t.dim() == 2) return floats(t.t());
      return floats(t.expand({a.B, a.L, a.groups, a.states}).permute({0, 2, 3, 1}));
    };
    a.b = along(b);
    a.c = along(c);
    a.documents = whole<int64_t>(o.documents);
    if (o.state.defined()) a.state = whole<float>(o.state.transpose(1, 2));
  }

  int64_t workers() const { return std::clamp<int64_t>(block_count(args), 1, thread_count()); }

  void run(bool backward) const {
    static selective_scan_kernel::Run* const kernel = HL_CHOOSE(selective_scan_kernel::run);
    const int64_t blocks = block_count(args), each = (blocks + workers() - 1) / workers();
    const Tensor scratch =
        at::empty({workers(), std::min(blocks_together(args), each) * carried(args)}, at::kFloat);
    float* const data = scratch.data_ptr<float>();
    for_each_share(blocks, workers(), [&](int64_t worker, int64_t begin, int64_t end) {
      kernel(args, {.backward = backward,
                    .worker = worker,
                    .begin = begin,
                    .end = end,
                    .scratch = data + worker * scratch.stride(0)});
    });
  }
};

std::vector<Tensor> forward(const SelectiveScan::Arguments& given, bool training) {
  SelectiveScanCall call(given);
  selective_scan_kernel::Args& a = call.args;
  std::vector<Tensor> out = SelectiveScan::outputs(given, training);
  const Tensor last = contiguous_float({a.B, a.states, a.channels}, given.u);
  a.out = out[0].data_ptr();
  a.last = last.data_ptr<float>();
  if (training) a.kept = out[2].data_ptr<float>();
  call.run(false);
  out[1].copy_(last.transpose(1, 2));
  return out;
}

void backward(const SelectiveScan::Arguments& given, Backward<SelectiveScan>& b) {
  SelectiveScanCall call(given);
  selective_scan_kernel::Args& a = call.args;
  SelectiveScan::Arguments& to = b.gradients;
  const Tensor& u = given.u;
  a.grad_out = call.sequence(b.grads[0]);
  if (b.grads[1].defined()) a.grad_last = call.whole<float>(b.grads[1].transpose(1, 2));
  a.kept = const_cast<float*>(call.whole<float>(b.kept[0]));
  to.u = contiguous_like(u);
  to.delta = contiguous_like(u);
  a.grad_u = to.u.data_ptr();
  a.grad_delta = to.delta.data_ptr();
  if (given.options.z.defined()) {
    to.options.z = contiguous_like(u);
    a.grad_z = to.options.z.data_ptr();
  }
  const auto by_state = [&] { return contiguous_float({a.B, a.states, a.channels}, u); };
  const auto by_channel = [&] { return contiguous_float({a.B, a.channels}, u); };
  const auto along = [&](bool constant) {
    return constant ? by_state()
                    : at::zeros({call.workers(), a.B, a.groups, a.states, a.L},
                                u.options().dtype(at::kFloat));
  };
  const Tensor A = by_state(), D = by_channel(), bias = by_channel(), state = by_state(),
               b_sums = along(a.constant_b), c_sums = along(a.constant_c);
  a.grad_A = A.data_ptr<float>();
  a.grad_D = D.data_ptr<float>();
  a.grad_bias = bias.data_ptr<float>();
  a.grad_b = b_sums.data_ptr<float>();
  a.grad_c = c_sums.data_ptr<float>();
  a.grad_state = state.data_ptr<float>();
  call.run(true);

  const auto of_map = [](const Tensor& sums, const Tensor& like) {
    if (like.dim() == 2) return sums.sum(0).t();
    const Tensor grouped = sums.sum(0).permute({0, 3, 1, 2});  // [B, L, G, N]
    return grouped.sum_to_size(by_group(like).sizes()).view_as(like);
  };
  to.A = A.sum(0).t();
  to.B = of_map(b_sums, given.B);
  to.C = of_map(c_sums, given.C);
  to.options.D = D.sum(0);
  to.options.delta_bias = bias.sum(0);
  to.options.state = state.transpose(1, 2);
}

const Kernels<SelectiveScan> selective_scan_cpu({.forward = forward, .backward = backward});

}  // namespace
}  // namespace headloom::ops
