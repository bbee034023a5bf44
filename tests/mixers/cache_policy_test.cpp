// What attention forgets under a budget: against its definition written out, against the recording
// of TOVA's own code, and for every mixer with keys and values.
#include <array>
#include <random>

#include "mixers/token/attend.h"
#include "support.h"
#include "testing/errors.h"
#include "testing/golden.h"

namespace headloom::cache_policy_test {
namespace {

using test::close;
using test::contains;
using test::message_of;

// Positions as they are kept.
Tensor kept(CacheTensor& cache, const Tensor& like) { return cache.append(like.narrow(1, 0, 0)); }

TEST(CachePolicy, TovaRecording) {
  const test::Tensors g = test::read_golden("tova_decode");
  const auto layout = [&](const char* name) { return g.at(name).transpose(1, 2).contiguous(); };
  const Tensor q = layout("q"), k = layout("k"), v = layout("v"), out = layout("out");
  const Tensor positions = g.at("kept_positions");  // [forwards, B, 16], then -1
  MixerState state;
  state.policy = CachePolicy::parse("tova:16");
  int64_t at = 0;
  for (int64_t forward = 0; forward < 18; ++forward) {
    const int64_t n = forward == 0 ? 13 : 1;
    const auto piece = [&](const Tensor& t) { return t.narrow(1, at, n); };
    EXPECT_TRUE(close(attend(piece(q), piece(k), piece(v), {}, {}, state, {}), piece(out), 1e-5))
        << forward;
    at += n;
    const int64_t count = std::min<int64_t>(at, 16);
    ASSERT_EQ(state.cache.at("key").size(), count);
    const Tensor keys = kept(state.cache.at("key"), k), values = kept(state.cache.at("value"), v);
    for (int64_t b = 0; b < 2; ++b) {
      const Tensor which = positions[forward][b].narrow(0, 0, count);
      EXPECT_TRUE(at::equal(keys[b], k[b].index_select(0, which))) << forward;
      EXPECT_TRUE(at::equal(values[b], v[b].index_select(0, which))) << forward;
    }
  }
}

// Whichever way rows close up, and however those that are appended lie in memory.
TEST(CachePolicy, RowsKeepWhatIsChosen) {
  at::manual_seed(11);
  std::mt19937 random(11);
  const auto below = [&](int64_t n) {
    return std::uniform_int_distribution<int64_t>(0, n - 1)(random);
  };
  CacheTensor rows;
  Tensor expected = at::empty({3, 0, 2, 5});
  for (int round = 0; round < 200; ++round) {
    const int64_t added = std::array<int64_t, 3>{1, 3, 20}[static_cast<size_t>(below(3))];
    // Part of a wider projection, or with strides that no copy of whole rows can take.
    const Tensor wide = at::randn({3, added, 4, 5});
    const Tensor piece =
        below(4) > 0 ? wide.narrow(2, 1, 2) : at::randn({3, 2, added, 5}).transpose(1, 2);
    expected = at::cat({expected, piece}, 1);
    ASSERT_TRUE(at::equal(rows.append(piece), expected)) << round;
    const int64_t all = expected.size(1), count = all - below(std::min<int64_t>(all, 8));
    const Tensor chosen = std::get<0>(
        at::rand({below(2) > 0 ? 3 : 1, all}).argsort(int64_t{1}).narrow(1, 0, count).sort(1));
    expected = expected.gather(1, chosen.view({-1, count, 1, 1}).expand({3, count, 2, 5}));
    rows.keep(chosen.size(0) == 1 ? chosen[0] : chosen);
    if (count > 40) {
      rows.keep_last(10);
      expected = expected.narrow(1, count - 10, 10);
    }
    ASSERT_TRUE(at::equal(kept(rows, piece), expected)) << round;
  }
}

// One layer of attention over one sequence, in double, and what it composes.
struct Layer {
  const char* name;
  std::optional<int64_t> window;
  bool rope, alibi, composed;
};

class Definition {
 public:
  explicit Definition(const Layer& layer) : layer_(layer) {}

  Tensor random(at::IntArrayRef sizes) const { return at::randn(sizes, test::kDouble); }

