// The operator against tensors recorded from the original authors' code.
#include "ops/composed_attention/op.h"
#include "testing/compare.h"
#include "testing/golden.h"

namespace headloom::composed_attention_golden_test {
namespace {

using at::Tensor;
using ops::ComposedAttentionOptions;
using test::Tensors;

// Recorded tensors as leaves, by name.
struct Golden {
  explicit Golden(const std::string& name) : tensors(test::read_golden(name)) {}
  Tensor operator[](const std::string& name) {
    auto& slot = leaves[name];
    if (!slot.defined()) slot = test::leaf(tensors.at(name));
    return slot;
  }
  bool has(const std::string& name) const { return tensors.count(name) > 0; }
  // Compares `out` and the gradients of every leaf taken.
  void expect(const Tensor& out) {
    EXPECT_TRUE(test::close(out, tensors.at("out"), 1e-4));
    (out * tensors.at("cotangent")).sum().backward();
    for (const auto& [name, tensor] : leaves) {
      EXPECT_TRUE(test::close(tensor.grad(), tensors.at("grad." + name), 1e-3)) << name;
    }
  }

  Tensors tensors;
  std::map<std::string, Tensor> leaves;
};

void dcmha_core(const std::string& name, std::optional<int64_t> window) {
  Golden g(name);
  ComposedAttentionOptions o;
  o.window = window;
  for (const auto& [prefix, mix] : {std::pair("pre_", &o.pre), std::pair("post_", &o.post)}) {
    const std::string p = prefix;
    mix->q_down = g[p + "qw1"];
    mix->q_up = g[p + "qw2"];
    mix->q_gate = g[p + "qdd"];
    mix->k_down = g[p + "kw1"];
    mix->k_up = g[p + "kw2"];
    mix->k_gate = g[p + "kdd"];
    // The source adds its static weights to the skip.
    if (g.has(p + "sw")) mix->static_matrix = g[p + "sw"] + at::eye(6);
  }
  const auto bthd = [&](const char* key) { return g[key].transpose(1, 2); };
  g.expect(ops::composed_attention(bthd("q"), bthd("k"), bthd("v"), o).transpose(1, 2));
}

TEST(ComposedAttentionGolden, DcmhaCore) { dcmha_core("dcmha_core_full", std::nullopt); }

TEST(ComposedAttentionGolden, DcmhaCoreStaticWindow) {
  dcmha_core("dcmha_core_sw_window7", 8);  // the source's window of 7 keeps 8 keys
}

TEST(ComposedAttentionGolden, TalkingHeads) {
  Golden g("talking_heads_both");
  ComposedAttentionOptions o;
  // The source keeps a residual before softmax; its weights are [out, in, 1, 1].
  o.pre.static_matrix = g["pre_softmax_talking_heads.weight"].flatten(1).t() + at::eye(6);
  o.post.static_matrix = g["post_softmax_talking_heads.weight"].flatten(1).t();
  const auto bthd = [&](const char* key) { return g[key].transpose(1, 2); };
  g.expect(ops::composed_attention(bthd("q"), bthd("k"), bthd("v"), o).transpose(1, 2));
}

TEST(ComposedAttentionGolden, MultiTokenBeforeSoftmax) {
  Golden g("mta_core_pre_both");
  ComposedAttentionOptions o;
  o.pre_conv = g["mta_kernel"].squeeze(1);
  g.expect(ops::composed_attention(g["q"], g["k"], g["v"], o).flatten(2));
}

TEST(ComposedAttentionGolden, MultiTokenAfterSoftmax) {
  Golden g("mta_core_post_both_head2");
  ComposedAttentionOptions o;
  o.post_conv = g["mta_kernel_after_sm"].squeeze(1);
  o.post.static_matrix = g["head_kernel"];
  o.post.groups = 3;
  const Tensor heads = ops::composed_attention(g["q"], g["k"], g["v"], o);
  const double depth_factor = 1 - (0.8 - 0.6);  // layer 0
  g.expect((at::rms_norm(heads, {20}, g["subln.weight"], 1e-5) * depth_factor).flatten(2));
}

}  // namespace
}  // namespace headloom::composed_attention_golden_test
