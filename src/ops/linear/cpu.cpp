// linear on its CPU kernels.
#include <atomic>

#include "ops/cpu.h"
#include "ops/linear/declaration.h"
#include "ops/linear/kernel.h"
#include "ops/product/product.h"

namespace headloom::ops {
namespace {

const char* unsupported(const Linear::Arguments& a) {
  if (!a.scale.defined()) return nullptr;
  if (a.x.sym_numel() > a.weight.sym_size(1) * kStreamedRows) {
    return "the weights are int8 and there are more than 16 rows";
  }
  if (at::GradMode::is_enabled() && a.x.requires_grad()) {
    return "the weights are int8 and a gradient is wanted";
  }
  return nullptr;
}

// y [M, O] of few rows: a thread reads the weights in the order in which they lie.
void streamed(const Linear::Arguments& a, const Tensor& y) {
  static linear_kernel::Run* const kernel = HL_CHOOSE(linear_kernel::run);
  Held held;
  const int64_t in = a.weight.size(1), out = a.weight.size(0);
  const linear_kernel::Args args{.rows = y.size(0),
                                 .in = in,
                                 .type = kernel_type(a.x),
                                 .weight_type = kernel_type(a.weight),
                                 .x = held.whole(a.x),
                                 .weight = held.whole(a.weight),
                                 .scale = held.whole<float>(a.scale),
                                 .bias = held.whole(a.bias),
                                 .out = out,
                                 .y = y.data_ptr()};
  // Groups of four outputs; below 32 KB of weights a second thread costs more than it brings.
  constexpr int64_t kGroup = 4;
  const int64_t bytes = kGroup * in * a.weight.element_size(), groups = (out + kGroup - 1) / kGroup;
  const int64_t least = std::max<int64_t>(1, (int64_t{32} << 10) / std::max<int64_t>(bytes, 1));
  const int64_t threads = std::min<int64_t>(at::get_num_threads(), (groups + least - 1) / least);
  // Threads do not share the memory evenly: who is ahead takes more, in ever smaller runs.
  std::atomic<int64_t> next{0};
  at::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    for (int64_t begin = next.load(); begin < groups;) {
      const int64_t run = std::max(least, (groups - begin) / (2 * threads));
      const int64_t end = threads == 1 ? groups : std::min(begin + run, groups);
      if (!next.compare_exchange_weak(begin, end)) continue;
      kernel(args, kGroup * begin, std::min(kGroup * end, out));
      begin = next.load();
    }
  });
}

std::vector<Tensor> forward(const Linear::Arguments& a, bool training) {
  std::vector<Tensor> outputs = Linear::outputs(a, training);
  const Tensor& y = outputs[0];
  if (y.numel() == 0) return outputs;
  const int64_t out = a.weight.size(0), rows = y.numel() / out;
  const Tensor to = y.view({rows, out});
  if (rows <= kStreamedRows) {
    streamed(a, to);
  } else {
    product(to, a.x.reshape({rows, a.weight.size(1)}), a.weight.t(), a.bias);
  }
  return outputs;
}

void backward(const Linear::Arguments& a, Backward<Linear>& b) {
  const int64_t in = a.weight.size(1), out = a.weight.size(0);
  const int64_t rows = out > 0 ? b.grads[0].numel() / out : a.x.numel() / std::max<int64_t>(in, 1);
  const Tensor grad = b.grads[0].reshape({rows, out});
  Linear::Arguments& to = b.gradients;
  if (b.wants(to.x)) {
    to.x = contiguous_like(a.x);
    product(to.x.view({rows, in}), grad, a.weight);
  }
  if (b.wants(to.weight)) {
    to.weight = contiguous_like(a.weight);
    product(to.weight, grad.t(), a.x.reshape({rows, in}));
  }
  if (b.wants(to.bias)) to.bias = grad.sum(0);
}

const Kernels<Linear> linear_cpu({.limits = c10::str("int8 weights too, for up to ", kStreamedRows,
                                                     " rows and without a gradient"),
                                  .unsupported = unsupported,
                                  .forward = forward,
                                  .backward = backward});

}  // namespace
}  // namespace headloom::ops
