// Attention maps before and after composition (Xiao et al. 2024, eq. 7 and 8), and hidden states.
#include <ATen/ATen.h>

#include <algorithm>

#include "analysis/analysis.h"
#include "core/text.h"

namespace headloom::analysis {
namespace {

// Of hidden states [B, T, C], without padding.
double rms_of(const Tensor& hidden, const Tensor& real) {
  if (!hidden.defined()) return std::nan("");
  return root_mean_square(real.defined() ? hidden.masked_select(real.unsqueeze(2)) : hidden);
}

// Of the pairs that a query sees: elsewhere scores are -inf and their parts 0.
double visible_rms(const Tensor& part, const Tensor& scores, const Tensor& real) {
  if (!part.defined()) return std::nan("");
  Tensor seen = scores.isfinite().narrow(1, 0, 1);  // the same for all heads
  if (real.defined()) seen = seen.logical_and(real.unsqueeze(1).unsqueeze(3));
  return root_mean_square(part.masked_select(seen));
}

std::vector<std::string> map_names() {
  std::vector<std::string> names = {"input", "output"};
  for (const std::string prefix : {"", "cross."}) {
    for (const std::string stage : {"scores", "weights"}) {
      names.push_back(prefix + stage);
      for (const char* part : {"convolved", "static", "query", "key", "composed", "map_static",
                               "map_query", "map_key"}) {
        names.push_back(prefix + stage + "." + part);
      }
    }
  }
  return names;
}

}  // namespace

Findings maps(const Subject& subject) {
  const std::vector<LayerPlace> layers = chosen_layers(subject);
  std::vector<std::string> names;
  for (const LayerPlace& place : layers) {
    for (const std::string& name : map_names()) names.push_back(place.name + "." + name);
  }
  const Recording recording = record(subject, names);
  Findings out{.title = "Attention maps"};
  Table table{.title = "What the composition adds: root mean squares, relative to the static part",
              .columns = {"layer", "mixer", "heads", "maps out", "scores: query-wise", "key-wise",
                          "weights: query-wise", "key-wise", "input", "output"}};
  bool any = false;
  for (const auto& [name, tensor] : recording.tensors()) {
    // Composition maps join heads; all others have a head each.
    const bool map = tensor.dim() == 4 && name.find(".map_") == std::string::npos;
    any |= map;
    const size_t end = name.find('.', name.find("layer"));
    const auto place = std::find_if(layers.begin(), layers.end(), [&](const LayerPlace& layer) {
      return layer.name == name.substr(0, end);
    });
    const bool cross = name.substr(end + 1).starts_with("cross.");
    out.tensors.emplace_back(name, map ? chosen_heads(subject, tensor, *place, cross) : tensor);
  }
  if (!any) {
    usage_error("there are no attention maps: ", mixers_text(subject), ".");
  }
  for (const LayerPlace& place : layers) {
    const auto find = [&](const char* name) { return recording.find(place.name + "." + name); };
    const Tensor scores = find("scores"), weights = find("weights"),
                 last = find("weights.composed");
    const Tensor real = reading_of(subject.input, place.name).real;
    const auto relative = [&](const char* part, const char* base) {
      return visible_rms(find(part), scores, real) / visible_rms(find(base), scores, real);
    };
    if (!last.defined() && !find("input").defined()) continue;
    table.rows.push_back(
        {place.name, place.layer->mixer->type(),
         scores.defined() ? Cell(scores.size(1)) : Cell(std::nan("")),
         last.defined() ? Cell(last.size(1)) : Cell(std::nan("")),
         relative("scores.query", "scores.static"), relative("scores.key", "scores.static"),
         relative("weights.query", "weights.static"), relative("weights.key", "weights.static"),
         rms_of(find("input"), real), rms_of(find("output"), real)});
  }
  out.tables.push_back(std::move(table));
  const Tensor& read = subject.input.tokens.defined() ? subject.input.tokens : subject.input.images;
  out.sentences.push_back(str(
      "Maps of ", counted(std::ssize(layers), "layer"), ", for ", counted(read.size(0), "sequence"),
      subject.input.tokens.defined() ? str(" of ", subject.input.tokens.size(1), " tokens.")
                                     : std::string(".")));
  return out;
}

}  // namespace headloom::analysis
