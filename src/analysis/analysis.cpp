#include "analysis/analysis.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "core/text.h"
#include "core/utf8.h"
#include "mixers/padding.h"
#include "train/codec.h"

namespace headloom::analysis {
namespace {

// What mixers_text() and channels_text() say; `type_of` gives a layer's.
template <typename F>
std::string types_text(const char* what, const Subject& subject, const F& type_of) {
  std::vector<std::string> once, numbers;
  for (const LayerPlace& place : chosen_layers(subject)) {
    const std::string type = type_of(*place.layer);
    if (std::find(once.begin(), once.end(), type) == once.end()) once.push_back(type);
    numbers.push_back(std::to_string(place.number));
  }
  const std::string of =
      subject.layers.empty()
          ? ""
          : str(numbers.size() == 1 ? " of layer " : " of layers ", join(numbers, " and "));
  return str("the ", what, of, " are ", join(once, " and "));
}

ModelInput moved(const ModelInput& input, at::Device device) {
  ModelInput out = input;
  for (Tensor* t : out.tensors()) {
    if (t->defined()) *t = t->to(device);
  }
  return out;
}

}  // namespace

const std::vector<Entry>& analyses() {
  static const std::vector<Entry> entries = {
      {"maps", "attention maps before and after composition, and hidden states", "Xiao et al. 2024",
       true, true, Choice::kHeads, maps},
      {"diversity", "how different the heads are: captured variance and similarity",
       "Xiao et al. 2024, figure 5", true, false, Choice::kLayers, diversity},
      {"rank", "rank and singular values of the maps against head size and length",
       "Bhojanapalli et al. 2020; Wang et al. 2020", true, true, Choice::kHeads, rank},
      {"noise", "the share of attention on the answer against the rest", "Ye et al. 2024", true,
       true, Choice::kHeads, noise},
      {"experts", "load and specialisation of experts", "Dai et al. 2024", true, true,
       Choice::kLayers, experts, /*lists=*/true},
      {"states", "norms of recurrent states and the spectrum of decays",
       "Peng et al. 2023; Sun et al. 2023; Gu & Dao 2023", true, true, Choice::kLayers, states},
      {"memory", "which tokens a hidden unit fires on, and what it writes", "Geva et al. 2021",
       true, true, Choice::kLayers, memory, /*lists=*/true},
      {"sparsity", "attention as a graph: edges, distances, sinks", "Joshi 2020", true, true,
       Choice::kHeads, sparsity},
      {"params", "parameters and FLOPs of each part, and what the mechanism adds",
       "Xiao et al. 2024, table 2", true, false, Choice::kNothing, params},
      {"theorems", "the theorems of the papers, computed",
       "Xiao et al. 2024; Bhojanapalli et al. 2020; Sun et al. 2023; Oren et al. 2024", false,
       false, Choice::kNothing, theorems},
  };
  return entries;
}

const Entry& find_analysis(const std::string& name, const std::vector<std::string>& others) {
  std::vector<std::string> names;
  for (const Entry& entry : analyses()) {
    if (entry.name == name) return entry;
    names.push_back(entry.name);
  }
  names.insert(names.end(), others.begin(), others.end());
  usage_error("there is no analysis '", name, "'", did_you_mean(name, names));
}

Findings analyze(const Entry& entry, const Subject& subject) {
  if (entry.model && subject.model == nullptr) {
    usage_error("the analysis ", entry.name, " needs a model, but there is none.");
  }
  const bool reads = subject.input.tokens.defined() || subject.input.images.defined();
  if (entry.input && !reads) {
    usage_error("the analysis ", entry.name, " needs tokens or images that the model reads.");
  }
  const at::NoGradGuard no_grad;
  // The model runs where it is; what it read and what it shows is analysed on the CPU.
  Subject own = subject;
  own.input = moved(subject.input, at::kCPU);
  for (Tensor* t : {&own.targets, &own.answer}) {
    if (t->defined()) *t = t->cpu();
  }
  return entry.run(own);
}

std::string text_of(const Subject& subject, int64_t token) {
  const auto place = static_cast<size_t>(token);
  return place < subject.vocabulary.size() ? subject.vocabulary[place] : std::to_string(token);
}

std::vector<std::string> texts_of(const Subject& subject, const Tensor& tokens) {
  std::vector<std::string> texts;
  const Tensor flat = tokens.to(at::kCPU, at::kLong).flatten().contiguous();
  const int64_t* first = flat.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < flat.numel(); ++i) texts.push_back(text_of(subject, first[i]));
  return texts;
}

std::vector<LayerPlace> chosen_layers(const Subject& subject) {
  std::vector<LayerPlace> all;
  for (const Layers* stack : subject.model->stacks()) {
    for (size_t i = 0; i < stack->all().size(); ++i) {
      all.push_back({.name = stack->place(i),
                     .number = stack->first() + static_cast<int64_t>(i),
                     .layer = &stack->all()[i]});
    }
  }
  if (subject.layers.empty()) return all;
  std::vector<LayerPlace> chosen;
  for (const int64_t number : subject.layers) {
    const auto found = std::find_if(all.begin(), all.end(),
                                    [&](const LayerPlace& l) { return l.number == number; });
    if (found == all.end()) {
      throw NoSuchPart(str("there is no layer ", number, ", expected 0 to ", all.size() - 1, "."));
    }
    chosen.push_back(*found);
  }
  return chosen;
}

Recording record(const Subject& subject, const ModelInput& input, std::vector<std::string> names) {
  const at::NoGradGuard no_grad;
  Recording recording(std::move(names));
  ModelInput own = moved(input, subject.model->device());
  own.recording = &recording;
  subject.model->forward(own);
  recording.to_cpu();
  return recording;
}

