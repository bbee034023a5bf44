// wkv's reference against loops over its formula in double, gradients against differences, the
// authors' recorded tensors, and what it refuses. The kernels are in wkv_fused_test.cpp.
#include "ops/wkv/op.h"

#include "testing/autocast.h"
#include "testing/compare.h"
#include "testing/errors.h"
#include "testing/golden.h"

namespace headloom::wkv_test {
namespace {

using namespace test;
using ops::WkvOptions;

struct Call {
  Tensor k, v, decay, bonus;
  WkvOptions o;

  Call(int64_t batch, int64_t length, int64_t channels)
      : k(at::randn({batch, length, channels}, kDouble)),
        v(at::randn({batch, length, channels}, kDouble)),
        decay(at::exp(at::linspace(-5, 2, channels, kDouble))),
        bonus(at::randn({channels}, kDouble)) {}
  std::tuple<Tensor, Tensor> run() const { return ops::wkv(k, v, decay, bonus, o); }
};

// Both sums over the past written out, a position at a time.
Tensor naive(const Call& c) {
  const int64_t batch = c.k.size(0), length = c.k.size(1), channels = c.k.size(2);
  Tensor out = at::zeros_like(c.k);
  const auto k = c.k.accessor<double, 3>(), v = c.v.accessor<double, 3>();
  const auto w = c.decay.accessor<double, 1>(), u = c.bonus.accessor<double, 1>();
  auto o = out.accessor<double, 3>();
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t t = 0; t < length; ++t) {
      for (int64_t i = 0; i < channels; ++i) {
        double above = std::exp(u[i] + k[b][t][i]) * v[b][t][i];
        double below = std::exp(u[i] + k[b][t][i]);
        double age = 0;
        int64_t s = t - 1;
        for (; s >= 0; --s, ++age) {
          if (c.o.documents.defined() &&
              c.o.documents[b][s].item<int64_t>() != c.o.documents[b][s + 1].item<int64_t>()) {
            break;
          }
          const double weight = std::exp(k[b][s][i] - age * w[i]);
          above += weight * v[b][s][i];
          below += weight;
        }
        if (s < 0 && c.o.state.defined()) {
          const Tensor state = c.o.state[b].select(1, i);
          const double scale = std::exp(state[2].item<double>() - age * w[i]);
          above += state[0].item<double>() * scale;
          below += state[1].item<double>() * scale;
        }
        o[b][t][i] = above / below;
        if (c.o.receptance.defined()) {
          o[b][t][i] /= 1 + std::exp(-c.o.receptance[b][t][i].item<double>());
        }
      }
    }
  }
  return out;
}

Tensor some_state(int64_t batch, int64_t channels) {
  const Tensor b = at::rand({batch, channels}, kDouble) + 0.5;
  return at::stack(
      {at::randn({batch, channels}, kDouble), b, at::randn({batch, channels}, kDouble) + 1}, 1);
}

// The state whatever its scale: both sums at exponent 0.
Tensor sums(const Tensor& state) { return state.narrow(1, 0, 2) * at::exp(state.narrow(1, 2, 1)); }

class Wkv : public ::testing::Test {
 protected:
  void SetUp() override { at::manual_seed(31); }
};

TEST_F(Wkv, FollowsItsFormula) {
  for (const int64_t length : {1, 2, 40}) {
    for (const bool with_state : {false, true}) {
      for (const bool packed : {false, true}) {
        Call c(2, length, 5);
        if (with_state) c.o.state = some_state(2, 5);
        if (packed) {
          c.o.documents = (at::rand({2, length}) < 0.2).to(at::kLong);  // ids come back
          c.o.receptance = at::randn_like(c.k);
        }
        EXPECT_TRUE(close(std::get<0>(c.run()), naive(c), 1e-12)) << length << with_state << packed;
      }
    }
  }
}

TEST_F(Wkv, IsThePublishedOne) {
  const auto g = read_golden("rwkv4_wkv");
  for (const char* backend : {"reference", "fused"}) {
    const Tensor k = leaf(g.at("k")), v = leaf(g.at("v")), decay = leaf(g.at("time_decay")),
                 bonus = leaf(g.at("time_first"));
    WkvOptions o;
    o.backend = backend;
    const auto [out, state] = ops::wkv(k, v, decay.exp(), bonus, o);
    EXPECT_TRUE(close(out, g.at("out"), 1e-5)) << backend;
    for (int64_t i = 0; i < 3; ++i) {
      const char* const names[] = {"state_a", "state_b", "state_m"};
      EXPECT_TRUE(close(state.select(1, i), g.at(names[i]), 1e-5)) << backend << names[i];
    }
    (out * g.at("cotangent")).sum().backward();
    EXPECT_TRUE(close(k.grad(), g.at("grad.k"), 1e-4)) << backend;
    EXPECT_TRUE(close(v.grad(), g.at("grad.v"), 1e-4)) << backend;
    EXPECT_TRUE(close(decay.grad(), g.at("grad.time_decay"), 1e-4)) << backend;
    EXPECT_TRUE(close(bonus.grad(), g.at("grad.time_first"), 1e-4)) << backend;
    // From the recorded state in the middle.
    o.state = at::stack({g.at("mid_state_a"), g.at("mid_state_b"), g.at("mid_state_m")}, 1);
    const auto [rest, end] = ops::wkv(g.at("k").narrow(1, 8, 15), g.at("v").narrow(1, 8, 15),
                                      g.at("time_decay").exp(), g.at("time_first"), o);
    EXPECT_TRUE(close(rest, g.at("out").narrow(1, 8, 15), 1e-5)) << backend;
    EXPECT_TRUE(close(end, state, 1e-5)) << backend;
  }
}

