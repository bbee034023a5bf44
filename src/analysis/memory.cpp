// A feed-forward layer as key-value memory (Geva et al. 2021): a hidden unit is a key that fires on
// some texts, and its column of the second map is the value that it then writes.
#include <ATen/ATen.h>

#include <algorithm>

#include "analysis/analysis.h"
#include "core/text.h"

namespace headloom::analysis {
namespace {

constexpr int64_t kFirings = 10;  // of a unit that are looked at: its highest
constexpr int64_t kBefore = 4;    // tokens of context shown before one

std::string quoted(const std::string& text) { return "\u201c" + text + "\u201d"; }

// The token at place n of `tokens`, which holds sequences of this length, in brackets after those
// before it.
std::string in_context(const Subject& subject, const Tensor& tokens, int64_t n, int64_t length) {
  const int64_t begin = std::max(n - n % length, n - kBefore);
  const std::vector<std::string> before = texts_of(subject, tokens.narrow(0, begin, n - begin));
  return quoted(join(before, "") + "[" + text_of(subject, tokens[n].item<int64_t>()) + "]");
}

// The tokens whose scores a unit's value [C] raises most.
std::string written(const Subject& subject, const Tensor& value) {
  const Tensor there = value.to(subject.model->device());
  // The value beside nothing, whose scores are the output layer's biases.
  const Tensor both = at::stack({there, at::zeros_like(there)}).unsqueeze(0);
  const Tensor logits = subject.model->logits(both).squeeze(0).cpu();
  const Tensor raised = logits[0] - logits[1];
  const Tensor best = std::get<1>(raised.topk(std::min<int64_t>(subject.top, raised.size(0))));
  std::vector<std::string> out;
  for (const auto& text : texts_of(subject, best)) out.push_back(quoted(text));
  return join(out, " ");
}

// What the units of one layer fire on. N: the positions of all its sequences.
struct UnitFirings {
  Tensor tokens;       // [N], those that the layer reads
  int64_t length;      // of a sequence
  Tensor top;          // [at most kFirings, units]: each unit's highest values
  Tensor where;        // the same of their positions, below N
  Tensor times;        // [units]: how many of them are above 0; at others a unit does not fire
  Tensor selectivity;  // [units]
};

// units [B, T, units].
UnitFirings firings_of(const Tensor& units, const Reading& reading) {
  Tensor flat = units.flatten(0, 1).to(at::kDouble);  // [N, units]
  Tensor real = at::arange(flat.size(0));             // positions that are no padding
  if (reading.real.defined()) real = reading.real.flatten().nonzero().squeeze(1);
  flat = flat.index_select(0, real);
  const auto [top, where_real] = flat.topk(std::min(kFirings, flat.size(0)), 0);
  // A unit that is mostly quiet and now and then fires high is selective. The mean over firings,
  // so that one that fires a single time does not stand before all others.
  const Tensor selectivity =
      top.clamp_min(0).sum(0) / kFirings / flat.abs().mean(0).clamp_min(1e-30);
  return {.tokens = reading.tokens.to(at::kLong).flatten(),
          .length = units.size(1),
          .top = top,
          .where = real.index_select(0, where_real.flatten()).view_as(where_real),
          .times = top.gt(0).sum(0),
          .selectivity = selectivity};
}

// The numbers of the `most` most selective units, the first first.
Tensor most_selective(const UnitFirings& firings, int64_t most) {
  // Units with no more firings than are looked at have the same selectivity, but for rounding.
  // Among them the one that fires more often comes first.
  const Tensor by_times = firings.times.argsort(true, 0, true);
  const Tensor selectivity = firings.selectivity.to(at::kFloat).index_select(0, by_times);
  const Tensor order = selectivity.argsort(true, 0, true);
  return by_times.index_select(0, order.narrow(0, 0, std::min<int64_t>(most, order.size(0))));
}

// The table's row of a unit that fires. `value` [C] is what it writes; undefined where that is not
// said.
std::vector<Cell> unit_row(const Subject& subject, const std::string& place,
                           const UnitFirings& firings, int64_t unit, const Tensor& value) {
  const int64_t times = firings.times[unit].item<int64_t>();
  const Tensor places = firings.where.select(1, unit).narrow(0, 0, times);
  const Tensor counts = at::bincount(firings.tokens.index_select(0, places));
  std::vector<std::string> shown;
  for (int64_t j = 0; j < std::min<int64_t>(3, times); ++j) {
    shown.push_back(in_context(subject, firings.tokens, places[j].item<int64_t>(), firings.length));
  }
  return {place,
          unit,
          firings.selectivity[unit].item<double>(),
          times,
          static_cast<double>(counts.max().item<int64_t>()) / static_cast<double>(times),
          join(shown),
          value.defined() ? written(subject, value) : std::string("–")};
}

}  // namespace

Findings memory(const Subject& subject) {
  if (subject.input.images.defined()) {
    usage_error(
        "the analysis memory is about hidden units that read tokens, but this model reads images.");
  }
  const Recording recording = record(subject, {"units", "unit_values"});
  Findings out{.title = "Hidden units as memory"};
  Table table{.title = "The most selective units of each layer",
              .columns = {"layer", "unit", "highest / mean", "firings", "same token", "fires on",
                          "writes towards"}};
  const std::string& kind = subject.model->config().kind;
  const bool scores_tokens = kind == "decoder" || kind == "encoder_decoder";
  bool any = false;
  for (const LayerPlace& place : chosen_layers(subject)) {
    const Tensor units = recording.find(place.name + ".units");
    const Reading reading = reading_of(subject.input, place.name);
    if (!units.defined() || !reading.tokens.defined()) continue;
    any = true;
    const UnitFirings firings = firings_of(units, reading);
    const Tensor values = recording.find(place.name + ".unit_values");  // [C, units]
    // What an encoder writes is read by cross-attention, not by the output layer.
    const bool writes = values.defined() && scores_tokens && !in_encoder(place.name);
    out.tensors.emplace_back(place.name + ".largest", firings.top);
    out.tensors.emplace_back(place.name + ".positions", firings.where);
    out.tensors.emplace_back(place.name + ".selectivity", firings.selectivity);
    const Tensor chosen = most_selective(firings, subject.top);
    for (int64_t i = 0; i < chosen.size(0); ++i) {
      const int64_t unit = chosen[i].item<int64_t>();
      if (firings.times[unit].item<int64_t>() == 0) continue;
      table.rows.push_back(
          unit_row(subject, place.name, firings, unit, writes ? values.select(1, unit) : Tensor()));
    }
  }
  if (!any) {
    usage_error("the analysis memory is about hidden units that read tokens, but ",
                channels_text(subject), ", expected mlp, swiglu or rwkv_channel.");
  }
  out.tables.push_back(std::move(table));
  out.sentences.push_back(
      str("A unit fires where it is above 0. Highest / mean: the mean of its ", kFirings,
          " highest firings, those that are missing counted as 0, over the mean of its absolute "
          "values. Firings: how many of the ",
          kFirings,
          " there are. Same token: the share of "
          "them that is on one token. The token in brackets is the one that it fires on. Writes "
          "towards: the tokens whose scores the unit's value raises most."));
  return out;
}

}  // namespace headloom::analysis