  // The next n positions through attend().
  Tensor step(MixerState& state, int64_t n) {
    const int64_t from = q_.defined() ? q_.size(1) : 0;
    const auto grow = [&](Tensor& all, at::IntArrayRef rest) {
      std::vector<int64_t> sizes = {1, n};
      sizes.insert(sizes.end(), rest.begin(), rest.end());
      const Tensor piece = random(sizes);
      all = all.defined() ? at::cat({all, piece}, 1) : piece;
    };
    grow(q_, {kHeads, kDim});
    grow(k_, {kHeads, kDim});
    grow(v_, {kHeads, 3});
    grow(q_gate_, {kHeads});
    grow(k_gate_, {kHeads});
    grow(post_gate_, {kHeads});
    const auto piece = [&](const Tensor& t) { return t.narrow(1, from, n); };
    ops::ComposedAttentionOptions o;
    if (layer_.composed) {
      o.pre.q_gate = piece(q_gate_);
      o.pre.k_gate = piece(k_gate_);
      o.post.k_gate = piece(post_gate_);
    }
    AttendOptions how{.rotary = layer_.rope ? &rotary_ : nullptr, .window = layer_.window};
    if (layer_.alibi) {
      how.bias = [](const Tensor& d) { return alibi_bias(kHeads, d, test::kDouble); };
    }
    const Tensor out = attend(piece(q_), piece(k_), piece(v_), o, how, state, {});
    state.position += n;
    return out;
  }

  // The same from the positions kept, and which are kept after it.
  Tensor expected(std::vector<int64_t>& kept, int64_t n, const CachePolicy& policy) {
    const int64_t end = q_.size(1), from = end - n;
    for (int64_t t = from; t < end; ++t) kept.push_back(t);
    const auto count = static_cast<int64_t>(kept.size());
    const bool recounted = policy.type == "sinks";
    const Tensor places = at::tensor(at::IntArrayRef(kept), at::kLong);
    const auto of_keys = [&](const Tensor& t) { return t.index_select(1, places); };
    // Where a key stands, for rotations, distances and the window.
    const Tensor where = recounted ? at::arange(count) : places;
    const auto rotated = [&](const Tensor& t, const Tensor& positions) {
      if (!layer_.rope) return t;
      std::vector<Tensor> rows;
      for (int64_t i = 0; i < t.size(1); ++i) {
        rows.push_back(rotary_.apply(t.narrow(1, i, 1), {positions[i].item<int64_t>(), {}}));
      }
      return at::cat(rows, 1);
    };
    const Tensor own = where.narrow(0, count - n, n);
    const Tensor q = rotated(q_.narrow(1, from, n), own), k = rotated(of_keys(k_), where);
    const Tensor distance = own.unsqueeze(1) - where;
    Tensor visible = distance.ge(0);
    if (layer_.window) visible = visible.logical_and(distance.lt(*layer_.window));
    Tensor a = at::einsum("bthd,bshd->bhts", {q, k}) / std::sqrt(static_cast<double>(kDim));
    if (layer_.alibi) a = a + alibi_bias(kHeads, distance.abs().unsqueeze(0), test::kDouble);
    const auto by_key = [&](const Tensor& t) { return of_keys(t).transpose(1, 2).unsqueeze(2); };
    if (layer_.composed) {
      a = a * (1 + q_gate_.narrow(1, from, n).transpose(1, 2).unsqueeze(-1) + by_key(k_gate_));
    }
    a = a.masked_fill(visible.logical_not(), -std::numeric_limits<double>::infinity());
    const Tensor p = at::softmax(a, -1);
    const Tensor weights = layer_.composed ? p * (1 + by_key(post_gate_)) : p;
    const Tensor out = at::einsum("bhts,bshe->bthe", {weights, of_keys(v_)});
    // What is kept.
    std::vector<int64_t> order;
    for (int64_t i = 0; i < count; ++i) order.push_back(i);
    const int64_t budget = policy.budget;
    if (count > budget && policy.type == "tova") {
      const Tensor mean = p.select(2, n - 1).mean(1)[0];
      std::sort(order.begin(), order.end(), [&](int64_t i, int64_t j) {
        return mean[i].item<double>() > mean[j].item<double>();
      });
    } else if (count > budget) {
      // Sinks first, then from the newest backwards.
      const int64_t first = recounted ? 4 : 0;
      std::sort(order.begin() + first, order.end(), std::greater<>());
    }
    order.resize(static_cast<size_t>(std::min(count, budget)));
    std::sort(order.begin(), order.end());
    std::vector<int64_t> after;
    for (const int64_t i : order) after.push_back(kept[static_cast<size_t>(i)]);
    kept = after;
    return out;
  }

