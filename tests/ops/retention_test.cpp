// Retention's three forms against loops over its formula, gradients against differences, and what
// it refuses.
#include "ops/retention/op.h"

#include "linear_attention.h"
#include "testing/autocast.h"
#include "testing/compare.h"
#include "testing/errors.h"

namespace headloom::retention_test {
namespace {

using namespace test;
using ops::RetentionOptions;

const char* const kForms[] = {"chunkwise", "parallel", "recurrent"};

struct Call {
  Tensor q, k, v, gamma;
  RetentionOptions o;

  Call(int64_t batch, int64_t length, int64_t heads, int64_t dim, int64_t values)
      : q(at::randn({batch, length, heads, dim}, kDouble)),
        k(at::randn({batch, length, heads, dim}, kDouble)),
        v(at::randn({batch, length, heads, values}, kDouble)),
        gamma(1 - at::exp2(-1 - at::arange(heads, kDouble))) {}
  std::tuple<Tensor, Tensor> run() const { return ops::retention(q, k, v, gamma, o); }
};

std::tuple<Tensor, Tensor> naive(const Call& c) {
  const auto gamma = c.gamma.accessor<double, 1>();
  return linear_attention_loop(c.q, c.k, c.v, c.o,
                               [&](int64_t, int64_t, int64_t h, int64_t) { return gamma[h]; });
}

class Retention : public ::testing::Test {
 protected:
  void SetUp() override { at::manual_seed(31); }
};

// A published example of three features by hand: gamma = 1/4, two positions.
TEST_F(Retention, WorkedExampleInEveryForm) {
  const auto rows = [](at::ArrayRef<double> values) {
    return at::tensor(values, kDouble).view({1, 2, 1, 3});
  };
  Call c(1, 2, 1, 3, 3);
  c.q = rows({1, 2, 1, 3, 2, 3});
  c.k = rows({1, 2, 3, 4, 5, 6});
  c.v = rows({5, 4, 3, 2, 1, 0});
  c.gamma = at::tensor({0.25}, kDouble);
  const Tensor output = rows({40, 32, 24, 100, 56, 12});
  const Tensor state =
      at::tensor({9.25, 5., 0.75, 12.5, 7., 1.5, 15.75, 9., 2.25}, kDouble).view({1, 1, 3, 3});
  for (const char* form : kForms) {
    for (const int64_t chunk : {1, 2, 64}) {
      c.o.form = form;
      c.o.chunk = chunk;
      const auto [o, s] = c.run();
      EXPECT_TRUE(at::equal(o, output)) << form << " " << chunk;
      EXPECT_TRUE(at::equal(s, state)) << form << " " << chunk;
    }
  }
  for (Tensor* t : {&c.q, &c.k, &c.v}) *t = t->to(at::kFloat);
  c.o.form = "chunkwise";
  c.o.backend = "fused";
  const auto [o, s] = c.run();
  EXPECT_TRUE(at::equal(o, output.to(at::kFloat)));
  EXPECT_TRUE(at::equal(s, state.to(at::kFloat)));
}

TEST_F(Retention, FormsAgreeWithTheLoop) {
  for (const int64_t length : {1, 2, 63, 64, 130}) {
    for (const bool with_state : {false, true}) {
      for (const bool packed : {false, true}) {
        Call c(2, length, 3, 4, 5);
        if (with_state) c.o.state = at::randn({2, 3, 4, 5}, kDouble);
        // Ids that come back, boundaries inside chunks, at their edges and in every position.
        if (packed) {
          c.o.documents = (at::rand({2, length}) < 0.2).to(at::kLong);
          c.o.documents[0] = at::arange(length, kLong).div(16, "floor").remainder(2);
        }
        const auto [output, state] = naive(c);
        for (const char* form : kForms) {
          for (const int64_t chunk : {64, 16, 7}) {
            if (chunk != 64 && std::string(form) != "chunkwise") continue;
            c.o.form = form;
            c.o.chunk = chunk;
            const auto [o, s] = c.run();
            const std::string what = std::string(form) + " T " + std::to_string(length) +
                                     " chunk " + std::to_string(chunk) +
                                     (with_state ? " state" : "") + (packed ? " packed" : "");
            EXPECT_TRUE(close(o, output, 1e-12)) << what;
            EXPECT_TRUE(close(s, state, 1e-12)) << what;
          }
        }
      }
    }
  }
}

TEST_F(Retention, FloatAgreesOverLongSequences) {
  Call c(1, 1000, 6, 20, 24);
  c.gamma = 1 - at::exp2(-5 - at::arange(6, kDouble));
  c.o.form = "parallel";
  const auto [output, state] = c.run();
  for (Tensor* t : {&c.q, &c.k, &c.v}) *t = t->to(at::kFloat);
  for (const char* form : kForms) {
    c.o.form = form;
    const auto [o, s] = c.run();
    EXPECT_EQ(o.scalar_type(), at::kFloat);
    EXPECT_TRUE(close(o, output, 1e-5)) << form;
    EXPECT_TRUE(close(s, state, 1e-5)) << form;
  }
}

TEST_F(Retention, PiecesWithTheStateBetweenAreTheWhole) {
  Call c(2, 150, 3, 4, 6);
  c.o.documents = at::arange(150, kLong).div(40, "floor").expand({2, 150});
  const auto [output, state] = c.run();
  for (const int64_t first : {1, 64, 77, 80, 149}) {
    const auto piece = [&](int64_t from, int64_t length, const Tensor& s) {
      Call p = c;
      for (Tensor* t : {&p.q, &p.k, &p.v, &p.o.documents}) *t = t->narrow(1, from, length);
      p.o.state = s;
      return p.run();
    };
    const auto [o1, s1] = piece(0, first, {});
    // An initial state belongs to the first position's document: one that begins there has none.
    const bool boundary = first % 40 == 0;
    const auto [o2, s2] = piece(first, 150 - first, boundary ? Tensor() : s1);
    EXPECT_TRUE(close(at::cat({o1, o2}, 1), output, 1e-12)) << first;
    EXPECT_TRUE(close(s2, state, 1e-12)) << first;
  }
}

TEST_F(Retention, DefinitionsTakeStridedInputs) {
  Call c(2, 70, 3, 4, 6);
  const auto [output, state] = c.run();
  const auto strided = [](const Tensor& t) {
    return t.permute({2, 3, 0, 1}).contiguous().permute({2, 3, 0, 1});
  };
  for (Tensor* t : {&c.q, &c.k, &c.v}) *t = strided(*t);
  const auto [o, s] = c.run();
  EXPECT_TRUE(close(o, output, 1e-12));
  EXPECT_TRUE(close(s, state, 1e-12));
}

TEST_F(Retention, GradientsAgreeWithDifferences) {
  expect_gradients_of_forms_agree({"chunkwise", "parallel", "recurrent"}, &Call::gamma);
}

TEST_F(Retention, LowPrecisionAccumulatesInFloat) {
  Call c(1, 200, 3, 8, 16);
  for (Tensor* t : {&c.q, &c.k, &c.v}) *t = t->to(at::kBFloat16);
  c.gamma = (1 - at::exp2(-5 - at::arange(3, kDouble))).to(at::kFloat);
  const auto [o, s] = c.run();
  EXPECT_EQ(o.scalar_type(), at::kBFloat16);
  EXPECT_EQ(s.scalar_type(), at::kFloat);
  for (Tensor* t : {&c.q, &c.k, &c.v}) *t = t->to(at::kDouble);
  const auto [output, state] = c.run();
  EXPECT_TRUE(close(o, output, 0.004));  // one rounding of the result
  EXPECT_TRUE(close(s, state, 1e-5));
  for (Tensor* t : {&c.q, &c.k, &c.v}) *t = t->to(at::kFloat);
  const auto cast = under_autocast([&] { return std::get<0>(c.run()); });
  EXPECT_EQ(cast.scalar_type(), at::kBFloat16);
  EXPECT_TRUE(close(cast, output, 0.004));
}

TEST_F(Retention, RefusesInOneSentence) {
  const struct {
    void (*apply)(Call&);
    const char* message;
  } cases[] = {
      {[](Call& c) { c.q = c.q[0]; }, "q has shape [5, 2, 3], expected [B, T, H, D]"},
      {[](Call& c) { c.q = c.q.to(at::kLong); }, "q has dtype Long"},
      {[](Call& c) {
         for (Tensor* t : {&c.q, &c.k, &c.v}) *t = t->narrow(1, 0, 0);
       },
       "T and D of at least 1"},
      {[](Call& c) { c.k = c.k.narrow(3, 0, 2); }, "k has shape"},
      {[](Call& c) { c.k = c.k.to(at::kFloat); }, "k has dtype Float, expected Double"},
      {[](Call& c) { c.v = c.v[0]; }, "v has shape [5, 2, 4], expected [B, T, H, E]"},
      {[](Call& c) { c.v = c.v.narrow(1, 0, 4); }, "v has shape"},
      {[](Call& c) { c.gamma = c.gamma.narrow(0, 0, 1); }, "gamma has shape [1]"},
      {[](Call& c) { c.gamma = c.gamma.to(at::kBFloat16); }, "gamma has dtype BFloat16"},
      {[](Call& c) { c.o.state = at::zeros({2, 2, 4, 3}, kDouble); }, "state has shape"},
      {[](Call& c) { c.o.state = at::zeros({2, 2, 3, 4}); }, "state has dtype Float"},
      {[](Call& c) { c.o.documents = at::zeros({2, 5}); }, "documents has dtype Float"},
      {[](Call& c) { c.o.documents = at::zeros({2, 4}, kLong); }, "documents has shape"},
      {[](Call& c) { c.o.form = "chunked"; }, "form is \"chunked\""},
      {[](Call& c) { c.o.chunk = 0; }, "chunk is 0, expected at least 1"},
      {[](Call& c) { c.o.backend = "quick"; }, "backend is \"quick\""},
  };
  for (const auto& bad : cases) {
    Call c(2, 5, 2, 3, 4);
    bad.apply(c);
    expect_refused("retention", bad.message, [&] { c.run(); });
  }
}

}  // namespace
}  // namespace headloom::retention_test
