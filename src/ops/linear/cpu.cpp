// linear on its CPU kernels.
#include "ops/linear/cpu.h"

#include "ops/cpu.h"
#include "ops/linear/declaration.h"
#include "ops/linear/int4.h"
#include "ops/linear/kernel.h"
#include "ops/product/product.h"

namespace headloom::ops {
namespace {

const char* unsupported(const Linear::Arguments& a) {
  if (!a.scale.defined()) return nullptr;
  if (at::GradMode::is_enabled() && a.x.requires_grad()) {
    return "the weights are quantised and a gradient is wanted";
  }
  return nullptr;
}

// y [M, O] of few rows: a thread reads the weights in the order in which they lie.
void streamed(const Linear::Arguments& a, const Tensor& y) {
  static linear_kernel::Run* const kernel = HL_CHOOSE(linear_kernel::run);
  Held held;
  const bool rounded = a.weight.scalar_type() == at::kFloat;
  const Tensor weight = rounded ? a.weight.to(a.x.scalar_type()) : a.weight;
  const int64_t in = weight.size(1), out = weight.size(0);
  const linear_kernel::Args args{.rows = y.size(0),
                                 .in = in,
                                 .type = kernel_type(a.x),
                                 .weight_type = kernel_type(weight),
                                 .x = held.whole(a.x),
                                 .weight = held.whole(weight),
                                 .scale = held.whole<float>(a.scale),
                                 .bias = held.whole(a.bias),
                                 .out = out,
                                 .y = y.data_ptr(),
                                 .past_cache = fetches_past_cache()};
  for_runs_of_outputs(out, in * weight.element_size(),
                      [&](int64_t begin, int64_t end) { kernel(args, begin, end); });
}

// Whether few rows take less time by reading the weights where they lie, which are read once, than
// by a dense product, which packs them first. These are better packed: values that have to be
// widened; short rows, whose sums are soon to be added up; rows that do not begin with a line of
// the cache, where each vector is read from two lines; and an x that leaves the nearest caches,
// from which every four outputs read it again.
bool is_streamed(const Linear::Arguments& a, int64_t rows) {
  constexpr int64_t kMost = 64, kShort = 256, kLine = 64, kBytesOfX = 160 << 10;
  if (rows <= kStreamedRows) return true;
  const bool pairs = capability() == Capability::kAvx512Bf16 && !has_amx() &&
                     a.x.scalar_type() == at::kBFloat16 && a.weight.scalar_type() != at::kFloat;
  const bool floats = capability() != Capability::kDefault && a.x.scalar_type() == at::kFloat;
  const int64_t in = a.weight.size(1);
  const bool whole_lines = in * a.weight.element_size() % kLine == 0;
  return (floats || pairs) && rows <= kMost && in >= kShort && whole_lines &&
         rows * in * a.x.element_size() <= kBytesOfX && a.weight.is_contiguous();
}

// The places of those that are not 0.
std::vector<int64_t> places(const std::vector<uint8_t>& flags) {
  std::vector<int64_t> found;
  for (size_t i = 0; i < flags.size(); ++i) {
    if (flags[i] != 0) found.push_back(static_cast<int64_t>(i));
  }
  return found;
}

// y [M, O] on the fastest route, weights of eight and four bits widened to the type of x.
void widened_product(const Linear::Arguments& a, const Tensor& y) {
  if (!a.scale.defined()) {
    return product(y, a.x.reshape({y.size(0), a.weight.size(1)}), a.weight.t(), a.bias);
  }
  static linear_kernel::Widen* const widen = HL_CHOOSE(linear_kernel::widen);
  Held held;
  const int64_t in = a.x.size(-1);
  const bool int4 = a.weight.scalar_type() == at::kByte;
  const linear_kernel::WidenArgs args{
      .weight = held.whole(a.weight),
      .scale = int4 ? static_cast<const uint16_t*>(held.whole(a.scale)) : nullptr,
      .in = in,
      .type = kernel_type(a.x)};
  const MadeFactor weight{.columns = [&](int64_t begin, int64_t end, int64_t i0, int64_t i1,
                                         void* to) { widen(args, begin, end, i0, i1, to); },
                          .scale = int4 ? Tensor() : a.scale};
  product(y, a.x.reshape({y.size(0), in}), weight, a.bias);
}

// Whether y [M, O] was computed in integers, but for a few rows and outputs that integers do not
// hold.
bool integer_product(const Linear::Arguments& a, const Tensor& y) {
  using namespace linear_kernel;
  static PackIntegers* const pack = HL_CHOOSE(pack_integers);
  static RunIntegers* const run = HL_CHOOSE(run_integers);
  constexpr int64_t kMostKept = 16 << 20, kBytesOfWeights = 256 << 10;  // in the second-level cache
  if (capability() != Capability::kAvx2 || a.x.scalar_type() != at::kBFloat16) return false;
  const bool int4 = a.weight.scalar_type() == at::kByte, int8 = a.weight.scalar_type() == at::kChar;
  if (!int4 && !int8 && (a.weight.scalar_type() != at::kBFloat16 || !a.weight.is_contiguous())) {
    return false;
  }
  const int64_t rows = y.size(0), out = y.size(1), in = a.x.size(-1);
  if (rows == 0 || out == 0 || in == 0) return false;
  Held held;
  IntegerArgs args{.rows = rows,
                   .in = in,
                   .out = out,
                   .group = int8 ? kInt8Group : kBFloat16Group,
                   .x = held.whole(a.x),
                   .weight = held.whole(a.weight),
                   .bias = held.whole(a.bias),
                   .y = y.data_ptr()};
  if (int4) {
    args.group_scale = static_cast<const uint16_t*>(held.whole(a.scale));
  } else if (int8) {
    args.row_scale = held.whole<float>(a.scale);
  }
  thread_local KeptMemory of_x(kMostKept);
  const int64_t panels = (rows + kIntegerRows - 1) / kIntegerRows;
  const Tensor packed_x = of_x.bytes(panels * args.panel_bytes(kIntegerRows));
  args.packed_x = static_cast<char*>(packed_x.data_ptr());
  std::vector<uint8_t> unfit_rows(static_cast<size_t>(rows));
  std::vector<uint8_t> unfit_outputs(static_cast<size_t>(out));
  args.unfit_rows = unfit_rows.data();
  args.unfit_outputs = unfit_outputs.data();
  const int64_t threads = at::in_parallel_region() ? 1 : thread_count();
  at::parallel_for(0, panels, 16, [&](int64_t begin, int64_t end) { pack(args, begin, end); });
  const std::vector<int64_t> rows_left = places(unfit_rows);
  // Language models often have one, the first token's, in which a few values exceed the others ten
  // thousand times (Sun et al. 2024, "Massive activations in large language models").
  constexpr int64_t kForOneUnfit = 4;
  if (static_cast<int64_t>(rows_left.size()) > rows / kForOneUnfit) return false;
  const int64_t of_outputs = (out + kIntegerOutputs - 1) / kIntegerOutputs;
  const int64_t bytes = args.panel_bytes(kIntegerOutputs);
  const int64_t together = std::clamp<int64_t>(kBytesOfWeights / bytes, 1,
                                               (of_outputs + 4 * threads - 1) / (4 * threads));
  each_task(threads, (of_outputs + together - 1) / together, [&](int64_t i) {
    thread_local KeptMemory of_weights(kMostKept);
    const int64_t begin = i * together * kIntegerOutputs;
    run(args, begin, std::min(begin + together * kIntegerOutputs, out),
        of_weights.bytes(together * bytes).data_ptr());
  });
  const std::vector<int64_t> outputs_left = places(unfit_outputs);
  if (static_cast<int64_t>(outputs_left.size()) > out / kForOneUnfit) return false;
  if (!outputs_left.empty()) {
    const Tensor which = at::tensor(outputs_left, at::kLong);
    const auto of = [&](const Tensor& t) { return t.defined() ? t.index_select(0, which) : t; };
    Linear::Arguments part = a;
    part.weight = of(a.weight);
    part.scale = of(a.scale);
    part.bias = of(a.bias);
    const Tensor others = at::empty({rows, which.size(0)}, y.options());
    widened_product(part, others);
    y.index_copy_(1, which, others);
  }
  // All of these are unfit, so they are not multiplied in integers of 16 bits again.
  if (!rows_left.empty()) compute_rows(a, rows_left, y);
  return true;
}

std::vector<Tensor> forward(const Linear::Arguments& a, bool training) {
  if (a.weight.scalar_type() == at::kByte) return int4_forward(a);
  std::vector<Tensor> outputs = Linear::outputs(a, training);
  const Tensor& y = outputs[0];
  if (y.numel() == 0) return outputs;
  const int64_t out = a.weight.size(0), rows = y.numel() / out;
  linear_product(a, y.view({rows, out}));
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

const Kernels<Linear> linear_cpu(
    {.limits = "weights of eight and four bits too, where no gradient is wanted",
     .unsupported = unsupported,
     .forward = forward,
     .backward = backward});

}  // namespace

void compute_rows(const Linear::Arguments& a, const std::vector<int64_t>& which, const Tensor& y) {
  const Tensor rows = at::tensor(which, at::kLong);
  Linear::Arguments part = a;
  part.x = a.x.reshape({y.size(0), a.x.size(-1)}).index_select(0, rows);
  y.index_copy_(0, rows, forward(part, /*training=*/false)[0]);
}

void linear_product(const Linear::Arguments& a, const Tensor& y) {
  const int64_t rows = y.size(0);
  is_streamed(a, rows) ? streamed(a, y) : dense_product(a, y);
}

void dense_product(const Linear::Arguments& a, const Tensor& y) {
  if (!integer_product(a, y)) widened_product(a, y);
}

}  // namespace headloom::ops