Recording record(const Subject& subject, std::vector<std::string> names) {
  return record(subject, subject.input, std::move(names));
}

Tensor visible_keys(const Recording& recording, const LayerPlace& place, const Tensor& maps) {
  const Tensor scores = recording.find(place.name + ".scores");
  const bool fits = scores.defined() && columns_are_positions(place, "scores") &&
                    scores.size(2) == maps.size(2) && scores.size(3) == maps.size(3);
  return fits ? scores.isfinite().narrow(1, 0, 1).expand_as(maps) : maps.ne(0);
}

bool columns_are_positions(const LayerPlace& place, std::string_view name) {
  return !place.layer->mixer->traits().projected_keys || name == "weights.composed";
}

std::string mixers_text(const Subject& subject) {
  return types_text("token mixers", subject,
                    [](const Layers::Layer& layer) { return layer.mixer->type(); });
}

std::string channels_text(const Subject& subject) {
  return types_text("channel mixers", subject, [](const Layers::Layer& layer) {
    return layer.channel ? layer.channel->type() : "none";
  });
}

void refuse_without_maps(const std::string& analysis, const Subject& subject) {
  usage_error("the analysis ", analysis, " reads attention maps, but ", mixers_text(subject),
              ", which have none.");
}

int64_t maps_of_head(const TokenMixer& mixer, int64_t maps) {
  if (mixer.type() != "differential") return 1;
  return maps / mixer.head_projections()->o.size(0);
}

Tensor chosen_heads(const Subject& subject, const Tensor& maps, const LayerPlace& place,
                    bool cross) {
  if (subject.heads.empty()) return maps;
  const int64_t each =
      maps_of_head(cross ? *place.layer->cross : *place.layer->mixer, maps.size(1));
  const int64_t heads = maps.size(1) / each;
  for (const int64_t head : subject.heads) {
    if (head >= 0 && head < heads) continue;
    throw NoSuchPart(
        str("there is no head ", head, " in ", place.name, ", expected 0 to ", heads - 1, "."));
  }
  const std::vector<int64_t> numbers =
      map_numbers(subject, each * static_cast<int64_t>(subject.heads.size()));
  return maps.index_select(1, at::tensor(numbers, at::kLong));
}

std::vector<int64_t> map_numbers(const Subject& subject, int64_t kept) {
  std::vector<int64_t> numbers;
  const auto heads = static_cast<int64_t>(subject.heads.size());
  for (int64_t i = 0; i < kept; ++i) {
    const int64_t each = heads == 0 ? 1 : kept / heads;
    const int64_t head = heads == 0 ? i : subject.heads[static_cast<size_t>(i / each)];
    numbers.push_back(head * each + i % each);
  }
  return numbers;
}

bool in_encoder(const std::string& place) { return place.starts_with("encoder."); }

Reading reading_of(const ModelInput& input, const std::string& place) {
  const bool source = in_encoder(place);
  Reading out{.tokens = source ? input.source : input.tokens, .real = {}};
  const Tensor& lengths = source ? input.source_lengths : input.lengths;
  if (out.tokens.defined() && lengths.defined()) {
    out.real = real_positions(lengths, out.tokens.size(1));
  }
  return out;
}

Tensor without_padding(const ModelInput& input, const LayerPlace& place, std::string_view name,
                       const Tensor& maps) {
  const Tensor real = reading_of(input, place.name).real;
  if (!real.defined()) return maps;
  const Tensor padding = real.logical_not().unsqueeze(1);
  const Tensor rows = maps.masked_fill(padding.unsqueeze(3), 0);
  // The padding's keys are 0 before linformer combines them, but the combination is recorded.
  return columns_are_positions(place, name) ? rows.masked_fill(padding.unsqueeze(2), 0) : rows;
}

report::Line curve(const std::string& label, int style, const Tensor& share) {
  report::Line line{.label = label, .style = style};
  for (int64_t i = 0; i < share.size(0); ++i) {
    const double y = share[i].item<double>();
    line.points.push_back({.x = static_cast<double>(i + 1), .y = y, .low = y, .high = y});
  }
  return line;
}

ModelInput shortened(const ModelInput& input, int64_t length) {
  ModelInput out = input;
  const auto cut = [&](Tensor& t) {
    if (t.defined() && t.size(1) > length) t = t.narrow(1, 0, length);
  };
  cut(out.tokens);
  cut(out.documents);
  cut(out.segments);
  cut(out.source);
  for (Tensor* lengths : {&out.lengths, &out.source_lengths}) {
    if (lengths->defined()) *lengths = lengths->clamp_max(length);
  }
  return out;
}

std::string shown_token(std::string_view bytes) {
  std::string out;
  const auto hexadecimal = [&](unsigned char byte) {
    constexpr const char* kDigits = "0123456789abcdef";
    out += {'\\', 'x', kDigits[byte >> 4], kDigits[byte & 15]};
  };
  for (size_t i = 0; i < bytes.size();) {
    const auto byte = static_cast<unsigned char>(bytes[i]);
    if (byte == '\n') {
      out += "\u21b5";
      ++i;
      continue;
    }
    if (byte < 0x20 || byte == 0x7f) {
      hexadecimal(byte);
      ++i;
      continue;
    }
    size_t length = byte < 0x80 ? 1 : byte >= 0xf0 ? 4 : byte >= 0xe0 ? 3 : 2;
    length = std::min(length, bytes.size() - i);
    if (is_utf8(bytes.substr(i, length))) {
      out += bytes.substr(i, length);
      i += length;
    } else {
      hexadecimal(byte);
      ++i;
    }
  }
  return out;
}

}  // namespace headloom::analysis
