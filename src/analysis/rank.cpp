// Ranks and singular values of attention maps against head size and length (Bhojanapalli et al.
// 2020: scores of a head of size D have rank D at most; Wang et al. 2020, figure 1: the spectrum).
#include <ATen/ATen.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <optional>
#include <utility>

#include "analysis/analysis.h"
#include "core/text.h"

namespace headloom::analysis {
namespace {

// Singular values of maps [..., T, S], descending.
Tensor spectrum(const Tensor& maps) { return at::linalg_svdvals(maps.to(at::kDouble)); }

// How many values are not rounding: above eps max(T, S) of the largest, with the eps of the maps'
// type. Mean over all but the last dimension.
double mean_rank(const Tensor& values, const Tensor& maps) {
  const double eps = maps.scalar_type() == at::kDouble ? 0x1p-52 : 0x1p-23;
  const auto size = static_cast<double>(std::max(maps.size(-1), maps.size(-2)));
  const Tensor least = values.select(-1, 0).unsqueeze(-1) * (eps * size);
  return values.gt(least).sum(-1).to(at::kDouble).mean().item<double>();
}

// exp(entropy) of the values' shares (Roy & Vetterli 2007, effective rank), mean.
double effective_rank(const Tensor& values) {
  const Tensor share = values / values.sum(-1, true).clamp_min(1e-300);
  return at::xlogy(share, share).sum(-1).neg().exp().mean().item<double>();
}

// Cumulative share of the values.
Tensor cumulative(const Tensor& values) {
  return values.cumsum(-1) / values.sum(-1, true).clamp_min(1e-300);
}

// How many of the largest values have 90% of the sum, mean.
double for_90(const Tensor& values) {
  return (cumulative(values).lt(0.9).sum(-1) + 1).to(at::kDouble).mean().item<double>();
}

constexpr size_t kMostLines = 6;  // of the figure: a layer each

// A layer's name and the cumulative share of its singular values, mean over heads.
using LayerSpectrum = std::pair<std::string, Tensor>;

Figure spectrum_figure(const std::vector<LayerSpectrum>& layers) {
  const size_t every = (layers.size() + kMostLines - 1) / kMostLines;  // one of so many is shown
  std::vector<report::Line> lines;
  size_t longest = 2;
  for (size_t i = 0; i < layers.size(); i += every) {
    lines.push_back(curve(layers[i].first, static_cast<int>(lines.size()), layers[i].second));
    longest = std::max(longest, lines.back().points.size());
  }
  const report::LineChart chart{
      .title = "Singular values of the maps",
      .description = "Cumulative share of the sum of singular values, mean over heads.",
      .x = report::make_axis("largest singular values", report::Unit::kCount, 1,
                             static_cast<double>(longest)),
      .y = report::make_axis("share of their sum", report::Unit::kPercent, 0, 1),
      .lines = lines};
  return {
      report::draw(chart),
      str("The longest length. A curve that rises early belongs to maps of low rank (Wang et al. "
          "2020, figure 1).",
          every > 1 ? str(" One layer of ", every, " is shown.") : "")};
}

// The lengths at which ranks are compared, ascending: that of the longest text without its padding,
// and its halves. A single 0 stands for an input that is taken as it is.
std::vector<int64_t> lengths_of(const ModelInput& input) {
  if (!input.tokens.defined() || input.source.defined()) return {0};
  std::vector<int64_t> lengths = {input.tokens.size(1)};
  if (input.lengths.defined()) {
    lengths[0] = std::max<int64_t>(1, input.lengths.max().item<int64_t>());
  }
  for (int64_t n = lengths[0] / 2; n >= 4 && lengths.size() < 4; n /= 2) {
    lengths.insert(lengths.begin(), n);
  }
  return lengths;
}

// The chosen heads' maps `name` of a layer, which has read `input`; undefined where it has none.
// Rows and columns of padding are made 0, which adds no singular value but 0.
Tensor map_to_rank(const Subject& subject, const ModelInput& input, const Recording& recording,
                   const LayerPlace& place, const char* name) {
  Tensor recorded = recording.find(place.name + "." + name);
  if (!recorded.defined()) return recorded;
  if (recorded.element_size() < 4) {
    usage_error(
        "the analysis rank tells singular values from the rounding of float32, but "
        "the model computes in ",
        recorded.scalar_type(), ": convert it to float32.");
  }
  return without_padding(input, place, name, chosen_heads(subject, recorded, place));
}

// NaN for undefined maps.
double rank_of_maps(const Tensor& maps) {
  return maps.defined() ? mean_rank(spectrum(maps), maps) : std::nan("");
}

// What keeps scores from full rank, in the rows of the table.
struct RankLimits {
  int64_t rows = 0;     // whose scores are products of queries and keys and nothing else
  int64_t limited = 0;  // of these, with a head smaller than the number of queries and of keys
  bool causal = false;  // some map is triangular
};

// Counts a row: the scores, which may be undefined, and weights of one layer.
void count_limits(const Subject& subject, const std::optional<HeadProjections>& heads,
                  const Tensor& scores, const Tensor& weights, RankLimits& limits) {
  limits.causal |= weights.size(-2) == weights.size(-1) && weights.triu(1).eq(0).all().item<bool>();
  // A bias of the distance is no product of queries and keys.
  const bool biased = subject.model->config().position.type == "alibi";
  if (!scores.defined() || !heads || biased) return;
  ++limits.rows;
  limits.limited += heads->q.size(2) < std::min(scores.size(-1), scores.size(-2)) ? 1 : 0;
}

std::string rank_limits_text(const RankLimits& limits) {
  const std::string than = "smaller than the number of queries and of keys, ";
  return str(limits.limited == 0
                 ? str("In none of the ", limits.rows, " rows is the head ", than,
                       "which would limit the rank of its scores")
                 : str("In ", limits.limited, " of ", limits.rows, " rows the head is ", than,
                       "so that its scores cannot have full rank"),
             " (Bhojanapalli et al. 2020).",
             limits.causal ? " A causal map is triangular and mostly has full rank all the same; "
                             "its effective rank says more."
                           : "");
}

}  // namespace

Findings rank(const Subject& subject) {
  // The rounding of bfloat16 would fill every map.
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const std::vector<int64_t> lengths = lengths_of(subject.input);
  Findings out{.title = "Rank of attention maps"};
  Table table{.title = "Means over heads and sequences",
              .columns = {"layer", "mixer", "head size", "length", "rank of scores",
                          "of composed scores", "rank of the map", "effective rank", "for 90%"}};
  std::map<int64_t, std::vector<std::vector<Cell>>> rows_of_layer;  // a row for each length
  std::vector<LayerSpectrum> spectra;                               // of the longest length
  RankLimits limits;
  for (const int64_t length : lengths) {
    const ModelInput input = length == 0 ? subject.input : shortened(subject.input, length);
    const Recording recording =
        record(subject, input, {"scores.unmasked", "scores.composed_unmasked", "weights.composed"});
    for (const LayerPlace& place : chosen_layers(subject)) {
      const auto map = [&](const char* name) {
        return map_to_rank(subject, input, recording, place, name);
      };
      const Tensor weights = map("weights.composed");
      if (!weights.defined()) continue;
      const Tensor scores = map("scores.unmasked");
      const auto heads = place.layer->mixer->head_projections();
      count_limits(subject, heads, scores, weights, limits);
      const Tensor values = spectrum(weights);
      const int64_t size = weights.size(-1);
      rows_of_layer[place.number].push_back(
          {place.name, place.layer->mixer->type(),
           heads ? Cell(heads->q.size(2)) : Cell(std::nan("")), size, rank_of_maps(scores),
           rank_of_maps(map("scores.composed_unmasked")), mean_rank(values, weights),
           effective_rank(values), for_90(values)});
      out.tensors.emplace_back(str(place.name, ".length", size, ".singular_values"), values);
      if (length != lengths.back()) continue;
      spectra.emplace_back(place.name, cumulative(values).flatten(0, 1).mean(0));
    }
  }
  for (auto& [layer, of_layer] : rows_of_layer) {
    std::move(of_layer.begin(), of_layer.end(), std::back_inserter(table.rows));
  }
  if (table.rows.empty()) refuse_without_maps("rank", subject);
  out.figures.push_back(spectrum_figure(spectra));
  out.tables.push_back(std::move(table));
  if (limits.rows > 0) out.sentences.push_back(rank_limits_text(limits));
  return out;
}

}  // namespace headloom::analysis
