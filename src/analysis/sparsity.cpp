// Attention as a graph: tokens are nodes, and a map's weights are edges from keys to queries (the
// view of Joshi 2020 and of graph attention networks). How many edges matter?
#include <ATen/ATen.h>

#include "analysis/analysis.h"
#include "core/text.h"

namespace headloom::analysis {
namespace {

// One layer's maps as graphs.
struct Graphs {
  std::vector<Tensor> columns;  // of the table from "visible keys" on, [H] each
  Tensor in_degree;             // [B, H, S]: the sum of the weights on a key
  Tensor edges;                 // [B, H, T]: how many have 90% of a query's attention
};

// `maps` [B, H, T, S] without padding and not negative: weights that mixers subtract count by their
// size, as shares of a row.
Graphs graphs_of(const Recording& recording, const LayerPlace& place, const Tensor& maps) {
  const Tensor sum = maps.sum(-1, true);
  const Tensor share = maps / sum.clamp_min(1e-300);
  const Tensor row_is_real = sum.squeeze(-1).gt(0);  // [B, H, T]
  const auto mean = [&](const Tensor& of_rows) {
    const Tensor real = row_is_real.to(at::kDouble);
    const int64_t over[] = {0, 2};
    return (of_rows.to(at::kDouble) * real).sum(over) / real.sum(over).clamp_min(1);
  };
  const Tensor sorted = std::get<0>(share.sort(-1, /*descending=*/true));
  const Tensor needed = sorted.cumsum(-1).lt(0.9 - 1e-12).sum(-1) + 1;
  const Tensor edges = needed.masked_fill(row_is_real.logical_not(), 0);
  const Tensor seen = visible_keys(recording, place, maps).sum(-1);
  const Tensor density = edges.to(at::kDouble) / seen.clamp_min(1);
  const Tensor entropy = at::xlogy(share, share).sum(-1).neg();
  const int64_t queries = maps.size(2), keys = maps.size(3), past = keys - queries;
  const Tensor key = at::arange(keys, at::kDouble);
  const Tensor query = at::arange(past, keys, at::kDouble).unsqueeze(-1);
  const Tensor distance = (share * (query - key).abs()).sum(-1);
  const Tensor own = past >= 0 ? share.diagonal(past, -2, -1) : at::zeros({1, 1, 1});
  const Tensor in_degree = share.sum(2);
  const Tensor largest_in_degree = std::get<0>(in_degree.max(-1)) / row_is_real.sum(2).clamp_min(1);
  return {.columns = {mean(seen), mean(edges), mean(density), mean(entropy), mean(distance),
                      mean(share.select(-1, 0)), mean(own), largest_in_degree.mean(0)},
          .in_degree = in_degree,
          .edges = edges};
}

}  // namespace

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
    const Graphs graphs = graphs_of(
        recording, place,
        without_padding(subject.input, place, "weights.composed", maps.to(at::kDouble).abs()));
    const std::vector<int64_t> numbers = map_numbers(subject, maps.size(1));
    for (int64_t h = 0; h < maps.size(1); ++h) {
      std::vector<Cell> row = {place.name, numbers[static_cast<size_t>(h)]};
      for (const Tensor& t : graphs.columns) row.emplace_back(t[h].item<double>());
      edges += std::get<double>(row[3]);
      keys += std::get<double>(row[2]);
      ++count;
      table.rows.push_back(std::move(row));
    }
    out.tensors.emplace_back(place.name + ".in_degree", graphs.in_degree);
    out.tensors.emplace_back(place.name + ".edges", graphs.edges);
  }
  if (count == 0) refuse_without_maps("sparsity", subject);
  out.tables.push_back(std::move(table));
  const auto n = static_cast<double>(count);
  out.sentences.push_back(str("A query sees ", formatted("%.1f", keys / n),
                              " keys and gives 90% of ", "its attention to ",
                              formatted("%.1f", edges / n), " of them, mean over heads."));
  return out;
}

}  // namespace headloom::analysis
