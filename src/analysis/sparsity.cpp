// Attention as a graph: tokens are nodes, and a map's weights are edges from keys to queries (the
// view of Joshi 2020 and of graph attention networks). How many edges matter?
#include <ATen/ATen.h>

#include "analysis/analysis.h"
#include "core/text.h"

namespace headloom::analysis {

Findings sparsity(const Subject& subject) {
  const Recording recording = record(subject, {"weights.composed", "scores"});
  Findings out{.title = "Attention as a graph"};
  Table table{.title = "Each head, mean over queries and sequences",
              .columns = {"layer", "head", "visible keys", "edges for 90%", "density", "entropy",
                          "mean distance", "on the first", "on itself", "largest in-degree"}};
  double edges = 0, keys = 0;
  int64_t count = 0;
  for (const LayerPlace& place : chosen_layers(subject)) {
    const Tensor whole = recording.find(place.name + ".weights.composed");
    if (!whole.defined()) continue;
    const Tensor maps = chosen_heads(subject, whole, place);
    // Weights that mixers subtract count by their size, as shares of a row.
    const Reading reading = reading_of(subject.input, place.name);
    const Tensor size =
        without_padding(reading, place, "weights.composed", maps.to(at::kDouble).abs());
    const Tensor sum = size.sum(-1, true);
    const Tensor share = size / sum.clamp_min(1e-300);
    const auto row_is_real = sum.squeeze(-1).gt(0);  // [B, H, T]
    const auto mean = [&](const Tensor& of_rows) {
      const Tensor real = row_is_real.to(at::kDouble);
      const int64_t over[] = {0, 2};
      return (of_rows.to(at::kDouble) * real).sum(over) / real.sum(over).clamp_min(1);
    };
    const int64_t queries = maps.size(2), columns = maps.size(3), past = columns - queries;
    const Tensor visible = visible_keys(recording, place, size);
    const Tensor sorted = std::get<0>(share.sort(-1, /*descending=*/true));
    const Tensor counted = sorted.cumsum(-1).lt(0.9 - 1e-12).sum(-1) + 1;
    const Tensor needed = counted.masked_fill(row_is_real.logical_not(), 0);
    const Tensor place_of_key = at::arange(columns, at::kDouble);
    const Tensor query = at::arange(past, columns, at::kDouble).unsqueeze(-1);
    const Tensor seen = visible.sum(-1);
    const Tensor density = needed.to(at::kDouble) / seen.clamp_min(1);
    const Tensor entropy = at::xlogy(share, share).sum(-1).neg();
    const Tensor distance = (share * (query - place_of_key).abs()).sum(-1);
    const Tensor own = past >= 0 ? share.diagonal(past, -2, -1) : at::zeros({1, 1, 1});
    const Tensor in_degree = std::get<0>(share.sum(2).max(-1)) / row_is_real.sum(2).clamp_min(1);
    const std::vector<Tensor> of_heads = {mean(seen),     mean(needed),
                                          mean(density),  mean(entropy),
                                          mean(distance), mean(share.select(-1, 0)),
                                          mean(own),      in_degree.mean(0)};
    const std::vector<int64_t> numbers = map_numbers(subject, maps.size(1));
    for (int64_t h = 0; h < maps.size(1); ++h) {
      std::vector<Cell> row = {place.name, numbers[static_cast<size_t>(h)]};
      for (const Tensor& t : of_heads) row.emplace_back(t[h].item<double>());
      edges += std::get<double>(row[3]);
      keys += std::get<double>(row[2]);
      ++count;
      table.rows.push_back(std::move(row));
    }
    out.tensors.emplace_back(place.name + ".in_degree", share.sum(2));
    out.tensors.emplace_back(place.name + ".edges", needed);
  }
  if (count == 0) {
    usage_error("the analysis sparsity reads attention maps, but ", mixers_text(subject),
                ", which have none.");
  }
  out.tables.push_back(std::move(table));
  const auto n = static_cast<double>(count);
  out.sentences.push_back(str("A query sees ", formatted("%.1f", keys / n),
                              " keys and gives 90% of ", "its attention to ",
                              formatted("%.1f", edges / n), " of them, mean over heads."));
  return out;
}

}  // namespace headloom::analysis
