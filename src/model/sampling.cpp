#include "model/sampling.h"

#include <algorithm>
#include <limits>
#include <tuple>

#include "core/error.h"

namespace headloom {
namespace {

// Smaller temperatures take the likeliest token all the same, and larger ones draw from equal
// probabilities, but float32 has no such numbers.
constexpr double kColdest = 1e-30, kHottest = 1e30;
// A penalty beyond these bounds does what they do: the scores that it changes stay finite.
constexpr double kStrongestPenalty = 1e30, kLargestPenalised = 1e38;

// Also refuses NaN.
void check_range(const char* name, double value, double low, double high, const char* expected) {
  if (value >= low && value <= high) return;
  usage_error("sampling: ", name, " is ", value, ", expected ", expected, ".");
}

// What may be drawn, [B, n] each. Undefined tokens are all of the vocabulary.
struct Candidates {
  Tensor p, tokens;
};

// Of scores [B, n] -> [B, n]. Their largest is subtracted first, so that no quotient is too large.
Tensor probabilities(const Tensor& scores, double temperature) {
  return at::softmax((scores - scores.amax(-1, true)) / std::clamp(temperature, kColdest, kHottest),
                     -1);
}

// The likeliest tokens by scores [B, V], likeliest first, which together have at least `share` of
// the probability p [B, V] of each row. Those are mostly few: finding `count` takes a small part of
// the time of sorting the vocabulary. Only rows that need more look further, because equal scores
// may stand in another order there, and a row must not depend on its neighbours.
Candidates likeliest(const Tensor& scores, const Tensor& p, double share, int64_t count = 64) {
  const int64_t vocabulary = scores.size(-1);
  if (count >= vocabulary) {
    const Tensor tokens = scores.argsort(-1, /*descending=*/true);
    return {p.gather(-1, tokens), tokens};
  }
  const Tensor tokens = std::get<1>(scores.topk(count));
  const Candidates found = {p.gather(-1, tokens), tokens};
  const Tensor rest = found.p.cumsum(-1).select(-1, -1).lt(share).nonzero().squeeze(-1);
  if (rest.size(0) == 0) return found;
  const Candidates more =
      likeliest(scores.index_select(0, rest), p.index_select(0, rest), share, 64 * count);
  const auto joined = [&](const Tensor& few, const Tensor& many) {
    return at::constant_pad_nd(few, {0, many.size(-1) - count}).index_copy(0, rest, many);
  };
  return {joined(found.p, more.p), joined(found.tokens, more.tokens)};
}

// What top-k, top-p and min-p leave of scores [B, V]; the others have probability 0. Candidates are
// ordered by the scores themselves, which differ also where high temperatures make them equal.
Candidates filtered(const Tensor& scores, const SamplingOptions& o) {
  Candidates c;
  if (o.top_k > 0 && o.top_k < scores.size(-1)) {
    std::tie(c.p, c.tokens) = scores.topk(o.top_k);
    c.p = probabilities(c.p, o.temperature);
  } else {
    c.p = probabilities(scores, o.temperature);
    if (o.top_p < 1) c = likeliest(scores, c.p, o.top_p);
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
  const Candidates candidates = filtered(scores, o);
  const Tensor places = drawn(candidates.p, generators);
  return candidates.tokens.defined()
             ? candidates.tokens.gather(-1, places.unsqueeze(-1)).squeeze(-1)
             : places;
}

}  // namespace headloom
