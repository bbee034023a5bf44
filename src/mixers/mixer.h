// What a mixer is: a module, the options it is built from, and its line in a registry.
//
// A token mixer moves information along the sequence (attention and its alternatives); a channel
// mixer works inside each position (the feed-forward part). Adding one takes one file under token/
// or channel/ and one line in registry.cpp.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/fields.h"
#include "core/text.h"
#include "mixers/auxiliary.h"
#include "mixers/context_parallel.h"
#include "mixers/decoding_state.h"
#include "mixers/nn.h"

namespace headloom {

class Recording;  // mixers/recording.h

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
  PositionOptions position = {};
  // Positions that a causal depthwise convolution before the token mixer reaches over; 0: none.
  int64_t short_conv = 0;
  // Parameters that several layers of one model have in common, by a name of the mixer's: the first
  // layer registers it and puts it here. Null: the layer stands alone.
  std::shared_ptr<std::map<std::string, Tensor>> shared = {};
  // The processes that share out the layer's heads and hidden units; null: this one has all.
  std::shared_ptr<const TensorParallel> tensor_parallel = {};
  // The processes that share out the positions of every sequence; null: this one has all.
  std::shared_ptr<const ContextParallel> context_parallel = {};

  int64_t processes() const { return tensor_parallel ? tensor_parallel->size : 1; }
  int64_t rank() const { return tensor_parallel ? tensor_parallel->rank : 0; }
  // This process's equal share of `count` heads or units. Throws UsageError, which calls them
  // `option`, where there is none.
  int64_t share(const char* option, int64_t count) const;
  // The size of each of `heads` heads that fill the width. Throws UsageError naming `mixer` where
  // they do not.
  int64_t head_dim(const char* mixer, int64_t heads) const;

  // Output projections start smaller so that the residual stream keeps its scale with depth.
  double output_std() const { return init_std / std::sqrt(2.0 * static_cast<double>(depth)); }
};

// What a forward pass knows beyond x. Undefined tensors are absent.
struct MixerContext {
  Tensor lengths = {};         // [B] int64: tokens of each sequence that are real
  Tensor documents = {};       // [B, T] int64: attention stays inside a document
  Tensor memory = {};          // [B, S, C]: cross-attention reads keys and values from here
  Tensor memory_lengths = {};  // [B] int64: positions of each memory that are real
  // Decoding: x continues the positions that this state has seen. Lengths, documents and memory
  // are absent then; of the memory the state keeps what cross-attention reads.
  LayerState* state = nullptr;
  // Which of the newest positions, x's included, are no left padding: Positions::padding_mask() of
  // all, made once for all layers. Undefined: every layer makes its own.
  Tensor padding_mask = {};
  // Decoding: outputs are wanted at so many of the newest positions of x alone; states take in all
  // of x. Absent: at all positions.
  std::optional<int64_t> newest = {};
  // Training: where layers leave auxiliary losses and statistics.
  AuxiliaryOutputs* auxiliary = nullptr;
  // Where layers and mixers show what they compute; null: nobody looks. Not while decoding.
  Recording* recording = nullptr;
  // Training: each layer's inputs alone are kept, and its backward computes the layer again.
  bool activation_checkpointing = false;
  // The layer's place among all of its model's, an encoder's before its decoder's.
  int64_t layer = 0;
};

// The positions of x [B, T, C], along dimension 1, at which outputs are wanted.
inline Tensor newest_of(const Tensor& x, const MixerContext& context) {
  if (!context.newest || *context.newest >= x.size(1)) return x;
  return x.narrow(1, x.size(1) - *context.newest, *context.newest);
}

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

// What linear maps cost a token: two FLOPs a weight. Maps that are null are not counted.
Cost linear_cost(const std::string& part, const std::string& formula,
                 const std::vector<std::shared_ptr<Linear>>& maps);

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
  friend class TokenMixerSpec;
  friend class ChannelMixerSpec;
  const char* const kind_;
  std::string type_;
  int64_t width_ = 0;
};

