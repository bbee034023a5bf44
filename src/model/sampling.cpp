#include "model/sampling.h"

#include <algorithm>
#include <limits>

#include "core/error.h"

namespace headloom {
namespace {

// Smaller temperatures take the likeliest token all the same, but would make scores infinite.
constexpr double kColdest = 1e-30;
// A penalty beyond these bounds does what they do: the scores that it changes stay finite, also
// when they are divided by the coldest temperature.
constexpr double kStrongestPenalty = 1e30, kLargestPenalised = 1e8;

// Also refuses NaN.
void check_range(const char* name, double value, double low, double high, const char* expected) {
  if (value >= low && value <= high) return;
  usage_error("sampling: ", name, " is ", value, ", expected ", expected, ".");
}

}  // namespace

void check_sampling(const SamplingOptions& o) {
  constexpr double kLargest = std::numeric_limits<double>::max();
  constexpr double kSmallest = std::numeric_limits<double>::denorm_min();
  check_range("temperature", o.temperature, 0, kLargest, "a finite number of at least 0");
  if (o.top_k < 0) usage_error("sampling: top_k is ", o.top_k, ", expected at least 0.");
  check_range("top_p", o.top_p, 0, 1, "0 to 1");
  check_range("min_p", o.min_p, 0, 1, "0 to 1");
  check_range("repetition_penalty", o.repetition_penalty, kSmallest, kLargest,
              "a finite number above 0");
}

Tensor sample(const Tensor& logits, const Tensor& seen, const SamplingOptions& o,
              std::vector<at::Generator>& generators) {
  require(logits.dim() == 2 && logits.size(1) >= 1, "sampling: logits has shape ", logits.sizes(),
          ", expected [B, V] with V of at least 1.");
  require(o.temperature == 0 || static_cast<int64_t>(generators.size()) >= logits.size(0),
          "sampling: there are ", generators.size(), " generators for ", logits.size(0),
          " rows of logits, expected one for each.");
  Tensor scores = logits.to(at::kFloat);
  require(scores.amax(-1).isfinite().all().item<bool>(),
          "the model's scores of the next token are not finite: its weights are damaged, or its "
          "training diverged.");
  if (o.repetition_penalty != 1 && seen.defined()) {
    const Tensor found = scores.gather(-1, seen);
    const double penalty =
        std::clamp(o.repetition_penalty, 1 / kStrongestPenalty, kStrongestPenalty);
    scores = scores.scatter(-1, seen,
                            at::where(found.gt(0), found / penalty, found * penalty)
                                .clamp(-kLargestPenalised, kLargestPenalised));
  }
  if (o.temperature == 0) return scores.argmax(-1);
  const auto [sorted, order] =
      (scores / std::max(o.temperature, kColdest)).sort(/*dim=*/-1, /*descending=*/true);
  Tensor p = at::softmax(sorted, -1);
  const int64_t vocabulary = p.size(-1);
  if (o.top_k > 0 && o.top_k < vocabulary) {
    p.narrow(-1, o.top_k, vocabulary - o.top_k).zero_();
    p = p / p.sum(-1, true);
  }
  // A token is kept while the likelier ones before it have not yet reached top_p.
  if (o.top_p < 1) p = p.masked_fill((p.cumsum(-1) - p).ge(o.top_p), 0);
  if (o.min_p > 0) p = p.masked_fill(p.lt(p.narrow(-1, 0, 1) * o.min_p), 0);
  p.narrow(-1, 0, 1).clamp_min_(1e-30);  // top_p = 0 keeps the likeliest
  std::vector<Tensor> chosen;
  for (int64_t b = 0; b < p.size(0); ++b) {
    chosen.push_back(at::multinomial(p[b], 1, false, generators[static_cast<size_t>(b)]));
  }
  return order.gather(-1, at::stack(chosen)).squeeze(-1);
}

}  // namespace headloom
