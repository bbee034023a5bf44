// Load and specialisation of the experts of a mixture (Dai et al. 2024, DeepSeekMoE).
#include <ATen/ATen.h>

#include <algorithm>

#include "analysis/analysis.h"
#include "core/text.h"

namespace headloom::analysis {
namespace {

// I(expert; token) / H(token), from how often each expert was chosen for each token [experts,
// tokens]: 0 where experts do not look at the token, 1 where the expert tells the token.
double shared_information(const Tensor& counts) {
  const Tensor joint = counts.to(at::kDouble) / counts.sum();
  const Tensor expert = joint.sum(1), token = joint.sum(0);
  const auto entropy = [](const Tensor& p) { return at::xlogy(p, p).sum().neg(); };
  const double of_token = entropy(token).item<double>();
  const Tensor both = entropy(expert) + entropy(token) - entropy(joint);
  return of_token > 0 ? both.item<double>() / of_token : std::nan("");
}

// What one layer's experts did for the tokens that are no padding.
struct Choices {
  Tensor chosen, weights;          // [N, active]
  Tensor load;                     // [experts]: how often each was chosen
  Tensor counts;                   // [experts, distinct tokens]; undefined for images
  std::vector<std::string> texts;  // of the distinct tokens
};

Choices choices_of(const Subject& subject, const Recording& recording, const std::string& place) {
  Choices out;
  out.chosen = recording.find(place + ".experts").flatten(0, 1);
  out.weights = recording.find(place + ".expert_weights").flatten(0, 1).to(at::kDouble);
  const Reading reading = reading_of(subject.input, place);
  Tensor ids = reading.tokens.defined() ? reading.tokens.flatten() : Tensor();
  if (reading.real.defined()) {
    const Tensor kept = reading.real.flatten().nonzero().squeeze(1);
    for (Tensor* t : {&out.chosen, &out.weights, &ids}) *t = t->index_select(0, kept);
  }
  const int64_t routed = recording.find(place + ".expert_scores").size(-1);
  out.load = at::bincount(out.chosen.flatten(), {}, routed).to(at::kDouble);
  if (ids.defined()) {
    const auto [distinct, inverse] = at::_unique(ids, /*sorted=*/true, /*return_inverse=*/true);
    const int64_t kinds = distinct.numel();
    const Tensor pairs = out.chosen * kinds + inverse.unsqueeze(1);
    out.counts = at::bincount(pairs.flatten(), {}, routed * kinds).view({routed, kinds});
    out.texts = texts_of(subject, distinct);
  }
  return out;
}

// The tokens that an expert is chosen for most, and how often.
std::string favourites(const Choices& c, int64_t expert, int64_t most) {
  if (!c.counts.defined()) return "";
  const auto [best, which] = c.counts[expert].topk(std::min<int64_t>(most, c.counts.size(1)));
  std::vector<std::string> out;
  for (int64_t j = 0; j < best.size(0); ++j) {
    const int64_t n = best[j].item<int64_t>();
    if (n == 0) break;
    out.push_back(
        str("\u201c", c.texts[static_cast<size_t>(which[j].item<int64_t>())], "\u201d ", n));
  }
  return join(out);
}

}  // namespace

Findings experts(const Subject& subject) {
  const Recording recording = record(subject, {"experts", "expert_weights", "expert_scores"});
  Findings out{.title = "Experts"};
  Table summary{.title = "Each layer",
                .columns = {"layer", "experts", "chosen for a token", "largest load / mean",
                            "never chosen", "entropy of the load / largest", "says of the token"}};
  Table each{
      .title = "Each expert",
      .columns = {"layer", "expert", "load / mean", "mean weight", "tokens it is chosen for"}};
  for (const LayerPlace& place : chosen_layers(subject)) {
    if (!recording.find(place.name + ".experts").defined()) continue;
    const Choices c = choices_of(subject, recording, place.name);
    const int64_t routed = c.load.size(0);
    const double mean = c.load.mean().item<double>();
    const Tensor share = c.load / c.load.sum();
    const double entropy = at::xlogy(share, share).sum().neg().item<double>();
    summary.rows.push_back({place.name, routed, c.chosen.size(1),
                            c.load.max().item<double>() / mean, c.load.eq(0).sum().item<int64_t>(),
                            entropy / std::log(static_cast<double>(std::max<int64_t>(routed, 2))),
                            c.counts.defined() ? shared_information(c.counts) : std::nan("")});
    out.tensors.emplace_back(place.name + ".load", c.load);
    if (c.counts.defined()) out.tensors.emplace_back(place.name + ".tokens_of_experts", c.counts);
    const Tensor order = c.load.argsort(0, /*descending=*/true);
    for (int64_t i = 0; i < routed; ++i) {
      const int64_t expert = order[i].item<int64_t>();
      const double times = c.load[expert].item<double>();
      const double weight = times > 0
                                ? c.weights.masked_select(c.chosen.eq(expert)).mean().item<double>()
                                : std::nan("");
      each.rows.push_back(
          {place.name, expert, times / mean, weight, favourites(c, expert, subject.top)});
    }
  }
  if (summary.rows.empty()) {
    usage_error("the analysis experts looks into mixtures of experts, but ", channels_text(subject),
                ", expected moe.");
  }
  out.tables = {std::move(summary), std::move(each)};
  out.sentences.push_back(
      "A load of 1 is an even share. What the choice says of the token is the mutual information "
      "of a token and one of the experts chosen for it, as a share of the token's entropy: 0 where "
      "experts do not look at the token, though tokens that occur seldom raise it, and 1 where one "
      "expert tells the token, which takes as many experts as there are tokens.");
  return out;
}

}  // namespace headloom::analysis
