// Analyses: functions from a loaded model, and mostly something that it reads, to named tensors,
// tables and figures. The command line prints the tables and writes pages; Python returns the
// tensors. docs/analyses.md says how each is read.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "core/error.h"
#include "mixers/recording.h"
#include "model/model.h"
#include "report/plot.h"

namespace headloom::analysis {

using Cell = std::variant<std::string, int64_t, double>;

struct Table {
  std::string title;
  std::vector<std::string> columns;
  std::vector<std::vector<Cell>> rows = {};  // a cell for each column
};

struct Figure {
  std::string drawing;  // SVG with what is read in it, by report/plot.h
  std::string caption;
};

// What an analysis has found.
struct Findings {
  std::string title;
  std::vector<std::string> sentences = {};  // the result in words
  std::vector<Table> tables = {};
  std::vector<Figure> figures = {};
  std::vector<std::pair<std::string, Tensor>> tensors = {};
};

// What is analysed.
struct Subject {
  Model* model = nullptr;  // in evaluation mode; null where the analysis needs none
  ModelInput input = {};   // B sequences; empty where the analysis reads none
  std::vector<std::string> vocabulary =
      {};  // what each token is shown as, valid UTF-8; may be empty
  // noise: which token is asked for at each position, data::kIgnore elsewhere; of input.tokens'
  // shape. Or which positions of the only sequence are the answer that its last one is to find.
  Tensor targets = {}, answer = {};
  std::vector<int64_t> layers = {};  // by their place among all of the model's; empty: all
  std::vector<int64_t> heads = {};   // empty: all
  int64_t top = 5;                   // how many a list shows
};

// What of a model an analysis can be limited to.
enum class Choice { kNothing, kLayers, kHeads };

struct Entry {
  std::string name;
  std::string doc;     // one line
  std::string source;  // paper
  bool model;          // needs a model
  bool input;          // needs something that the model reads
  Choice choice;       // heads where layers can be chosen too
  Findings (*run)(const Subject& subject);
  bool lists = false;  // shows the `top` of something
};
const std::vector<Entry>& analyses();
// Throws UsageError with the nearest name, of these and of `others`, which are not found here.
const Entry& find_analysis(const std::string& name, const std::vector<std::string>& others = {});

// A layer or head is asked for that the model does not have.
class NoSuchPart : public UsageError {
 public:
  using UsageError::UsageError;
};

// Runs it. Throws UsageError where the model has nothing of the kind, and NoSuchPart.
Findings analyze(const Entry& entry, const Subject& subject);

// All but the figures.
std::string to_json(const Findings& findings);
// Tables and sentences for a terminal.
std::string to_text(const Findings& findings);
// One self-contained page.
std::string to_html(const Findings& findings);

// A token's bytes as text that can be shown: a line break as U+21B5, other control characters and
// what is no UTF-8 as \xNN.
std::string shown_token(std::string_view bytes);

// --- What analyses share ------------------------------------------------------------------

// What tokens [...] are shown as: their texts, or their numbers where there is no vocabulary.
std::string text_of(const Subject& subject, int64_t token);
std::vector<std::string> texts_of(const Subject& subject, const Tensor& tokens);

// A layer of the model, of those that were asked for.
struct LayerPlace {
  std::string name;  // "layer3", as in a Recording
  int64_t number;    // among all of the model's
  const Layers::Layer* layer;
};
std::vector<LayerPlace> chosen_layers(const Subject& subject);

// Runs the model without gradients on subject.input, or on another.
Recording record(const Subject& subject, std::vector<std::string> names);
Recording record(const Subject& subject, const ModelInput& input, std::vector<std::string> names);

// "the token mixers are mamba and mha", or "the token mixers of layers 0 and 2 are ..." where some
// were chosen. The same of the channel mixers.
std::string mixers_text(const Subject& subject);
std::string channels_text(const Subject& subject);

// Throws UsageError: `analysis` reads attention maps, and none of the chosen layers has any.
[[noreturn]] void refuse_without_maps(const std::string& analysis, const Subject& subject);

// How many of a mixer's maps belong to each head: two before differential's difference, else one.
int64_t maps_of_head(const TokenMixer& mixer, int64_t maps);
// maps [B, H, T, S] of a layer, of its cross-attention where `cross` -> those of the heads that
// were asked for. Throws NoSuchPart for heads that it does not have.
Tensor chosen_heads(const Subject& subject, const Tensor& maps, const LayerPlace& place,
                    bool cross = false);
// The numbers of the `kept` maps that chosen_heads() has kept of a layer, in the same order.
std::vector<int64_t> map_numbers(const Subject& subject, int64_t kept);

// Whether the columns of the layer's map `name` ("weights") are positions, and no combinations of
// them.
bool columns_are_positions(const LayerPlace& place, std::string_view name);

// Which keys each query sees, bool [B, H, T, S] as `maps`, weights of the layer `place`: those that
// have a finite score, or a weight other than 0 where the layer has no scores of single keys.
Tensor visible_keys(const Recording& recording, const LayerPlace& place, const Tensor& maps);

// Whether a layer is of the encoder of an encoder-decoder, which reads the source.
bool in_encoder(const std::string& place);
// What a layer's stack reads.
struct Reading {
  Tensor tokens;  // [B, T]; undefined for images
  Tensor real;    // [B, T] bool: positions that are no padding; undefined where all are real
};
Reading reading_of(const ModelInput& input, const std::string& place);
// The layer's maps `name` ("weights") [B, H, T, S] of `input` with 0 in the rows of queries that
// are padding and, where columns are positions, in the columns of keys that are.
Tensor without_padding(const ModelInput& input, const LayerPlace& place, std::string_view name,
                       const Tensor& maps);

// A line through share [n] at 1, 2, ... n.
report::Line curve(const std::string& label, int style, const Tensor& share);

// The first `length` positions of the tokens, and of the source, alone.
ModelInput shortened(const ModelInput& input, int64_t length);

// --- The analyses, one file each ------------------------------------------------------------

Findings maps(const Subject& subject);
Findings diversity(const Subject& subject);
Findings rank(const Subject& subject);
Findings noise(const Subject& subject);
Findings experts(const Subject& subject);
Findings states(const Subject& subject);
Findings memory(const Subject& subject);
Findings sparsity(const Subject& subject);
Findings params(const Subject& subject);
Findings theorems(const Subject& subject);

// The interactive page of maps(), in place of to_html().
std::string maps_page(const Subject& subject, const Findings& findings);

}  // namespace headloom::analysis
