#include "ops/moe/fused.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <numeric>

#include "ops/dispatch.h"
#include "ops/kernel/capability.h"
#include "ops/moe/kernel.h"

namespace headloom::ops {
namespace {

using at::Tensor;
using experts::Args;
using experts::Step;

// The tokens' choices sorted by expert: a row is one choice of one token.
struct Sorted {
  std::vector<int64_t> begin;          // [experts + 1]: rows of each expert
  std::vector<int64_t> token;          // [rows]
  std::vector<int64_t> row;            // [N, K]
  std::vector<float> weight;           // [rows]
  std::vector<int64_t> largest_first;  // experts that were chosen

  Sorted(const Tensor& choice, const Tensor& weights, int64_t count)
      : begin(count + 1), token(choice.numel()), row(choice.numel()), weight(choice.numel()) {
    const Tensor chosen = choice.contiguous(), real = weights.to(at::kFloat).contiguous();
    const int64_t* expert = chosen.const_data_ptr<int64_t>();
    const float* value = real.const_data_ptr<float>();
    const int64_t rows = choice.numel(), choices = choice.size(1);
    for (int64_t i = 0; i < rows; ++i) {
      TORCH_CHECK_INDEX(expert[i] >= 0 && expert[i] < count, "moe: choice has the expert ",
                        expert[i], ", expected one of 0 to ", count - 1, ".");
      ++begin[expert[i] + 1];
    }
    std::partial_sum(begin.begin(), begin.end(), begin.begin());
    std::vector<int64_t> next(begin.begin(), begin.end() - 1);
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t to = next[expert[i]]++;
      token[to] = i / choices;
      row[i] = to;
      weight[to] = value[i];
    }
    for (int64_t e = 0; e < count; ++e) {
      if (size(e) > 0) largest_first.push_back(e);
    }
    std::stable_sort(largest_first.begin(), largest_first.end(),
                     [&](int64_t a, int64_t b) { return size(a) > size(b); });
  }

  int64_t size(int64_t expert) const { return begin[expert + 1] - begin[expert]; }
};

// Runs `work` for every expert that was chosen: side by side where no expert has more than a
// thread's share, else one after the other, each on all threads. The results are the same.
template <typename Work>
void for_each_expert(const Sorted& sorted, const Work& work) {
  const auto& chosen = sorted.largest_first;
  if (chosen.empty()) return;
  const int64_t threads = at::get_num_threads();
  const auto rows = static_cast<int64_t>(sorted.token.size());
  if (threads == 1 || sorted.size(chosen[0]) * threads > rows) {
    for (const int64_t expert : chosen) work(expert);
    return;
  }
  std::atomic<size_t> next{0};
  at::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    at::AutoDispatchBelowADInplaceOrView below;  // threads do not inherit it
    for (size_t i = next++; i < chosen.size(); i = next++) work(chosen[i]);
  });
}

struct Call {
  Sorted sorted;
  experts::Type type;

  Call(const Tensor& x, const Tensor& choice, const Tensor& weight, int64_t count)
      : sorted(choice, weight, count),
        type(x.scalar_type() == at::kBFloat16 ? experts::Type::kBFloat16 : experts::Type::kFloat) {}

  void run(Args args, int64_t count) const {
    static experts::Run* const kernel = HL_CHOOSE(experts::run);
    args.type = type;
    const int64_t grain = std::max<int64_t>(1, 16384 / std::max<int64_t>(args.width, 1));
    at::parallel_for(0, count, grain,
                     [&](int64_t begin, int64_t end) { kernel(args, begin, end); });
  }
  // The rows of an expert, of [N, C].
  Tensor gather(const Tensor& from, int64_t expert) const {
    const int64_t rows = sorted.size(expert);
    Tensor out = at::empty({rows, from.size(1)}, from.options());
    run({.step = Step::kGather,
         .width = from.size(1),
         .rows = from.const_data_ptr(),
         .index = sorted.token.data() + sorted.begin[expert],
         .out = out.data_ptr()},
        rows);
    return out;
  }
  // Sums over each token's rows, [N, C].
  Tensor combine(const Tensor& rows, int64_t tokens, const float* weight) const {
    Tensor out = at::empty({tokens, rows.size(1)}, rows.options());
    run({.step = Step::kCombine,
         .width = rows.size(1),
         .weight = weight,
         .rows = rows.const_data_ptr(),
         .index = sorted.row.data(),
         .choices = tokens > 0 ? static_cast<int64_t>(sorted.row.size()) / tokens : 0,
         .out = out.data_ptr()},
        tokens);
    return out;
  }
};

