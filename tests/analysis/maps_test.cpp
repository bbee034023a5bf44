// Recorded maps and the analyses made of them, against the same computed directly in float64.
#include <gtest/gtest.h>

#include "analysis/analysis.h"
#include "testing/compare.h"
#include "testing/errors.h"

namespace headloom::analysis {
namespace {

ModelConfig config_of(const std::string& layer, const std::string& more = "") {
  ModelConfig config;
  read_fields(parse_toml("width = 16\ndepth = 2\nvocabulary = 11\nmax_length = 24\n" + more +
                             "[[layer]]\n" + layer,
                         "test"),
              config, "model");
  return config;
}

// In float64, with every parameter moved away from where it starts.
std::shared_ptr<Model> model_of(const std::string& layer, const std::string& more = "") {
  at::manual_seed(3);
  const auto model = build_model(config_of(layer, more));
  model->to(at::kDouble);
  model->eval();
  const at::NoGradGuard no_grad;
  for (Tensor p : model->parameters()) p.add_(at::randn_like(p) * 0.3);
  return model;
}

Tensor some_tokens(int64_t batch = 2, int64_t length = 9) {
  at::manual_seed(5);
  return at::randint(0, 11, {batch, length}, at::kLong);
}

Subject subject_of(const std::shared_ptr<Model>& model, const Tensor& tokens = some_tokens()) {
  return {.model = model.get(), .input = {.tokens = tokens}};
}

Recording all_of(const Subject& subject) {
  std::vector<std::string> names;
  for (const char* stage : {"scores", "weights"}) {
    names.emplace_back(stage);
    for (const char* part : {"convolved", "static", "query", "key", "composed", "unmasked",
                             "composed_unmasked", "map_static", "map_query", "map_key"}) {
      names.push_back(std::string(stage) + "." + part);
    }
  }
  names.emplace_back("input");
  names.emplace_back("output");
  return record(subject, names);
}

void expect_close(const Tensor& a, const Tensor& b, const std::string& what) {
  ASSERT_TRUE(a.defined() && b.defined()) << what;
  ASSERT_EQ(a.sizes(), b.sizes()) << what;
  EXPECT_TRUE(at::allclose(a, b, 1e-9, 1e-10)) << what;
}

const char* const kAttention[] = {
    "mixer = { type = \"mha\", heads = 4 }",
    "mixer = { type = \"mha\", heads = 4, kv_heads = 2, window = 4 }",
    "mixer = { type = \"dcmha\", heads = 4 }",
    "mixer = { type = \"dcmha\", heads = 4, groups = 2, static = \"add\" }",
    "mixer = { type = \"dcmha\", heads = 4, key_wise = false, gate = false }",
    "mixer = { type = \"talking_heads\", heads = 4, key_heads = 2, value_heads = 8 }",
    "mixer = { type = \"differential\", heads = 2 }",
    "mixer = { type = \"differential\", heads = 4, kv_heads = 2, head_dim = 2 }",
    "mixer = { type = \"multi_token\", heads = 4, conv_layers = \"all\", query_kernel = 2, "
    "key_kernel = 3, post_conv = true }",
};

TEST(Recording, LeavesTheOutputAsItIs) {
  for (const std::string layer : kAttention) {
    const auto model = model_of(layer);
    const Subject subject = subject_of(model);
    const at::NoGradGuard no_grad;
    const Tensor plain = model->forward(subject.input);
    Recording recording({"weights.composed"});
    ModelInput input = subject.input;
    input.recording = &recording;
    expect_close(model->forward(input), plain, layer);
  }
}

// Softmax of what it was given, parts that add up, rows of 1, nothing from the future.
TEST(Recording, MapsAreThoseOfTheDefinition) {
  for (const std::string layer : kAttention) {
    const auto model = model_of(layer);
    const Subject subject = subject_of(model);
    const Recording r = all_of(subject);
    for (const std::string place : {"layer0", "layer1"}) {
      const auto find = [&](const std::string& name) { return r.find(place + "." + name); };
      const Tensor weights = find("weights");
      expect_close(weights, at::softmax(find("scores.composed"), -1), layer);
      expect_close(weights.sum(-1), at::ones_like(weights.sum(-1)), layer);
      const Tensor future = at::ones({9, 9}, at::kBool).triu(1);
      EXPECT_EQ(weights.masked_select(future).abs().max().item<double>(), 0) << layer;
      EXPECT_EQ(find("weights.composed").masked_select(future).abs().max().item<double>(), 0);
      for (const std::string stage : {"scores", "weights"}) {
        Tensor sum = find(stage + ".static");
        if (!sum.defined()) continue;
        for (const char* part : {".query", ".key"}) {
          if (find(stage + part).defined()) sum = sum + find(stage + part);
        }
        const Tensor composed = find(stage + ".composed");
        const Tensor seen = composed.isfinite();
        expect_close(sum.masked_select(seen), composed.masked_select(seen), layer + " " + stage);
      }
    }
  }
}

// The composition map of each pair takes the maps before it to those after it (DCMHA eq. 8).
TEST(Recording, CompositionMapsComposeTheMaps) {
  for (const std::string layer :
       {kAttention[2], kAttention[3], kAttention[4], kAttention[5], kAttention[6], kAttention[7]}) {
    const auto model = model_of(layer);
    const Subject subject = subject_of(model);
    const Recording r = all_of(subject);
    for (const std::string stage : {"scores", "weights"}) {
      const auto find = [&](const char* name) { return r.find("layer1." + stage + name); };
      const Tensor fixed = find(".map_static");
      if (!fixed.defined()) continue;
      const Tensor before = stage == "scores" ? find(".unmasked") : r.find("layer1.weights");
      const Tensor after = stage == "scores" ? find(".composed_unmasked") : find(".composed");
      Tensor map = fixed.unsqueeze(0).unsqueeze(0).unsqueeze(0);  // [B, T, S, H, H']
      if (find(".map_query").defined()) map = map + find(".map_query").unsqueeze(2);
      if (find(".map_key").defined()) map = map + find(".map_key").unsqueeze(1);
      map = map.expand({before.size(0), before.size(2), before.size(3), -1, -1});
      expect_close(at::einsum("bhts,btshm->bmts", {before, map}), after, layer + " " + stage);
    }
  }
}

// What the model computes of its recorded maps and its values, by hand.
TEST(Recording, MapsTimesValuesAreTheOutput) {
  for (const std::string layer : {kAttention[0], kAttention[1], kAttention[2], kAttention[5]}) {
    const auto model = model_of(layer + "\nchannel = { type = \"none\" }",
                                "norm = \"none\"\nposition = { type = \"none\" }\n");
    const Subject subject = subject_of(model);
    const Recording r = all_of(subject);
    const auto heads = chosen_layers(subject)[0].layer->mixer->head_projections();
    const Tensor x = r.find("layer0.input"), maps = r.find("layer0.weights.composed");
    const Tensor values = at::einsum("bsc,hce->bhse", {x, heads->v});
    const Tensor y = at::einsum("bhte,hec->btc", {at::matmul(maps, values), heads->o});
    expect_close(x + y, r.find("layer0.output"), layer);
    // Scores are those of the projections.
    const Tensor scores = at::einsum("btc,hcd,bse,hed->bhts", {x, heads->q, x, heads->k}) /
                          std::sqrt(static_cast<double>(heads->q.size(2)));
    expect_close(r.find("layer0.scores.unmasked"), scores, layer);
  }
}

// Differential attention with grouped queries: map 2i + m of head i reads key map 2 floor(i/r) + m.
TEST(Recording, DifferentialMapsAreInTheHeadsOrder) {
  const auto model = model_of(kAttention[7], "norm = \"none\"\nposition = { type = \"none\" }\n");
  const Subject subject = subject_of(model);
  const Recording r = all_of(subject);
  const Tensor x = r.find("layer0.input");
  const auto parameters = model->named_parameters();
  const Tensor all = at::matmul(x, parameters["layer0.mixer.qkv.weight"].t());
  const Tensor q = all.narrow(-1, 0, 16).unflatten(-1, {8, 2});
  const Tensor k = all.narrow(-1, 16, 8).unflatten(-1, {4, 2});
  const Tensor scores = r.find("layer0.scores.unmasked");
  const auto heads = chosen_layers(subject)[0].layer->mixer->head_projections();
  for (int64_t map = 0; map < 8; ++map) {
    const int64_t head = map / 2, key = 2 * (head / 2) + map % 2;
    const Tensor expected =
        at::matmul(q.select(2, map), k.select(2, key).transpose(1, 2)) / std::sqrt(2.0);
    expect_close(scores.select(1, map), expected, "map " + std::to_string(map));
    expect_close(at::matmul(x, heads->k[map]), k.select(2, key), "projection");
  }
  // And the difference has each head's own two.
  const Tensor weights = r.find("layer0.weights"), composed = r.find("layer0.weights.composed");
  const Tensor lambda = -r.find("layer0.weights.map_static")[1][0];
  expect_close(composed.select(1, 0), weights.select(1, 0) - lambda * weights.select(1, 1),
               "head 0");
  expect_close(composed.select(1, 3), weights.select(1, 6) - lambda * weights.select(1, 7),
               "head 3");
}

// Maps of mixers that are no softmax attention, times values, are what they compute.
TEST(Recording, MapsOfOtherMixersAreTheirLinearMaps) {
  const at::NoGradGuard no_grad;
  const auto check = [](const std::string& type, const std::string& options, bool causal) {
    const auto spec = make_spec(token_mixers(), "token mixer", type);
    read_fields(parse_toml(options, "test"), *spec, type);
    LayerShape shape;
    shape.width = 16;
    shape.max_length = 12;
    shape.causal = causal;
    at::manual_seed(7);
    const auto mixer = spec->build(shape);
    mixer->to(at::kDouble);
    mixer->eval();
    for (Tensor p : mixer->parameters()) p.add_(at::randn_like(p) * 0.3);
    const Tensor x = at::randn({2, 7, 16}, at::kDouble);
    Recording recording({"weights.composed"});
    MixerContext context;
    context.recording = &recording;
    const Tensor y = mixer->forward(x, context);
    return std::tuple{mixer, x, y, recording.find("weights.composed")};
  };
  {
    const auto [mixer, x, y, maps] = check("linformer", "heads = 2\nrank = 3\n", false);
    const auto heads = mixer->head_projections();
    const Tensor values = at::einsum("bsc,hce->bhse", {x, heads->v});
    expect_close(at::einsum("bhte,hec->btc", {at::matmul(maps, values), heads->o}), y, "linformer");
  }
  {
    const auto [mixer, x, y, maps] = check("shaped", "heads = 2\n", true);
    const auto p = mixer->named_parameters();
    const Tensor v =
        (at::matmul(x, p["value.weight"].t()) * p["value_gain"] + x * p["value_skip_gain"])
            .unflatten(-1, {2, 8})
            .transpose(1, 2);
    expect_close(at::matmul(maps, v).transpose(1, 2).flatten(-2), y, "shaped");
  }
  for (const bool causal : {false, true}) {
    const auto [mixer, x, y, maps] = check("performer", "heads = 2\n", causal);
    const auto p = mixer->named_parameters();
    const Tensor v = at::matmul(x, p["qkv.weight"].narrow(0, 32, 16).t()).unflatten(-1, {2, 8});
    const Tensor o = at::matmul(maps, v.transpose(1, 2)).transpose(1, 2).flatten(-2);
    expect_close(at::matmul(o, p["output.weight"].t()), y, "performer");
  }
  for (const std::string scores : {"random", "dense"}) {
    const auto [mixer, x, y, maps] =
        check("synthesizer", "heads = 2\nscores = [\"" + scores + "\"]\n", true);
    const auto p = mixer->named_parameters();
    const Tensor v = at::matmul(x, p["value.weight"].t()).unflatten(-1, {2, 8});
    const Tensor o = at::matmul(maps, v.transpose(1, 2)).transpose(1, 2).flatten(-2);
    expect_close(at::matmul(o, p["output.weight"].t()), y, "synthesizer");
  }
  const Tensor future = at::ones({7, 7}, at::kBool).triu(1);
  {
    const auto [mixer, x, y, maps] = check("aft", "form = \"simple\"\n", true);
    const auto p = mixer->named_parameters();
    const Tensor k = at::matmul(x, p["qkv.weight"].narrow(0, 16, 16).t());  // [B, S, C]
    const Tensor seen = k.transpose(1, 2)
                            .unsqueeze(2)
                            .expand({-1, -1, 7, -1})
                            .masked_fill(future, -std::numeric_limits<double>::infinity());
    expect_close(at::softmax(seen, -1).mean(1, true), maps, "aft");
  }
  {
    const auto [mixer, x, y, maps] = check("mamba", "expand = 1\nd_state = 3\n", true);
    const auto p = mixer->named_parameters();
    const Tensor inner = at::matmul(x, p["input.weight"].narrow(0, 0, 16).t()).transpose(1, 2);
    const Tensor conv = p["conv"];  // [I, W]
    Tensor filtered = p["conv_bias"].unsqueeze(1) + at::zeros_like(inner);
    for (int64_t back = 0; back < 4; ++back) {
      filtered = filtered +
                 conv.select(1, 3 - back).unsqueeze(1) * at::constant_pad_nd(inner, {back, -back});
    }
    const Tensor u = at::silu(filtered).transpose(1, 2);  // [B, T, I]
    const auto selected = at::matmul(u, p["select.weight"].t()).split_with_sizes({1, 3, 3}, -1);
    const Tensor dt = at::softplus(at::matmul(selected[0], p["step.weight"].t()) + p["step.bias"]);
    const Tensor sums = (dt.unsqueeze(-1) * -p["A_log"].exp()).cumsum(1);  // [B, T, I, N]
    const Tensor faded = (sums.unsqueeze(2) - sums.unsqueeze(1)).exp();
    const Tensor direct =
        at::einsum("btn,btsin,bsi,bsn->bts", {selected[2], faded, dt, selected[1]}) / 16;
    expect_close(direct.masked_fill(future, 0).unsqueeze(1), maps, "mamba");
  }
  for (const std::string type : {"retention", "gla"}) {
    const auto [mixer, x, y, maps] = check(type, "heads = 2\n", true);
    const auto p = mixer->named_parameters();
    const int64_t values = p["output.weight"].size(1);
    const Tensor all = at::matmul(x, p["qkv.weight"].t());
    const Tensor v = all.narrow(-1, all.size(-1) - values, values).unflatten(-1, {2, -1});
    Tensor o = at::matmul(maps, v.transpose(1, 2)).transpose(1, 2);
    const Tensor gate = at::silu(at::matmul(x, p["gate.weight"].t())).unflatten(-1, {2, -1});
    o = o / (o.square().mean(-1, true) + 1e-6).sqrt() * gate;
    if (type == "gla") o = o * p["norm"];
    const Tensor expected = at::matmul(o.flatten(-2), p["output.weight"].t());
    // RetNet's own eps is of rows divided by their decays' sum.
    EXPECT_TRUE(at::allclose(expected, y, 1e-4, 1e-4)) << type;
  }
}

TEST(Recording, RwkvsWeightsAddUpToOneAndItsDecayIsShown) {
  const auto model = model_of("mixer = { type = \"rwkv\" }");
  const Subject subject = subject_of(model);
  const Recording r = record(subject, {"weights.composed", "decay"});
  const Tensor weights = r.find("layer0.weights.composed"), decay = r.find("layer0.decay");
  expect_close(weights.sum(-1), at::ones_like(weights.sum(-1)), "rows");
  const auto p = model->named_parameters();
  expect_close(decay, p["layer0.mixer.time_decay"].exp().neg().exp(), "decay");
}

TEST(Recording, SaysWhatThereIs) {
  const auto model = model_of("mixer = { type = \"mha\", heads = 4 }");
  const Recording recording = record(subject_of(model), {"wieghts"});
  EXPECT_EQ(test::message_of<UsageError>([&] { recording.check_all_found(); }),
            "this model has no 'wieghts' to show; did you mean 'weights'? it has input, output, "
            "scores, unit_values, units, weights.");
  const Recording one = record(subject_of(model), {"layer1.weights", "input"});
  EXPECT_EQ(one.tensors().size(), 3U);
  EXPECT_NO_THROW(one.check_all_found());
  const Recording part = record(subject_of(model), {"weights.query"});
  EXPECT_NE(test::message_of<UsageError>([&] { part.check_all_found(); }).find("'weights.query'"),
            std::string::npos);
}

// Cross-attention has names of its own, encoder and decoder too.
TEST(Recording, CrossAttention) {
  const auto model = model_of("mixer = { type = \"dcmha\", heads = 4 }",
                              "kind = \"encoder_decoder\"\nmax_source_length = 24\n");
  Subject subject = subject_of(model);
  subject.input.source = some_tokens(2, 13);
  const Findings found = maps(subject);
  std::map<std::string, Tensor> tensors(found.tensors.begin(), found.tensors.end());
  EXPECT_EQ(tensors.at("decoder.layer1.cross.weights").sizes(), at::IntArrayRef({2, 4, 9, 13}));
  EXPECT_EQ(tensors.at("encoder.layer0.weights").sizes(), at::IntArrayRef({2, 4, 13, 13}));
  EXPECT_EQ(tensors.at("decoder.layer0.weights").sizes(), at::IntArrayRef({2, 4, 9, 9}));
  const std::string page = maps_page(subject, found);
  EXPECT_NE(page.find("decoder.layer1, cross-attention"), std::string::npos);
}

}  // namespace
}  // namespace headloom::analysis
