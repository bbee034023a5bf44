// Multi-token attention (Golovneva et al. 2025): attention maps convolved over queries and keys,
// and mixed across heads.
//
// Convolution and linear head mixing may each stand before and after softmax, the mixing after the
// convolution. Kernels and mixes start as the identity. Then, per head: RMS norm over its outputs
// (eps 1e-5), times the depth factor 1 - lambda_init(layer) of differential attention, and the gate
// o * sigmoid(Linear(o)), all shared by the heads.
#include "core/sizes.h"
#include "mixers/token/attention.h"
#include "ops/positionwise/op.h"

namespace headloom {
namespace {

struct MultiTokenOptions {
  AttentionOptions attention;
  std::string preset = "text";
  bool pre_conv = true;
  bool post_conv = false;
  std::string conv_layers = "mod4";
  int64_t query_kernel = 6;
  int64_t key_kernel = 11;
  int64_t conv_heads = 1;
  std::string conv_padding = "both";
  std::string conv_mask = "double";
  std::string pre_mix = "off";
  std::string post_mix = "groups";
  int64_t mix_heads = 2;
  bool norm = true;
  bool depth_scale = true;
  std::string gate = "none";

  void fields(Fields& f) {
    const std::string before = preset;
    f.field("preset", preset,
            "defaults of the other options: the paper's text, the released models, or nothing on",
            {"text", "released", "none"});
    if (preset != before) apply_preset();
    attention.fields(f);
    f.field("pre_conv", pre_conv, "convolution before softmax");
    f.field("post_conv", post_conv, "convolution after softmax");
    f.field("conv_layers", conv_layers, "layers of a model with convolutions: l mod 4 = 2, or all",
            {"mod4", "all"});
    f.field("query_kernel", query_kernel, "queries a kernel spans, the current one last",
            size_from(1));
    f.field("key_kernel", key_kernel, "keys a kernel spans", size_from(1));
    f.field("conv_heads", conv_heads, "heads that a convolution reads together", size_from(1));
    f.field("conv_padding", conv_padding, "keys a kernel reads: around, before or after its own",
            {"both", "left", "right"});
    f.field("conv_mask", conv_mask, "masking of earlier queries' rows: double, or the exact form",
            {"double", "exact"});
    f.field("pre_mix", pre_mix, "linear head mixing before softmax", {"off", "groups", "all"});
    f.field("post_mix", post_mix, "linear head mixing after softmax", {"off", "groups", "all"});
    f.field("mix_heads", mix_heads, "heads in a group of head mixing", size_from(1));
    f.field("norm", norm, "RMS norm of each head's output");
    f.field("depth_scale", depth_scale, "scale the norm by 1 - lambda_init(layer)");
    f.field("gate", gate, "sigmoid gate on each head's output: none, one value a head, or one each",
            {"none", "head", "full"});
  }

