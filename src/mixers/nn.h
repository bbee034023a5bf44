// The few building blocks every mixer shares: linear map, norms, rotary positions.
//
// They are modules held by shared_ptr; parameters are registered under the names users see in a
// state_dict.
#pragma once

#include <ATen/ATen.h>
#include <torch/nn/module.h>

#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "core/fields.h"
#include "mixers/decoding_state.h"
#include "mixers/tensor_parallel.h"

namespace headloom {

using at::Tensor;

// What a parameter says of itself beside its value.
struct ParameterTraits {
  // Whether weight decay shrinks it. Vectors and scalars, biases and norms among them, are never
  // decayed. docs/models.md gives the source for each exception.
  bool decay = true;
};

// A module that can run with parameters and buffers of somebody else's: Python's modules own
// theirs, and python/src/functional_call.h calls it with them.
class Module : public torch::nn::Module {
 public:
  // Registers `value` under `name` and puts it into `slot`, which lives as long as this module.
  void parameter(const std::string& name, Tensor& slot, const Tensor& value,
                 ParameterTraits traits = {});
  // Puts `value`, a parameter that another module of the model registers, into `slot` as well.
  void shared_parameter(Tensor& slot, const Tensor& value);
  // As parameter(), for what checkpoints hold but no gradient changes.
  void buffer(const std::string& name, Tensor& slot, const Tensor& value);
  // Says how tensor parallelism has cut the parameter `name`.
  void cut(const std::string& name, ParameterCut how) { cuts_[name] = std::move(how); }
  // `slot` is in no checkpoint, but goes to the device to which the parameters go.
  void unregistered(Tensor& slot) { outside_.push_back(&slot); }

  // The tensors that this module and its children compute with, those of other modules included.
  std::vector<Tensor> used_tensors() const;
  // For each of named_tensors() where this module and its children keep it. The module has no
  // parameters from then on.
  std::vector<std::vector<Tensor*>> release_tensors();
  // Takes every tensor of this module and its children to `device`, with those that are not
  // registered.
  void to(at::Device device, bool non_blocking = false) override;
  using torch::nn::Module::to;
  // Of its tensors; the CPU where it has none.
  at::Device device() const;
  // The names of this module's own parameters that are registered as not decayed.
  const std::set<std::string>& undecayed() const { return undecayed_; }
  // How its own parameters are cut, those that are.
  const std::map<std::string, ParameterCut>& cuts() const { return cuts_; }

  // Its name as the user knows it: how messages about what it was given begin.
  virtual std::string what() const { return "module"; }

 private:
  using torch::nn::Module::register_buffer;     // leaves no slot
  using torch::nn::Module::register_parameter;  // leaves no slot
  std::vector<Tensor*> slots_, outside_;
  std::set<std::string> undecayed_;
  std::map<std::string, ParameterCut> cuts_;
};

// The parameters of a module, then its buffers: what a checkpoint holds.
std::vector<std::pair<std::string, Tensor>> named_tensors(const torch::nn::Module& module);
// The names of the parameters that weight decay shrinks: matrices, unless their traits say
// otherwise.
std::set<std::string> decayed_parameters(const torch::nn::Module& module);
// The parameters that tensor parallelism has cut.
std::map<std::string, ParameterCut> parameter_cuts(const torch::nn::Module& module);

// While one lives on this thread, normal() and draw_uniform() leave tensors as the allocator gives
// them, which costs neither time nor memory: for models whose parameters are counted, read from a
// file or given by the caller.
class WithoutValues {
 public:
  // `filled`: the module's own parameters get their values later, so they need memory then.
  explicit WithoutValues(bool filled = false);
  ~WithoutValues();
  WithoutValues(const WithoutValues&) = delete;
  WithoutValues& operator=(const WithoutValues&) = delete;
  // Whether one lives on this thread.
  static bool on();
  // Whether one lives on this thread whose parameters are never filled.
  static bool never_filled();

 private:
  const bool filled_;
};

// Weights drawn from N(0, std).
Tensor normal(at::IntArrayRef sizes, double std);
// Draws `weight` again, uniformly from [-limit, limit].
void draw_uniform(Tensor weight, double limit);

// y = x W^T + b with W [out, in]. W ~ N(0, std), b = 0.
struct Linear : Module {
  Linear(int64_t in, int64_t out, bool with_bias, double std);
  Tensor forward(const Tensor& x) const;
  // Outputs [from, from + count) alone.
  Tensor outputs(const Tensor& x, int64_t from, const c10::SymInt& count) const;
  // From now on holds W as bfloat16, int8 (kChar) or with four bits a weight (Int4), if
  // `may_narrow` and it is not quantized already: it runs, but is not trained again.
  void convert(at::ScalarType type);
  // Where tensor parallelism has cut the map: this process computes the outputs of `segments`
  // alone, or adds what its inputs give and its share of the bias, as one of `processes`.
  void cut_outputs(const std::vector<int64_t>& segments);
  void cut_inputs(int64_t processes);

