// Autoregressive models: each position predicts the next token, so that text is generated token by
// token from a decoding state.
#pragma once

#include "model/embeddings_and_heads.h"
#include "model/model.h"

namespace headloom {

// What decoding keeps of the positions that a batch of sequences has seen.
struct DecoderState {
  Positions position = {};  // seen
  std::vector<LayerState> layers = {};
  std::string model = {};  // the configuration that its model has, as text; "": of none yet

  int64_t bytes() const;
  // Sequences; 0 while nothing is kept of any.
  int64_t batch() const;
  // Before the first token: sequences are going to see `positions` in all, and caches take memory
  // for them at once.
  void reserve(int64_t positions);
  // The state of the sequences that `rows` [n] int64 names, a row as often as it is named.
  DecoderState select(const Tensor& rows) const;
  // In place: row b becomes row which[b], and other rows are dropped. which[b] is b, which costs
  // nothing, or a row from which.size() on, which moves to the place of one that leaves.
  void keep(const std::vector<int64_t>& which);
  // In place: puts the sequences of `others` after these, whatever each has seen; from then on
  // they are extended together. Throws Error where they are not of one model and policy, or some
  // have seen nothing. If adding the layers fails, this state keeps its sequences; one that had
  // none becomes empty.
  void add(const std::vector<DecoderState>& others);
  // The same as a state of its own.
  static DecoderState join(const std::vector<DecoderState>& parts);
  // The same memory under another name, to go on from one state twice: what the first wrote into
  // its caches the second overwrites.
  DecoderState alias() const;
};

// What an encoder-decoder reads before it writes: a row a sequence.
struct Source {
  Tensor tokens = {};   // [B, S] int64; undefined: there is none
  Tensor lengths = {};  // [B] int64: tokens of each that are real; undefined: all
};

class AutoregressiveModel : public Model {
 public:
  explicit AutoregressiveModel(const ModelConfig& config);

  // Converts the weights of linear maps to bfloat16, or quantizes them to int8 (kChar: symmetric,
  // one scale for each output; Dettmers et al. 2022) or to four bits (Int4: symmetric, one scale
  // for 32 inputs of an output): those of mixers, channel mixers and the head. Embeddings, norms,
  // routers, the experts of a mixture and what a mixer does not multiply as a linear map stay as
  // they are. A model that was converted cannot be trained.
  void convert_weights(at::ScalarType type);

  // The state before the first token: for any number of sequences, or for those of `source`, which
  // is read now. Throws UsageError where the model reads a source and there is none, or the other
  // way round, where a layer has no state or cannot forget as `policy` says, and where no layer
  // keeps keys and values to which a policy other than the default could apply.
  DecoderState initial_state(const CachePolicy& policy = {}, const Source& source = {}) const;
  // The next tokens [B, n] int64 of sequences that `state` has seen -> [B, n, C], equal to those
  // rows of hidden() on the whole unless something was forgotten; `state` has seen them too. Of
  // `newest` positions alone, [B, newest, C], where it is given (at most n): the last layer then
  // computes little for the others. Tokens and source may be on the CPU, wherever the model is. A
  // state of nothing becomes the initial one. Without gradients. Throws UsageError for tokens of
  // another shape or number of sequences, or outside the vocabulary, beyond learned positions, and
  // for a state of a model that is configured otherwise.
  Tensor extend(const Tensor& tokens, DecoderState& state,
                std::optional<int64_t> newest = {}) const;

  // The layers that look back only.
  virtual const Layers& decoder_layers() const = 0;

 private:
  virtual const Embedding& decoder_embedding() const = 0;
  virtual TokenHead& head() = 0;
  // Encodes the source and leaves in each layer's state what it keeps of it.
  virtual void read_source(const Source& source, std::vector<LayerState>& states) const = 0;

  const std::string text_;  // the configuration, by which its states know it
};

}  // namespace headloom