 private:
  void apply_preset() {
    const bool released = preset == "released", text = preset == "text";
    pre_conv = released || text;
    post_conv = released;
    pre_mix = released ? "all" : "off";
    post_mix = released ? "all" : text ? "groups" : "off";
    norm = released || text;
    depth_scale = text;
    gate = released ? "head" : "none";
  }
};

// Groups of heads that `choice` mixes.
int64_t groups_of(const std::string& choice, const MultiTokenOptions& o) {
  return choice == "groups" ? o.attention.heads / o.mix_heads : 1;
}

// Throws UsageError where the heads, or the `own` ones of a process, are no whole groups.
void check_groups(const MultiTokenOptions& o, const LayerShape& shape, int64_t own) {
  const auto check = [&](const char* name, int64_t together, const std::string& why = "") {
    const int64_t heads = o.attention.heads;
    if (heads % together != 0) {
      usage_error("multi_token: ", name, " is ", together, why,
                  ", expected a divisor of heads = ", heads, ".");
    }
    if (own % together == 0) return;
    usage_error("multi_token: ", name, " is ", together, ", but each of the ", shape.processes(),
                " processes of train.tensor_parallel has ", own, " of the ", heads,
                " heads, expected a divisor of ", own, ".");
  };
  if (o.pre_conv || o.post_conv) check("conv_heads", o.conv_heads);
  const char* const mix = o.pre_mix == "groups"    ? "pre_mix"
                          : o.post_mix == "groups" ? "post_mix"
                                                   : nullptr;
  // The preset sets both where nobody has written them.
  if (mix) check("mix_heads", o.mix_heads, str(" (", mix, " is \"groups\")"));
}

// The options of a process's own heads. Throws UsageError where a part reads heads of others.
MultiTokenOptions own_options(const MultiTokenOptions& options, const LayerShape& shape) {
  MultiTokenOptions own = options;
  const std::pair<const char*, std::string> mixes[] = {{"pre_mix", own.pre_mix},
                                                       {"post_mix", own.post_mix}};
  for (const auto& [name, mix] : mixes) {
    if (mix != "all" || shape.processes() == 1) continue;
    usage_error("multi_token: ", name, " is \"all\", but the ", shape.processes(),
                " processes of train.tensor_parallel have some heads each, expected \"groups\" or "
                "\"off\".");
  }
  own.attention.heads = shape.share("heads", own.attention.heads);
  check_groups(options, shape, own.attention.heads);
  return own;
}

// A kernel that leaves the maps as they are: [H, c_q, c_k], or [H, c_h, c_q, c_k] with c_h > 1.
Tensor identity_kernel(const MultiTokenOptions& o) {
  const int64_t heads = o.attention.heads, together = o.conv_heads;
  if (o.conv_padding == "both" && o.key_kernel % 2 == 0) {
    usage_error("multi_token: key_kernel is ", o.key_kernel,
                ", expected an odd number with conv_padding \"both\".");
  }
  const int64_t own = o.conv_padding == "both"   ? (o.key_kernel - 1) / 2
                      : o.conv_padding == "left" ? o.key_kernel - 1
                                                 : 0;
  Tensor kernel = at::zeros({heads, together, o.query_kernel, o.key_kernel});
  kernel.select(3, own)
      .select(2, o.query_kernel - 1)
      .unflatten(0, {heads / together, together})
      .copy_(at::eye(together));
  return together == 1 ? kernel.squeeze(1) : kernel;
}

class MultiToken final : public Attention {
 public:
  MultiToken(const MultiTokenOptions& options, const LayerShape& shape)
      : Attention(options.attention, AttentionSizes::plain(options.attention, shape), shape),
        own_(own_options(options, shape)),
        factor_(options.depth_scale ? 1 - lambda_init(shape.layer) : 1) {
    const auto learned = [&](const char* name, Tensor& slot, const Tensor& value) {
      parameter(name, slot, value);
      if (shape.processes() > 1) cut(name, {.dim = 0, .segments = {value.size(0)}});
    };
    // A mixer that is no layer of a model has what its name says.
    const bool here = options.conv_layers == "all" || shape.alone || shape.layer % 4 == 2;
    if (options.pre_conv || options.post_conv) {
      // Built on every layer, so that options that do not fit are refused on every layer.
      const Tensor kernel = identity_kernel(own_);
      if (here && options.pre_conv) learned("pre_conv", pre_conv_, kernel.clone());
      if (here && options.post_conv) learned("post_conv", post_conv_, kernel.clone());
    }
    const auto mix = [&](const std::string& choice) {
      const Tensor matrix = identity_mix(own_.attention.heads, groups_of(choice, own_));
      return shape.processes() > 1 ? grouped(matrix) : matrix;
    };
    if (options.pre_mix != "off") learned("pre_mix", pre_mix_, mix(options.pre_mix));
    if (options.post_mix != "off") learned("post_mix", post_mix_, mix(options.post_mix));
    if (options.norm) parameter("norm", scale_, at::ones({sizes_.v_dim}));
    if (options.gate != "none") {
      const int64_t values = options.gate == "head" ? 1 : sizes_.v_dim;
      gate_ = register_module("gate",
                              std::make_shared<Linear>(sizes_.v_dim, values, true, shape.init_std));
    }
  }

