// Each analysis against a direct computation in float64, and what it refuses.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <set>

#include "analysis/analysis.h"
#include "data/task.h"
#include "model/autoregressive.h"
#include "model/describe.h"
#include "testing/errors.h"

namespace headloom::analysis {
namespace {

std::shared_ptr<Model> small_model(const std::string& layer, const std::string& more = "") {
  ModelConfig config;
  read_fields(parse_toml("width = 16\ndepth = 2\nvocabulary = 11\nmax_length = 24\n" + more +
                             "[[layer]]\n" + layer,
                         "test"),
              config, "model");
  at::manual_seed(3);
  const auto model = build_model(config);
  model->to(at::kDouble);
  model->eval();
  const at::NoGradGuard no_grad;
  for (Tensor p : model->parameters()) p.add_(at::randn_like(p) * 0.3);
  return model;
}

Tensor few_tokens(int64_t batch, int64_t length) {
  at::manual_seed(5);
  return at::randint(0, 11, {batch, length}, at::kLong);
}

Subject reading(const std::shared_ptr<Model>& model, const Tensor& tokens = few_tokens(2, 9)) {
  return {.model = model.get(), .input = {.tokens = tokens}};
}

Findings run(const std::string& what, const Subject& subject) {
  return analyze(find_analysis(what), subject);
}

Tensor tensor_of(const Findings& found, const std::string& name) {
  for (const auto& [key, value] : found.tensors) {
    if (key == name) return value;
  }
  ADD_FAILURE() << name;
  return at::zeros({});
}

double number(const Table& table, size_t row, const std::string& column) {
  for (size_t c = 0; c < table.columns.size(); ++c) {
    if (table.columns[c] != column) continue;
    const Cell& cell = table.rows.at(row).at(c);
    if (const auto* whole = std::get_if<int64_t>(&cell)) return static_cast<double>(*whole);
    return std::get<double>(cell);
  }
  ADD_FAILURE() << column;
  return 0;
}

const std::string kMha = "mixer = { type = \"mha\", heads = 4 }";
const std::string kDcmha = "mixer = { type = \"dcmha\", heads = 4 }";

// The products themselves, flattened, by a singular value decomposition.
TEST(Diversity, IsTheCapturedVarianceOfTheFlattenedProducts) {
  for (const std::string& layer : {kMha, kDcmha,
                                   std::string("mixer = { type = \"mha\", heads = 4, "
                                               "kv_heads = 2, head_dim = 6 }")}) {
    const auto model = small_model(layer);
    const Findings found = run("diversity", {.model = model.get()});
    const auto heads = chosen_layers({.model = model.get()})[1].layer->mixer->head_projections();
    const auto direct = [](const Tensor& products) {
      const Tensor s = at::linalg_svdvals(products.flatten(1)).square();
      return s.cumsum(0) / s.sum();
    };
    const Tensor qk = direct(at::matmul(heads->q, heads->k.transpose(1, 2)));
    const Tensor ov = direct(at::matmul(heads->v, heads->o));
    EXPECT_TRUE(at::allclose(tensor_of(found, "layer1.qk"), qk, 1e-9, 1e-9)) << layer;
    EXPECT_TRUE(at::allclose(tensor_of(found, "layer1.ov"), ov, 1e-9, 1e-9)) << layer;
    EXPECT_TRUE(at::allclose(tensor_of(found, "qk"),
                             (tensor_of(found, "layer0.qk") + tensor_of(found, "layer1.qk")) / 2,
                             1e-12));
  }
}

// A head of differential attention has two products of queries and keys and one of values.
TEST(Diversity, SaysWhatAnEvenShareIsOfEachKindOfProducts) {
  const auto model = small_model("mixer = { type = \"differential\", heads = 2 }");
  const Findings found = run("diversity", {.model = model.get()});
  ASSERT_GE(found.sentences.size(), 2u);
  EXPECT_TRUE(test::contains(found.sentences[0], "Of the QK products the first of 4 components"))
      << found.sentences[0];
  EXPECT_TRUE(test::contains(found.sentences[0], "evenly (25.0%)")) << found.sentences[0];
  EXPECT_TRUE(test::contains(found.sentences[1], "Of the OV products the first of 2 components"))
      << found.sentences[1];
  EXPECT_TRUE(test::contains(found.sentences[1], "evenly (50.0%)")) << found.sentences[1];
}

TEST(Diversity, SimilarityIsTheMeanCosine) {
  const auto model = small_model(kDcmha);
  const Subject subject = reading(model);
  const Findings found = run("diversity", subject);
  const Recording r = record(subject, {"weights", "weights.composed"});
  for (const bool composed : {false, true}) {
    const Tensor maps = r.find(composed ? "layer0.weights.composed" : "layer0.weights");
    double sum = 0;
    for (int64_t i = 0; i < 4; ++i) {
      for (int64_t j = 0; j < i; ++j) {
        const Tensor a = maps.select(1, i).flatten(), b = maps.select(1, j).flatten();
        sum += (a.dot(b) / (a.norm() * b.norm())).item<double>();
      }
    }
    EXPECT_NEAR(
        number(found.tables[0], 0, composed ? "similarity, composed" : "similarity, weights"),
        sum / 6, 1e-9);
  }
}

TEST(Rank, ScoresOfAHeadHaveItsRank) {
  const auto model = small_model(kDcmha + "\nblock = { type = \"sequential\" }",
                                 "position = { type = \"none\" }\n");
  const Findings found = run("rank", reading(model, few_tokens(1, 20)));
  const Table& table = found.tables[0];
  for (size_t row = 0; row < table.rows.size(); ++row) {
    const double length = number(table, row, "length");
    EXPECT_EQ(number(table, row, "head size"), 4);
    EXPECT_LE(number(table, row, "rank of scores"), std::min(4.0, length));
    // Composition lifts the limit of a head's size (Xiao et al. 2024, theorem 2.1).
    if (length > 10) {
      EXPECT_GT(number(table, row, "of composed scores"), 4);
      EXPECT_EQ(number(table, row, "rank of scores"), 4);
    }
  }
  const Subject subject = reading(model, few_tokens(1, 20));
  const Tensor maps = record(subject, {"weights.composed"}).find("layer0.weights.composed");
  const Tensor values = tensor_of(found, "layer0.length20.singular_values");
  const Tensor gram = at::matmul(maps, maps.transpose(-1, -2));
  const Tensor direct = at::linalg_eigvalsh(gram).flip(-1).clamp_min(0).sqrt();
  EXPECT_TRUE(at::allclose(values, direct, 1e-6, 1e-5));
}

// The same weights, once as a decoder and once as an encoder.
TEST(Rank, CausalMapsHaveAHigherOneThanMapsOfBothWays) {
  const auto rank_of = [](const std::string& more) {
    const auto model = small_model(kMha, "position = { type = \"none\" }\n" + more);
    const at::NoGradGuard no_grad;
    for (auto& item : model->named_parameters()) {  // every query sees its keys nearly equally
      if (item.key().ends_with("mixer.qkv.weight")) item.value().narrow(0, 0, 32).mul_(0.1);
    }
    const Findings found = run("rank", reading(model, few_tokens(1, 20)));
    const Table& table = found.tables[0];  // of the first layer at three lengths
    EXPECT_EQ(number(table, 2, "length"), 20);
    return std::pair(number(table, 2, "rank of the map"), number(table, 2, "effective rank"));
  };
  const auto [causal, causal_effective] = rank_of("");
  const auto [both, both_effective] = rank_of("kind = \"encoder\"\n");
  EXPECT_EQ(causal, 20);
  EXPECT_LT(both_effective, 0.5 * causal_effective);
}

TEST(Sparsity, CountsEdgesOfKnownMaps) {
  // With W_q = 0 every query sees its keys equally.
  const auto model = small_model(kMha);
  const at::NoGradGuard no_grad;
  for (auto& item : model->named_parameters()) {
    if (item.key().ends_with("mixer.qkv.weight")) item.value().narrow(0, 0, 16).zero_();
  }
  const Findings found = run("sparsity", reading(model, few_tokens(2, 10)));
  const Table& table = found.tables[0];
  ASSERT_EQ(table.rows.size(), 8U);
  double edges = 0, entropy = 0, distance = 0, first = 0;
  for (int n = 1; n <= 10; ++n) {
    edges += std::ceil(0.9 * n - 1e-9) / 10;
    entropy += std::log(n) / 10;
    distance += (n - 1) / 2.0 / 10;
    first += 1.0 / n / 10;
  }
  EXPECT_NEAR(number(table, 3, "visible keys"), 5.5, 1e-12);
  EXPECT_NEAR(number(table, 3, "edges for 90%"), edges, 1e-12);
  EXPECT_NEAR(number(table, 3, "entropy"), entropy, 1e-9);
  EXPECT_NEAR(number(table, 3, "mean distance"), distance, 1e-9);
  EXPECT_NEAR(number(table, 3, "on the first"), first, 1e-9);
  EXPECT_NEAR(number(table, 3, "on itself"), first, 1e-9);
  EXPECT_NEAR(number(table, 3, "largest in-degree"), first, 1e-9);  // all see the first key
}

TEST(Noise, IsTheShareOnTheAnswer) {
  const auto model = small_model(kDcmha);
  // recall: key 3 has value 7 at position 2, key 4 has 8; 3 is asked for at the end.
  const Tensor tokens = at::tensor({1, 3, 7, 4, 8, 2, 7, 3}, at::kLong).unsqueeze(0);
  Tensor targets = at::full({1, 8}, data::kIgnore, at::kLong);
  targets[0][7] = 7;
  Subject subject = reading(model, tokens);
  subject.targets = targets;
  const Findings found = run("noise", subject);
  const Recording r = record(subject, {"weights", "weights.composed"});
  for (const bool composed : {false, true}) {
    const Tensor maps = r.find(composed ? "layer1.weights.composed" : "layer1.weights");
    const Tensor row = maps[0].select(1, 7).abs();
    const Tensor share = row.select(1, 2) / row.sum(1);  // the 7 after the 3, not the other one
    const std::string name = composed ? "layer1.composed" : "layer1.softmax";
    EXPECT_TRUE(at::allclose(tensor_of(found, name + ".answer"), share, 1e-12));
    EXPECT_TRUE(at::allclose(tensor_of(found, name + ".rest"), 1 - share, 1e-9));
  }
  // An answer of several tokens is found as a whole; of a text it is given.
  Subject given = reading(model, tokens);
  given.answer = at::zeros({8}, at::kBool);
  given.answer[3] = given.answer[4] = true;
  const Tensor row = r.find("layer0.weights")[0].select(1, 7);
  EXPECT_TRUE(at::allclose(tensor_of(run("noise", given), "layer0.softmax.answer"),
                           row.narrow(1, 3, 2).sum(1), 1e-12));
}

// With the answer at position 2, a query at position 7 sees it among 8 keys, among 6 in a window
// of 6, and not at all in one of 4.
TEST(Noise, EqualAttentionIsOfTheKeysThatAQuerySees) {
  for (const auto& [window, share] : {std::pair(0, "12.50%"), {6, "16.67%"}, {4, "0.00%"}}) {
    const auto model = small_model(
        window == 0 ? kMha
                    : str("mixer = { type = \"mha\", heads = 4, window = ", window, " }"));
    Subject subject = reading(model, few_tokens(1, 8));
    subject.answer = at::zeros({8}, at::kBool);
    subject.answer[2] = true;
    const std::string said = run("noise", subject).sentences[0];
    EXPECT_TRUE(said.ends_with(str("every key that a query sees would give ", share, "."))) << said;
  }
}

// Linformer's softmax is over as many combinations of keys here as there are keys.
TEST(Noise, ReadsNoCombinationsOfKeys) {
  const auto model = small_model("mixer = { type = \"linformer\", heads = 4, rank = 8 }",
                                 "kind = \"encoder\"\n");
  Subject subject = reading(model, few_tokens(1, 8));
  subject.answer = at::zeros({8}, at::kBool);
  subject.answer[2] = true;
  const Findings found = run("noise", subject);
  EXPECT_EQ(found.sentences[0].find("softmax"), std::string::npos) << found.sentences[0];
  for (const auto& row : found.tables[0].rows) EXPECT_EQ(std::get<std::string>(row[1]), "composed");
}

// A composed map without a softmax counts in the mean of all, not where the two are compared.
TEST(Noise, ComparesTheSameLayers) {
  const auto model = small_model(
      "mixer = { type = \"mha\", heads = 4 }\n[[layer]]\nmixer = { type = \"gla\", heads = 4 }");
  Subject subject = reading(model, few_tokens(1, 8));
  subject.answer = at::zeros({8}, at::kBool);
  subject.answer[2] = true;
  const Findings found = run("noise", subject);
  const std::string share =
      formatted("%.2f%%", 100 * tensor_of(found, "layer0.softmax.answer").mean().item<double>());
  EXPECT_NE(found.sentences[0].find(
                str("their maps give ", share, " after it and ", share, " composed")),
            std::string::npos)
      << found.sentences[0];
}

TEST(Noise, RefusesWhatIsNoQuestion) {
  const auto model = small_model(kMha);
  Subject subject = reading(model);
  EXPECT_NE(test::message_of<UsageError>([&] { run("noise", subject); }).find("needs a question"),
            std::string::npos);
  subject.targets = subject.input.tokens;
  // Of two sequences.
  const std::string all = test::message_of<UsageError>([&] { run("noise", subject); });
  EXPECT_NE(all.find("every one of the 9 tokens of a sequence"), std::string::npos) << all;
  subject.targets = at::full({2, 9}, data::kIgnore, at::kLong);
  subject.targets[0][0] = (subject.input.tokens[0][0].item<int64_t>() + 1) % 11;
  EXPECT_NE(test::message_of<UsageError>([&] { run("noise", subject); }).find("none of the 1"),
            std::string::npos);
}

TEST(Experts, CountsTheChoices) {
  const auto model = small_model(
      kMha + "\nchannel = { type = \"moe\", routed = 4, active = 2, shared = 1, hidden = 8 }");
  const Subject subject = reading(model);
  const Findings found = run("experts", subject);
  const Tensor choice = record(subject, {"experts"}).find("layer1.experts");
  ASSERT_EQ(choice.sizes(), at::IntArrayRef({2, 9, 2}));
  const Tensor load = tensor_of(found, "layer1.load");
  for (int64_t e = 0; e < 4; ++e) {
    EXPECT_EQ(load[e].item<double>(), choice.eq(e).sum().item<double>());
  }
  EXPECT_EQ(load.sum().item<double>(), 36);
  // Choices are a function of the hidden state, so the information lies between nothing and all.
  const double information = number(found.tables[0], 1, "says of the token");
  EXPECT_GE(information, 0);
  EXPECT_LE(information, 1 + 1e-12);
  const Tensor counts = tensor_of(found, "layer1.tokens_of_experts").to(at::kDouble) / 36;
  double direct = 0;
  for (int64_t e = 0; e < counts.size(0); ++e) {
    for (int64_t k = 0; k < counts.size(1); ++k) {
      const double p = counts[e][k].item<double>();
      if (p > 0) {
        direct += p * std::log(p / (counts[e].sum().item<double>() *
                                    counts.select(1, k).sum().item<double>()));
      }
    }
  }
  const Tensor token = counts.sum(0);
  EXPECT_NEAR(information, direct / -(token * token.log()).sum().item<double>(), 1e-9);
}

TEST(States, NormsAreThoseOfTheRecurrence) {
  const auto model = small_model("mixer = { type = \"retention\", heads = 2 }");
  const Subject subject = reading(model);
  const Findings found = run("states", subject);
  auto& decoder = dynamic_cast<AutoregressiveModel&>(*model);
  DecoderState state = decoder.initial_state();
  decoder.extend(subject.input.tokens, state);
  const Tensor whole = state.layers[1].mixer.recurrent.at("retention");
  const Tensor norm = tensor_of(found, "layer1.norm.retention");
  ASSERT_EQ(norm.sizes(), at::IntArrayRef({2, 9}));
  EXPECT_TRUE(at::allclose(norm.select(1, 8), whole.to(at::kDouble).flatten(1).norm(2, {1}), 1e-6));
  const Tensor decay = tensor_of(found, "layer0.decay");
  EXPECT_NEAR(decay[0].item<double>(), 1 - 1.0 / 32, 1e-12);
  const Table& decays = found.tables[1];
  EXPECT_NEAR(number(decays, 0, "shortest"), std::log(0.5) / std::log(1 - 1.0 / 32), 1e-9);
  // Of an even number the median is the mean of the middle two, here of both heads'.
  const Tensor life = std::log(0.5) / decay.log();
  ASSERT_EQ(life.numel(), 2);
  EXPECT_NEAR(number(decays, 0, "median"), life.mean().item<double>(), 1e-9);
}

TEST(States, DecaysOfEveryRecurrence) {
  for (const char* type : {"gla", "mamba", "rwkv"}) {
    const auto model = small_model(std::string("mixer = { type = \"") + type + "\" }");
    const Tensor decay = tensor_of(run("states", reading(model)), "layer0.decay");
    EXPECT_GE(decay.min().item<double>(), 0) << type;
    EXPECT_LE(decay.max().item<double>(), 1) << type;
  }
  const auto model = small_model("mixer = { type = \"mamba\" }");
  const Tensor decay = tensor_of(run("states", reading(model)), "layer0.decay");
  EXPECT_EQ(decay.sizes(), at::IntArrayRef({2, 9, 32, 16}));
  // exp(dt A_n) for A_n = -exp(A_log): its logarithms are in the ratios of A.
  const Tensor log = decay.log();
  const Tensor a = model->named_parameters()["layer0.mixer.A_log"].exp();
  EXPECT_TRUE(at::allclose(log.select(-1, 3) / log.select(-1, 0),
                           (a.select(-1, 3) / a.select(-1, 0)).expand({2, 9, 32}), 1e-6));
}

// Of one token again and again every position adds the same to the sums, whatever exponent they are
// held relative to.
TEST(States, NormsAreThoseOfTheSumsAndNotOfTheirExponents) {
  const Tensor tokens = at::full({1, 7}, 4, at::kLong);
  const auto norms = [&](const std::shared_ptr<Model>& model, const std::string& name) {
    return tensor_of(run("states", reading(model, tokens)), "layer0.norm." + name)[0];
  };
  const auto state_of = [&](Model& model, const std::string& name) {
    auto& decoder = dynamic_cast<AutoregressiveModel&>(model);
    DecoderState state = decoder.initial_state();
    decoder.extend(tokens.narrow(1, 0, 1), state);
    return state.layers[0].mixer.recurrent.at(name)[0].to(at::kDouble);
  };
  const Tensor count = at::arange(1, 8, at::kDouble);
  {
    const auto model = small_model("mixer = { type = \"rwkv\" }");
    const at::NoGradGuard no_grad;
    model->named_parameters()["layer0.mixer.mix"].fill_(1);  // nothing of the position before
    const Tensor first = state_of(*model, "wkv");            // v, 1, k
    const Tensor decay = tensor_of(run("states", reading(model, tokens)), "layer0.decay");
    const Tensor times = (1 - decay.pow(count.unsqueeze(-1))) / (1 - decay);  // [T, C]
    const Tensor sums = first.narrow(0, 0, 2).unsqueeze(0) * first[2].exp() * times.unsqueeze(1);
    EXPECT_TRUE(at::allclose(norms(model, "wkv"), sums.flatten(1).norm(2, {1}), 1e-9));
  }
  {
    const auto model = small_model("mixer = { type = \"aft\", form = \"simple\" }");
    const Tensor first = state_of(*model, "aft");
    const Tensor one = (first.narrow(0, 0, 2) * first[2].exp()).norm();
    EXPECT_TRUE(at::allclose(norms(model, "aft"), one * count, 1e-9));
  }
  {
    const auto model = small_model("mixer = { type = \"performer\", heads = 2 }",
                                   "position = { type = \"none\" }\n");
    const Tensor first = state_of(*model, "performer"), c = state_of(*model, "performer.max");
    const int64_t features = first.size(1) - 1;
    const Tensor scale =
        at::cat({c.exp().unsqueeze(-1).expand({2, features}), at::ones({2, 1}, at::kDouble)}, 1);
    const Tensor one = (first * scale.unsqueeze(-1)).norm();
    EXPECT_TRUE(at::allclose(norms(model, "performer"), one * count, 1e-9));
  }
}

TEST(States, SumsOfNothingHoldNothing) {
  const auto model = small_model("mixer = { type = \"aft\", form = \"local\", local_window = 4 }");
  const Tensor norm = tensor_of(run("states", reading(model)), "layer0.norm.aft");
  EXPECT_EQ(norm.narrow(1, 0, 3).abs().max().item<double>(), 0);  // what the window still holds
  EXPECT_GT(norm.narrow(1, 3, 6).min().item<double>(), 0);
}

// Every number of two tables is the same.
void expect_same(const Table& found, const Table& expected) {
  ASSERT_EQ(found.rows.size(), expected.rows.size());
  for (size_t row = 0; row < expected.rows.size(); ++row) {
    for (const std::string& column : expected.columns) {
      if (column == "layer" || column == "mixer" || column == "state") continue;
      EXPECT_NEAR(number(found, row, column), number(expected, row, column), 1e-9) << column;
    }
  }
}

// What comes after the end of a sequence changes no number.
TEST(Padding, DoesNotCount) {
  const auto model =
      small_model(kMha + "\nchannel = { type = \"mlp\", hidden = 12 }",
                  "kind = \"encoder\"\nhead = \"label\"\nclasses = 2\n");
  const Tensor tokens = few_tokens(2, 16);
  const Subject whole = reading(model, tokens.narrow(1, 0, 12));
  Subject padded = reading(model, tokens);
  padded.input.lengths = at::full({2}, 12, at::kLong);
  for (const char* what : {"sparsity", "diversity"}) {
    SCOPED_TRACE(what);
    expect_same(run(what, padded).tables[0], run(what, whole).tables[0]);
  }
  const Table expected = run("memory", whole).tables[0], found = run("memory", padded).tables[0];
  for (size_t row = 0; row < expected.rows.size(); ++row) {
    EXPECT_NEAR(number(found, row, "highest / mean"), number(expected, row, "highest / mean"),
                1e-9);
  }
}

// The same of what needs composed maps, and of ranks at the whole length.
TEST(Padding, DoesNotCountInCompositionAndRank) {
  const auto model = small_model(kDcmha + "\nchannel = { type = \"mlp\", hidden = 12 }",
                                 "kind = \"encoder\"\nhead = \"label\"\nclasses = 2\n");
  const Tensor tokens = few_tokens(2, 16);
  const Subject whole = reading(model, tokens.narrow(1, 0, 8));
  Subject padded = reading(model, tokens);
  padded.input.lengths = at::full({2}, 8, at::kLong);
  for (const char* what : {"maps", "rank"}) {
    SCOPED_TRACE(what);
    expect_same(run(what, padded).tables[0], run(what, whole).tables[0]);
  }
  // At lengths 4 and 8 of two layers: no text is as long as the padded ones.
  EXPECT_EQ(run("rank", padded).tables[0].rows.size(), 4u);
}

// The same of recurrent states, whose rows end where their sequences do.
TEST(Padding, DoesNotCountInStates) {
  for (const char* type : {"mamba", "gla", "retention", "rwkv"}) {
    SCOPED_TRACE(type);
    const auto model = small_model(str("mixer = { type = \"", type, "\" }"));
    const Tensor tokens = few_tokens(2, 16);
    const Subject whole = reading(model, tokens.narrow(1, 0, 12));
    Subject padded = reading(model, tokens);
    padded.input.lengths = at::full({2}, 12, at::kLong);
    for (const size_t table : {0, 1}) {
      expect_same(run("states", padded).tables[table], run("states", whole).tables[table]);
    }
    // A shorter sequence counts where it is.
    padded.input.lengths = at::tensor({12, 5}, at::kLong);
    const Findings found = run("states", padded);
    for (const auto& [key, norm] : found.tensors) {
      if (!key.starts_with("layer1.norm.")) continue;
      EXPECT_EQ(norm.sizes(), at::IntArrayRef({2, 12}));
      EXPECT_EQ(norm.isnan().sum().item<int64_t>(), 7);
      EXPECT_TRUE(norm[1].narrow(0, 5, 7).isnan().all().item<bool>());
      EXPECT_TRUE(at::allclose(norm[0], tensor_of(run("states", whole), key)[0], 1e-12, 1e-12));
    }
    EXPECT_FALSE(std::isnan(number(found.tables[0], 0, "last")));
  }
}

// A state begins anew in each document.
TEST(States, DocumentsAreSequencesOfTheirOwn) {
  const auto model = small_model("mixer = { type = \"gla\", heads = 2 }");
  const Tensor tokens = few_tokens(2, 9);
  Subject subject = reading(model, tokens);
  subject.input.documents =
      at::tensor({0, 0, 0, 0, 1, 1, 1, 1, 1, 7, 7, 7, 7, 7, 7, 7, 7, 7}, at::kLong).view({2, 9});
  const Tensor norm = tensor_of(run("states", subject), "layer1.norm.gla");
  ASSERT_EQ(norm.sizes(), at::IntArrayRef({3, 9}));
  const auto expect = [&](int64_t row, const Tensor& alone) {
    const Tensor own =
        tensor_of(run("states", reading(model, alone.unsqueeze(0))), "layer1.norm.gla");
    EXPECT_TRUE(at::allclose(norm[row].narrow(0, 0, alone.size(0)), own[0], 1e-12, 1e-12)) << row;
    EXPECT_TRUE(norm[row].slice(0, alone.size(0)).isnan().all().item<bool>()) << row;
  };
  expect(0, tokens[0].narrow(0, 0, 4));
  expect(1, tokens[0].narrow(0, 4, 5));
  expect(2, tokens[1]);
}

// Linformer records weights on the positions of the padding, which its keys do not hold. Its rank
// is here also that of as many combinations as there are positions.
TEST(Padding, DoesNotCountInProjectedKeys) {
  for (const char* rank : {"8", "16"}) {
    const auto model =
        small_model(str("mixer = { type = \"linformer\", heads = 4, rank = ", rank, " }"),
                    "kind = \"encoder\"\n");
    const Tensor tokens = few_tokens(2, 16);
    const Subject whole = reading(model, tokens.narrow(1, 0, 9));
    Subject padded = reading(model, tokens);
    padded.input.lengths = at::full({2}, 9, at::kLong);
    for (const char* what : {"sparsity", "diversity"}) {
      SCOPED_TRACE(str(what, ", rank ", rank));
      expect_same(run(what, padded).tables[0], run(what, whole).tables[0]);
    }
    EXPECT_EQ(number(run("sparsity", padded).tables[0], 0, "visible keys"), 9);
  }
}

// A query that is padding has no edges.
TEST(Padding, HasNoEdges) {
  const auto model = small_model(kMha, "kind = \"encoder\"\n");
  Subject padded = reading(model, few_tokens(2, 16));
  padded.input.lengths = at::full({2}, 9, at::kLong);
  const Tensor edges = tensor_of(run("sparsity", padded), "layer0.edges");  // [B, H, T]
  EXPECT_TRUE(edges.narrow(2, 9, 7).eq(0).all().item<bool>()) << edges;
  EXPECT_GE(edges.narrow(2, 0, 9).min().item<int64_t>(), 1);
  EXPECT_LE(edges.max().item<int64_t>(), 9);
}

// An encoder's layers read the source, whose sequences are longer here than the target's.
TEST(EncoderDecoder, TokensAreThoseThatTheStackReads) {
  const auto model = small_model(
      kMha + "\nchannel = { type = \"mlp\", hidden = 12 }\n[[encoder_layer]]\n" + kMha +
          "\nchannel = { type = \"moe\", routed = 3, active = 1, hidden = 8 }\n" +
          "[[encoder_layer]]\n" + kMha + "\nchannel = { type = \"mlp\", hidden = 12 }",
      "kind = \"encoder_decoder\"\n");
  Subject subject = reading(model, few_tokens(2, 3));
  subject.input.source = at::full({2, 9}, 7, at::kLong);
  subject.input.source.narrow(1, 4, 5).fill_(8);
  subject.input.source_lengths = at::full({2}, 4, at::kLong);
  const Table memory = run("memory", subject).tables[0];
  int64_t of_encoder = 0;
  for (const auto& row : memory.rows) {
    if (std::get<std::string>(row[0]) != "encoder.layer1") continue;
    ++of_encoder;
    EXPECT_EQ(std::get<double>(row[4]), 1);  // every token that is no padding is a 7
    EXPECT_NE(std::get<std::string>(row[5]).find("[7]"), std::string::npos);
    EXPECT_EQ(std::get<std::string>(row[6]), "–");
  }
  EXPECT_GT(of_encoder, 0);
  const Table experts = run("experts", subject).tables[1];
  for (const auto& row : experts.rows) {
    const std::string& tokens = std::get<std::string>(row[4]);
    EXPECT_TRUE(tokens.empty() || tokens.starts_with("\u201c7\u201d")) << tokens;
  }
}

TEST(EncoderDecoder, ALengthIsOfTheSourceToo) {
  const ModelInput cut = shortened({.tokens = few_tokens(2, 3),
                                    .source = few_tokens(2, 9),
                                    .source_lengths = at::tensor({9, 2}, at::kLong)},
                                   4);
  EXPECT_EQ(cut.tokens.size(1), 3);
  EXPECT_TRUE(at::equal(cut.source, few_tokens(2, 9).narrow(1, 0, 4)));
  EXPECT_TRUE(at::equal(cut.source_lengths, at::tensor({4, 2}, at::kLong)));
}

TEST(Rank, RowsAreInTheOrderOfTheLayers) {
  const auto model = small_model(kMha, "");
  ModelConfig config = model->config();
  config.depth = 11;
  const auto deep = build_model(config);
  deep->eval();
  const Table table = run("rank", reading(deep, few_tokens(1, 5))).tables[0];
  ASSERT_EQ(table.rows.size(), 11u);
  for (size_t row = 0; row < 11; ++row) {
    EXPECT_EQ(std::get<std::string>(table.rows[row][0]), "layer" + std::to_string(row));
  }
}

TEST(States, WhatDoesNotFadeIsKeptForEver) {
  const auto model = small_model("mixer = { type = \"rwkv\" }");
  {
    const at::NoGradGuard no_grad;  // the rates are exp(-50): the decay exp(-rate) is 1
    model->named_parameters()["layer0.mixer.time_decay"].fill_(-50);
  }
  const Findings found = run("states", reading(model));
  EXPECT_EQ(number(found.tables[1], 0, "shortest"), std::numeric_limits<double>::infinity());
  EXPECT_EQ(number(found.tables[1], 0, "median"), std::numeric_limits<double>::infinity());
  EXPECT_EQ(number(found.tables[1], 0, "longest"), std::numeric_limits<double>::infinity());
}

TEST(Memory, FindsWhatAUnitFiresOn) {
  const auto model = small_model(kMha + "\nchannel = { type = \"mlp\", hidden = 12 }",
                                 "output_bias = true\n");
  {
    const at::NoGradGuard no_grad;  // which no unit writes
    Tensor& bias = model->named_parameters()["output_bias"];
    bias.copy_(at::arange(bias.numel()) * 100);
  }
  const Subject subject = reading(model);
  const Findings found = run("memory", subject);
  const Tensor units = record(subject, {"units"}).find("layer0.units");
  ASSERT_EQ(units.sizes(), at::IntArrayRef({2, 9, 12}));
  const Tensor flat = units.flatten(0, 1);
  EXPECT_TRUE(at::equal(tensor_of(found, "layer0.largest")[0], std::get<0>(flat.max(0))));
  EXPECT_TRUE(at::equal(tensor_of(found, "layer0.positions")[0], flat.argmax(0)));
  // The first row's unit writes towards the tokens that its column of the second map scores most.
  const auto unit = static_cast<int64_t>(number(found.tables[0], 0, "unit"));
  const Tensor value = model->named_parameters()["layer0.channel.down.weight"].select(1, unit);
  const Tensor scores = at::matmul(model->named_parameters()["embedding"], value);
  const auto best = std::to_string(scores.argmax().item<int64_t>());
  EXPECT_TRUE(std::get<std::string>(found.tables[0].rows[0][6]).starts_with("\u201c" + best));
}

// Where a unit is not above 0 it does not fire, however few its firings are.
TEST(Memory, CountsFiringsAlone) {
  const auto model = small_model(kMha + "\nchannel = { type = \"mlp\", hidden = 12 }");
  Subject subject = reading(model);
  subject.top = 12;
  const Tensor units = record(subject, {"units"}).find("layer0.units").flatten(0, 1);
  const Tensor times = units.gt(0).sum(0).clamp_max(10);
  ASSERT_LT(times.min().item<int64_t>(), 10) << "a unit that fires seldom";
  const Table table = run("memory", subject).tables[0];
  int64_t rows = 0;
  for (size_t row = 0; row < table.rows.size(); ++row) {
    if (std::get<std::string>(table.rows[row][0]) != "layer0") continue;
    ++rows;
    const auto unit = static_cast<int64_t>(number(table, row, "unit"));
    const int64_t fires = times[unit].item<int64_t>();
    EXPECT_EQ(number(table, row, "firings"), static_cast<double>(fires));
    const Tensor own = units.select(1, unit);
    const auto [highest, where] = own.topk(fires);
    EXPECT_NEAR(number(table, row, "highest / mean"),
                (highest.sum() / 10 / own.abs().mean()).item<double>(), 1e-9);
    const Tensor tokens = subject.input.tokens.flatten().index_select(0, where);
    EXPECT_NEAR(number(table, row, "same token"),
                (tokens.bincount().max().to(at::kDouble) / fires).item<double>(), 1e-12);
  }
  EXPECT_EQ(rows, times.gt(0).sum().item<int64_t>());
}

// After ReLU, units with at most ten firings stand out alike, whatever their values are.
TEST(Memory, PrefersMoreFirings) {
  const auto model =
      small_model(kMha + "\nchannel = { type = \"mlp\", hidden = 24, activation = \"relu\" }");
  Subject subject = reading(model);
  subject.top = 24;
  const Table table = run("memory", subject).tables[0];
  std::set<double> firings_of_ties;
  for (size_t row = 1; row < table.rows.size(); ++row) {
    if (table.rows[row][0] != table.rows[row - 1][0]) continue;
    const double above = number(table, row - 1, "highest / mean");
    const double ratio = number(table, row, "highest / mean");
    EXPECT_LE(ratio, above + 1e-6);
    if (std::abs(ratio - above) > 1e-6) continue;
    EXPECT_LE(number(table, row, "firings"), number(table, row - 1, "firings"));
    firings_of_ties.insert(number(table, row, "firings"));
  }
  EXPECT_GT(firings_of_ties.size(), 1U) << "ties between units that fire more and less often";
}

// Differential attention has two maps before its difference for each head.
TEST(Noise, HeadsOfDifferentialAreItsHeads) {
  const auto model = small_model("mixer = { type = \"differential\", heads = 3, head_dim = 4 }");
  Subject subject = reading(model, few_tokens(1, 9));
  subject.answer = at::zeros({9}, at::kBool);
  subject.answer[3] = true;
  const Table all = run("noise", subject).tables[0];
  subject.heads = {2};
  const Table found = run("noise", subject).tables[0];
  ASSERT_EQ(all.rows.size(), 18u);
  ASSERT_EQ(found.rows.size(), 6u);
  std::vector<std::vector<Cell>> expected;
  for (const auto& row : all.rows) {
    if (std::get<int64_t>(row[2]) == 2) expected.push_back(row);
  }
  EXPECT_EQ(found.rows, expected);
  EXPECT_EQ(std::get<std::string>(found.rows[0][1]), "softmax 1");
  EXPECT_EQ(std::get<std::string>(found.rows[1][1]), "softmax 2");
  EXPECT_EQ(std::get<std::string>(found.rows[2][1]), "composed");
  const Tensor maps = record(subject, {"weights"}).find("layer0.weights");
  EXPECT_NEAR(number(found, 0, "on the answer"), maps[0][4][8][3].item<double>(), 1e-12);
  EXPECT_NEAR(number(found, 1, "on the answer"), maps[0][5][8][3].item<double>(), 1e-12);
}

TEST(Params, AddsUpToTheModel) {
  const auto model = small_model(kDcmha);
  const Findings found = run("params", {.model = model.get()});
  int64_t all = 0;
  for (const Tensor& p : model->parameters()) all += p.numel();
  double sum = 0;
  for (size_t row = 0; row < found.tables[0].rows.size(); ++row) {
    sum += number(found.tables[0], row, "parameters");
  }
  EXPECT_EQ(sum, static_cast<double>(all));
}

TEST(Analyses, OfAVisionTransformerSpeakOfImages) {
  ModelConfig config;
  read_fields(parse_toml("kind = 'vit'\nwidth = 16\ndepth = 1\nclasses = 3\n"
                         "image = { channels = 1, height = 8, width = 8, patch = 4 }\n"
                         "[[layer]]\n" + kMha,
                         "test"),
              config, "model");
  const auto model = build_model(config);
  const Subject subject{.model = model.get(), .input = {.images = at::rand({2, 1, 8, 8})}};
  const Findings heads = run("diversity", subject), parts = run("params", subject);
  EXPECT_NE(heads.sentences.at(1).find("On the images, "), std::string::npos);
  EXPECT_NE(parts.sentences.at(0).find(" FLOPs a position forward, at length "), std::string::npos);
}

TEST(Theorems, Hold) {
  const Findings found = run("theorems", {});
  const auto& t = found.tables;
  ASSERT_EQ(t.size(), 6U);
  EXPECT_LT(number(t[0], 0, "largest error"), 1e-12 * number(t[0], 0, "size"));
  EXPECT_LT(number(t[0], 1, "largest error"), 1e-12 * number(t[0], 1, "size"));
  EXPECT_GT(number(t[0], 2, "largest error"), 1);
  for (size_t row = 0; row < 3; ++row) EXPECT_LT(number(t[1], row, "largest error of P"), 1e-13);
  for (size_t row = 4; row < t[1].rows.size(); ++row) {
    EXPECT_GT(number(t[1], row, "largest error of P"), 1e-3);
  }
  EXPECT_NEAR(number(t[2], 0, "least error over W_k W_q from -50 to 50"), 0.25, 1e-12);
  for (size_t row = 0; row < 3; ++row) EXPECT_GT(number(t[3], row, "largest difference"), 0.1);
  for (size_t row = 0; row < 3; ++row) EXPECT_EQ(number(t[4], row, "largest error"), 0);
  for (size_t row = 0; row < t[5].rows.size(); ++row) {
    EXPECT_LT(number(t[5], row, "decoding - recurrence"), 1e-12);
  }
  EXPECT_LT(number(t[5], 0, "decoding - full attention"), 1e-12);
  EXPECT_GT(number(t[5], 3, "decoding - full attention"), 1e-3);
}

TEST(Theorems, LeaveTheRandomNumbersAlone) {
  at::manual_seed(1);
  const Tensor expected = at::rand({3});
  at::manual_seed(1);
  run("theorems", {});
  EXPECT_TRUE(at::equal(at::rand({3}), expected));
}

TEST(Analyses, RefuseWhatIsNotThere) {
  const auto fnet = small_model("mixer = { type = \"fnet\" }\nchannel = { type = \"none\" }",
                                "kind = \"encoder\"\n");
  const auto mha = small_model(kMha);
  const auto refusal = [](const std::string& what, const Subject& subject) {
    return test::message_of<UsageError>([&] { run(what, subject); });
  };
  for (const char* what : {"maps", "diversity", "rank", "sparsity", "experts", "memory"}) {
    const std::string said = refusal(what, reading(fnet));
    EXPECT_TRUE(said.find("fnet") != std::string::npos || said.find("none") != std::string::npos)
        << what << ": " << said;
  }
  EXPECT_NE(refusal("states", reading(mha)).find("is kept: the token mixers are mha, expected"),
            std::string::npos);
  Subject layers = reading(mha);
  layers.layers = {0, 5};
  EXPECT_EQ(refusal("maps", layers), "there is no layer 5, expected 0 to 1.");
  Subject heads = reading(mha);
  heads.heads = {4};
  EXPECT_EQ(refusal("rank", heads), "there is no head 4 in layer0, expected 0 to 3.");
  EXPECT_EQ(refusal("rank", {.model = mha.get()}),
            "the analysis rank needs tokens or images that the model reads.");
  EXPECT_EQ(refusal("rank", {}), "the analysis rank needs a model, but there is none.");
  EXPECT_EQ(test::message_of<UsageError>([] { find_analysis("divercity"); }),
            "there is no analysis 'divercity'; did you mean 'diversity'?");
}

TEST(Analyses, ShowTokens) {
  EXPECT_EQ(shown_token("a\n\x01\xff\xc3\xa4 "), "a\u21b5\\x01\\xff\u00e4 ");
}

// Texts cannot break out of the page's data.
TEST(Analyses, PagesEscapeTexts) {
  const auto model = small_model(kMha);
  Subject subject = reading(model);
  subject.vocabulary.assign(11, "</script><b>&\"");
  const Findings found = run("maps", subject);
  const std::string page = maps_page(subject, found);
  EXPECT_EQ(page.find("<b>"), std::string::npos);
  EXPECT_EQ(page.find("http"), std::string::npos);  // no network
}

}  // namespace
}  // namespace headloom::analysis
