// The positionwise operators on their CPU kernels.
#include "ops/cpu.h"
#include "ops/positionwise/declaration.h"
#include "ops/positionwise/kernel.h"

namespace headloom::ops {
namespace {

// --- rms_norm ---

positionwise_kernel::NormArgs norm_args(Held& held, const RmsNorm::Arguments& a) {
  positionwise_kernel::NormArgs args;
  args.width = a.x.size(-1);
  args.type = kernel_type(a.x);
  args.eps = static_cast<float>(a.eps);
  args.x = held.whole(a.x);
  args.scale = held.floats(a.scale);
  return args;
}

std::vector<Tensor> norm_forward(const RmsNorm::Arguments& a, bool training) {
  static positionwise_kernel::Norm* const kernel = HL_CHOOSE(positionwise_kernel::norm);
  Held held;
  positionwise_kernel::NormArgs args = norm_args(held, a);
  std::vector<Tensor> y = RmsNorm::outputs(a, training);
  args.y = y[0].data_ptr();
  at::parallel_for(0, a.x.numel() / args.width, grain(args.width),
                   [&](int64_t begin, int64_t end) { kernel(args, begin, end); });
  return y;
}

void norm_backward(const RmsNorm::Arguments& a, Backward<RmsNorm>& b) {
  static positionwise_kernel::Norm* const kernel = HL_CHOOSE(positionwise_kernel::norm);
  Held held;
  positionwise_kernel::NormArgs args = norm_args(held, a);
  const int64_t width = args.width, rows = a.x.numel() / width, step = grain(width);
  const int64_t shares = std::clamp<int64_t>((rows + step - 1) / step, 1, thread_count());
  b.gradients.x = contiguous_like(a.x);
  args.grad = held.whole(b.grads[0]);
  args.grad_x = b.gradients.x.data_ptr();
  // Every share of the rows has sums of its own, so that a number of threads gives one result.
  Tensor sums;
  if (a.scale.defined()) sums = at::zeros({shares, width}, a.x.options().dtype(at::kFloat));
  for_each_share(rows, shares, [&](int64_t share, int64_t begin, int64_t end) {
    positionwise_kernel::NormArgs own = args;
    if (sums.defined()) own.grad_scale = sums.data_ptr<float>() + share * width;
    kernel(own, begin, end);
  });
  if (sums.defined()) b.gradients.scale = sums.sum(0);
}

// --- rotary ---

// `back` turns the other way, which is the backward.
void turn(const Tensor& from, const Rotary::Arguments& a, bool back, const Tensor& to) {
  static positionwise_kernel::Rotary* const kernel = HL_CHOOSE(positionwise_kernel::rotary);
  Held held;
  positionwise_kernel::RotaryArgs args;
  args.length = from.size(1);
  args.heads = from.size(2);
  args.width = from.size(3);
  args.pairs = a.cos.size(-1);
  args.interleaved = a.interleaved;
  args.back = back;
  args.type = kernel_type(from);
  args.x = held.head_sequence(from);
  args.cos = held.whole<float>(a.cos);
  args.sin = held.whole<float>(a.sin);
  args.table_stride[0] = a.cos.dim() == 3 ? args.length * args.pairs : 0;
  args.table_stride[1] = args.pairs;
  args.y = to.data_ptr();
  at::parallel_for(0, to.numel() > 0 ? from.size(0) * args.length : 0,
                   grain(args.heads * args.width),
                   [&](int64_t begin, int64_t end) { kernel(args, begin, end); });
}

std::vector<Tensor> rotary_forward(const Rotary::Arguments& a, bool training) {
  std::vector<Tensor> y = Rotary::outputs(a, training);
  turn(a.x, a, false, y[0]);
  return y;
}

void rotary_backward(const Rotary::Arguments& a, Backward<Rotary>& b) {
  b.gradients.x = contiguous_like(a.x);
  turn(b.grads[0], a, true, b.gradients.x);
}

// --- swiglu and gelu_tanh ---

// x as the kernel reads it; the rest of `args` says what is wanted.
void run_pointwise(positionwise_kernel::GateArgs args, const Tensor& x) {
  static positionwise_kernel::Gate* const kernel = HL_CHOOSE(positionwise_kernel::gate);
  const Tensor values = x.contiguous();
  args.width = x.size(-1) / 2;
  args.type = kernel_type(x);
  args.x = values.const_data_ptr();
  at::parallel_for(0, x.numel() / x.size(-1), grain(x.size(-1)),
                   [&](int64_t begin, int64_t end) { kernel(args, begin, end); });
}

void run_pointwise(positionwise_kernel::GeluArgs args, const Tensor& x) {
  static positionwise_kernel::Gelu* const kernel = HL_CHOOSE(positionwise_kernel::gelu_tanh);
  const Tensor values = x.contiguous();
  args.type = kernel_type(x);
  args.x = values.const_data_ptr();
  at::parallel_for(0, x.numel(), grain(1),
                   [&](int64_t begin, int64_t end) { kernel(args, begin, end); });
}

template <typename Op, typename Args>
std::vector<Tensor> pointwise_forward(const typename Op::Arguments& a, bool training) {
  std::vector<Tensor> y = Op::outputs(a, training);
  Args args;
  args.y = y[0].data_ptr();
  run_pointwise(args, a.x);
  return y;
}

template <typename Op, typename Args>
void pointwise_backward(const typename Op::Arguments& a, Backward<Op>& b) {
  const Tensor grad = b.grads[0].contiguous();
  b.gradients.x = contiguous_like(a.x);
  Args args;
  args.grad = grad.const_data_ptr();
  args.grad_x = b.gradients.x.data_ptr();
  run_pointwise(args, a.x);
}

const Kernels<RmsNorm> rms_norm_cpu({.forward = norm_forward, .backward = norm_backward});
const Kernels<Rotary> rotary_cpu({.forward = rotary_forward, .backward = rotary_backward});
const Kernels<Swiglu> swiglu_cpu(
    {.forward = pointwise_forward<Swiglu, positionwise_kernel::GateArgs>,
     .backward = pointwise_backward<Swiglu, positionwise_kernel::GateArgs>});
const Kernels<GeluTanh> gelu_tanh_cpu(
    {.forward = pointwise_forward<GeluTanh, positionwise_kernel::GeluArgs>,
     .backward = pointwise_backward<GeluTanh, positionwise_kernel::GeluArgs>});

}  // namespace
}  // namespace headloom::ops
