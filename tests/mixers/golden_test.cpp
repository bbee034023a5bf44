// Mixers against tensors recorded from the original authors' code.
#include "testing/golden.h"
#include "mixers/token/dynamic_weights.h"
#include "support.h"

namespace headloom::golden_test {
namespace {

using test::close;
using test::Tensors;

LayerShape shape_of(int64_t width, const char* layout, double base = 10000) {
  return {.width = width,
          .depth = 8,
          .position = {.type = "rope", .base = base, .layout = layout, .fraction = 1}};
}

// Runs forward and backward and compares output and input gradient; `prefix` as in the recording.
void run(TokenMixer& mixer, const Tensors& g, const std::string& out, const std::string& prefix) {
  const Tensor x = test::leaf(g.at("x"));
  const Tensor y = mixer.forward(x, {});
  EXPECT_TRUE(close(y, g.at(out), 1e-4));
  (y * g.at("cotangent")).sum().backward();
  EXPECT_TRUE(close(x.grad(), g.at(prefix + "x"), 1e-3));
}

TEST(MixerGolden, DcmhaDynamicWeights) {
  const Tensors g = test::read_golden("dcmha_dynproj_h6");
  const Tensor x = test::leaf(g.at("x")), dw1 = test::leaf(g.at("dw1")),
               qkw = test::leaf(g.at("qkw")), dd = test::leaf(g.at("dd"));
  const auto map = [](const Tensor& recorded) {
    const Tensor weight = recorded.flatten(1).t();
    auto linear = std::make_shared<Linear>(weight.size(1), weight.size(0), false, 0);
    linear->weight = weight;
    return linear;
  };
  const DynamicWeightNetworks net = {.w1 = map(dw1),
                                     .w2 = qkw.transpose(0, 1).flatten(3),
                                     .gate = map(dd),
                                     .sides = 4,
                                     .heads = 6};
  const auto weights = net(x, 0, 4);
  Tensor sum = at::zeros({});
  std::vector<Tensor> key_maps;
  const char* const names[] = {"pre_q", "pre_k", "post_q", "post_k"};
  for (size_t i = 0; i < 4; ++i) {
    const DynamicWeights& w = weights[i];
    const std::string name = names[i];
    for (const auto& [part, value] :
         {std::pair("w1", w.down), std::pair("w2", w.up), std::pair("dd", w.gate)}) {
      EXPECT_TRUE(close(value, g.at(name + part), 1e-4)) << name << part;
      sum = sum + (value * g.at("cotangent." + name + part)).sum();
    }
    if (name.back() == 'k') {
      key_maps.push_back(at::einsum("btim,btin->btmn", {w.down, w.up}) + at::diag_embed(w.gate));
    }
  }
  const Tensor maps = at::stack(key_maps, 2);
  EXPECT_TRUE(close(maps, g.at("KW"), 1e-4));
  (sum + (maps * g.at("cotangent.KW")).sum()).backward();
  EXPECT_TRUE(close(x.grad(), g.at("grad.x"), 1e-3));
  EXPECT_TRUE(close(dw1.grad(), g.at("grad.dw1"), 1e-3));
  EXPECT_TRUE(close(qkw.grad(), g.at("grad.qkw"), 1e-3));
  EXPECT_TRUE(close(dd.grad(), g.at("grad.dd"), 1e-3));
}

TEST(MixerGolden, DcmhaLayer) {
  const Tensors g = test::read_golden("dcmha_layer_window7");
  // The source's window of 7 keeps 8 keys.
  const auto mixer =
      test::mixer("dcmha", "heads = 6\nwindow = 8\nqk_norm = true", shape_of(72, "half", 500000));
  // Recorded: dw1 [C, 1, sides, K], qkw [1, sides, K, 2R, H], dd [C, 1, sides H].
  test::set(*mixer, "qkv.weight", g.at("wqkv"));
  test::set(*mixer, "output.weight", g.at("wo"));
  test::set(*mixer, "q_norm", g.at("q_norm_scale"));
  test::set(*mixer, "k_norm", g.at("k_norm_scale"));
  test::set(*mixer, "w1.weight", g.at("dw1").flatten(1).t());
  test::set(*mixer, "w2", g.at("qkw").transpose(0, 1).flatten(3));
  test::set(*mixer, "gate.weight", g.at("dd").flatten(1).t());
  run(*mixer, g, "out", "grad.");
  const auto p = test::parameters(*mixer);
  EXPECT_TRUE(close(p.at("qkv.weight").grad(), g.at("grad.wqkv"), 1e-3));
  EXPECT_TRUE(close(p.at("output.weight").grad(), g.at("grad.wo"), 1e-3));
  EXPECT_TRUE(close(p.at("q_norm").grad(), g.at("grad.q_norm_scale"), 1e-3));
  EXPECT_TRUE(close(p.at("k_norm").grad(), g.at("grad.k_norm_scale"), 1e-3));
  EXPECT_TRUE(close(p.at("w1.weight").grad(), g.at("grad.dw1").flatten(1).t(), 1e-3));
  EXPECT_TRUE(close(p.at("w2").grad(), g.at("grad.qkw").transpose(0, 1).flatten(3), 1e-3));
  EXPECT_TRUE(close(p.at("gate.weight").grad(), g.at("grad.dd").flatten(1).t(), 1e-3));
}

void differential(const std::string& pairing, const std::string& out, const std::string& prefix) {
  const Tensors g = test::read_golden("diff_attn_gqa");
  LayerShape shape = shape_of(72, "interleaved");
  shape.layer = 3;
  const auto mixer =
      test::mixer("differential", "heads = 6\nkv_heads = 3\npairing = \"" + pairing + "\"", shape);
  test::set(*mixer, "qkv.weight",
            at::cat({g.at("q_proj.weight"), g.at("k_proj.weight"), g.at("v_proj.weight")}));
  test::set(*mixer, "output.weight", g.at("out_proj.weight"));
  test::set(*mixer, "norm", g.at("subln.weight"));
  for (const char* name : {"lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"}) {
    test::set(*mixer, name, g.at(name));
  }
  run(*mixer, g, out, prefix + "grad.");
  const auto p = test::parameters(*mixer);
  const auto grad = [&](const std::string& name) { return g.at(prefix + "grad." + name); };
  EXPECT_TRUE(close(p.at("qkv.weight").grad(),
                    at::cat({grad("q_proj.weight"), grad("k_proj.weight"), grad("v_proj.weight")}),
                    1e-3));
  EXPECT_TRUE(close(p.at("output.weight").grad(), grad("out_proj.weight"), 1e-3));
  EXPECT_TRUE(close(p.at("norm").grad(), grad("subln.weight"), 1e-3));
  for (const char* name : {"lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"}) {
    EXPECT_TRUE(close(p.at(name).grad(), grad(name), 1e-3)) << name;
  }
}

TEST(MixerGolden, DifferentialPair) { differential("pair", "out_flash", "flash."); }

TEST(MixerGolden, DifferentialRepeat) { differential("repeat", "out_naive", "naive."); }

TEST(MixerGolden, MultiTokenLayer) {
  const Tensors g = test::read_golden("mta_layer_gqa");
  LayerShape shape = shape_of(84, "interleaved", 100000);
  shape.layer = 4;
  const auto mixer =
      test::mixer("multi_token",
                  "preset = \"released\"\nconv_layers = \"all\"\nheads = 6\nkv_heads = 2\n"
                  "head_dim = 20",
                  shape);
  test::set(*mixer, "qkv.weight",
            at::cat({g.at("wq.weight"), g.at("wk.weight"), g.at("wv.weight")}));
  test::set(*mixer, "output.weight", g.at("wo.weight"));
  test::set(*mixer, "pre_conv", g.at("mta_kernel").squeeze(1));
  test::set(*mixer, "post_conv", g.at("mta_kernel_after_sm").squeeze(1));
  test::set(*mixer, "pre_mix", g.at("wpsm.weight").t());  // recorded [out, in]
  test::set(*mixer, "post_mix", g.at("head_kernel").squeeze(0));
  test::set(*mixer, "norm", g.at("subln.weight"));
  test::set(*mixer, "gate.weight", g.at("gate.weight"));
  test::set(*mixer, "gate.bias", g.at("gate.bias"));
  run(*mixer, g, "out", "grad.");
  const auto p = test::parameters(*mixer);
  const auto grad = [&](const std::string& name) { return g.at("grad." + name); };
  EXPECT_TRUE(close(p.at("qkv.weight").grad(),
                    at::cat({grad("wq.weight"), grad("wk.weight"), grad("wv.weight")}), 1e-3));
  EXPECT_TRUE(close(p.at("output.weight").grad(), grad("wo.weight"), 1e-3));
  EXPECT_TRUE(close(p.at("pre_conv").grad(), grad("mta_kernel").squeeze(1), 1e-3));
  EXPECT_TRUE(close(p.at("post_conv").grad(), grad("mta_kernel_after_sm").squeeze(1), 1e-3));
  EXPECT_TRUE(close(p.at("pre_mix").grad(), grad("wpsm.weight").t(), 1e-3));
  EXPECT_TRUE(close(p.at("post_mix").grad(), grad("head_kernel").squeeze(0), 1e-3));
  EXPECT_TRUE(close(p.at("norm").grad(), grad("subln.weight"), 1e-3));
  EXPECT_TRUE(close(p.at("gate.weight").grad(), grad("gate.weight"), 1e-3));
  EXPECT_TRUE(close(p.at("gate.bias").grad(), grad("gate.bias"), 1e-3));
}

}  // namespace
}  // namespace headloom::golden_test