// What a kind of token mixer can do. Its entry says so once; forward(), models and tests go by it.
struct MixerTraits {
  bool causal = true;             // can look back only
  bool bidirectional = true;      // can look both ways
  bool cross_attention = false;   // can read a memory
  bool documents = true;          // can keep packed documents apart
  bool stateful = true;           // causal, it can decode from a state, at least with some options
  bool tensor_parallel = false;   // processes can share out its heads, at least with some options
  bool context_parallel = false;  // and the positions of its sequences
  bool projected_keys = false;    // its scores and softmax weights are of combinations of keys
};

// The linear maps of attention heads as products see them: score map h is x W_q[h] (x W_k[h])^T
// before positions and scale, output map h' reads x W_v[h'] and is written by W_o[h'].
struct HeadProjections {
  Tensor q, k;  // [H, C, D]
  Tensor v;     // [H', C, E]
  Tensor o;     // [H', E, C]
};

// With LayerShape::short_conv = W every token mixer reads x + conv(x) instead of x, where conv is a
// causal depthwise convolution over W positions without a bias or an activation: the layer
// "Canon-A" of Allen-Zhu 2025 (Physics of Language Models, part 4.1), whose code starts its filters
// as PyTorch does, uniformly within W^-1/2.
class TokenMixer : public Mixer {
 public:
  TokenMixer() : Mixer("mixer") {}

  const MixerTraits& traits() const { return traits_; }

  // x [B, T, C] -> [B, T, C]. Throws UsageError naming the mixer and the argument that does not
  // fit.
  Tensor forward(const Tensor& x, const MixerContext& context);
  // Cost at sequence length `length`; parameters add up to the module's.
  std::vector<Cost> costs(int64_t length) const;
  // Decoding with cross-attention. What forward() computes of the memory alone: memory [B, S, C],
  // of which `lengths` [B] int64 positions are real (undefined: all).
  virtual MixerState build_cross_cache(const Tensor& memory, const Tensor& lengths);
  // The next positions of sequences that read the memory of `state`: x [B, n, C] -> [B, n, C],
  // equal to those rows of forward() on the whole.
  virtual Tensor extend_cross(const Tensor& x, MixerState& state);
  // forward(), or extend_cross() where the context has a state.
  Tensor run_cross(const Tensor& x, const MixerContext& context) {
    if (context.state == nullptr) return run(x, context);
    const Tensor y = extend_cross(x, context.state->cross);
    context.state->cross.position += x.size(1);
    return y;
  }
  // Bytes of float32 state that decoding keeps of a sequence (in cross-attention, a memory) of
  // `length` positions.
  double state_bytes(int64_t length) const;

  // Without biases and norms; absent where the mixer has no heads of this form.
  virtual std::optional<HeadProjections> head_projections() const { return {}; }

  // Whether forward() starts near the identity, so that a block needs no skip around it.
  virtual bool keeps_input() const { return false; }

  // The linear map whose output is the mixer's; null where it has none. Every mixer that has one
  // registers it as "output".
  std::shared_ptr<Linear> output_projection() const;

  // Whether it decodes from a state: extend() is there.
  virtual bool stateful() const { return traits_.stateful && causal_; }
  // The state before the first position. The policy and its type concern keys and values; a mixer
  // without any ignores them. Throws UsageError where the mixer keeps some but cannot evict or
  // narrow them as asked.
  virtual MixerState initial_state(const CachePolicy& policy) const {
    (void)policy;
    return {};
  }
  // After each optimiser step, `step` of them so far: draws what is random about the mixer again
  // where it is time. What it draws follows from the arguments alone; `layer` is the layer's place
  // among all of its model's.
  virtual void redraw(int64_t step, uint64_t seed, int64_t layer) {
    (void)step, (void)seed, (void)layer;
  }
  // Positions that there are weights for; absent: any number.
  virtual std::optional<int64_t> longest() const { return {}; }
  // The next positions of sequences that `state`, empty before the first, has seen: x [B, n, C] ->
  // [B, n, C], equal to those rows of forward() on the whole unless something was forgotten, and
  // `state` has seen them too. Sequences may have seen different numbers. Without gradients. Throws
  // UsageError naming the mixer and the argument that does not fit.
  Tensor extend(const Tensor& x, MixerState& state, const MixerContext& context);
  // forward(), or extend() where the context has a state, inside a model, which has checked what it
  // was given. [B, n, C], or the newest positions of it that the context wants.
  Tensor run(const Tensor& x, const MixerContext& context);

