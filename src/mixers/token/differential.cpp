// Differential attention (Ye et al. 2024): the difference of two softmax maps, a head.
//
// n heads with two maps of size d = C / (2n) each, maps 2i and 2i+1 being head i's, and n value
// heads of size 2d. P_i = softmax(a_2i) - lambda softmax(a_2i+1) is composed attention with a
// static matrix [2n, n] after softmax; then RMS norm over a head's 2d outputs, times
// (1 - lambda_init).
//
//   lambda = exp(lq1 . lk1) - exp(lq2 . lk2) + lambda_init,  lambda_init = 0.8 - 0.6 exp(-0.3
//   layer)
#include <ATen/OpMathType.h>

#include "mixers/token/attention.h"
#include "ops/positionwise/op.h"

namespace headloom {
namespace {

struct DifferentialOptions {
  AttentionOptions attention;
  std::string pairing = "pair";
  bool norm_scale = true;

  void fields(Fields& f) {
    attention.fields(f);
    f.field(
        "pairing", pairing,
        "grouped queries, r = heads / kv_heads: \"pair\" gives head i the key maps 2 floor(i/r) "
        "and 2 floor(i/r) + 1 (published models), \"repeat\" gives map j the key map floor(j/r)",
        {"pair", "repeat"});
    f.field("norm_scale", norm_scale, "learned scale in the heads' norm");
  }
};

AttentionSizes differential_sizes(const DifferentialOptions& o, const LayerShape& shape) {
  const int64_t heads = o.attention.heads;
  const int64_t groups = o.attention.kv_heads.value_or(heads);
  if (heads % groups != 0) {
    usage_error("differential: kv_heads is ", groups, ", expected a divisor of heads = ", heads,
                ".");
  }
  if (!o.attention.head_dim && shape.width % (2 * heads) != 0) {
    usage_error("differential: heads is ", heads,
                ", expected that 2 heads divide the model's width = ", shape.width,
                " (or set head_dim).");
  }
  const int64_t dim = o.attention.head_dim.value_or(shape.width / (2 * heads));
  const int64_t own = shape.share("heads", heads), own_groups = shape.share("kv_heads", groups);
  return {.maps = 2 * own,
          .keys = 2 * own_groups,
          .values = own_groups,
          .outputs = own,
          .head_dim = dim,
          .v_dim = 2 * dim};
}

class Differential final : public Attention {
 public:
  Differential(const DifferentialOptions& options, const LayerShape& shape)
      : Attention(options.attention, differential_sizes(options, shape), shape),
        start_(lambda_init(shape.layer)),
        runs_(options.pairing == "pair" ? sizes_.values : sizes_.outputs) {
    const auto vector = [&](const char* name, Tensor& slot) {
      parameter(name, slot, normal({sizes_.head_dim}, 0.1));
    };
    vector("lambda_q1", lambda_q1_);
    vector("lambda_k1", lambda_k1_);
    vector("lambda_q2", lambda_q2_);
    vector("lambda_k2", lambda_k2_);
    if (options.norm_scale) parameter("norm", scale_, at::ones({sizes_.v_dim}));
  }

  std::vector<Cost> own_costs(int64_t length) const override {
    std::vector<Cost> out = Attention::own_costs(length);
    out.push_back({.part = "difference",
                   .formula = "2 K n",
                   .parameters = 4 * sizes_.head_dim,
                   .flops_per_token = 2 * mean_keys(length) * static_cast<double>(sizes_.outputs),
                   .mechanism = true});
    out.push_back({.part = "head norm",
                   .formula = "4 n E",
                   .parameters = scale_.defined() ? scale_.numel() : 0,
                   .flops_per_token = 4.0 * static_cast<double>(sizes_.output_width()),
                   .mechanism = true});
    return out;
  }

 protected:
  // The operator gives map p the key map floor(p / r). Under "pair" all first maps of the heads
  // that share value head g therefore come before all their second maps.
  Tensor order_maps(const Tensor& t, int64_t dim) const override { return ordered(t, dim); }

  void compose(const Tensor&, const Tensor&, ops::ComposedAttentionOptions& o) override {
    const auto wide = at::toOpMathType(lambda_q1_.scalar_type());
    const auto exp_dot = [&](const Tensor& a, const Tensor& b) {
      return (a.to(wide) * b.to(wide)).sum().exp();
    };
    const Tensor lambda =
        exp_dot(lambda_q1_, lambda_k1_) - exp_dot(lambda_q2_, lambda_k2_) + start_;
    const int64_t heads = sizes_.outputs;
    const Tensor first =
        at::eye(heads, lambda.options().requires_grad(false)).view({runs_, heads / runs_, heads});
    o.post.static_matrix = at::stack({first, first * -lambda}, 1)
                               .view({sizes_.maps, heads})
                               .to(lambda_q1_.scalar_type());
  }

  Tensor finish(const Tensor& o) override { return ops::rms_norm(o, scale_, 1e-5) * (1 - start_); }

 private:
  // Reorders dimension `dim` of 2n maps from (run, head, map) to (run, map, head).
  Tensor ordered(const Tensor& x, int64_t dim) const {
    if (runs_ == sizes_.outputs || x.sym_size(dim) == 1) return x;
    return x.unflatten(dim, {runs_, sizes_.outputs / runs_, 2})
        .transpose(dim + 1, dim + 2)
        .flatten(dim, dim + 2);
  }

  const double start_;  // lambda_init
  const int64_t runs_;  // runs of heads whose maps are reordered together
  Tensor lambda_q1_, lambda_k1_, lambda_q2_, lambda_k2_;  // [d]
  Tensor scale_;                                          // [2d]
};

}  // namespace

TokenMixerEntry differential_mixer() {
  return token_mixer<Differential, DifferentialOptions>(
      "differential", "the difference of two softmax maps a head", "Ye et al. 2024",
      {.cross_attention = true, .tensor_parallel = true});
}

}  // namespace headloom
