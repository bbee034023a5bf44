// moe on the CPU: tokens sorted by expert, one matrix product an expert and map, and kernels
// between them.
#include <atomic>
#include <numeric>

#include "ops/cpu.h"
#include "ops/linear/cpu.h"
#include "ops/moe/declaration.h"
#include "ops/moe/kernel.h"
#include "ops/product/product.h"

namespace headloom::ops {
namespace {

// The tokens' choices sorted by expert: a row is one choice of one token.
struct MoeCall : Held {
  const Moe::Arguments& a;
  const int64_t tokens = a.x.size(0), width = a.x.size(1), hidden = a.down.size(2);
  const int64_t experts = a.up.size(0), rows = a.choice.numel();
  const float* const weight = floats(a.weight);                    // [N, K]
  std::vector<int64_t> begin = std::vector<int64_t>(experts + 1);  // rows of each expert
  std::vector<int64_t> token = std::vector<int64_t>(rows);
  std::vector<int64_t> row = std::vector<int64_t>(rows);     // [N, K]
  std::vector<float> row_weight = std::vector<float>(rows);  // [rows]
  std::vector<int64_t> largest_first;                        // experts that were chosen

  explicit MoeCall(const Moe::Arguments& arguments) : a(arguments) {
    const int64_t* const expert = whole<int64_t>(a.choice);
    for (int64_t i = 0; i < rows; ++i) {
      TORCH_CHECK_INDEX(expert[i] >= 0 && expert[i] < experts, "moe: choice has the expert ",
                        expert[i], ", expected one of 0 to ", experts - 1, ".");
      ++begin[expert[i] + 1];
    }
    std::partial_sum(begin.begin(), begin.end(), begin.begin());
    std::vector<int64_t> next(begin.begin(), begin.end() - 1);
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t to = next[expert[i]]++;
      token[to] = i / a.choice.size(1);
      row[i] = to;
      row_weight[to] = weight[i];
    }
    for (int64_t e = 0; e < experts; ++e) {
      if (size(e) > 0) largest_first.push_back(e);
    }
    std::stable_sort(largest_first.begin(), largest_first.end(),
                     [&](int64_t one, int64_t other) { return size(one) > size(other); });
  }

  int64_t size(int64_t expert) const { return begin[expert + 1] - begin[expert]; }
  Tensor empty(int64_t count, int64_t columns) const {
    return at::empty({count, columns}, a.x.options());
  }
  Tensor rows_of(const Tensor& t, int64_t expert) const {
    return t.narrow(0, begin[expert], size(expert));
  }

  // Runs `work` for every expert that was chosen: side by side where no expert has more than a
  // thread's share, else one after the other, each on all threads. The results are the same.
  template <typename Work>
  void for_each_expert(const Work& work) const {
    if (largest_first.empty()) return;
    const int64_t threads = at::get_num_threads();
    if (threads == 1 || size(largest_first[0]) * threads > rows) {
      for (const int64_t expert : largest_first) work(expert);
      return;
    }
    std::atomic<size_t> next{0};
    at::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
      at::AutoDispatchBelowADInplaceOrView below;  // threads do not inherit it
      for (size_t i = next++; i < largest_first.size(); i = next++) work(largest_first[i]);
    });
  }

  void run(moe_kernel::Args args, int64_t count) const {
    static moe_kernel::Run* const kernel = HL_CHOOSE(moe_kernel::run);
    args.type = kernel_type(a.x);
    at::parallel_for(0, count, grain(args.width),
                     [&](int64_t first, int64_t last) { kernel(args, first, last); });
  }
  // The rows of an expert, of [N, C].
  Tensor gather(const void* from, int64_t expert) const {
    Tensor out = empty(size(expert), width);
    run({.step = moe_kernel::Step::kGather,
         .width = width,
         .rows = from,
         .index = token.data() + begin[expert],
         .out = out.data_ptr()},
        size(expert));
    return out;
  }
  // Sums over each token's rows into `out` [N, C].
  void combine(const Tensor& from, const float* factors, const Tensor& out) const {
    run({.step = moe_kernel::Step::kCombine,
         .width = width,
         .weight = factors,
         .rows = from.const_data_ptr(),
         .index = row.data(),
         .choices = a.choice.size(1),
         .out = out.data_ptr()},
        tokens);
  }
};

std::vector<Tensor> forward(const Moe::Arguments& a, bool training) {
  MoeCall call(a);
  std::vector<Tensor> outputs = Moe::outputs(a, training);
  const void* const x = call.whole(a.x);
  const Tensor results = call.empty(call.rows, call.width);
  call.for_each_expert([&](int64_t e) {
    const int64_t n = call.size(e);
    const Tensor h = training ? call.rows_of(outputs[1], e) : call.empty(n, 2 * call.hidden);
    linear_product({.x = call.gather(x, e), .weight = a.up[e], .scale = {}, .bias = {}}, h);
    const Tensor active = call.empty(n, call.hidden);
    call.run({.step = moe_kernel::Step::kActivate,
              .width = call.hidden,
              .h = h.const_data_ptr(),
              .a = active.data_ptr()},
             n);
    linear_product({.x = active, .weight = a.down[e], .scale = {}, .bias = {}},
                   call.rows_of(results, e));
  });
  call.combine(results, call.weight, outputs[0]);
  return outputs;
}

void backward(const Moe::Arguments& a, Backward<Moe>& b) {
  MoeCall call(a);
  const void *const x = call.whole(a.x), *const grad = call.whole(b.grads[0]);
  Moe::Arguments& to = b.gradients;
  to = {.x = contiguous_like(a.x),
        .up = contiguous_like(a.up),
        .down = contiguous_like(a.down),
        .choice = {},
        .weight = contiguous_float(a.weight.sym_sizes(), a.weight)};
  const Tensor grad_rows = call.empty(call.rows, call.width);
  std::vector<float> grad_weight(static_cast<size_t>(call.rows));
  call.for_each_expert([&](int64_t e) {
    const int64_t n = call.size(e), first = call.begin[e];
    const Tensor grad_out = call.gather(grad, e), h = call.rows_of(b.kept[0], e);
    const Tensor active = call.empty(n, call.hidden), grad_h = call.empty(n, 2 * call.hidden);
    product(active, grad_out, a.down[e]);  // without the weight, whose gradient it makes
    call.run({.step = moe_kernel::Step::kBackward,
              .width = call.hidden,
              .h = h.const_data_ptr(),
              .a = active.data_ptr(),
              .grad_h = grad_h.data_ptr(),
              .weight = call.row_weight.data() + first,
              .grad_weight = grad_weight.data() + first},
             n);
    product(to.down[e], grad_out.t(), active);
    product(to.up[e], grad_h.t(), call.gather(x, e));
    product(call.rows_of(grad_rows, e), grad_h, a.up[e]);
  });
  for (int64_t e = 0; e < call.experts; ++e) {
    if (call.size(e) > 0) continue;
    to.up[e].zero_();
    to.down[e].zero_();
  }
  float* const weights = to.weight.data_ptr<float>();
  for (int64_t i = 0; i < call.rows; ++i) weights[i] = grad_weight[call.row[i]];
  call.combine(grad_rows, nullptr, to.x);
}

const Kernels<Moe> moe_cpu({.limits = "with dense products of the tokens sorted by expert",
                            .forward = forward,
                            .backward = backward});

}  // namespace
}  // namespace headloom::ops