 protected:
  // costs() and state_bytes() of what the mixer itself has: without the short convolution.
  virtual std::vector<Cost> own_costs(int64_t length) const = 0;
  virtual double own_state_bytes(int64_t length) const = 0;
  // forward() and extend() of what was checked, after the short convolution.
  virtual Tensor compute(const Tensor& x, const MixerContext& context) = 0;
  // The positions that `state` has seen are counted by the caller. Outputs that the context does
  // not want may be left out.
  virtual Tensor compute_next(const Tensor& x, MixerState& state, const MixerContext& context);
  // The processes that share the positions of x in compute(); null where all are here.
  const ContextParallel* context_parallel() const { return context_parallel_.get(); }

 private:
  friend class TokenMixerSpec;
  friend void equalize(TokenMixer& mixer, const LayerShape& shape, const std::string& place);
  Tensor next(const Tensor& x, MixerState& state, const MixerContext& context);
  // x plus the short convolution of it, given the rows before x and changed to those it leaves; x
  // where there is no convolution.
  Tensor convolved(const Tensor& x, Tensor& rows, const Tensor& documents) const;

  MixerTraits traits_;
  Tensor short_conv_;  // [C, W], the last tap is the position itself; undefined: none
  bool causal_ = true;
  std::shared_ptr<const TensorParallel> tensor_parallel_;    // may be null
  std::shared_ptr<const ContextParallel> context_parallel_;  // may be null
};

struct ChannelMixerTraits {
  bool bidirectional = true;     // fits a model that looks both ways
  bool tensor_parallel = false;  // processes can share out its hidden units
  bool context_parallel = true;  // each position is by itself, or those before it can be had
};

class ChannelMixer : public Mixer {
 public:
  ChannelMixer() : Mixer("channel_mixer") {}

  // x [B, T, C] -> [B, T, C], each position by itself or with the one before it. Throws UsageError
  // naming the mixer and the argument that does not fit.
  Tensor forward(const Tensor& x, const MixerContext& context);
  // forward() inside a model, which has checked what it was given, and counts the positions that
  // the channel mixer's state has seen.
  Tensor run(const Tensor& x, const MixerContext& context) {
    return written_by_all(compute(read_by_all(x, tensor_parallel_.get()), context),
                          tensor_parallel_.get());
  }
  virtual std::vector<Cost> costs() const = 0;
  // Bytes of float32 state that decoding keeps of a sequence.
  virtual double state_bytes() const { return 0; }

  // Whether balance() does something.
  virtual bool balances() const { return false; }
  // After each optimiser step: evens the load of experts out, given how many choices each got in
  // that step [experts] (AuxiliaryOutputs::load).
  virtual void balance(const Tensor& load) { (void)load; }

 protected:
  // forward() of what was checked.
  virtual Tensor compute(const Tensor& x, const MixerContext& context) = 0;

 private:
  friend class ChannelMixerSpec;
  std::shared_ptr<const TensorParallel> tensor_parallel_;  // may be null
};

// The options of one kind of mixer or block. Its name and traits are those of its entry.
template <typename TraitsType>
class Options {
 public:
  using Traits = TraitsType;

  virtual ~Options() = default;
  const std::string& type() const { return type_; }
  const Traits& traits() const { return traits_; }
  virtual void fields(Fields& f) = 0;

 private:
  template <typename SpecType>
  friend struct Entry;
  std::string type_;
  Traits traits_;
};