TEST_F(Wkv, PiecesWithTheStateBetweenAreTheWhole) {
  for (const int64_t first : {1, 32, 41, 69}) {
    Call c(2, 70, 4);
    c.o.documents = at::arange(70, kLong).div(25, "floor").expand({2, 70});
    c.o.state = some_state(2, 4);
    const auto [whole, end] = c.run();
    Call head = c, tail = c;
    const auto cut = [](Call& p, int64_t from, int64_t length) {
      for (Tensor* t : {&p.k, &p.v, &p.o.documents}) *t = t->narrow(1, from, length);
    };
    cut(head, 0, first);
    cut(tail, first, 70 - first);
    const auto [a, middle] = head.run();
    tail.o.state = middle;
    const auto [b, last] = tail.run();
    EXPECT_TRUE(close(at::cat({a, b}, 1), whole, 1e-12)) << first;
    EXPECT_TRUE(close(last, end, 1e-12)) << first;
  }
}

TEST_F(Wkv, GradientsAgreeWithDifferences) {
  for (const bool packed : {false, true}) {
    Call c(2, 9, 3);
    c.o.state = some_state(2, 3);
    c.o.receptance = at::randn_like(c.k);
    if (packed) c.o.documents = at::arange(9, kLong).div(4, "floor").expand({2, 9});
    const Tensor wo = at::randn_like(c.k), ws = at::randn({2, 2, 3}, kDouble);
    const std::vector<Tensor> leaves = {c.k, c.v, c.decay, c.bonus, c.o.state, c.o.receptance};
    for (Tensor t : leaves) t.requires_grad_(true);
    EXPECT_TRUE(gradients_agree(
        [&] {
          const auto [o, s] = c.run();
          return (o * wo).sum() + (sums(s) * ws).sum();
        },
        leaves, 1e-5))
        << packed;
  }
}

// Keys of a hundred either way, in float32: the formula in double is exact there.
TEST_F(Wkv, LargeKeysStayExact) {
  for (const char* backend : {"reference", "fused"}) {
    Call c(1, 200, 6);
    c.k = at::empty_like(c.k).uniform_(-100, 100);
    const Tensor expected = naive(c);
    for (Tensor* t : {&c.k, &c.v, &c.decay, &c.bonus}) *t = t->to(at::kFloat);
    c.o.backend = backend;
    EXPECT_TRUE(close(std::get<0>(c.run()), expected, 2e-5)) << backend;
  }
}

TEST_F(Wkv, AutocastCastsTheSequences) {
  Call c(1, 50, 8);
  for (Tensor* t : {&c.k, &c.v, &c.decay, &c.bonus}) *t = t->to(at::kFloat);
  const auto [expected, state] = c.run();
  const auto [cast, cast_state] = under_autocast([&] { return c.run(); });
  EXPECT_EQ(cast.scalar_type(), at::kBFloat16);
  EXPECT_EQ(cast_state.scalar_type(), at::kFloat);
  EXPECT_TRUE(close(cast, expected, 0.02));
}

TEST_F(Wkv, RefusesInOneSentence) {
  const struct {
    void (*apply)(Call&);
    const char* message;
  } cases[] = {
      {[](Call& c) { c.k = c.k[0]; }, "k has shape [5, 3], expected [B, T, C]"},
      {[](Call& c) { c.k = c.k.narrow(1, 0, 0); }, "T of at least 1"},
      {[](Call& c) { c.k = c.k.to(at::kLong); }, "k has dtype Long"},
      {[](Call& c) { c.v = c.v.narrow(1, 0, 4); }, "v has shape"},
      {[](Call& c) { c.v = c.v.to(at::kFloat); }, "v has dtype Float, expected Double as k has"},
      {[](Call& c) { c.o.receptance = c.v[0]; }, "receptance has shape"},
      {[](Call& c) { c.decay = c.decay.narrow(0, 0, 1); }, "rate has shape [1]"},
      {[](Call& c) { c.bonus = c.bonus.to(at::kLong); }, "bonus has dtype Long"},
      {[](Call& c) { c.o.state = at::zeros({2, 2, 3}, kDouble); }, "state has shape"},
      {[](Call& c) { c.o.state = at::zeros({2, 3, 3}); }, "state has dtype Float"},
      {[](Call& c) { c.o.documents = at::zeros({2, 5}); }, "documents has dtype Float"},
      {[](Call& c) { c.o.documents = at::zeros({2, 4}, kLong); }, "documents has shape"},
      {[](Call& c) { c.o.backend = "fast"; }, "backend is \"fast\""},
      {[](Call& c) { c.o.backend = "fused"; }, "take float32 and bfloat16 only"},
  };
  for (const auto& bad : cases) {
    Call c(2, 5, 3);
    bad.apply(c);
    expect_refused("wkv", bad.message, [&] { c.run(); });
  }
}

}  // namespace
}  // namespace headloom::wkv_test
