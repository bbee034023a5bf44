#include "model/sampling.h"

#include <algorithm>
#include <limits>
#include <tuple>

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

// What may be drawn, [B, n] each. Undefined tokens are all of the vocabulary.
struct Candidates {
  Tensor p, tokens;
};

// The likeliest tokens of scores [B, V], likeliest first, which together have at least `share` of
// each row's probability. Those are mostly few, and finding them takes a small part of the time of
// sorting the vocabulary.
Candidates likeliest(const Tensor& scores, double share) {
  const int64_t vocabulary = scores.size(-1);
  const Tensor all = scores.logsumexp(-1, true);
  for (int64_t count = std::min<int64_t>(64, vocabulary);;
       count = std::min(64 * count, vocabulary)) {
    const auto [values, tokens] =
        count < vocabulary ? scores.topk(count) : scores.sort(-1, /*descending=*/true);
    const Tensor p = (values - all).exp();
    if (count == vocabulary || p.sum(-1).ge(share).all().item<bool>()) return {p, tokens};
  }
}

// What top-k, top-p and min-p leave of scores [B, V]; the others have probability 0.
Candidates filtered(const Tensor& scores, const SamplingOptions& o) {
  Candidates c;
  if (o.top_k > 0 && o.top_k < scores.size(-1)) {
    std::tie(c.p, c.tokens) = scores.topk(o.top_k);
    c.p = at::softmax(c.p, -1);
  } else if (o.top_p < 1) {
    c = likeliest(scores, o.top_p);
  } else {
    c.p = at::softmax(scores, -1);
  }
  // A token is kept while the likelier ones before it have not yet reached top_p.
  if (o.top_p < 1) c.p = c.p.masked_fill((c.p.cumsum(-1) - c.p).ge(o.top_p), 0);
  if (o.min_p > 0) c.p = c.p.masked_fill(c.p.lt(c.p.amax(-1, true) * o.min_p), 0);
  if (c.tokens.defined()) c.p.narrow(-1, 0, 1).clamp_min_(1e-30);  // top_p = 0 keeps the likeliest
  return c;
}

// One place of each row of p [B, n], which need not add up to 1 -> [B]. A place of probability 0
// is not drawn: the number below 1 that is drawn is a double, as the sums are, so that its product
// with the sum of all stays below that sum.
Tensor drawn(const Tensor& p, const std::vector<at::Generator>& generators) {
  const Tensor sums = p.to(at::kDouble).cumsum(-1);
  std::vector<Tensor> numbers;
  for (int64_t b = 0; b < p.size(0); ++b) {
    numbers.push_back(at::rand({1}, generators[static_cast<size_t>(b)], sums.options()));
  }
  const Tensor wanted = at::stack(numbers) * sums.narrow(-1, -1, 1);
  return at::searchsorted(sums, wanted, /*out_int32=*/false, /*right=*/true).squeeze(-1);
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
  const Candidates candidates = filtered(scores / std::max(o.temperature, kColdest), o);
  const Tensor places = drawn(candidates.p, generators);
  return candidates.tokens.defined()
             ? candidates.tokens.gather(-1, places.unsqueeze(-1)).squeeze(-1)
             : places;
}

}  // namespace headloom
