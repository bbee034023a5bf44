// States of recurrent mixers: their norms along the sequence, and how fast they forget.
#include <ATen/ATen.h>

#include <algorithm>
#include <map>
#include <utility>

#include "analysis/analysis.h"
#include "core/text.h"
#include "mixers/padding.h"
#include "model/autoregressive.h"
#include "report/plot.h"

namespace headloom::analysis {
namespace {

// Positions after which half of what was there is left; infinite where nothing fades.
Tensor half_life(const Tensor& decay) {
  return at::log(at::full({}, 0.5, at::kDouble)).neg() / at::log(decay.to(at::kDouble)).abs();
}

// Low, median and high of values that may be infinite, between which a quantile is NaN.
std::vector<double> spread(const Tensor& values) {
  const Tensor sorted = std::get<0>(values.flatten().sort());
  const int64_t n = sorted.numel();
  const Tensor median = (sorted[(n - 1) / 2] + sorted[n / 2]) / 2;
  return {sorted[0].item<double>(), median.item<double>(), sorted[n - 1].item<double>()};
}

// A layer's number, and the name of one of its states.
using StateKey = std::pair<int64_t, std::string>;
struct StateNorms {
  std::vector<Tensor> by_position;  // [B] each
  int64_t numbers = 0;              // of a sequence's state
};

// Documents inside which attention stays, as sequences of their own: a state begins anew in each.
ModelInput with_documents_apart(const ModelInput& input) {
  if (!input.documents.defined()) return input;
  const int64_t batch = input.tokens.size(0), length = input.tokens.size(1);
  std::vector<Tensor> apart;
  std::vector<int64_t> lengths;
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t end = input.lengths.defined() ? input.lengths[b].item<int64_t>() : length;
    const Tensor documents = input.documents[b].contiguous();
    const int64_t* const of = documents.const_data_ptr<int64_t>();
    for (int64_t begin = 0, t = 1; t <= end; ++t) {
      if (t < end && of[t] == of[begin]) continue;
      apart.push_back(input.tokens[b].narrow(0, begin, t - begin));
      lengths.push_back(t - begin);
      begin = t;
    }
  }
  return {.tokens = at::pad_sequence(apart, /*batch_first=*/true),
          .lengths = at::tensor(lengths, at::kLong)};
}

// The state `name` of those that a layer holds, in double. Sums of exponentials are held relative
// to an exponent, and are multiplied by it here; the keys and values that aft has not yet added to
// them are left out. Undefined for a tensor that only holds exponents.
Tensor real_state(const Named<Tensor>& held, const std::string& name) {
  const Tensor state = held.at(name).to(at::kDouble);
  if (name == "wkv" || name == "aft") {  // [B, rows, C]: two sums, their exponent, the rest
    return state.narrow(1, 0, 2) * state.narrow(1, 2, 1).exp();
  }
  if (name == "performer.max") return {};
  const auto largest = held.find("performer.max");
  if (name == "performer" && largest != held.end() && largest->second.defined()) {
    // [B, H, rows, D + 1]: the features' rows, then eps's, which has no exponent.
    const int64_t features = state.size(2) - 1;
    const Tensor scale = largest->second.to(at::kDouble).exp().unsqueeze(-1).unsqueeze(-1);
    return at::cat({state.narrow(2, 0, features) * scale, state.narrow(2, features, 1)}, 2);
  }
  return state;
}

// Decodes the input token by token, up to the end of the longest sequence.
std::map<StateKey, StateNorms> norms_of(AutoregressiveModel& model, const ModelInput& input) {
  DecoderState state =
      model.initial_state({}, {.tokens = input.source, .lengths = input.source_lengths});
  std::map<StateKey, StateNorms> found;
  const int64_t longest =
      input.lengths.defined() ? input.lengths.max().item<int64_t>() : input.tokens.size(1);
  for (int64_t t = 0; t < longest; ++t) {
    model.extend(input.tokens.narrow(1, t, 1), state);
    for (size_t l = 0; l < state.layers.size(); ++l) {
      const auto& recurrent = state.layers[l].mixer.recurrent;
      for (const auto& [name, value] : recurrent) {
        const Tensor real = value.defined() ? real_state(recurrent, name) : Tensor();
        if (!real.defined()) continue;
        StateNorms& of = found[{model.decoder_layers().first() + static_cast<int64_t>(l), name}];
        of.by_position.push_back(real.flatten(1).norm(2, {1}));
        of.numbers = value[0].numel();
      }
    }
  }
  return found;
}

constexpr size_t kMostNorms = 6;  // lines of the figure

// How fast each layer that has decays forgets. Adds them to the tensors of `out`.
Table decays_table(const Subject& subject, const Recording& recording,
                   const std::vector<LayerPlace>& layers, Findings& out) {
  Table table{.title = "Positions after which half is forgotten",
              .columns = {"layer", "mixer", "decays", "shortest", "median", "longest"}};
  for (const LayerPlace& place : layers) {
    const Tensor decay = recording.find(place.name + ".decay");
    if (!decay.defined()) continue;
    const Tensor real = reading_of(subject.input, place.name).real;
    // Retention's and rwkv's are the same at every position.
    const bool of_positions = decay.dim() > 1;
    const Tensor shown = of_positions && real.defined() ? decay.index({real}) : decay;
    const std::vector<double> s = spread(half_life(shown));
    table.rows.push_back({place.name, place.layer->mixer->type(), shown.numel(), s[0], s[1], s[2]});
    out.tensors.emplace_back(place.name + ".decay", decay);
  }
  return table;
}

// A state's norm [B, T] at each position; NaN in padding.
Tensor norm_by_position(const StateNorms& state, const ModelInput& input) {
  Tensor norm = at::stack(state.by_position, 1).cpu();
  if (input.lengths.defined()) {
    const Tensor real = real_positions(input.lengths, norm.size(1));
    norm.masked_fill_(real.logical_not(), std::nan(""));
  }
  return norm;
}

// Through those of the norms [T] that are finite.
report::Line norm_line(const std::string& label, int style, const Tensor& norm) {
  report::Line line{.label = label, .style = style};
  for (int64_t t = 0; t < norm.size(0); ++t) {
    const double y = norm[t].item<double>();
    if (std::isfinite(y)) {
      line.points.push_back({.x = static_cast<double>(t + 1), .y = y, .low = y, .high = y});
    }
  }
  return line;
}

// The norms of the states that decoding the input keeps. Adds them to the tensors of `out`, and the
// first of them to `lines`.
Table norms_table(const Subject& subject, const std::vector<LayerPlace>& layers, Findings& out,
                  std::vector<report::Line>& lines) {
  Table table{.title = "Norm of the state, mean over sequences",
              .columns = {"layer", "mixer", "state", "numbers", "first position", "middle", "last",
                          "largest"}};
  auto* decoder = dynamic_cast<AutoregressiveModel*>(subject.model);
  if (decoder == nullptr || !decoder->decoder_layers().stateful()) return table;
  if (!subject.input.tokens.defined()) return table;
  const ModelInput apart = with_documents_apart(subject.input);
  const std::map<StateKey, StateNorms> found = norms_of(*decoder, apart);
  for (const LayerPlace& place : layers) {
    for (const auto& [key, state] : found) {
      if (key.first != place.number) continue;
      const std::string& name = key.second;
      const Tensor norm = norm_by_position(state, apart);
      const int64_t n = norm.size(1);
      const Tensor mean = norm.nanmean(0);
      table.rows.push_back({place.name, place.layer->mixer->type(), name, state.numbers,
                            mean[0].item<double>(), mean[n / 2].item<double>(),
                            mean[n - 1].item<double>(), mean.max().item<double>()});
      out.tensors.emplace_back(place.name + ".norm." + name, norm);
      if (lines.size() >= kMostNorms) continue;
      lines.push_back(norm_line(place.name + " " + name, static_cast<int>(lines.size()), mean));
    }
  }
  return table;
}

Figure norms_figure(const std::vector<report::Line>& lines, int64_t length) {
  double high = 0;
  for (const auto& line : lines) {
    for (const auto& point : line.points) high = std::max(high, point.y);
  }
  return {report::draw(report::LineChart{
              .title = "Norm of the states",
              .description = "Mean over sequences, against the position.",
              .x = report::make_axis("position", report::Unit::kCount, 1,
                                     static_cast<double>(std::max<int64_t>(length, 2))),
              .y = report::make_axis("norm", report::Unit::kPlain, 0, high),
              .lines = lines}),
          "A norm that levels off forgets as much as it takes in."};
}

}  // namespace

Findings states(const Subject& subject) {
  Findings out{.title = "Recurrent states"};
  const Recording recording = record(subject, {"decay"});
  const std::vector<LayerPlace> layers = chosen_layers(subject);
  Table decays = decays_table(subject, recording, layers, out);
  std::vector<report::Line> lines;
  Table norms = norms_table(subject, layers, out, lines);
  if (norms.rows.empty() && decays.rows.empty()) {
    usage_error("no recurrent state is kept: ", mixers_text(subject),
                ", expected retention, gla, rwkv, mamba or another recurrence.");
  }
  if (!lines.empty()) out.figures.push_back(norms_figure(lines, subject.input.tokens.size(1)));
  if (!norms.rows.empty()) out.tables.push_back(std::move(norms));
  if (!decays.rows.empty()) out.tables.push_back(std::move(decays));
  return out;
}

}  // namespace headloom::analysis