  MixerState initial_state(const CachePolicy& policy) const override {
    if (policy.evicts() && (pre_conv_.defined() || post_conv_.defined())) {
      usage_error(
          "convolves over neighbouring keys, so none can be forgotten between others, but "
          "the cache policy is ",
          policy.text(), ", expected \"full\".");
    }
    return Attention::initial_state(policy);
  }

  std::vector<Cost> own_costs(int64_t length) const override {
    std::vector<Cost> out = Attention::own_costs(length);
    const auto number = [](const Tensor& t) { return t.defined() ? t.numel() : int64_t{0}; };
    const auto add = [&](const char* part, const char* formula, int64_t parameters, double flops) {
      out.push_back({.part = part,
                     .formula = formula,
                     .parameters = parameters,
                     .flops_per_token = flops,
                     .mechanism = true});
    };
    const auto per_pair = [&](int64_t weights) {
      return 2 * mean_keys(length) * static_cast<double>(weights);
    };
    if (const int64_t kernels = number(pre_conv_) + number(post_conv_); kernels > 0) {
      add("convolution", "2 K H c_h c_q c_k for each", kernels, per_pair(kernels));
    }
    if (const int64_t mixes = number(pre_mix_) + number(post_mix_); mixes > 0) {
      add("head mixing", "2 K H c_h for each", mixes, per_pair(mixes));
    }
    const auto width = static_cast<double>(sizes_.output_width());
    if (scale_.defined()) add("head norm", "4 H E", number(scale_), 4 * width);
    if (gate_) {
      const int64_t parameters = number(gate_->weight) + number(gate_->bias);
      add("gate", own_.gate == "head" ? "2 H E" : "2 H E E", parameters,
          2.0 * static_cast<double>(sizes_.outputs * number(gate_->weight)));
    }
    return out;
  }

 protected:
  int64_t earlier_queries() const override {
    const auto reach = [](const Tensor& kernel) {
      return kernel.defined() ? kernel.size(-2) - 1 : int64_t{0};
    };
    return reach(pre_conv_) + reach(post_conv_);
  }

  void compose(const Tensor&, const Tensor&, ops::ComposedAttentionOptions& o) override {
    const auto groups = [](const Tensor& matrix) {
      return matrix.defined() && matrix.dim() == 3 ? matrix.size(0) : 1;
    };
    o.pre_conv = pre_conv_;
    o.post_conv = post_conv_;
    o.conv_padding = own_.conv_padding;
    o.conv_mask = own_.conv_mask;
    o.pre.static_matrix = ungrouped(pre_mix_);
    o.pre.groups = groups(pre_mix_);
    o.post.static_matrix = ungrouped(post_mix_);
    o.post.groups = groups(post_mix_);
  }

  Tensor finish(const Tensor& heads) override {
    Tensor o = heads;
    if (scale_.defined()) o = ops::rms_norm(o, scale_ * factor_, 1e-5);
    if (gate_) o = o * at::sigmoid(gate_->forward(o));
    return o;
  }

 private:
  const MultiTokenOptions own_;
  const double factor_;
  Tensor pre_conv_, post_conv_;  // [H, c_q, c_k] or [H, c_h, c_q, c_k]
  Tensor pre_mix_, post_mix_;    // [H, H] or [g, c_h, c_h]
  Tensor scale_;                 // [E]
  std::shared_ptr<Linear> gate_;
};

}  // namespace

TokenMixerEntry multi_token_mixer() {
  return token_mixer<MultiToken, MultiTokenOptions>(
      "multi_token", "attention maps convolved over queries and keys and mixed across heads",
      "Golovneva et al. 2025", {.cross_attention = true, .tensor_parallel = true});
}

}  // namespace headloom
