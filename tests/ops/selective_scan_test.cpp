// The selective scan's reference against loops over its formula in double, gradients against
// differences, the authors' recorded tensors, and what it refuses. The kernels are in
// selective_scan_fused_test.cpp.
#include "ops/selective_scan/op.h"

#include "testing/autocast.h"
#include "testing/compare.h"
#include "testing/errors.h"
#include "testing/golden.h"

namespace headloom::selective_scan_test {
namespace {

using namespace test;
using ops::SelectiveScanOptions;

enum class Map { kShared, kGroups, kConstant };

struct Call {
  Tensor u, delta, A, B, C;
  SelectiveScanOptions o;

  Call(int64_t batch, int64_t length, int64_t channels, int64_t states, Map b = Map::kShared,
       Map c = Map::kShared)
      : u(at::randn({batch, length, channels}, kDouble)),
        delta(at::randn({batch, length, channels}, kDouble) * 0.5),
        A(-at::rand({channels, states}, kDouble) * static_cast<double>(states)) {
    const auto map = [&](Map kind) {
      if (kind == Map::kConstant) return at::randn({channels, states}, kDouble);
      if (kind == Map::kShared) return at::randn({batch, length, states}, kDouble);
      return at::randn({batch, length, 2, states}, kDouble);
    };
    B = map(b);
    C = map(c);
  }
  void everything() {
    o.D = at::randn({u.size(2)}, kDouble);
    o.z = at::randn_like(u);
    o.delta_bias = at::randn({u.size(2)}, kDouble) - 1;
    o.delta_softplus = true;
    o.state = at::randn({u.size(0), u.size(2), A.size(1)}, kDouble);
  }
  std::vector<Tensor*> tensors() {
    std::vector<Tensor*> all = {&u, &delta, &A, &B, &C, &o.D, &o.z, &o.delta_bias, &o.state};
    std::erase_if(all, [](Tensor* t) { return !t->defined(); });
    return all;
  }
  std::tuple<Tensor, Tensor> run() const { return ops::selective_scan(u, delta, A, B, C, o); }
};

double at3(const Tensor& t, int64_t b, int64_t l, int64_t d, int64_t channels, int64_t n) {
  if (t.dim() == 2) return t[d][n].item<double>();
  if (t.dim() == 3) return t[b][l][n].item<double>();
  return t[b][l][d * t.size(2) / channels][n].item<double>();
}

// The formula, number by number.
std::tuple<Tensor, Tensor> naive(const Call& c) {
  const int64_t batch = c.u.size(0), length = c.u.size(1), channels = c.u.size(2);
  const int64_t states = c.A.size(1);
  Tensor out = at::zeros_like(c.u);
  Tensor last =
      c.o.state.defined() ? c.o.state.clone() : at::zeros({batch, channels, states}, kDouble);
  auto h = last.accessor<double, 3>(), y = out.accessor<double, 3>();
  const auto u = c.u.accessor<double, 3>(), delta = c.delta.accessor<double, 3>();
  const auto A = c.A.accessor<double, 2>();
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t t = 0; t < length; ++t) {
      const bool anew =
          t > 0 && c.o.documents.defined() &&
          c.o.documents[b][t].item<int64_t>() != c.o.documents[b][t - 1].item<int64_t>();
      for (int64_t d = 0; d < channels; ++d) {
        double dt = delta[b][t][d];
        if (c.o.delta_bias.defined()) dt += c.o.delta_bias[d].item<double>();
        if (c.o.delta_softplus) dt = std::log1p(std::exp(dt));
        for (int64_t n = 0; n < states; ++n) {
          const double before = anew ? 0 : std::exp(dt * A[d][n]) * h[b][d][n];
          h[b][d][n] = before + dt * at3(c.B, b, t, d, channels, n) * u[b][t][d];
          y[b][t][d] += at3(c.C, b, t, d, channels, n) * h[b][d][n];
        }
        if (c.o.D.defined()) y[b][t][d] += c.o.D[d].item<double>() * u[b][t][d];
        if (c.o.z.defined()) {
          const double z = c.o.z[b][t][d].item<double>();
          y[b][t][d] *= z / (1 + std::exp(-z));
        }
      }
    }
  }
  return {out, last};
}