  const Tensor& values() const { return v_; }

 private:
  static constexpr int64_t kHeads = 3, kDim = 6;
  const Layer layer_;
  Rotary rotary_{{.type = "rope"}, kDim};
  Tensor q_, k_, v_, q_gate_, k_gate_, post_gate_;
};

TEST(CachePolicy, TheDefinition) {
  at::manual_seed(5);
  // A window of 15 reaches further than the budget of 9.
  const Layer layers[] = {{"plain", {}, false, false, false}, {"rope", {}, true, false, false},
                          {"alibi", {}, false, true, false},  {"composed", {}, true, false, true},
                          {"window", 15, true, false, true},  {"all", 15, true, true, true}};
  for (const char* type : {"window", "sinks", "tova"}) {
    for (const Layer& layer : layers) {
      const CachePolicy policy = CachePolicy::parse(str(type, ":9"));
      Definition d(layer);
      MixerState state;
      state.policy = policy;
      std::vector<int64_t> places;
      std::mt19937 random(3);
      for (int i = 0; i < 30; ++i) {
        // A prompt of more than the budget, then mostly single positions.
        const int64_t n = i == 0             ? 14
                          : random() % 4 > 0 ? 1
                                             : 1 + static_cast<int64_t>(random() % 6);
        const Tensor y = d.step(state, n);
        EXPECT_TRUE(close(y, d.expected(places, n, policy), 1e-10))
            << policy.text() << " " << layer.name << " step " << i;
        const Tensor values = kept(state.cache.at("value"), d.values());
        ASSERT_TRUE(at::equal(
            values, d.values().index_select(1, at::tensor(at::IntArrayRef(places), at::kLong))))
            << policy.text() << " " << layer.name << " step " << i;
      }
    }
  }
}

struct Case {
  std::string mixer, options, position = "rope";
};

// Every mixer that keeps keys and values.
std::vector<Case> cases() {
  return {{"mha", "heads = 6\nkv_heads = 2\nqk_norm = true"},
          {"mha", "heads = 4", "alibi"},
          {"mha", "heads = 4\nwindow = 5"},
          {"mha", "heads = 4\nwindow = 14", "alibi"},
          {"talking_heads", "heads = 6\nkey_heads = 4\nvalue_heads = 12"},
          {"dcmha", "heads = 6"},
          {"dcmha", "heads = 6\nkv_heads = 2\nwindow = 14"},
          {"differential", "heads = 6\nkv_heads = 2"},
          {"differential", "heads = 6\nkv_heads = 1\nhead_dim = 10", "alibi"},
          {"multi_token", "preset = \"released\"\npre_conv = false\npost_conv = false\nheads = 6"},
          {"shaped", "heads = 6"},
          {"shaped", "heads = 6", "alibi"}};
}

std::shared_ptr<TokenMixer> build(const Case& c, std::optional<int64_t> window = {}) {
  at::manual_seed(1);
  LayerShape shape;
  shape.width = 48;
  shape.depth = 4;
  shape.position.type = c.position;
  const std::string options = window ? str(c.options, "\nwindow = ", *window) : c.options;
  const auto mixer = test::mixer(c.mixer, options, shape);
  test::add_noise(*mixer, 0.2);
  return mixer;
}

TEST(CachePolicy, ABudgetThatIsNotReachedChangesNothing) {
  at::NoGradGuard no_grad;
  for (const Case& c : cases()) {
    const auto mixer = build(c);
    const Tensor x = at::randn({2, 40, 48});
    for (const char* policy : {"window:40", "sinks:40", "tova:40", "window:9223372036854775807",
                               "sinks:9223372036854775807", "tova:9223372036854775807"}) {
      MixerState full, state = mixer->initial_state(CachePolicy::parse(policy));
      for (int64_t at = 0; at < 40; at += at == 0 ? 18 : 1) {
        const Tensor piece = x.narrow(1, at, at == 0 ? 18 : 1);
        ASSERT_TRUE(at::equal(mixer->extend(piece, state, {}), mixer->extend(piece, full, {})))
            << c.mixer << " {" << c.options << "} " << policy << " at " << at;
      }
    }
  }
}

// Users write the largest integer for none.
TEST(CachePolicy, TheLargestWindowIsNone) {
  at::NoGradGuard no_grad;
  for (const Case& c : {Case{"mha", "heads = 4"}, Case{"dcmha", "heads = 4", "alibi"},
                        Case{"multi_token", "preset = \"released\"\nheads = 6"}}) {
    const auto plain = build(c), windowed = build(c, std::numeric_limits<int64_t>::max());
    const Tensor x = at::randn({2, 30, 48});
    const Tensor y = plain->forward(x, {});
    EXPECT_TRUE(close(windowed->forward(x, {}), y, 1e-5)) << c.mixer;
    EXPECT_EQ(windowed->state_bytes(30), plain->state_bytes(30)) << c.mixer;
    MixerState state = windowed->initial_state({});
    for (const auto& [from, length] : {std::pair(0, 20), {20, 1}, {21, 9}}) {
      const Tensor piece = windowed->extend(x.narrow(1, from, length), state, {});
      EXPECT_TRUE(close(piece, y.narrow(1, from, length), 1e-5)) << c.mixer << " at " << from;
    }
  }
}

// Position by position, the newest M and its own are what a window of M + 1 sees.
TEST(CachePolicy, TheNewestAreAWindow) {
  at::NoGradGuard no_grad;
  for (const char* name : {"mha", "dcmha", "differential", "talking_heads"}) {
    const Case c{name, "heads = 4"};
    const auto plain = build(c), windowed = build(c, 8);
    const Tensor x = at::randn({2, 30, 48}), y = windowed->forward(x, {});
    MixerState state = plain->initial_state(CachePolicy::parse("window:7"));
    for (int64_t t = 0; t < 30; ++t) {
      EXPECT_TRUE(close(plain->extend(x.narrow(1, t, 1), state, {}), y.narrow(1, t, 1), 1e-5));
    }
  }
}

TEST(CachePolicy, SequencesForgetIndependently) {
  at::NoGradGuard no_grad;
  for (const Case& c : cases()) {
    const auto mixer = build(c);
    for (const char* policy : {"window:9", "sinks:9", "tova:9"}) {
      std::vector<MixerState> alone;
      std::vector<const MixerState*> parts;
      // Below, at and above the budget.
      const std::vector<int64_t> lengths = {3, 9, 1, 20, 8};
      for (const int64_t length : lengths) {
        alone.push_back(mixer->initial_state(CachePolicy::parse(policy)));
        mixer->extend(at::randn({1, length, 48}), alone.back(), {});
      }
      for (const MixerState& state : alone) parts.push_back(&state);
      MixerState together;
      together.add(parts);
      std::vector<int64_t> who = {0, 1, 2, 3, 4};
      for (const int64_t n : {1, 1, 3, 1, 6, 1, 1, 12, 1, 1}) {
        if (n == 6) {
          // The longest leaves, the others change places.
          who = {4, 0, 2, 1};
          together = together.select(at::tensor(at::IntArrayRef(who), at::kLong));
        }
        const Tensor x = at::randn({static_cast<int64_t>(who.size()), n, 48});
        const Tensor y = mixer->extend(x, together, {});
        for (size_t b = 0; b < who.size(); ++b) {
          const auto row = static_cast<int64_t>(b);
          const Tensor own =
              mixer->extend(x.narrow(0, row, 1), alone[static_cast<size_t>(who[b])], {});
          EXPECT_TRUE(close(y.narrow(0, row, 1), own, 2e-5))
              << c.mixer << " {" << c.options << "} " << policy << ", sequence " << who[b] << ", "
              << n << " positions";
        }
      }
    }
  }
}

TEST(CachePolicy, TheStateStaysWithinTheBudget) {
  at::NoGradGuard no_grad;
  for (const Case& c : cases()) {
    const auto mixer = build(c);
    for (const char* policy : {"window:16", "sinks:16", "tova:16"}) {
      const auto after = [&](int64_t prompt, int64_t steps) {
        MixerState state = mixer->initial_state(CachePolicy::parse(policy));
        mixer->extend(at::randn({1, prompt, 48}), state, {});
        for (int64_t i = 0; i < steps; ++i) mixer->extend(at::randn({1, 1, 48}), state, {});
        return state.bytes();
      };
      const int64_t at_budget = after(16, 0);
      EXPECT_EQ(after(100, 0), at_budget) << c.mixer << " " << policy;
      EXPECT_EQ(after(1, 60), at_budget) << c.mixer << " " << policy;
      EXPECT_LT(after(5, 0), at_budget + 1) << c.mixer << " " << policy;
    }
  }
}

// What keeps no keys and values stays as it is; what keeps them and cannot forget says so.
TEST(CachePolicy, IsForKeysAndValues) {
  LayerShape shape;
  shape.width = 48;
  shape.layer = 2;
  const CachePolicy tova = CachePolicy::parse("tova:512");
  for (const char* name : {"retention", "rwkv", "mamba", "aft"}) {
    EXPECT_EQ(test::mixer(name, "", shape)->initial_state(tova).policy, CachePolicy{}) << name;
  }
  EXPECT_EQ(test::mixer("mha", "", shape)->initial_state(tova).policy, tova);
  const auto convolved = test::mixer("multi_token", "", shape);
  const std::string said = message_of<UsageError>([&] { convolved->initial_state(tova); });
  EXPECT_TRUE(contains(said, "convolves over neighbouring keys")) << said;
  EXPECT_TRUE(contains(said, "tova:512, expected \"full\"")) << said;
  convolved->initial_state({});
}

TEST(CachePolicy, Names) {
  EXPECT_EQ(CachePolicy::parse("full"), CachePolicy{});
  for (const char* text : {"full", "window:1", "sinks:5", "tova:512"}) {
    EXPECT_EQ(CachePolicy::parse(text).text(), text);
  }
  for (const char* text : {"", "tova", "tova:", "tova:0", "tova:-3", "tova:12x", "toda:5",
                           "window 5", "full:3", "tova:99999999999999999999"}) {
    EXPECT_TRUE(contains(message_of<UsageError>([&] { CachePolicy::parse(text); }),
                         "\"tova:N\" with a budget"))
        << text;
  }
  EXPECT_TRUE(
      contains(message_of<UsageError>([&] { CachePolicy::parse("sinks:4"); }), "more than the 4"));
}

// As parse() does.
TEST(CachePolicy, RefusesWhatCodeFillsInWrong) {
  const auto mixer = test::mixer("mha", "", test::shape_of(96));
  const auto said = [&](const CachePolicy& policy) {
    return message_of<UsageError>([&] { mixer->initial_state(policy); });
  };
  EXPECT_TRUE(contains(said({.type = "toda", .budget = 5}), "the cache policy is \"toda:5\""));
  EXPECT_TRUE(contains(said({.type = "window"}), "the cache policy is \"window:0\""));
  EXPECT_TRUE(contains(said({.type = "tova", .budget = -1}), "the cache policy is \"tova:-1\""));
  EXPECT_TRUE(contains(said({.type = "sinks", .budget = 2}), "more than the 4"));
  EXPECT_TRUE(contains(said({.dtype = "int3"}), "cannot be held in \"int3\""));
}

// One that was moved from begins anew, and none is read or kept beyond its positions.
TEST(CachePolicy, CachesStayWithinTheirMemory) {
  CacheTensor first;
  first.append(at::randn({2, 30, 4}));
  CacheTensor second = std::move(first);
  EXPECT_EQ(first.size(), 0);  // NOLINT(bugprone-use-after-move): what this is about
  EXPECT_EQ(first.append(at::randn({2, 1, 4})).size(1), 1);
  EXPECT_EQ(second.size(), 30);
  EXPECT_TRUE(contains(message_of<Error>([&] { second.keep(at::tensor({0, 30}, at::kLong)); }),
                       "position 30 of a cache of 30 cannot be kept"));
  EXPECT_TRUE(contains(message_of<Error>([&] { MixerState().add({}); }), "to join"));
}

}  // namespace
}  // namespace headloom::cache_policy_test