// What a registry says of a kind of mixer or block.
template <typename SpecType>
struct Entry {
  std::string name;
  std::string doc;     // one line
  std::string source;  // paper
  typename SpecType::Traits traits;
  std::shared_ptr<SpecType> (*create)();

  // Fresh options.
  std::shared_ptr<SpecType> make() const {
    std::shared_ptr<SpecType> spec = create();
    spec->type_ = name;
    spec->traits_ = traits;
    return spec;
  }
};

// Builds mixers. Throws UsageError for options that do not fit the layer.
class TokenMixerSpec : public Options<MixerTraits> {
 public:
  using Mixer = TokenMixer;
  std::shared_ptr<TokenMixer> build(const LayerShape& shape) const;

 private:
  virtual std::shared_ptr<TokenMixer> make(const LayerShape& shape) const = 0;
};

// The hidden width of a channel mixer, by which models are made equal in parameters.
struct HiddenWidth {
  std::optional<int64_t>* option;
  int64_t present;   // also where the option is absent
  int64_t multiple;  // of this it is one
};

class ChannelMixerSpec : public Options<ChannelMixerTraits> {
 public:
  using Mixer = ChannelMixer;
  // Null for no mixer at all ("none").
  std::shared_ptr<ChannelMixer> build(const LayerShape& shape) const;
  // In a model of width `width`; absent where there is none.
  virtual std::optional<HiddenWidth> hidden(int64_t width) {
    static_cast<void>(width);
    return std::nullopt;
  }

 private:
  virtual std::shared_ptr<ChannelMixer> make(const LayerShape& shape) const = 0;
};

using TokenMixerEntry = Entry<TokenMixerSpec>;
using ChannelMixerEntry = Entry<ChannelMixerSpec>;

// For mixers without options.
struct NoOptions {
  void fields(Fields&) {}
};

// The spec of mixers of type Built with options of their own, a struct with void fields(Fields&). A
// mixer is made as Built(options, shape), or as Built(shape) where it has no options.
template <typename Spec, typename Built, typename BuiltOptions>
struct BuiltSpec : Spec {
  BuiltOptions options;
  void fields(Fields& f) override { options.fields(f); }
  std::shared_ptr<typename Spec::Mixer> make(const LayerShape& shape) const override {
    if constexpr (std::is_same_v<BuiltOptions, NoOptions>) {
      return std::make_shared<Built>(shape);
    } else {
      return std::make_shared<Built>(options, shape);
    }
  }
};

template <typename Built, typename BuiltOptions = NoOptions>
TokenMixerEntry token_mixer(std::string name, std::string doc, std::string source,
                            const MixerTraits& traits = {}) {
  using Spec = BuiltSpec<TokenMixerSpec, Built, BuiltOptions>;
  return {std::move(name), std::move(doc), std::move(source), traits,
          []() -> std::shared_ptr<TokenMixerSpec> { return std::make_shared<Spec>(); }};
}

// The options have `hidden` and hidden_at(width), which is the width also where the option is
// absent, and hidden_multiple() where not all widths are possible.
template <typename Built, typename BuiltOptions>
ChannelMixerEntry channel_mixer(std::string name, std::string doc, std::string source,
                                const ChannelMixerTraits& traits = {}) {
  struct Spec final : BuiltSpec<ChannelMixerSpec, Built, BuiltOptions> {
    std::optional<HiddenWidth> hidden(int64_t width) override {
      BuiltOptions& options = this->options;
      int64_t multiple = 1;
      if constexpr (requires { options.hidden_multiple(); }) multiple = options.hidden_multiple();
      return HiddenWidth{&options.hidden, options.hidden_at(width), multiple};
    }
  };
  return {std::move(name), std::move(doc), std::move(source), traits,
          []() -> std::shared_ptr<ChannelMixerSpec> { return std::make_shared<Spec>(); }};
}

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
  usage_error("there is no ", kind, " '", name, "'", did_you_mean(name, entry_names(entries)));
}

}  // namespace headloom
