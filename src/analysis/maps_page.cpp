// The page on which maps are looked at: layer, map and head are chosen from lists, the query by the
// arrow keys, the mouse or a finger. Everything is in the one file; the script in maps_script.cpp
// draws it.
#include <ATen/ATen.h>

#include <map>
#include <nlohmann/json.hpp>

#include "analysis/analysis.h"
#include "analysis/maps_script.h"
#include "core/text.h"
#include "report/format.h"
#include "report/style.h"

namespace headloom::analysis {
namespace {

using Json = nlohmann::ordered_json;

// RFC 4648.
std::string base64(const uint8_t* bytes, size_t count) {
  constexpr const char* kLetters =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string out;
  out.reserve((count + 2) / 3 * 4);
  for (size_t i = 0; i < count; i += 3) {
    uint32_t group = static_cast<uint32_t>(bytes[i]) << 16;
    if (i + 1 < count) group |= static_cast<uint32_t>(bytes[i + 1]) << 8;
    if (i + 2 < count) group |= bytes[i + 2];
    for (int part = 0; part < 4; ++part) {
      const bool there = i + static_cast<size_t>(part) <= count;
      out += there ? kLetters[group >> (18 - 6 * part) & 63] : '=';
    }
  }
  return out;
}

// As float16: three digits are what is read.
Json packed(const Tensor& t) {
  const Tensor half = t.detach().to(at::kHalf).contiguous();
  return {{"shape", half.sizes().vec()},
          {"data", base64(static_cast<const uint8_t*>(half.const_data_ptr()), half.nbytes())}};
}

struct Kind {
  const char* name;
  const char* label;
  const char* brief;  // beside "scores" or "weights"
  bool scores;
};

// In the order in which they are computed; the last that a layer has is shown first.
constexpr Kind kKinds[] = {
    {"scores", "scores", "before", true},
    {"scores.convolved", "scores, convolved", "convolved", true},
    {"scores.static", "scores: static part", "static part", true},
    {"scores.query", "scores: added query-wise", "query-wise", true},
    {"scores.key", "scores: added key-wise", "key-wise", true},
    {"scores.composed", "scores, composed", "composed", true},
    {"weights", "weights", "before", false},
    {"weights.convolved", "weights, convolved", "convolved", false},
    {"weights.static", "weights: static part", "static part", false},
    {"weights.query", "weights: added query-wise", "query-wise", false},
    {"weights.key", "weights: added key-wise", "key-wise", false},
    {"weights.composed", "weights, composed", "composed", false},
};

// What the positions of an image are called.
std::vector<std::string> patch_names(const ModelConfig& config) {
  const ImageOptions& image = config.image;
  std::vector<std::string> names;
  if (config.pool == "first") names.emplace_back("class");
  for (int64_t row = 0; row < *image.height / image.patch; ++row) {
    for (int64_t column = 0; column < *image.width / image.patch; ++column) {
      names.push_back(str(row, ",", column));
    }
  }
  return names;
}

// The maps of one attention, or null where there are none.
Json panel_of(const Findings& findings, const LayerPlace& place, const std::string& prefix,
              const Subject& subject) {
  std::map<std::string, Tensor> found;
  for (const auto& [name, tensor] : findings.tensors) {
    if (name.starts_with(place.name + "." + prefix)) {
      found[name.substr(place.name.size() + 1 + prefix.size())] = tensor;
    }
  }
  Json maps = Json::array();
  for (const Kind& kind : kKinds) {
    const auto at = found.find(kind.name);
    if (at == found.end()) continue;
    Json map = packed(at->second[0]);
    map["name"] = kind.name;
    map["label"] = kind.label;
    map["short"] = kind.brief;
    map["scores"] = kind.scores;
    map["projected"] = !columns_are_positions(place, prefix + kind.name);
    // Differential attention has two maps of weights for each head.
    const int64_t kept = at->second.size(1);
    const int64_t each =
        subject.heads.empty()
            ? maps_of_head(prefix.empty() ? *place.layer->mixer : *place.layer->cross, kept)
            : kept / static_cast<int64_t>(subject.heads.size());
    std::vector<int64_t> heads = map_numbers(subject, kept);
    for (int64_t& head : heads) head /= each;
    map["each"] = each;
    map["heads"] = heads;
    maps.push_back(std::move(map));
  }
  if (maps.empty()) return {};
  Json composition = Json::array();
  for (const char* stage : {"scores", "weights"}) {
    Json one;
    for (const char* part : {"map_static", "map_query", "map_key"}) {
      const auto at = found.find(str(stage, ".", part));
      if (at == found.end()) continue;
      const Tensor& t = at->second;
      one[part] = packed(t.dim() == 4 ? t[0] : t);
    }
    if (one.is_null()) continue;
    one["stage"] = stage;
    composition.push_back(std::move(one));
  }
  const bool encoder = in_encoder(place.name);
  return {{"name", place.name + (prefix.empty() ? "" : ", cross-attention")},
          {"mixer", (prefix.empty() ? place.layer->mixer : place.layer->cross)->type()},
          {"rows", encoder ? "source" : "tokens"},
          {"columns", encoder || !prefix.empty() ? "source" : "tokens"},
          {"maps", std::move(maps)},
          {"composition", std::move(composition)}};
}

// <, so that nothing in a text ends the script.
std::string inline_json(const Json& json) {
  std::string out;
  for (const char c : json.dump(-1, ' ', false, Json::error_handler_t::replace)) {
    out += c == '<' ? std::string("\\u003c") : std::string(1, c);
  }
  return out;
}

}  // namespace

std::string maps_page(const Subject& subject, const Findings& findings) {
  Json data = {{"tokens", Json::array()}, {"source", Json::array()}};
  const ModelInput& input = subject.input;
  if (input.tokens.defined()) data["tokens"] = texts_of(subject, input.tokens[0]);
  if (input.source.defined()) data["source"] = texts_of(subject, input.source[0]);
  if (input.images.defined()) data["tokens"] = patch_names(subject.model->config());
  Json panels = Json::array(), hidden = Json::array();
  for (const LayerPlace& place : chosen_layers(subject)) {
    for (const char* prefix : {"", "cross."}) {
      Json panel = panel_of(findings, place, prefix, subject);
      if (!panel.is_null()) panels.push_back(std::move(panel));
    }
    for (const auto& [name, tensor] : findings.tensors) {
      if (name != place.name + ".output") continue;
      const Tensor size = tensor[0].to(at::kDouble).square().mean(-1).sqrt();
      std::vector<double> values;
      for (int64_t t = 0; t < size.size(0); ++t) values.push_back(size[t].item<double>());
      hidden.push_back({{"name", place.name},
                        {"rows", in_encoder(place.name) ? "source" : "tokens"},
                        {"rms", values}});
    }
  }
  data["panels"] = std::move(panels);
  data["hidden"] = std::move(hidden);
  std::string out =
      "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">"
      "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"><title>" +
      report::escape(findings.title) + "</title><style>" + report::kStyle + kMapsStyle +
      "</style></head>\n<body><main><h1>" + report::escape(findings.title) + "</h1>\n";
  for (const std::string& sentence : findings.sentences) {
    out += "<p class=\"soft\">" + report::rich(sentence) + "</p>";
  }
  out += kMapsBody;
  out += "<script type=\"application/json\" id=\"data\">" + inline_json(data) +
         "</script>\n<script>" + kMapsScript + "</script></main><footer></footer></body></html>\n";
  return out;
}

}  // namespace headloom::analysis