Tensor rows_of(const Tensor& t, const Sorted& sorted, int64_t expert) {
  return t.narrow(0, sorted.begin[expert], sorted.size(expert));
}

// at::mm_out for an `out` that is a view made for it.
void product(Tensor out, const Tensor& a, const Tensor& b) { at::mm_out(out, a, b); }

}  // namespace

std::string moe_limits() {
  return c10::str(
      "tokens sorted by expert, ATen's matrix products and CPU kernels between them for float32 "
      "and bfloat16; the reference, every expert on every token, "
      "for other types and devices");
}

std::tuple<Tensor, Tensor> moe_forward(const Tensor& x_given, const Tensor& up, const Tensor& down,
                                       const Tensor& choice, const Tensor& weight, bool keep) {
  const Tensor x = x_given.contiguous(), factors = weight.to(at::kFloat).contiguous();
  const int64_t hidden = down.size(2);
  const Call call(x, choice, factors, up.size(0));
  const Sorted& sorted = call.sorted;
  const auto rows = static_cast<int64_t>(sorted.token.size());
  const Tensor kept = at::empty({keep ? rows : 0, 2 * hidden}, x.options());
  const Tensor results = at::empty({rows, x.size(1)}, x.options());
  for_each_expert(sorted, [&](int64_t e) {
    const int64_t n = sorted.size(e);
    const Tensor h = keep ? rows_of(kept, sorted, e) : at::empty({n, 2 * hidden}, x.options());
    product(h, call.gather(x, e), up[e].t());
    const Tensor a = at::empty({n, hidden}, x.options());
    call.run({.step = Step::kActivate, .width = hidden, .h = h.const_data_ptr(), .a = a.data_ptr()},
             n);
    product(rows_of(results, sorted, e), a, down[e].t());
  });
  return {call.combine(results, x.size(0), factors.const_data_ptr<float>()), kept};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> moe_grads(const Tensor& grad_given,
                                                     const Tensor& x_given, const Tensor& up,
                                                     const Tensor& down, const Tensor& choice,
                                                     const Tensor& weight,
                                                     const Tensor& hidden_units) {
  const Tensor x = x_given.contiguous(), grad = grad_given.contiguous();
  const int64_t hidden = down.size(2);
  const Call call(x, choice, weight, up.size(0));
  const Sorted& sorted = call.sorted;
  const auto rows = static_cast<int64_t>(sorted.token.size());
  const auto contiguous = at::MemoryFormat::Contiguous;
  const Tensor grad_up = at::empty_like(up, up.options(), contiguous);
  const Tensor grad_down = at::empty_like(down, down.options(), contiguous);
  const Tensor grad_rows = at::empty({rows, x.size(1)}, x.options());
  std::vector<float> grad_weight(static_cast<size_t>(rows));
  for_each_expert(sorted, [&](int64_t e) {
    const int64_t n = sorted.size(e), first = sorted.begin[e];
    const Tensor grad_out = call.gather(grad, e), h = rows_of(hidden_units, sorted, e);
    const Tensor a = at::empty({n, hidden}, x.options());
    const Tensor grad_h = at::empty({n, 2 * hidden}, x.options());
    product(a, grad_out, down[e]);  // without the weight, whose gradient it makes
    call.run({.step = Step::kBackward,
              .width = hidden,
              .h = h.const_data_ptr(),
              .a = a.data_ptr(),
              .grad_h = grad_h.data_ptr(),
              .weight = sorted.weight.data() + first,
              .grad_weight = grad_weight.data() + first},
             n);
    product(grad_down[e], grad_out.t(), a);
    product(grad_up[e], grad_h.t(), call.gather(x, e));
    product(rows_of(grad_rows, sorted, e), grad_h, up[e]);
  });
  for (int64_t e = 0; e < up.size(0); ++e) {
    if (sorted.size(e) > 0) continue;
    grad_up[e].zero_();
    grad_down[e].zero_();
  }
  Tensor weights = at::empty(choice.sizes(), weight.options().dtype(at::kFloat));
  float* to = weights.data_ptr<float>();
  for (int64_t i = 0; i < rows; ++i) to[i] = grad_weight[sorted.row[i]];
  return {call.combine(grad_rows, x.size(0), nullptr), grad_up, grad_down,
          weights.to(weight.scalar_type())};
}

}  // namespace headloom::ops