class SelectiveScan : public ::testing::Test {
 protected:
  void SetUp() override { at::manual_seed(31); }
};

TEST_F(SelectiveScan, FollowsItsFormula) {
  for (const auto& [b, c] : {std::pair(Map::kShared, Map::kShared),
                             {Map::kGroups, Map::kGroups},
                             {Map::kConstant, Map::kGroups},
                             {Map::kShared, Map::kConstant}}) {
    for (const int64_t length : {1, 2, 19}) {
      for (const bool everything : {false, true}) {
        Call call(2, length, 4, 3, b, c);
        if (everything) {
          call.everything();
          call.o.documents = (at::rand({2, length}) < 0.3).to(at::kLong);  // ids come back
        } else {
          call.delta = call.delta.abs();
        }
        const auto [out, state] = naive(call);
        const auto [y, last] = call.run();
        EXPECT_TRUE(close(y, out, 1e-12)) << length << everything;
        EXPECT_TRUE(close(last, state, 1e-12)) << length << everything;
      }
    }
  }
}

TEST_F(SelectiveScan, IsThePublishedOne) {
  const auto g = read_golden("mamba_scan_full");
  const auto along = [&](const char* name) {  // recorded [B, channels or N, L]
    return leaf(g.at(name).transpose(1, 2).contiguous());
  };
  for (const char* backend : {"reference", "fused"}) {
    const Tensor u = along("u"), delta = along("delta"), B = along("B"), C = along("C"),
                 z = along("z"), A = leaf(g.at("A")), D = leaf(g.at("D")),
                 bias = leaf(g.at("delta_bias"));
    const auto [y, last] = ops::selective_scan(u, delta, A, B, C,
                                               {.D = D,
                                                .z = z,
                                                .delta_bias = bias,
                                                .delta_softplus = true,
                                                .state = {},
                                                .documents = {},
                                                .backend = backend});
    EXPECT_TRUE(close(y.transpose(1, 2), g.at("out"), 1e-5)) << backend;
    EXPECT_TRUE(close(last, g.at("last_state"), 1e-5)) << backend;
    ((y.transpose(1, 2) * g.at("cotangent")).sum() + (last * g.at("cotangent_last")).sum())
        .backward();
    for (const auto& [name, t] :
         {std::pair("u", u), {"delta", delta}, {"B", B}, {"C", C}, {"z", z}}) {
      EXPECT_TRUE(close(t.grad().transpose(1, 2), g.at(std::string("grad.") + name), 1e-4))
          << backend << name;
    }
    for (const auto& [name, t] : {std::pair("A", A), {"D", D}, {"delta_bias", bias}}) {
      EXPECT_TRUE(close(t.grad(), g.at(std::string("grad.") + name), 1e-4)) << backend << name;
    }
  }
}

TEST_F(SelectiveScan, GradientsAgreeWithDifferences) {
  for (const Map map : {Map::kShared, Map::kGroups, Map::kConstant}) {
    Call c(2, 7, 4, 3, map, map);
    c.everything();
    if (map == Map::kGroups) c.o.documents = at::arange(7, kLong).div(3, "floor").expand({2, 7});
    const Tensor wo = at::randn_like(c.u), ws = at::randn_like(c.o.state);
    std::vector<Tensor> leaves;
    for (Tensor* t : c.tensors()) leaves.push_back(t->requires_grad_(true));
    EXPECT_TRUE(gradients_agree(
        [&] {
          const auto [y, last] = c.run();
          return (y * wo).sum() + (last * ws).sum();
        },
        leaves, 1e-5))
        << static_cast<int>(map);
  }
}

