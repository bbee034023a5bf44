// What a mixer is: a module, the options it is built from, and its line in a registry.
//
// A token mixer moves information along the sequence (attention and its alternatives); a channel
// mixer works inside each position (the feed-forward part). Adding one takes one file under token/
// or channel/ and one line in registry.cpp.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/error.h"
#include "core/fields.h"
#include "core/text.h"
#include "mixers/nn.h"
#include "mixers/observed.h"
#include "mixers/state.h"

namespace headloom {

// What a layer knows of the model it is built into.
struct LayerShape {
  int64_t width = 256;  // C
  int64_t layer = 0;    // from 0
  int64_t depth = 1;
  bool alone = false;        // no layer of a model: `layer` and `depth` mean nothing
  int64_t max_length = 256;  // longest sequence the model is built for
  bool causal = true;
  bool bias = false;   // biases in linear maps
  bool cross = false;  // reads a memory of at most max_length positions, all of it
  std::string norm = "rms_norm";
  std::optional<double> norm_eps = {};  // the norm's own when absent
  double init_std = 0.02;
  PositionOptions position;
  // Parameters that several layers of one model have in common, by a name of the mixer's: the first
  // layer registers it and puts it here. Null: the layer stands alone.
  std::shared_ptr<std::map<std::string, Tensor>> shared = {};

  // Output projections start smaller so that the residual stream keeps its scale with depth.
  double output_std() const { return init_std / std::sqrt(2.0 * static_cast<double>(depth)); }
};

// What a forward pass knows beyond x. Undefined tensors are absent.
struct MixerContext {
  Tensor lengths;         // [B] int64: tokens of each sequence that are real
  Tensor documents;       // [B, T] int64: attention stays inside a document
  Tensor memory;          // [B, S, C]: cross-attention reads keys and values from here
  Tensor memory_lengths;  // [B] int64: positions of each memory that are real
  // Decoding: x continues the positions that this state has seen. Lengths, documents and memory
  // are absent then; of the memory the state keeps what cross-attention reads.
  LayerState* state = nullptr;
  // Which of the newest positions, x's included, are each sequence's own: Positions::present() of
  // all, made once for all layers. Undefined: every layer sees to it.
  Tensor present;
  // Training: where layers leave auxiliary losses and what is watched of them.
  Observed* observed = nullptr;
  // The layer's place among all of its model's, an encoder's before its decoder's.
  int64_t layer = 0;
};

// One part of a mixer's cost, as a formula and a number. FLOPs count a multiply-add as two, forward
// pass, averaged over the tokens of one sequence.
struct Cost {
  std::string part;     // "projections", "maps", "dynamic weights", ...
  std::string formula;  // FLOPs a token: "2 C (H + 2 G) D"
  int64_t parameters = 0;
  double flops_per_token = 0;
  bool mechanism = false;  // what the mechanism adds to plain attention
  // Of the parameters, those that a token leaves idle: what of a mixture of experts it did not
  // choose.
  int64_t idle_parameters = 0;
};

template <typename Built>
struct Spec;

// What a token mixer and a channel mixer have in common: their names, for messages.
class Mixer : public Module {
 public:
  // "dcmha", as the registry has it.
  const std::string& type() const { return type_; }
  // "mixer 'dcmha'".
  std::string what() const override { return str(kind_, " '", type_, "'"); }

 protected:
  explicit Mixer(const char* kind) : kind_(kind) {}
  int64_t width() const { return width_; }

 private:
  template <typename Built>
  friend struct Spec;
  const char* const kind_;
  std::string type_;
  int64_t width_ = 0;
};

class TokenMixer : public Mixer {
 public:
  TokenMixer() : Mixer("mixer") {}

  // x [B, T, C] -> [B, T, C]. Throws UsageError naming the mixer and the argument that does not
  // fit.
  Tensor forward(const Tensor& x, const MixerContext& context);
  // Cost at sequence length `length`; parameters add up to the module's.
  virtual std::vector<Cost> costs(int64_t length) const = 0;
  // Whether forward() takes a memory: what cross-attention needs.
  virtual bool reads_memory() const { return false; }
  // Decoding with a memory. What forward() computes of it alone: memory [B, S, C], of which
  // `lengths` [B] int64 positions are real (undefined: all).
  virtual MixerState remember(const Tensor& memory, const Tensor& lengths);
  // The next positions of sequences that read what `state` remembers: x [B, n, C] -> [B, n, C],
  // equal to those rows of forward() on the whole.
  virtual Tensor recall(const Tensor& x, MixerState& state);
  // forward(), or recall() where the context has a state.
  Tensor run_cross(const Tensor& x, const MixerContext& context) {
    return context.state ? recall(x, context.state->cross) : compute(x, context);
  }
  // Bytes of float32 state that decoding keeps of a sequence (in cross-attention, a memory) of
  // `length` positions.
  virtual double state_bytes(int64_t length) const = 0;

