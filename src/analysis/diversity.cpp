// Diversity of heads (Xiao et al. 2024, figure 5, after Cordonnier et al. 2020).
#include <ATen/ATen.h>

#include <algorithm>
#include <optional>
#include <tuple>

#include "analysis/analysis.h"
#include "core/text.h"

namespace headloom::analysis {
namespace {

// The share of the squared length of H flattened matrices that their first 1, 2, ... H principal
// components capture, from the matrices' inner products [H, H]. They are not centred: heads that
// are all the same are captured by one.
Tensor captured(const Tensor& inner) {
  const Tensor values = at::linalg_eigvalsh(inner).flip(0).clamp_min(0);
  return values.cumsum(0) / values.sum().clamp_min(1e-300);
}

// <A_i, A_j> of products A_h = left_h right_h, left [H, C, D] and right [H, D, C], without their
// C x C entries: tr((left_i^T left_j) (right_j right_i^T)).
Tensor inner_products(const Tensor& left, const Tensor& right) {
  const Tensor a = left.to(at::kDouble), b = right.to(at::kDouble);
  const int64_t heads = a.size(0);
  Tensor out = at::empty({heads, heads}, a.options());
  for (int64_t i = 0; i < heads; ++i) {
    const Tensor from = at::matmul(a[i].t(), a);              // [H, D, D]
    const Tensor to = at::matmul(b[i], b.transpose(-1, -2));  // [H, D, D]
    out[i] = (from * to).sum({1, 2});
  }
  return out;
}

// Components until 90% are captured.
int64_t needed(const Tensor& share) { return share.lt(0.9).sum().item<int64_t>() + 1; }

// The mean cosine of pairs of different heads' maps [B, H, T, S]; NaN for a single head.
double similarity(const Tensor& maps) {
  const int64_t heads = maps.size(1);
  if (heads < 2) return std::nan("");
  const Tensor flat = maps.to(at::kDouble).transpose(0, 1).flatten(1);
  const Tensor unit = flat / flat.norm(2, {1}, true).clamp_min(1e-300);
  const Tensor cosine = at::matmul(unit, unit.t());
  return ((cosine.sum() - cosine.diagonal().sum()) / static_cast<double>(heads * (heads - 1)))
      .item<double>();
}

// Of the maps that a layer has recorded as `name` ("weights"); NaN where there are none.
double recorded_similarity(const Subject& subject, const Recording& recording,
                           const LayerPlace& place, const char* name) {
  const Tensor recorded = recording.find(place.name + "." + name);
  if (!recorded.defined()) return std::nan("");
  return similarity(without_padding(subject.input, place, name, recorded));
}

// Of layers of as many heads as the first: a mean needs them to be alike.
Tensor mean_of_layers(const std::vector<Tensor>& all) {
  std::vector<Tensor> alike;
  for (const Tensor& t : all) {
    if (t.size(0) == all[0].size(0)) alike.push_back(t);
  }
  return at::stack(alike).mean(0);
}

// Of which layers that is the mean.
std::string of_layers(const std::vector<Tensor>& all) {
  const int64_t heads = all[0].size(0);
  const auto alike =
      std::count_if(all.begin(), all.end(), [&](const Tensor& t) { return t.size(0) == heads; });
  if (alike == static_cast<int64_t>(all.size())) return "mean over layers";
  return str("mean over the ", alike, " of ", all.size(), " layers with ", counted(heads, "head"));
}

std::string first_share(const Tensor& captured) {
  return formatted("%.1f%%", 100 * captured[0].item<double>());
}

std::string even_share(const Tensor& captured) {
  return formatted("%.1f%%", 100.0 / static_cast<double>(captured.size(0)));
}

// `which`: of which layers QK and OV are a mean.
Figure captured_figure(const Tensor& qk, const Tensor& ov, const std::string& which) {
  const auto most = static_cast<double>(std::max(qk.size(0), ov.size(0)));
  const report::LineChart chart{
      .title = "Captured variance of the heads' products",
      .description = "The cumulative share that principal components capture, " + which + ".",
      .x = report::make_axis("principal components", report::Unit::kCount, 1, std::max(most, 2.0)),
      .y = report::make_axis("captured", report::Unit::kPercent, 0, 1),
      .lines = {curve("QK", 1, qk), curve("OV", 2, ov)}};
  return {report::draw(chart),
          str("Shown: ", which,
              ". Lower curves: heads that differ more (Xiao et al. 2024, figure 5).")};
}

// Tensors, figure and sentences of what components capture of each layer's products.
void add_captured(const std::vector<Tensor>& qk, const std::vector<Tensor>& ov, Findings& out) {
  const Tensor mean_qk = mean_of_layers(qk), mean_ov = mean_of_layers(ov);
  out.tensors.emplace_back("qk", mean_qk);
  out.tensors.emplace_back("ov", mean_ov);
  const std::string of_qk = of_layers(qk), of_ov = of_layers(ov);
  const bool alike = of_qk == of_ov;
  out.figures.push_back(
      captured_figure(mean_qk, mean_ov, alike ? of_qk : str("QK: ", of_qk, "; OV: ", of_ov)));
  if (mean_qk.size(0) == mean_ov.size(0) && alike) {
    out.sentences.push_back(
        str("The first of ", mean_qk.size(0), " components captures ", first_share(mean_qk),
            " of the QK products and ", first_share(mean_ov), " of the OV products, ", of_qk,
            "; heads that are all different share it evenly (", even_share(mean_qk), ")."));
    return;
  }
  // Differential attention has two maps of scores for each head of values.
  for (const auto& [name, mean, layers] :
       {std::tuple("QK", mean_qk, of_qk), std::tuple("OV", mean_ov, of_ov)}) {
    out.sentences.push_back(str("Of the ", name, " products the first of ", mean.size(0),
                                " components captures ", first_share(mean), ", ", layers,
                                "; those that are all different share it evenly (",
                                even_share(mean), ")."));
  }
}

}  // namespace

Findings diversity(const Subject& subject) {
  Findings out{.title = "Diversity of heads"};
  const bool reads = subject.input.tokens.defined() || subject.input.images.defined();
  Table table{.title = "Shares that components capture, and how similar heads are",
              .columns = {"layer", "mixer", "heads", "QK: first", "QK: for 90%", "OV: first",
                          "OV: for 90%"}};
  std::optional<Recording> recording;
  if (reads) {
    table.columns.push_back("similarity, weights");
    table.columns.push_back("similarity, composed");
    recording.emplace(record(subject, {"weights", "weights.composed"}));
  }
  std::vector<Tensor> qk, ov;
  double before = 0, after = 0;
  int64_t compared = 0;
  for (const LayerPlace& place : chosen_layers(subject)) {
    const auto heads = place.layer->mixer->head_projections();
    if (!heads) continue;
    const Tensor of_scores = captured(inner_products(heads->q, heads->k.transpose(1, 2))).cpu();
    const Tensor of_values = captured(inner_products(heads->v, heads->o)).cpu();
    std::vector<Cell> row = {place.name,        place.layer->mixer->type(),
                             of_scores.size(0), of_scores[0].item<double>(),
                             needed(of_scores), of_values[0].item<double>(),
                             needed(of_values)};
    out.tensors.emplace_back(place.name + ".qk", of_scores);
    out.tensors.emplace_back(place.name + ".ov", of_values);
    qk.push_back(of_scores);
    ov.push_back(of_values);
    if (reads) {
      const double a = recorded_similarity(subject, *recording, place, "weights");
      const double b = recorded_similarity(subject, *recording, place, "weights.composed");
      row.insert(row.end(), {a, b});
      if (!std::isnan(a) && !std::isnan(b)) {
        before += a;
        after += b;
        ++compared;
      }
    }
    table.rows.push_back(std::move(row));
  }
  if (qk.empty()) {
    usage_error("the analysis diversity compares the products W_Q W_K of heads, but ",
                mixers_text(subject), ", whose products it does not read.");
  }
  out.tables.push_back(std::move(table));
  add_captured(qk, ov, out);
  if (compared > 0) {
    out.sentences.push_back(
        str("On the ", subject.input.images.defined() ? "images" : "text",
            ", the weights of two heads have a mean cosine of ",
            formatted("%.3f", before / static_cast<double>(compared)), " before composition and ",
            formatted("%.3f", after / static_cast<double>(compared)), " after it."));
  }
  return out;
}

}  // namespace headloom::analysis