TEST_F(SelectiveScan, PiecesWithTheStateBetweenAreTheWhole) {
  Call c(2, 40, 5, 4);
  c.everything();
  c.o.documents = at::arange(40, kLong).div(15, "floor").expand({2, 40});
  const auto [whole, end] = c.run();
  for (const int64_t first : {1, 17, 39}) {
    Call head = c, tail = c;
    const auto cut = [](Call& p, int64_t from, int64_t length) {
      for (Tensor* t : {&p.u, &p.delta, &p.B, &p.C, &p.o.z, &p.o.documents}) {
        *t = t->narrow(1, from, length);
      }
    };
    cut(head, 0, first);
    cut(tail, first, 40 - first);
    const auto [a, middle] = head.run();
    tail.o.state = middle;
    const auto [b, last] = tail.run();
    EXPECT_TRUE(close(at::cat({a, b}, 1), whole, 1e-12)) << first;
    EXPECT_TRUE(close(last, end, 1e-12)) << first;
  }
}

TEST_F(SelectiveScan, AutocastCastsTheSequences) {
  Call c(1, 50, 8, 4);
  c.everything();
  for (Tensor* t : c.tensors()) *t = t->to(at::kFloat);
  const auto [expected, state] = c.run();
  const auto [cast, cast_state] = under_autocast([&] { return c.run(); });
  EXPECT_EQ(cast.scalar_type(), at::kBFloat16);
  EXPECT_EQ(cast_state.scalar_type(), at::kFloat);
  EXPECT_TRUE(close(cast, expected, 0.02));
}

TEST_F(SelectiveScan, RefusesInOneSentence) {
  const struct {
    void (*apply)(Call&);
    const char* message;
  } cases[] = {
      {[](Call& c) { c.u = c.u[0]; }, "u has shape [5, 4], expected [B, L, channels]"},
      {[](Call& c) { c.u = c.u.narrow(1, 0, 0); }, "L and channels of at least 1"},
      {[](Call& c) { c.u = c.u.to(at::kLong); }, "u has dtype Long"},
      {[](Call& c) { c.delta = c.delta.narrow(1, 0, 4); }, "delta has shape"},
      {[](Call& c) { c.delta = c.delta.to(at::kFloat); },
       "delta has dtype Float, expected Double as u has"},
      {[](Call& c) { c.A = c.A.narrow(0, 0, 3); }, "A has shape [3, 3]"},
      {[](Call& c) { c.A = c.A.to(at::kFloat); }, "A has dtype Float, expected Double"},
      {[](Call& c) { c.B = c.B.narrow(2, 0, 2); }, "B has shape [2, 5, 2]"},
      {[](Call& c) { c.B = c.B[0][0]; }, "expected [B, L, N], [B, L, G, N] or [channels, N]"},
      {[](Call& c) { c.C = c.C[0]; }, "C has shape [5, 3], expected [channels, N] = [4, 3]"},
      {[](Call& c) { c.C = c.C.unsqueeze(2).repeat({1, 1, 3, 1}); },
       "C has 3 groups, expected a divisor of the 4 channels"},
      {[](Call& c) {
         c.B = c.B.unsqueeze(2).repeat({1, 1, 2, 1});
         c.C = c.C.unsqueeze(2).repeat({1, 1, 4, 1});
       },
       "C has 4 groups, expected 2 as B has"},
      {[](Call& c) { c.o.D = c.o.D.narrow(0, 0, 3); }, "D has shape [3]"},
      {[](Call& c) { c.o.delta_bias = c.o.D.to(at::kLong); }, "delta_bias has dtype Long"},
      {[](Call& c) { c.o.z = c.o.z[0]; }, "z has shape"},
      {[](Call& c) { c.o.state = c.o.state[0]; }, "state has shape"},
      {[](Call& c) { c.o.state = c.o.state.to(at::kFloat); }, "state has dtype Float"},
      {[](Call& c) { c.o.documents = at::zeros({2, 5}); }, "documents has dtype Float"},
      {[](Call& c) { c.o.documents = at::zeros({2, 4}, kLong); }, "documents has shape"},
      {[](Call& c) { c.o.backend = "fast"; }, "backend is \"fast\""},
      {[](Call& c) { c.o.backend = "fused"; }, "take float32 and bfloat16 only"},
  };
  for (const auto& bad : cases) {
    Call c(2, 5, 4, 3);
    c.everything();
    bad.apply(c);
    expect_refused("selective_scan", bad.message, [&] { c.run(); });
  }
}

}  // namespace
}  // namespace headloom::selective_scan_test
