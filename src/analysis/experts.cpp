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
    Tensor choice = recording.find(place.name + ".experts");
    if (!choice.defined()) continue;
    Tensor weight = recording.find(place.name + ".expert_weights").flatten(0, 1).to(at::kDouble);
    choice = choice.flatten(0, 1);  // [N, active]
    const Reading reading = reading_of(subject.input, place.name);
    Tensor ids = reading.tokens.defined() ? reading.tokens.flatten() : Tensor();
    if (reading.real.defined()) {
      const Tensor kept = reading.real.flatten().nonzero().squeeze(1);
      choice = choice.index_select(0, kept);
      weight = weight.index_select(0, kept);
      ids = ids.index_select(0, kept);
    }
    const int64_t routed = recording.find(place.name + ".expert_scores").size(-1);
    const int64_t active = choice.size(1);
    const Tensor load = at::bincount(choice.flatten(), {}, routed).to(at::kDouble);
    const Tensor share = load / load.sum();
    const double mean = load.mean().item<double>();
    double information = std::nan("");
    Tensor counts;                   // [experts, distinct tokens]
    std::vector<std::string> texts;  // of the distinct tokens
    if (ids.defined()) {
      const auto [distinct, inverse] = at::_unique(ids, /*sorted=*/true, /*return_inverse=*/true);
      const int64_t kinds = distinct.numel();
      counts = at::bincount((choice * kinds + inverse.unsqueeze(1)).flatten(), {}, routed * kinds)
                   .view({routed, kinds});
      information = shared_information(counts);
      texts = texts_of(subject, distinct);
    }
    const double entropy = at::xlogy(share, share).sum().neg().item<double>();
    summary.rows.push_back({place.name, routed, active, load.max().item<double>() / mean,
                            load.eq(0).sum().item<int64_t>(),
                            entropy / std::log(static_cast<double>(std::max<int64_t>(routed, 2))),
                            information});
    out.tensors.emplace_back(place.name + ".load", load);
    if (counts.defined()) out.tensors.emplace_back(place.name + ".tokens_of_experts", counts);
    const Tensor order = load.argsort(0, /*descending=*/true);
    for (int64_t i = 0; i < routed; ++i) {
      const int64_t expert = order[i].item<int64_t>();
      const Tensor chosen = choice.eq(expert);
      std::vector<std::string> likes;
      if (counts.defined()) {
        const auto [best, which] =
            counts[expert].topk(std::min<int64_t>(subject.top, counts.size(1)));
        for (int64_t j = 0; j < best.size(0); ++j) {
          const int64_t n = best[j].item<int64_t>();
          if (n == 0) break;
          likes.push_back(
              str("\u201c", texts[static_cast<size_t>(which[j].item<int64_t>())], "\u201d ", n));
        }
      }
      const double times = load[expert].item<double>();
      each.rows.push_back(
          {place.name, expert, times / mean,
           times > 0 ? weight.masked_select(chosen).mean().item<double>() : std::nan(""),
           join(likes)});
    }
  }
  if (summary.rows.empty()) {
    usage_error(
        "the analysis experts looks into mixtures of experts, but this model's channel "
        "mixers are ",
        channels_of(subject), ", expected moe.");
  }
  out.tables = {std::move(summary), std::move(each)};
  out.sentences.push_back(
      "A load of 1 is an even share. What the choice says of the token is their mutual information "
      "as a share of the token's entropy: 0 where experts do not look at the token, 1 where the "
      "choice tells it.");
  return out;
}

}  // namespace headloom::analysis
