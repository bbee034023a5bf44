// aft's definition against loops over its formula in double, gradients against differences, and
// what it refuses. The kernels are in aft_fused_test.cpp.
#include "ops/aft/op.h"

#include <limits>

#include "testing/autocast.h"
#include "testing/compare.h"
#include "testing/errors.h"

namespace headloom::aft_test {
namespace {

using namespace test;
using ops::AftOptions;

constexpr int64_t kWindow = 3, kHeads = 2, kLongest = 12;

Tensor bias_of(const std::string& form, bool causal) {
  const int64_t columns = causal ? kWindow : 2 * kWindow - 1;
  if (form == "simple") return {};
  if (form == "full") return at::randn({kLongest, kLongest}, kDouble);
  return at::randn({form == "local" ? kLongest : kHeads, columns}, kDouble);
}

struct Call {
  Tensor q, k, v;
  AftOptions o;

  Call(const std::string& form, bool causal, int64_t batch, int64_t length, int64_t channels)
      : q(at::randn({batch, length, channels}, kDouble)),
        k(at::randn({batch, length, channels}, kDouble)),
        v(at::randn({batch, length, channels}, kDouble)) {
    o.form = form;
    o.causal = causal;
    o.bias = bias_of(form, causal);
  }
  std::tuple<Tensor, Tensor> run() const { return ops::aft(q, k, v, o); }
};

// Number by number.
Tensor naive(const Call& c) {
  const int64_t batch = c.q.size(0), length = c.q.size(1), channels = c.q.size(2);
  Tensor out = at::zeros_like(c.q);
  const auto q = c.q.accessor<double, 3>(), k = c.k.accessor<double, 3>(),
             v = c.v.accessor<double, 3>();
  auto y = out.accessor<double, 3>();
  const auto document = [&](int64_t b, int64_t t) {
    return c.o.documents.defined() ? c.o.documents[b][t].item<int64_t>() : 0;
  };
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t keys = c.o.lengths.defined() ? c.o.lengths[b].item<int64_t>() : length;
    int64_t start = 0;
    for (int64_t t = 0; t < length; ++t) {
      if (t > 0 && document(b, t) != document(b, t - 1)) start = t;
      int64_t end = t + 1;
      if (!c.o.causal) {
        while (end < length && document(b, end) == document(b, t)) ++end;
        end = std::min(end, keys);
      }
      for (int64_t i = 0; i < channels; ++i) {
        double above = 0, below = 0;
        for (int64_t s = start; s < end; ++s) {
          double w = 0;
          const int64_t column = kWindow - 1 - (t - s);
          const bool inside = std::abs(t - s) < kWindow;
          if (c.o.form == "full") w = c.o.bias[t - start][s - start].item<double>();
          if (c.o.form == "local" && inside) w = c.o.bias[t - start][column].item<double>();
          if (c.o.form == "conv" && inside) {
            w = c.o.bias[i / (channels / kHeads)][column].item<double>();
          }
          above += std::exp(k[b][s][i] + w) * v[b][s][i];
          below += std::exp(k[b][s][i] + w);
        }
        y[b][t][i] = above / below / (1 + std::exp(-q[b][t][i]));
      }
    }
  }
  return out;
}

class Aft : public ::testing::Test {
 protected:
  void SetUp() override { at::manual_seed(31); }
};

const char* const kForms[] = {"simple", "local", "full", "conv"};

TEST_F(Aft, FollowsItsFormula) {
  for (const char* form : kForms) {
    for (const bool causal : {true, false}) {
      for (const int64_t length : {1, 2, 9, 10}) {
        for (const char* mask : {"", "documents", "lengths"}) {
          const int64_t batch = length == 10 ? 1 : 2;
          Call c(form, causal, batch, length, 4);
          if (std::string(mask) == "documents") {
            // Ids grow: whole documents are runs of one id.
            c.o.documents = (at::rand({batch, length}) < 0.5).to(at::kLong).cumsum(1);
          }
          if (std::string(mask) == "lengths") {
            c.o.lengths = at::tensor({length, (length + 1) / 2}, kLong).narrow(0, 0, batch);
          }
          EXPECT_TRUE(close(std::get<0>(c.run()), naive(c), 1e-12))
              << form << (causal ? " causal " : " both ways ") << length << mask;
        }
      }
    }
  }
}

TEST_F(Aft, GradientsAgreeWithDifferences) {
  for (const char* form : kForms) {
    for (const bool causal : {true, false}) {
      for (const bool packed : {false, true}) {
        Call c(form, causal, 2, 7, 4);
        std::vector<Tensor> leaves = {c.q, c.k, c.v};
        if (c.o.bias.defined()) leaves.push_back(c.o.bias);
        if (packed) c.o.documents = at::arange(7, kLong).div(4, "floor").expand({2, 7});
        for (Tensor t : leaves) t.requires_grad_(true);
        const Tensor w = at::randn_like(c.q);
        EXPECT_TRUE(gradients_agree([&] { return (std::get<0>(c.run()) * w).sum(); }, leaves, 1e-5))
            << form << causal << packed;
      }
    }
  }
}

TEST_F(Aft, PiecesWithTheStateBetweenAreTheWhole) {
  for (const char* form : {"simple", "local"}) {
    for (const bool packed : {false, true}) {
      for (const int64_t first : {1, 2, 5, 11}) {
        Call c(form, true, 2, 12, 4);
        if (packed) c.o.documents = at::arange(12, kLong).div(7, "floor").expand({2, 12});
        const auto [whole, end] = c.run();
        Call head = c, tail = c;
        const auto cut = [&](Call& p, int64_t from, int64_t length) {
          for (Tensor* t : {&p.q, &p.k, &p.v}) *t = t->narrow(1, from, length);
          if (packed) p.o.documents = c.o.documents.narrow(1, from, length);
        };
        cut(head, 0, first);
        cut(tail, first, 12 - first);
        const auto [a, middle] = head.run();
        tail.o.state = middle;
        tail.o.offset = packed && first > 7 ? first - 7 : first;
        // Positions of the pieces are those of the whole.
        if (packed && std::string(form) == "local" && tail.o.offset + 12 - first > kLongest)
          continue;
        const auto [b, last] = tail.run();
        EXPECT_TRUE(close(at::cat({a, b}, 1), whole, 1e-12)) << form << packed << first;
        EXPECT_TRUE(close(last, end, 1e-12)) << form << packed << first;
      }
    }
  }
}

// The blocks of conv and the sums outside its band, against the definition. Causal ones run
// them on other devices only (tests/device).
TEST_F(Aft, ConvolutionsAreTheDefinition) {
  for (const int64_t length : {3, 64, 65, 200}) {
    for (const int64_t window : {1, 7, 70}) {
      Call c("conv", /*causal=*/false, 2, length, 6);
      c.o.bias = at::randn({2, 2 * window - 1}, kDouble);
      // No pair of positions is so far apart.
      if (window > length) c.o.bias.select(1, 0).fill_(800);
      c.o.lengths = at::tensor({length, (length + 1) / 2}, kLong);
      const Tensor w = at::randn_like(c.q);
      std::vector<std::vector<Tensor>> results;
      for (const char* backend : {"reference", ""}) {
        if (*backend)
          c.o.backend = backend;
        else
          c.o.backend.reset();
        const std::vector<Tensor> leaves = {leaf(c.q), leaf(c.k), leaf(c.v), leaf(c.o.bias)};
        Call run = c;
        run.q = leaves[0];
        run.k = leaves[1];
        run.v = leaves[2];
        run.o.bias = leaves[3];
        const Tensor y = std::get<0>(run.run());
        (y * w).sum().backward();
        results.push_back({y.detach()});
        for (const Tensor& t : leaves) results.back().push_back(t.grad());
      }
      for (size_t i = 0; i < results[0].size(); ++i) {
        EXPECT_TRUE(close(results[1][i], results[0][i], 1e-10))
            << "T " << length << " W " << window << " result " << i;
      }
    }
  }
}

TEST_F(Aft, GradientsReachTheState) {
  for (const char* form : {"simple", "local"}) {
    Call c(form, true, 2, 6, 3);
    c.o.state = std::get<1>(Call(form, true, 2, 4, 3).run());
    c.o.offset = 4;
    const Tensor w = at::randn_like(c.q);
    const std::vector<Tensor> leaves = {c.k, c.v, c.o.state};
    for (Tensor t : leaves) t.requires_grad_(true);
    // The sums at exponent 0, and the rows of the window.
    const Tensor ws = at::randn({2, c.o.state.size(1) - 1, 3}, kDouble);
    EXPECT_TRUE(gradients_agree(
        [&] {
          const auto [y, s] = c.run();
          const Tensor sums = s.narrow(1, 0, 2) * s.narrow(1, 2, 1).exp();
          return (y * w).sum() + (at::cat({sums, s.narrow(1, 3, s.size(1) - 3)}, 1) * ws).sum();
        },
        leaves, 1e-5))
        << form;
  }
}

// Keys of a hundred either way, in float32: the formula in double is exact there.
TEST_F(Aft, LargeKeysStayExact) {
  for (const char* form : kForms) {
    for (const bool causal : {true, false}) {
      Call c(form, causal, 1, 12, 4);
      c.k = at::empty_like(c.k).uniform_(-100, 100);
      const Tensor expected = naive(c);
      for (Tensor* t : {&c.q, &c.k, &c.v}) *t = t->to(at::kFloat);
      if (c.o.bias.defined()) c.o.bias = c.o.bias.to(at::kFloat);
      EXPECT_TRUE(close(std::get<0>(c.run()), expected, 2e-5)) << form << causal;
    }
  }
}

// Nothing has any weight where all keys are -inf, whatever computes it.
TEST_F(Aft, KeysWithoutWeightGiveZero) {
  for (const char* form : {"simple", "conv"}) {
    for (const bool with_lengths : {true, false}) {
      Call c(form, false, 2, 12, 4);
      c.k.select(2, 1).fill_(-std::numeric_limits<double>::infinity());
      if (with_lengths) c.o.lengths = at::tensor({12, 7}, at::kLong);
      for (Tensor* t : {&c.q, &c.k, &c.v}) *t = leaf(*t);
      for (const char* backend : {"", "reference"}) {
        c.o.backend = *backend ? std::optional<std::string>(backend) : std::nullopt;
        const Tensor y = std::get<0>(c.run());
        EXPECT_TRUE(y.select(2, 1).eq(0).all().item<bool>()) << form << backend;
        EXPECT_TRUE(y.isfinite().all().item<bool>()) << form << backend;
        y.sum().backward();
        for (const Tensor* t : {&c.q, &c.k, &c.v}) {
          EXPECT_TRUE(t->grad().isfinite().all().item<bool>()) << form << backend;
        }
      }
    }
  }
}

TEST_F(Aft, AutocastCastsTheSequences) {
  for (const char* form : kForms) {
    Call c(form, true, 1, 12, 4);
    for (Tensor* t : {&c.q, &c.k, &c.v}) *t = t->to(at::kFloat);
    const Tensor expected = std::get<0>(c.run());
    const Tensor cast = under_autocast([&] { return std::get<0>(c.run()); });
    EXPECT_EQ(cast.scalar_type(), at::kBFloat16);
    EXPECT_TRUE(close(cast, expected, 0.03)) << form;
  }
}

TEST_F(Aft, RefusesInOneSentence) {
  const struct {
    const char* form;
    void (*apply)(Call&);
    const char* message;
  } cases[] = {
      {"simple", [](Call& c) { c.q = c.q[0]; }, "q has shape [5, 4], expected [B, T, C]"},
      {"simple", [](Call& c) { c.q = c.q.to(at::kLong); }, "q has dtype Long"},
      {"simple", [](Call& c) { c.k = c.k.narrow(1, 0, 4); }, "k has shape"},
      {"simple", [](Call& c) { c.v = c.v.to(at::kFloat); }, "v has dtype Float, expected Double"},
      {"simple", [](Call& c) { c.o.form = "easy"; }, "form is \"easy\""},
      {"simple", [](Call& c) { c.o.bias = c.q[0]; }, "form \"simple\" has none"},
      {"simple", [](Call& c) { c.o.offset = -1; }, "offset is -1"},
      {"simple", [](Call& c) { c.o.backend = "fast"; }, "backend is \"fast\""},
      {"simple", [](Call& c) { c.o.backend = "fused"; }, "take float32 and bfloat16 only"},
      {"full", [](Call& c) { c.o.backend = "fused"; }, "take float32 and bfloat16 only"},
      {"full",
       [](Call& c) {
         c.o.backend = "fused";
         c.o.causal = false;
       },
       "only causal forms are fused"},
      {"local", [](Call& c) { c.o.bias = Tensor(); },
       "bias has shape none, form \"local\" expects"},
      {"local", [](Call& c) { c.o.bias = c.o.bias.narrow(0, 0, 4); }, "bias is for 4 positions"},
      {"local", [](Call& c) { c.o.offset = 8; },
       "bias is for 12 positions, but the sequence has 5 from offset 8 on"},
      {"local", [](Call& c) { c.o.bias = c.o.bias.to(at::kLong); }, "bias has dtype Long"},
      {"local",
       [](Call& c) {
         c.o.causal = false;
         c.o.bias = c.o.bias.narrow(1, 0, 2);
       },
       "bias has 2 columns, expected an odd number"},
      {"full", [](Call& c) { c.o.bias = c.o.bias.narrow(1, 0, 7); }, "expects [L, L]"},
      {"conv", [](Call& c) { c.o.bias = at::zeros({3, 3}, kDouble); }, "bias has 3 heads"},
      {"full", [](Call& c) { c.o.state = c.q; }, "only causal \"simple\" and \"local\" have one"},
      {"local", [](Call& c) { c.o.state = at::zeros({2, 3, 4}, kDouble); }, "state has shape"},
      {"simple", [](Call& c) { c.o.state = at::zeros({2, 3, 4}); }, "state has dtype Float"},
      {"simple", [](Call& c) { c.o.lengths = at::zeros({2}); }, "lengths has dtype Float"},
      {"simple", [](Call& c) { c.o.documents = at::zeros({2, 4}, kLong); }, "documents has shape"},
  };
  for (const auto& bad : cases) {
    Call c(bad.form, true, 2, 5, 4);
    bad.apply(c);
    expect_refused("aft", bad.message, [&] { c.run(); });
  }
}

}  // namespace
}  // namespace headloom::aft_test
