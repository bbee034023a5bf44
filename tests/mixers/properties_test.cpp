// What every token mixer must hold. The cases are every registered mixer with its defaults, and
// variants of the options; a newcomer is tested by its registry line.
#include <limits>
#include <random>

#include "support.h"
#include "testing/autocast.h"
#include "testing/joined.h"

namespace headloom::properties_test {
namespace {

constexpr int64_t kWidth = 96;
const char* const kForm = "only \"simple\" and \"local\" have a state";
const char* const kWindow = "window is 5, but a memory is read as a whole";

struct Variant {
  std::string mixer;
  std::string options;  // TOML, one a line
  int64_t layer = 0;
  std::string position = "rope";
  bool bias = false;
  int64_t short_conv = 0;
  // What it cannot do though its mixer's traits say that the mixer can. Everything else it must do.
  std::string not_both_ways = "", no_memory = "";  // words of the sentence that refuses it
  std::string no_state = "";                       // why

  MixerTraits traits() const { return make_spec(token_mixers(), "token mixer", mixer)->traits(); }
  LayerShape shape(bool causal = true) const {
    LayerShape s;
    s.width = kWidth;
    s.layer = layer;
    s.depth = 4;
    s.causal = causal;
    s.bias = bias;
    s.position.type = position;
    s.short_conv = short_conv;
    return s;
  }
  std::shared_ptr<TokenMixer> build(bool causal) const {
    return test::mixer(mixer, options, shape(causal));
  }
  // Causal, unless it is a mixer of whole sequences.
  std::shared_ptr<TokenMixer> build() const { return build(traits().causal); }
};
std::ostream& operator<<(std::ostream& out, const Variant& v) {
  return out << v.mixer << " {" << v.options << "} layer " << v.layer << " short_conv "
             << v.short_conv;
}

std::vector<Variant> variants() {
  std::vector<Variant> out;
  for (const auto& entry : token_mixers()) {
    out.push_back({entry.name, ""});
    out.push_back({entry.name, "", 2, "none", true});
  }
  // Every mixer that looks back, after a short convolution.
  for (const auto& entry : token_mixers()) {
    if (!entry.traits.causal) continue;
    out.push_back({.mixer = entry.name,
                   .options = "",
                   .short_conv = 4,
                   .not_both_ways = "short_conv is 4, which looks back only"});
  }
  const std::vector<Variant> more = {
      {.mixer = "mha",
       .options = "heads = 6\nkv_heads = 2\nhead_dim = 20\nqk_norm = true\nwindow = 5",
       .no_memory = kWindow},
      {"mha", "heads = 6\nkv_heads = 1\nhead_dim = 10\nqkv_bias = true", 0, "alibi"},
      {"talking_heads", "heads = 6\nkey_heads = 4\nvalue_heads = 12"},
      {"talking_heads", "heads = 8\nkey_heads = 12\nvalue_heads = 4\nkv_heads = 2\nhead_dim = 10"},
      {.mixer = "talking_heads",
       .options = "heads = 6\npost = false\nwindow = 5\nqk_norm = true",
       .position = "alibi",
       .no_memory = kWindow},
      {.mixer = "dcmha",
       .options = "heads = 6\nkv_heads = 2\nhead_dim = 20\nqk_norm = true\nwindow = 5",
       .no_memory = kWindow},
      {"dcmha", "heads = 6\ngroups = 3\nrank = 1\nstatic = \"replace\""},
      {"dcmha", "heads = 6\ngroups = 2\nstatic = \"add\"\nkey_wise = false"},
      {"dcmha", "heads = 1\nhead_dim = 20\nprojection = false\npost = false"},
      {"dcmha", "heads = 6\nquery_wise = false\ngate = false\nstatic = \"replace\"\npre = false"},
      {.mixer = "differential",
       .options = "heads = 6\nkv_heads = 2\nwindow = 5",
       .layer = 3,
       .no_memory = kWindow},
      {"differential", "heads = 6\nkv_heads = 3\npairing = \"repeat\"\nqk_norm = true", 1},
      {"differential", "heads = 6\nkv_heads = 1\nhead_dim = 10\nnorm_scale = false", 0, "alibi"},
      {"multi_token", "preset = \"released\"\nheads = 6\nkv_heads = 2\nconv_layers = \"all\""},
      {.mixer = "multi_token",
       .options = "conv_layers = \"all\"\nconv_mask = \"exact\"\nwindow = 5\ngate = \"full\"",
       .no_memory = kWindow},
      {"multi_token",
       "heads = 6\nconv_layers = \"all\"\nconv_heads = 2\npre_mix = \"groups\"\nmix_heads = 3\n"
       "conv_padding = \"left\"\nkey_kernel = 4\npost_conv = true"},
      {"multi_token",
       "preset = \"none\"\nheads = 3\nhead_dim = 20\nconv_layers = \"all\"\npre_conv = true\n"
       "conv_padding = \"right\"\nquery_kernel = 1\nkey_kernel = 2"},
      {"linformer", "heads = 6\nrank = 4\nsharing = \"none\""},
      {"linformer", "heads = 2\nrank = 70\nsharing = \"kv\"", 1},
      {"linformer", "rank = 16\nsharing = \"layerwise\"", 1, "none", true},
      {"shaped", "heads = 6", 3, "alibi"},
      {"retention", "heads = 6\nvalue_factor = 0.5\nchunk = 5"},
      {"aft", "form = \"simple\""},
      {"aft", "local_window = 5"},
      {.mixer = "aft", .options = "form = \"full\"", .no_state = kForm},
      {.mixer = "aft", .options = "form = \"full\"\nfactor = 3", .no_state = kForm},
      {.mixer = "aft", .options = "form = \"conv\"\nreach = 5\nheads = 6", .no_state = kForm},
      {"gla", "heads = 6\nexpand_k = 0.25\nexpand_v = 0.75\ngate_rank = 3\ngate_normalizer = 1.0"},
      {"performer", "heads = 6\nfeatures = 5\northogonal = false\neps = 0.01"},
      {"performer", "heads = 2\nfeatures = 20\nkernel = \"relu\"\neps = 0.1", 0, "learned", true},
      {"synthesizer", "heads = 6\nscores = \"random\""},
      {"synthesizer", "scores = \"factorized_dense\""},
      {"synthesizer", "scores = \"factorized_random\"\nrank = 3"},
      {"synthesizer", "scores = [\"random\", \"dense\", \"dot_product\"]\nfixed = true"},
      {"synthesizer", "scores = [\"dot_product\", \"factorized_random\"]", 0, "none", true},
      {"mamba", "expand = 1\nd_state = 5\nd_conv = 2\ndt_rank = 7"},
  };
  out.insert(out.end(), more.begin(), more.end());
  return out;
}

// What a mixer cannot do it refuses in a UsageError that begins with its name and has `words` in
// it; where there are no words, it must do it. Returns the sentence, "" where `run` went through.
std::string refused(const std::function<void()>& run, const std::string& mixer,
                    const std::string& words) {
  std::string sentence;
  try {
    run();
  } catch (const UsageError& e) {
    sentence = e.what();
  }
  if (words.empty()) {
    EXPECT_EQ(sentence, "");
  } else {
    EXPECT_TRUE(sentence.starts_with(mixer)) << sentence;
    EXPECT_TRUE(test::contains(sentence, words));
  }
  return sentence;
}

class TokenMixers : public ::testing::TestWithParam<Variant> {
 protected:
  void SetUp() override { at::manual_seed(11); }
  static Tensor input(int64_t batch, int64_t length) { return at::randn({batch, length, kWidth}); }
  // Why the mixer has no state to decode from; "" where it has one, as it must.
  static std::string stateless(const TokenMixer& mixer) {
    const Variant& v = GetParam();
    const MixerTraits traits = v.traits();
    const std::string why =
        traits.causal && traits.stateful ? v.no_state : v.mixer + " has no state";
    EXPECT_EQ(mixer.stateful(), why.empty());
    return why;
  }
};

TEST_P(TokenMixers, KeepsShapeAtOddLengths) {
  const auto mixer = GetParam().build();
  for (const int64_t length : {1, 2, 63}) {
    const Tensor x = input(2, length);
    const Tensor y = mixer->forward(x, {});
    EXPECT_EQ(y.sizes(), x.sizes());
    EXPECT_TRUE(y.isfinite().all().item<bool>());
    EXPECT_GT(y.abs().max().item<double>(), 0);
  }
}

TEST_P(TokenMixers, FutureTokensChangeNothing) {
  std::shared_ptr<TokenMixer> mixer;
  const Variant& v = GetParam();
  const std::string refusal = refused([&] { mixer = v.build(/*causal=*/true); }, v.mixer,
                                      v.traits().causal ? "" : "mixes the whole sequence");
  if (!refusal.empty()) GTEST_SKIP() << refusal;
  test::add_noise(*mixer, 0.1);
  const Tensor x = input(1, 24);
  const Tensor y = mixer->forward(x, {});
  for (const int64_t from : {1, 13, 23}) {
    Tensor changed = x.clone();
    changed.narrow(1, from, 24 - from).normal_(0, 3);
    const Tensor z = mixer->forward(changed, {});
    EXPECT_TRUE(test::close(z.narrow(1, 0, from), y.narrow(1, 0, from), 1e-6)) << from;
    EXPECT_FALSE(test::close(z.narrow(1, from, 1), y.narrow(1, from, 1), 1e-3)) << from;
  }
}

// forward() on the whole equals extend() over any cutting of it.
TEST_P(TokenMixers, PiecesGiveTheWhole) {
  at::NoGradGuard no_grad;
  const auto mixer = GetParam().build();
  if (const std::string why = stateless(*mixer); !why.empty()) GTEST_SKIP() << why;
  test::add_noise(*mixer, 0.1);
  const int64_t length = 41;
  const Tensor x = input(2, length), whole = mixer->forward(x, {});
  std::mt19937 random(5);
  for (int trial = 0; trial < 6; ++trial) {
    MixerState state;
    std::string cuts;
    // One by one; then pieces of random sizes, the first often long, as a prompt is.
    for (int64_t at = 0; at < length;) {
      const int64_t most = std::min<int64_t>(length - at, trial == 0 ? 1 : 4 * trial + 1);
      const int64_t n = 1 + static_cast<int64_t>(random() % static_cast<uint64_t>(most));
      cuts += " " + std::to_string(n);
      EXPECT_TRUE(
          test::close(mixer->extend(x.narrow(1, at, n), state, {}), whole.narrow(1, at, n), 1e-5))
          << "at " << at << " of the pieces" << cuts;
      at += n;
      EXPECT_EQ(state.position.longest, at);
    }
  }
}

// Kernels and definitions take positions in blocks, mostly of 64, which this length crosses.
TEST_P(TokenMixers, BlocksOfPositionsMakeNoDifference) {
  at::NoGradGuard no_grad;
  const Variant& v = GetParam();
  if (!v.traits().causal) GTEST_SKIP() << v.mixer << " mixes the whole sequence";
  const auto mixer = v.build();
  test::add_noise(*mixer, 0.1);
  const int64_t length = 150;
  const Tensor x = input(1, length), whole = mixer->forward(x, {});
  for (const int64_t from : {64, 100}) {
    Tensor changed = x.clone();
    changed.narrow(1, from, length - from).normal_(0, 3);
    const Tensor y = mixer->forward(changed, {});
    EXPECT_TRUE(test::close(y.narrow(1, 0, from), whole.narrow(1, 0, from), 1e-5)) << from;
  }
  if (!stateless(*mixer).empty()) return;
  for (const std::vector<int64_t>& pieces :
       std::vector<std::vector<int64_t>>{{70, 1, 57, 22}, {1, 63, 64, 20, 2}}) {
    MixerState state;
    int64_t at = 0;
    for (const int64_t n : pieces) {
      EXPECT_TRUE(
          test::close(mixer->extend(x.narrow(1, at, n), state, {}), whole.narrow(1, at, n), 1e-4))
          << n << " at " << at;
      at += n;
    }
    EXPECT_EQ(at, length);
  }
}

TEST_P(TokenMixers, TheStateIsAsLargeAsSaid) {
  at::NoGradGuard no_grad;
  const auto mixer = GetParam().build();
  if (const std::string why = stateless(*mixer); !why.empty()) GTEST_SKIP() << why;
  for (const int64_t length : {1, 3, 4, 41}) {
    MixerState state;
    mixer->extend(input(1, length), state, {});
    EXPECT_EQ(static_cast<double>(state.bytes()), mixer->state_bytes(length)) << length;
  }
}

// Sequences of different lengths, side by side in one state.
TEST_P(TokenMixers, JoinedSequencesAreAsAlone) {
  at::NoGradGuard no_grad;
  const auto mixer = GetParam().build();
  if (const std::string why = stateless(*mixer); !why.empty()) GTEST_SKIP() << why;
  test::add_noise(*mixer, 0.1);
  std::vector<Tensor> inputs, wholes;
  for (int i = 0; i < 5; ++i) {
    inputs.push_back(input(1, 41));
    wholes.push_back(mixer->forward(inputs.back(), {}));
  }
  for (const uint32_t seed : {1, 2, 3}) {
    test::joined_as_alone<MixerState>(
        inputs, wholes,
        [&](const Tensor& x, MixerState& state) { return mixer->extend(x, state, {}); },
        [](MixerState& state, const std::vector<MixerState>& others) {
          std::vector<const MixerState*> parts;
          for (const MixerState& other : others) parts.push_back(&other);
          state.add(parts);
        },
        mixer->initial_state({}), 1e-5, seed);
  }
}

TEST_P(TokenMixers, SequencesOfABatchAreIndependent) {
  const auto mixer = GetParam().build();
  test::add_noise(*mixer, 0.1);
  const Tensor a = input(1, 17), b = input(1, 17);
  const Tensor both = mixer->forward(at::cat({a, b}), {});
  EXPECT_TRUE(test::close(both.narrow(0, 0, 1), mixer->forward(a, {}), 1e-5));
  EXPECT_TRUE(test::close(both.narrow(0, 1, 1), mixer->forward(b, {}), 1e-5));
}

// A number that is not finite is not hidden, and stays in its sequence.
TEST_P(TokenMixers, NanReachesWhatReadsIt) {
  at::NoGradGuard no_grad;
  const Variant& v = GetParam();
  const auto mixer = v.build();
  test::add_noise(*mixer, 0.1);
  const int64_t length = 12, bad = 5;
  const Tensor x = input(2, length), y = mixer->forward(x, {});
  Tensor poisoned = x.clone();
  poisoned[1][bad].fill_(std::numeric_limits<double>::quiet_NaN());
  const Tensor z = mixer->forward(poisoned, {});
  EXPECT_TRUE(test::close(z[0], y[0], 1e-5));
  // What looks both ways reads it everywhere, a window at the nearest positions only.
  const bool window = v.no_memory == kWindow;
  const int64_t first = v.traits().causal ? bad : 0;
  const Tensor reached = z[1].isnan().any(-1);  // [T]
  EXPECT_TRUE(reached.narrow(0, first, window ? 1 : length - first).all().item<bool>()) << reached;
}

TEST_P(TokenMixers, PaddingBeyondLengthsIsNotRead) {
  const Variant& v = GetParam();
  if (v.mixer == "fnet") GTEST_SKIP() << "fnet does not mask padding, as published";
  std::shared_ptr<TokenMixer> mixer;
  const std::string refusal =
      refused([&] { mixer = v.build(/*causal=*/false); }, v.mixer,
              v.traits().bidirectional ? v.not_both_ways : "looks back only");
  if (!refusal.empty()) GTEST_SKIP() << refusal;
  test::add_noise(*mixer, 0.1);
  const Tensor x = input(2, 16);
  Tensor changed = x.clone();
  changed[0].narrow(0, 9, 7).normal_(0, 3);
  MixerContext context;
  context.lengths = at::tensor({9, 16}, test::kLong);
  const Tensor y = mixer->forward(x, context), z = mixer->forward(changed, context);
  EXPECT_TRUE(test::close(z[0].narrow(0, 0, 9), y[0].narrow(0, 0, 9), 1e-5));
  EXPECT_TRUE(test::close(z[1], y[1], 1e-5));
  // And a shorter sequence by itself gives the same.
  EXPECT_TRUE(test::close(mixer->forward(x.narrow(0, 0, 1).narrow(1, 0, 9), {})[0],
                          y[0].narrow(0, 0, 9), 1e-4));
}

TEST_P(TokenMixers, DocumentsAreIsolated) {
  const Variant& v = GetParam();
  const auto mixer = v.build();
  test::add_noise(*mixer, 0.1);
  const Tensor a = input(1, 11), b = input(1, 8);
  MixerContext context;
  context.documents = at::cat({at::zeros({1, 11}, test::kLong), at::ones({1, 8}, test::kLong)}, 1);
  Tensor packed;
  const std::string refusal =
      refused([&] { packed = mixer->forward(at::cat({a, b}, 1), context); }, v.mixer,
              v.traits().documents ? "" : "documents are packed in a sequence");
  if (!refusal.empty()) GTEST_SKIP() << refusal;
  // Positions are relative in every variant or begin anew, so the second document may start
  // anywhere.
  EXPECT_TRUE(test::close(packed.narrow(1, 0, 11), mixer->forward(a, {}), 1e-4));
  EXPECT_TRUE(test::close(packed.narrow(1, 11, 8), mixer->forward(b, {}), 1e-4));
}

TEST_P(TokenMixers, WindowOfTheWholeLengthIsNoWindow) {
  const Variant& v = GetParam();
  Lister lister;
  make_spec(token_mixers(), "token mixer", v.mixer)->fields(lister);
  const auto& options = lister.options();
  if (std::none_of(options.begin(), options.end(),
                   [](const OptionInfo& o) { return o.key == "window"; })) {
    GTEST_SKIP() << "no windows";
  }
  Variant none = v, whole = v, narrow = v;
  const auto at_window = v.options.find("window = 5");
  if (at_window != std::string::npos) none.options.erase(at_window, 10);
  whole.options = none.options + "\nwindow = 20";
  narrow.options = none.options + "\nwindow = 3";
  const Tensor x = input(1, 20);
  const auto run = [&](const Variant& variant) {
    at::manual_seed(12);
    const auto mixer = variant.build();
    test::add_noise(*mixer, 0.1);
    return mixer->forward(x, {});
  };
  EXPECT_TRUE(test::close(run(whole), run(none), 1e-6));
  EXPECT_FALSE(test::close(run(narrow), run(none), 1e-3));
  // The first three tokens see no further than the window anyway.
  EXPECT_TRUE(test::close(run(narrow).narrow(1, 0, 3), run(none).narrow(1, 0, 3), 1e-5));
}

TEST_P(TokenMixers, MemoryIsWhatCrossAttentionReads) {
  const Variant& v = GetParam();
  const auto mixer = v.build();
  test::add_noise(*mixer, 0.1);
  const Tensor x = input(2, 5);
  MixerContext context;
  context.memory = input(2, 9);
  Tensor y;
  const std::string refusal =
      refused([&] { y = mixer->forward(x, context); }, v.mixer,
              v.traits().cross_attention ? v.no_memory : "does not read a memory");
  if (!refusal.empty()) GTEST_SKIP() << refusal;
  EXPECT_EQ(y.sizes(), x.sizes());
  // Every query sees every key: the last one too.
  MixerContext other;
  other.memory = context.memory.clone();
  other.memory.narrow(1, 8, 1).normal_(0, 3);
  const Tensor change = (mixer->forward(x, other) - y).abs().amax(-1);
  EXPECT_GT(change.min().item<double>(), 0);
}

TEST_P(TokenMixers, CostsCountEveryParameter) {
  const auto mixer = GetParam().build();
  int64_t expected = 0, counted = 0;
  for (const Tensor& p : mixer->parameters()) expected += p.numel();
  double flops = 0;
  for (const Cost& cost : mixer->costs(256)) {  // the length it is built for
    counted += cost.parameters;
    flops += cost.flops_per_token;
    EXPECT_FALSE(cost.part.empty());
    EXPECT_FALSE(cost.formula.empty());
  }
  EXPECT_EQ(counted, expected);
  // A position reads one row of a table of scores. Every other weight is used once a token or more.
  for (const auto& item : mixer->named_parameters()) {
    if (item.key() == "random") expected -= item.value().numel();
  }
  EXPECT_GT(flops, static_cast<double>(expected));
}

TEST_P(TokenMixers, GradientsAgreeWithDifferences) {
  const auto mixer = GetParam().build();
  test::add_noise(*mixer, 0.1);
  mixer->to(at::kDouble);
  const Tensor x = input(2, 7).to(at::kDouble).requires_grad_(true);
  const Tensor cotangent = input(2, 7).to(at::kDouble);
  std::vector<Tensor> inputs = mixer->parameters();
  inputs.push_back(x);
  EXPECT_TRUE(test::gradients_agree([&] { return (mixer->forward(x, {}) * cotangent).sum(); },
                                    inputs, 1e-5));
}

TEST_P(TokenMixers, EveryParameterGetsAGradient) {
  const auto mixer = GetParam().build();
  if (mixer->parameters().empty()) GTEST_SKIP() << "no parameters";
  mixer->forward(input(2, 9), {}).square().sum().backward();
  for (const auto& item : mixer->named_parameters()) {
    ASSERT_TRUE(item.value().grad().defined()) << item.key();
    EXPECT_TRUE(item.value().grad().isfinite().all().item<bool>()) << item.key();
  }
}

TEST_P(TokenMixers, Bfloat16FollowsFloat) {
  const auto mixer = GetParam().build();
  // At their start many parts move the result by less than rounding does.
  test::add_noise(*mixer, 0.1);
  const Tensor x = input(2, 33);
  const Tensor expected = mixer->forward(x, {});
  const Tensor cast = test::under_autocast([&] { return mixer->forward(x, {}); });
  // Over all values: a single one may be the small difference of large ones.
  const auto expect_close = [&](const Tensor& y) {
    EXPECT_LT((y - expected).norm().item<double>(), 0.04 * expected.norm().item<double>());
  };
  expect_close(cast);
  if (cast.requires_grad()) cast.sum().backward();
  mixer->to(at::kBFloat16);
  const Tensor y = mixer->forward(x.to(at::kBFloat16), {});
  EXPECT_EQ(y.scalar_type(), at::kBFloat16);
  expect_close(y);
}

// The future, other sequences and other documents, across a block of positions. With AVX2 alone it
// depends on all rows of a product whether they are multiplied in integers, which changes their
// rounding (docs/decoding.md).
TEST_P(TokenMixers, Bfloat16ReadsNothingElse) {
  at::NoGradGuard no_grad;
  const Variant& v = GetParam();
  const auto mixer = v.build();
  test::add_noise(*mixer, 0.1);
  mixer->to(at::kBFloat16);
  const int64_t length = 70, first = 30, rest = length - first;
  const Tensor x = input(2, length).to(at::kBFloat16);
  // Other values at some positions of sequence 1.
  const auto changed = [&](int64_t from, int64_t count) {
    Tensor out = x.clone();
    out[1].narrow(0, from, count).normal_(0, 3);
    return out;
  };
  const auto expect_same = [](const Tensor& a, const Tensor& b, int64_t from, int64_t count) {
    EXPECT_TRUE(test::close(a.narrow(0, from, count), b.narrow(0, from, count), 1e-2)) << from;
  };
  const Tensor y = mixer->forward(x, {}), z = mixer->forward(changed(first, rest), {});
  expect_same(z[0], y[0], 0, length);
  if (v.traits().causal) expect_same(z[1], y[1], 0, first);
  if (!v.traits().documents) return;
  MixerContext context;
  context.documents = at::arange(length).ge(first).to(at::kLong).expand({2, length});
  const Tensor packed = mixer->forward(x, context);
  expect_same(mixer->forward(changed(0, first), context)[1], packed[1], first, rest);
  expect_same(mixer->forward(changed(first, rest), context)[1], packed[1], 0, first);
}

TEST_P(TokenMixers, OptionsSurviveWritingAndReading) {
  const Variant& v = GetParam();
  const auto spec = make_spec(token_mixers(), "token mixer", v.mixer);
  read_fields(parse_toml(v.options, "test"), *spec);
  const std::string written = to_toml(write_fields(*spec));
  const auto again = make_spec(token_mixers(), "token mixer", v.mixer);
  read_fields(parse_toml(written, "written"), *again);
  EXPECT_EQ(to_toml(write_fields(*again)), written);
}

INSTANTIATE_TEST_SUITE_P(, TokenMixers, ::testing::ValuesIn(variants()), [](const auto& info) {
  return info.param.mixer + "_" + std::to_string(info.index);
});

}  // namespace
}  // namespace headloom::properties_test