  Tensor weight, bias;
  Tensor scale;            // where W is quantized, as ops::linear takes it
  bool may_narrow = true;  // false where the mixer itself reads W, or needs it exact
  double bias_share = 1;
};

// W as convert() holds it, and its scale.
std::pair<Tensor, Tensor> converted(const Tensor& weight, at::ScalarType type);

// LayerNorm (scale and shift; eps 1e-5 unless given) or RMSNorm (scale; 1e-6) over the last
// dimension; `none` passes x through.
struct Norm : Module {
  Norm(const std::string& type, int64_t width, std::optional<double> eps = {});
  Tensor forward(const Tensor& x) const;

  std::string type;
  double eps;
  Tensor weight, bias;
};

struct PositionOptions {
  std::string type = "rope";
  double base = 10000;
  std::string layout = "half";
  double fraction = 1;
  // Rope stretched to longer sequences than the model was trained on.
  std::string scaling = "none";
  double factor = 1;               // lower frequencies are divided by it
  int64_t original_length = 8192;  // llama3, yarn
  // Turns within original_length that bound the lower frequencies.
  double low_factor = 1, high_factor = 4;  // llama3
  double beta_slow = 1, beta_fast = 32;    // yarn
  // yarn: of rotated queries and of rotated keys; 0.1 ln(factor) + 1 when absent.
  std::optional<double> attention_factor;

  void fields(Fields& f);
  // `frequency` [rotary/2] as scaling says: "linear" divides all by `factor` (Chen et al. 2023),
  // "llama3" (Dubey et al. 2024) those whose turn takes more than original_length / low_factor
  // positions, and in part those down to original_length / high_factor. "yarn" (Peng et al. 2024)
  // does the same with the betas, where the part falls with the place of the frequency.
  Tensor scaled(const Tensor& frequency) const;
  // What rotated queries and keys are multiplied with.
  double magnitude() const;
};

// Rotary position embedding of the first `rotary` of each head's d dimensions, at absolute
// positions: freq_i = base^(-2i / rotary); layout "half" pairs (i, i + rotary/2), "interleaved"
// pairs (2i, 2i+1).
class Rotary {
 public:
  // Throws UsageError where the rotated part of the head is not even.
  Rotary(const PositionOptions& options, int64_t head_dim);
  // RetNet's: the whole head in interleaved pairs with freq_i = 10000^(-i / (head_dim/2 - 1)), so
  // that the last pair's is 1/10000.
  static Rotary retention(int64_t head_dim);
  // x [B, T, H, D], the positions after those `seen`.
  Tensor apply(const Tensor& x, const Positions& seen = {});
  // x [B, T, H, D] at positions `places` [B, T] int64, all of them below T.
  Tensor apply_at(const Tensor& x, const Tensor& places);
  // Both in place of themselves, without a gradient; at once where they lie side by side, as parts
  // of one projection do.
  void apply(Tensor& q, Tensor& k, const Positions& seen);

 private:
  void prepare(const c10::SymInt& length, const Tensor& like);
  // cos and sin of all angles at `places` [...], of that type: [..., rotary/2].
  std::pair<Tensor, Tensor> angles(const Tensor& places, at::ScalarType type) const;
  // x rotated as positions `places` [B or 1, T] say, for which the tables are prepared.
  Tensor rotated(const Tensor& x, const Tensor& places) const;

  PositionOptions options_;
  bool interleaved_;
  int64_t rotary_;
  double span_;       // freq_i = base^(-2i / span)
  Tensor cos_, sin_;  // [L, rotary/2], grown on demand as position_table.h says
};

// How many positions of its document stand before each: documents [B, T] int64 -> [B, T] int64.
Tensor places_in_documents(const Tensor& documents);

// ALiBi (Press et al. 2022): -slope_h * distance with slope_h = 2^(-8(h+1)/H). [1, H, T, S].
Tensor alibi_bias(int64_t heads, const c10::SymInt& queries, const c10::SymInt& keys,
                  const at::TensorOptions& options);
// For queries and keys at any positions: distance [B or 1, T, S] -> [B or 1, H, T, S].
Tensor alibi_bias(int64_t heads, const Tensor& distance, const at::TensorOptions& options);

}  // namespace headloom
