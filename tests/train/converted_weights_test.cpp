// Models that write and hold their linear maps' weights as bfloat16, int8 or with four bits.
#include <gtest/gtest.h>

#include "model/support.h"
#include "ops/linear/op.h"
#include "train/device.h"
#include "train/evaluate.h"
#include "train/load.h"

namespace headloom::test::converted_weights_test {
namespace {

// The tolerances are for the weights that models start with.
constexpr double kNoise = 0;

const std::vector<std::string>& models() {
  static const std::vector<std::string> tomls = [] {
    std::vector<std::string> out;
    for (const auto& entry : token_mixers()) {
      out.push_back("[[layer]]\nmixer = { type = '" + entry.name + "'" + heads_of(entry.name, 4) +
                    " }\n");
    }
    const std::string mha = "[[layer]]\nmixer = { type = 'mha', heads = 4 }\n";
    out.push_back("bias = true\noutput_bias = true\n" + mha);
    out.push_back("tied = false\noutput_bias = true\n" + mha);
    out.push_back(mha + "channel = { type = 'moe', routed = 4, active = 2 }\n");
    out.push_back(mha + "channel = { type = 'swiglu', gate_groups = 2 }\n");
    out.push_back("[[layer]]\nmixer = { type = 'rwkv' }\nchannel = { type = 'rwkv_channel' }\n");
    return out;
  }();
  return tomls;
}

// The logits of `model` with the numbers that its weights stand for once `type` holds them, in
// float32. Changes the model.
Tensor dequantized_logits(AutoregressiveModel& model, const ModelInput& input,
                          at::ScalarType type) {
  const auto dequantized = [&](const Tensor& weight) {
    const auto [values, scale] = converted(weight, type);
    return type == at::kChar ? values.to(at::kFloat) * scale.unsqueeze(1)
                             : ops::dequantized_int4(values, scale, weight.size(1));
  };
  for (const auto& module : model.modules()) {
    auto* linear = dynamic_cast<Linear*>(module.get());
    if (linear != nullptr && linear->may_narrow) linear->weight.copy_(dequantized(linear->weight));
  }
  const Tensor hidden = model.hidden(input);
  // A head that is tied to the embedding quantizes a copy of its own, so this is the head's alone.
  const Tensor table = parameters_of(model).at("embedding");
  table.copy_(dequantized(table));
  return model.logits(hidden);
}

// Autocast multiplies the same numbers, so nothing changes at all.
TEST(NarrowWeights, BFloat16IsWhatAutocastComputes) {
  at::NoGradGuard no_grad;
  for (const std::string& toml : models()) {
    const auto model = decoder(toml, kNoise);
    if (!model) continue;
    const Tensor text = tokens(2, 9, 70);
    const Autocast autocast("bfloat16");
    const Tensor expected = model->forward(text);
    model->convert_weights(at::kBFloat16);
    EXPECT_TRUE(at::equal(model->forward(text), expected)) << toml;
  }
}

// Of the largest logit; int8 weights are off by at most 1 / 254 of a row's largest, those of four
// bits by about 1 / 16 of a group's. Products with these weights are exact but for rounding, also
// where a processor takes them in whole numbers.
TEST(NarrowWeights, QuantizedWeightsCostLittleAndPiecesGiveTheWhole) {
  at::NoGradGuard no_grad;
  for (const auto type : {at::kChar, at::ScalarType::Int4}) {
    for (const std::string& toml : models()) {
      SCOPED_TRACE(::testing::Message() << type << " " << toml);
      const auto model = decoder(toml, kNoise);
      if (!model) continue;
      const Tensor text = tokens(2, 9, 70);
      const Tensor expected = model->forward(text);
      model->convert_weights(type);
      const Tensor got = model->forward(text);
      const Tensor wide = dequantized_logits(*decoder(toml, kNoise), {.tokens = text}, type);
      EXPECT_TRUE(close(got, wide, 1e-3));
      EXPECT_LT(relative_error(got, expected), type == at::kChar ? 0.1 : 0.6);
      EXPECT_GT(relative_error(got, expected), 0);
      if (!model->stacks()[0]->all()[0].mixer->stateful()) continue;
      DecoderState state;
      const Tensor first = model->logits(model->extend(text.narrow(1, 0, 5), state));
      const Tensor rest = model->logits(model->extend(text.narrow(1, 5, 4), state));
      EXPECT_TRUE(close(at::cat({first, rest}, 1), got, 2e-5));
      // A second conversion finds nothing to do.
      model->convert_weights(type);
      EXPECT_TRUE(at::equal(model->forward(text), got));
    }
  }
}

// Cross-attention computes parts of a map, from the target or from the source.
TEST(NarrowWeights, EncoderDecodersTakeThem) {
  at::NoGradGuard no_grad;
  for (const char* mixer : {"mha", "dcmha", "differential", "multi_token", "talking_heads"}) {
    for (const auto type : {at::kBFloat16, at::kChar, at::ScalarType::Int4}) {
      const auto build = [&] {
        at::manual_seed(6);
        auto built = std::dynamic_pointer_cast<AutoregressiveModel>(build_model(model_of(str(
            "kind = 'encoder_decoder'\nwidth = 48\ndepth = 2\nvocabulary = 30\nmax_length = 12\n",
            "max_source_length = 12\nlayer = [{ mixer = { type = '", mixer, "', heads = 4 } }]"))));
        built->eval();
        return built;
      };
      const auto model = build();
      const ModelInput input{.tokens = tokens(2, 7, 30), .source = tokens(2, 9, 30)};
      const Autocast autocast(type == at::kBFloat16 ? "bfloat16" : "");
      const Tensor expected = model->forward(input);
      model->convert_weights(type);
      const auto parameters = parameters_of(*model);
      const auto held = type == at::ScalarType::Int4 ? at::kByte : type;
      EXPECT_EQ(parameters.at("decoder.layer1.cross.qkv.weight").scalar_type(), held) << mixer;
      EXPECT_EQ(parameters.at("encoder.layer0.mixer.qkv.weight").scalar_type(), held) << mixer;
      const Tensor got = model->forward(input);
      if (type == at::kBFloat16) {
        EXPECT_TRUE(at::equal(got, expected)) << mixer;
        continue;
      }
      EXPECT_TRUE(close(got, dequantized_logits(*build(), input, type), 1e-3)) << mixer;
      EXPECT_LT(relative_error(got, expected), type == at::kChar ? 0.1 : 0.6) << mixer;
      DecoderState state = model->initial_state({}, {.tokens = input.source});
      const Tensor first = model->logits(model->extend(input.tokens.narrow(1, 0, 3), state));
      const Tensor rest = model->logits(model->extend(input.tokens.narrow(1, 3, 4), state));
      EXPECT_TRUE(close(at::cat({first, rest}, 1), got, 2e-5)) << mixer;
    }
  }
}

TEST(NarrowWeights, WhatIsNotALinearMapStays) {
  const std::string toml =
      "[[layer]]\nmixer = { type = 'mha', heads = 4 }\nchannel = { type = 'moe', routed = 4, "
      "active = 2 }\n";
  const auto model = decoder(toml, kNoise), before = decoder(toml, kNoise);
  const int64_t count = count_parameters(model->config());
  model->convert_weights(at::kChar);
  int64_t sum = 0, bytes = 0;
  const auto old = parameters_of(*before);
  for (const auto& [name, p] : parameters_of(*model)) {
    sum += p.numel();
    bytes += static_cast<int64_t>(p.nbytes());
    const bool linear = name.find("qkv") != std::string::npos ||
                        name.find("output") != std::string::npos ||
                        name.find("shared") != std::string::npos;
    EXPECT_EQ(p.scalar_type(), linear ? at::kChar : at::kFloat) << name;
    if (!linear) {
      EXPECT_TRUE(at::equal(p, old.at(name))) << name;
    }
  }
  EXPECT_EQ(sum, count);
  EXPECT_LT(bytes, 4 * count);
}

TEST(NarrowWeights, WhatWritesNothingTakesNoInt8) {
  LoadedRun run;
  run.config.model = model_of(
      "kind = 'encoder'\nwidth = 32\ndepth = 1\nvocabulary = 20\nmax_length = 8\n[[layer]]\nmixer "
      "= { type = 'mha', heads = 4 }\n");
  run.model = build_model(run.config.model);
  EXPECT_TRUE(contains(message_of<UsageError>([&] { hold_weights(run, {.quantize = "int8"}); }),
                       "kind \"encoder\", expected a decoder"));
  EXPECT_TRUE(contains(message_of<UsageError>([&] { hold_weights(run, {.quantize = "int4"}); }),
                       "for weights in int4"));
  EXPECT_TRUE(contains(message_of<UsageError>([&] { hold_weights(run, {.quantize = "int2"}); }),
                       "\"int2\", expected int8 or int4"));
  EXPECT_TRUE(contains(message_of<UsageError>([&] { hold_weights(run, {.dtype = "float16"}); }),
                       "\"float16\", expected float32, bfloat16 or float64"));
}

TEST(NarrowWeights, ARunComputesInWhatIsAskedFor) {
  const auto type_of = [](const std::string& trained, const Precision& p) {
    LoadedRun run;
    run.config.train.dtype = trained;
    run.config.model = model_of(
        "width = 32\ndepth = 1\nvocabulary = 20\nmax_length = 8\n[[layer]]\nmixer = { type = "
        "'mha', heads = 4 }\n");
    run.model = build_model(run.config.model);
    hold_weights(run, p);
    const at::ScalarType held =
        run.model->named_parameters()["layer0.mixer.qkv.weight"].scalar_type();
    return std::pair(run.config.train.dtype, held);
  };
  using Held = std::pair<std::string, at::ScalarType>;
  EXPECT_EQ(type_of("float32", {}), Held("float32", at::kFloat));
  EXPECT_EQ(type_of("bfloat16", {}), Held("bfloat16", at::kBFloat16));
  EXPECT_EQ(type_of("float32", {.dtype = "bfloat16"}), Held("bfloat16", at::kBFloat16));
  EXPECT_EQ(type_of("bfloat16", {.dtype = "float32"}), Held("float32", at::kFloat));
  EXPECT_EQ(type_of("float32", {.dtype = "bfloat16", .quantize = "int8"}),
            Held("bfloat16", at::kChar));
  EXPECT_EQ(type_of("bfloat16", {.dtype = "float32", .quantize = "int4"}),
            Held("float32", at::kByte));
}

}  // namespace
}  // namespace headloom::test::converted_weights_test