  // Whether forward() starts near the identity, so that a block needs no skip around it.
  virtual bool keeps_input() const { return false; }

  // Whether extend() is there: not for mixers that look both ways.
  virtual bool stateful() const { return false; }
  // The state before the first position. A policy is for keys and values: what keeps none does not
  // take it on. Throws UsageError where some are kept of which none can be forgotten.
  virtual MixerState initial_state(const CachePolicy& policy) const {
    (void)policy;
    return {};
  }
  // Positions that there are weights for; absent: any number.
  virtual std::optional<int64_t> longest() const { return {}; }
  // The next positions of sequences that `state`, empty before the first, has seen: x [B, n, C] ->
  // [B, n, C], equal to those rows of forward() on the whole unless something was forgotten, and
  // `state` has seen them too. Sequences may have seen different numbers. Without gradients. Throws
  // UsageError naming the mixer and the argument that does not fit.
  Tensor extend(const Tensor& x, MixerState& state, const MixerContext& context);
  // forward(), or extend() where the context has a state, inside a model, which has checked what it
  // was given.
  Tensor run(const Tensor& x, const MixerContext& context) {
    return context.state ? compute_next(x, context.state->mixer, context) : compute(x, context);
  }

 protected:
  // forward() and extend() of what was checked.
  virtual Tensor compute(const Tensor& x, const MixerContext& context) = 0;
  virtual Tensor compute_next(const Tensor& x, MixerState& state, const MixerContext& context);
};

class ChannelMixer : public Mixer {
 public:
  ChannelMixer() : Mixer("channel_mixer") {}

  // x [B, T, C] -> [B, T, C], each position by itself or with the one before it. Throws UsageError
  // naming the mixer and the argument that does not fit.
  Tensor forward(const Tensor& x, const MixerContext& context);
  // forward() inside a model, which has checked what it was given.
  Tensor run(const Tensor& x, const MixerContext& context) { return compute(x, context); }
  virtual std::vector<Cost> costs() const = 0;
  // Bytes of float32 state that decoding keeps of a sequence.
  virtual double state_bytes() const { return 0; }

  // Whether balance() does something.
  virtual bool balances() const { return false; }
  // Behind each optimiser step: evens the load of experts out, given how many choices each got in
  // that step [experts] (Observed::load).
  virtual void balance(const Tensor& load) { (void)load; }

 protected:
  // forward() of what was checked.
  virtual Tensor compute(const Tensor& x, const MixerContext& context) = 0;
};

// The options of one kind of thing, and how to build it.
template <typename Built>
struct Spec {
  virtual ~Spec() = default;
  virtual std::string type() const = 0;
  virtual void fields(Fields& f) = 0;
  // Null for no mixer at all ("none"). Throws UsageError for options that do not fit the layer.
  std::shared_ptr<Built> build(const LayerShape& shape) const {
    std::shared_ptr<Built> built = make(shape);
    if (built) {
      built->type_ = type();
      built->width_ = shape.width;
    }
    return built;
  }

 protected:
  virtual std::shared_ptr<Built> make(const LayerShape& shape) const = 0;
};

using TokenMixerSpec = Spec<TokenMixer>;

struct ChannelMixerSpec : Spec<ChannelMixer> {
  // The hidden width that matches models to equal parameters, or nullptr where there is none.
  virtual std::optional<int64_t>* hidden() { return nullptr; }
};

template <typename SpecType>
struct Entry {
  std::string name;
  std::string doc;     // one line
  std::string source;  // paper
  std::shared_ptr<SpecType> (*make)();
};
using TokenMixerEntry = Entry<TokenMixerSpec>;
using ChannelMixerEntry = Entry<ChannelMixerSpec>;

const std::vector<TokenMixerEntry>& token_mixers();
const std::vector<ChannelMixerEntry>& channel_mixers();

template <typename SpecType>
std::vector<std::string> entry_names(const std::vector<Entry<SpecType>>& entries) {
  std::vector<std::string> names;
  for (const auto& entry : entries) names.push_back(entry.name);
  return names;
}

// A fresh spec by name; UsageError with the nearest name where there is none. `kind` is for the
// message.
template <typename SpecType>
std::shared_ptr<SpecType> make_spec(const std::vector<Entry<SpecType>>& entries, const char* kind,
                                    const std::string& name) {
  for (const auto& entry : entries) {
    if (entry.name == name) return entry.make();
  }
  const std::string near = nearest(name, entry_names(entries));
  usage_error("there is no ", kind, " '", name, "'",
              near.empty() ? str("; there are ", join(entry_names(entries)), ".")
                           : str("; did you mean '", near, "'?"));
}

}  // namespace headloom
