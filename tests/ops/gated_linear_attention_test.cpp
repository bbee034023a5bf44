// Gated linear attention: its definition in both forms against loops over its formula, gradients
// against differences, what it refuses; and the fused kernels against the definition in float64,
// with memory that a kernel fails to write poisoned with NaN, for every instruction set.
#include "ops/gated_linear_attention/op.h"

#include "fused.h"
#include "linear_attention.h"
#include "ops/retention/op.h"
#include "testing/autocast.h"
#include "testing/compare.h"
#include "testing/errors.h"
#include "testing/instruction_sets.h"

namespace headloom::gated_linear_attention_test {
namespace {

using namespace test;
using ops::GatedLinearAttentionOptions;

const double kForgotten = -std::numeric_limits<double>::infinity();

// Decays as the mixer starts, about 0.96.
Tensor log_decays(at::IntArrayRef sizes) { return at::log_sigmoid(at::randn(sizes, kDouble)) / 16; }

struct Call {
  Tensor q, k, v, log_decay;
  GatedLinearAttentionOptions o;

  Call(int64_t batch, int64_t length, int64_t heads, int64_t dim, int64_t values)
      : q(at::randn({batch, length, heads, dim}, kDouble)),
        k(at::randn({batch, length, heads, dim}, kDouble)),
        v(at::randn({batch, length, heads, values}, kDouble)),
        log_decay(log_decays({batch, length, heads, dim}) * 8) {}
  std::tuple<Tensor, Tensor> run() const {
    return ops::gated_linear_attention(q, k, v, log_decay, o);
  }
  std::vector<Tensor*> rows() { return {&q, &k, &v, &log_decay}; }
  void to(at::ScalarType type) {
    for (Tensor* t : rows()) *t = t->to(type);
  }
};

std::tuple<Tensor, Tensor> naive(const Call& c) {
  const auto log_decay = c.log_decay.accessor<double, 4>();
  return linear_attention_loop(c.q, c.k, c.v, c.o, [&](int64_t b, int64_t t, int64_t h, int64_t d) {
    return std::exp(log_decay[b][t][h][d]);
  });
}

class GatedLinearAttention : public ::testing::Test {
 protected:
  void SetUp() override { at::manual_seed(31); }
};

TEST_F(GatedLinearAttention, FormsAgreeWithTheLoop) {
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
        for (const int64_t chunk : {0, 64, 16, 7}) {
          c.o.form = chunk == 0 ? "recurrent" : "chunkwise";
          c.o.chunk = chunk == 0 ? 1 : chunk;
          const auto [o, s] = c.run();
          const std::string what = "T " + std::to_string(length) + " chunk " +
                                   std::to_string(chunk) + (with_state ? " state" : "") +
                                   (packed ? " packed" : "");
          EXPECT_TRUE(close(o, output, 1e-12)) << what;
          EXPECT_TRUE(close(s, state, 1e-12)) << what;
        }
      }
    }
  }
}

// Rows that forget everything at once beside rows that forget nothing: in float32, where a
// difference of running sums would be all rounding.
TEST_F(GatedLinearAttention, StrongDecaysAreSafe) {
  for (const double strong : {-5., -90., -1e5, kForgotten}) {
    Call c(1, 130, 2, 20, 24);
    c.log_decay.narrow(3, 0, 5).fill_(strong);
    c.log_decay.narrow(3, 5, 5).masked_fill_(at::rand({1, 130, 2, 5}) < 0.1, strong);
    c.log_decay.narrow(3, 10, 5).zero_();
    const auto [output, state] = naive(c);
    c.to(at::kFloat);
    for (const char* run : {"recurrent", "chunkwise", "fused"}) {
      const bool fused = std::string(run) == "fused";
      c.o.form = fused ? "chunkwise" : run;
      c.o.backend = fused ? "fused" : "reference";
      const auto [o, s] = c.run();
      EXPECT_TRUE(close(o, output, 2e-6)) << run << " " << strong;
      EXPECT_TRUE(close(s, state, 2e-6)) << run << " " << strong;
    }
  }
}

TEST_F(GatedLinearAttention, ConstantDecayIsRetention) {
  for (const auto type : {at::kDouble, at::kFloat}) {
    Call c(2, 150, 3, 8, 10);
    const Tensor gamma = 1 - at::exp2(-1 - at::arange(3, kDouble));
    c.log_decay = gamma.log().view({1, 1, 3, 1}).expand({2, 150, 3, 8});
    c.o.state = at::randn({2, 3, 8, 10}, kDouble).to(type);
    c.o.documents = at::arange(150, kLong).div(40, "floor").expand({2, 150});
    c.to(type);
    const auto [output, state] =
        ops::retention(c.q, c.k, c.v, gamma, {.state = c.o.state, .documents = c.o.documents});
    const auto [o, s] = c.run();
    EXPECT_TRUE(close(o, output, type == at::kDouble ? 1e-12 : 5e-6));
    EXPECT_TRUE(close(s, state, type == at::kDouble ? 1e-12 : 5e-6));
  }
}

TEST_F(GatedLinearAttention, PiecesWithTheStateBetweenAreTheWhole) {
  for (const auto type : {at::kDouble, at::kFloat}) {
    Call c(2, 150, 3, 4, 6);
    c.to(type);
    c.o.documents = at::arange(150, kLong).div(40, "floor").expand({2, 150});
    const auto [output, state] = c.run();
    for (const int64_t first : {1, 64, 77, 80, 149}) {
      const auto piece = [&](int64_t from, int64_t length, const Tensor& s) {
        Call p = c;
        for (Tensor* t : p.rows()) *t = t->narrow(1, from, length);
        p.o.documents = p.o.documents.narrow(1, from, length);
        p.o.state = s;
        return p.run();
      };
      const auto [o1, s1] = piece(0, first, {});
      // An initial state belongs to the first position's document: one that begins there has none.
      const bool boundary = first % 40 == 0;
      const auto [o2, s2] = piece(first, 150 - first, boundary ? Tensor() : s1);
      EXPECT_TRUE(close(at::cat({o1, o2}, 1), output, 1e-6)) << first;
      EXPECT_TRUE(close(s2, state, 1e-6)) << first;
    }
  }
}

TEST_F(GatedLinearAttention, GradientsAgreeWithDifferences) {
  expect_gradients_of_forms_agree({"chunkwise", "recurrent"}, &Call::log_decay);
}

TEST_F(GatedLinearAttention, LowPrecisionAccumulatesInFloat) {
  Call c(1, 200, 3, 8, 16);
  c.log_decay = log_decays({1, 200, 3, 8});
  c.to(at::kBFloat16);
  for (const char* backend : {"reference", "fused"}) {
    for (const auto decay : {at::kBFloat16, at::kFloat}) {
      c.log_decay = c.log_decay.to(decay);
      c.o.backend = backend;
      const auto [o, s] = c.run();
      EXPECT_EQ(o.scalar_type(), at::kBFloat16);
      EXPECT_EQ(s.scalar_type(), at::kFloat);
      Call wide = c;
      wide.o.backend = {};
      wide.to(at::kDouble);
      const auto [output, state] = wide.run();
      EXPECT_TRUE(close(o, output, 0.004)) << backend << decay;  // one rounding of the result
      EXPECT_TRUE(close(s, state, 1e-5)) << backend << decay;
    }
  }
  c.o.backend = {};
  c.to(at::kFloat);
  const Tensor output = std::get<0>(c.run());
  const auto cast = under_autocast([&] { return std::get<0>(c.run()); });
  EXPECT_EQ(cast.scalar_type(), at::kBFloat16);
  EXPECT_TRUE(close(cast, output, 0.004));
}

TEST_F(GatedLinearAttention, RefusesInOneSentence) {
  const struct {
    void (*apply)(Call&);
    const char* message;
  } cases[] = {
      {[](Call& c) { c.q = c.q[0]; }, "q has shape [5, 2, 3], expected [B, T, H, D]"},
      {[](Call& c) { c.q = c.q.to(at::kLong); }, "q has dtype Long"},
      {[](Call& c) {
         for (Tensor* t : c.rows()) *t = t->narrow(1, 0, 0);
       },
       "T and D of at least 1"},
      {[](Call& c) { c.k = c.k.narrow(3, 0, 2); }, "k has shape"},
      {[](Call& c) { c.k = c.k.to(at::kFloat); }, "k has dtype Float, expected Double"},
      {[](Call& c) { c.v = c.v[0]; }, "v has shape [5, 2, 4], expected [B, T, H, E]"},
      {[](Call& c) { c.v = c.v.narrow(3, 0, 0); }, "with E of at least 1"},
      {[](Call& c) { c.v = c.v.narrow(1, 0, 4); }, "v has shape"},
      {[](Call& c) { c.log_decay = c.log_decay.narrow(3, 0, 1); }, "log_decay has shape"},
      {[](Call& c) { c.log_decay = c.log_decay.to(at::kBFloat16); },
       "log_decay has dtype BFloat16, expected Float or Double as q has"},
      {[](Call& c) { c.o.state = at::zeros({2, 2, 4, 3}, kDouble); }, "state has shape"},
      {[](Call& c) { c.o.state = at::zeros({2, 2, 3, 4}); }, "state has dtype Float"},
      {[](Call& c) { c.o.documents = at::zeros({2, 5}); }, "documents has dtype Float"},
      {[](Call& c) { c.o.documents = at::zeros({2, 4}, kLong); }, "documents has shape"},
      {[](Call& c) { c.o.form = "parallel"; }, "form is \"parallel\""},
      {[](Call& c) { c.o.chunk = 0; }, "chunk is 0, expected at least 1"},
      {[](Call& c) { c.o.backend = "quick"; }, "backend is \"quick\""},
      {[](Call& c) { c.o.backend = "fused"; }, "float32 and bfloat16 only"},
  };
  for (const auto& bad : cases) {
    Call c(2, 5, 2, 3, 4);
    bad.apply(c);
    expect_refused("gated_linear_attention", bad.message, [&] { c.run(); });
  }
}

// --- The fused kernels ---

struct Case {
  std::string name = "";
  int64_t B = 1, T = 63, H = 6, D = 20, E = 24;
  bool state = false, strided = false, last_state = true;  // last_state: its gradient is wanted
  int64_t document = 0;                                    // positions a document; 0: all one
  double decay = 1;                                        // times those that the mixer starts with
  // log_decay in float32 beside narrow q, k and v, as the mixer has it.
  bool wide_decay = false;
};

struct Problem {
  std::vector<Tensor> leaves;  // q, k, v, log_decay and the state, where there is one
  GatedLinearAttentionOptions options;
};

Problem make(const Case& c, at::ScalarType type) {
  at::manual_seed(7);
  Problem p;
  p.leaves = random_qkv(c, type);
  const Tensor decay = c.decay * log_decays({c.B, c.T, c.H, c.D});
  p.leaves.push_back(decay.to(c.wide_decay ? at::toOpMathType(type) : type));
  if (c.state) p.leaves.push_back(at::randn({c.B, c.H, c.D, c.E}));
  p.options.documents = document_ids(c);
  return p;
}

// Output, last state and gradients under fixed random cotangents.
std::vector<Tensor> evaluate(Problem p, const Case& c, const char* backend, at::ScalarType type) {
  const std::vector<Tensor> leaves = leaves_of(p.leaves, c.wide_decay ? 3 : 4, type, c.strided);
  p.options.backend = backend;
  p.options.form = "recurrent";
  if (leaves.size() > 4) p.options.state = leaves[4];
  const auto [out, state] =
      ops::gated_linear_attention(leaves[0], leaves[1], leaves[2], leaves[3], p.options);
  return output_and_gradients(out, state, leaves, p.leaves[0].scalar_type(), c);
}

std::vector<Case> cases() {
  std::vector<Case> out = linear_attention_cases<Case>();
  for (const int64_t T : {1, 2, 15, 16, 17, 63, 127, 128, 129, 145, 1000}) {
    out.push_back({.name = "T " + std::to_string(T), .T = T});
  }
  for (const Case& c :
       {Case{.name = "GLA", .B = 2, .T = 200, .H = 2, .D = 64, .E = 128},
        Case{.name = "large", .T = 70, .H = 1, .D = 130, .E = 300}, Case{.name = "nothing", .B = 0},
        Case{.name = "no decay", .T = 150, .decay = 0},
        Case{.name = "fast decay", .T = 150, .decay = 50},
        Case{.name = "at once", .T = 150, .state = true, .decay = 1e5}}) {
    out.push_back(c);
  }
  return out;
}

TEST(GatedLinearAttentionFused, MatchesTheReference) {
  for (const Case& c : cases()) {
    SCOPED_TRACE(c.name);
    expect_matches_reference(evaluation(c, at::kFloat), 5e-6);
  }
}

// A low-precision kernel may err at most twice as much as the plain low-precision computation.
TEST(GatedLinearAttentionFused, BFloat16ErrsLikeItsRounding) {
  for (const Case& c :
       {Case{.name = "bfloat16", .T = 150, .D = 64, .E = 128},
        Case{.name = "bfloat16 odd", .B = 3, .T = 67, .H = 5, .D = 9, .E = 33, .state = true},
        Case{.name = "bfloat16 documents", .B = 2, .T = 200, .document = 30},
        Case{.name = "bfloat16 strided", .T = 50, .strided = true}}) {
    SCOPED_TRACE(c.name);
    expect_errs_like_rounding(evaluation(c, at::kBFloat16), 1e-6);
  }
}

// As the mixer trains under autocast.
TEST(GatedLinearAttentionFused, TakesWideDecaysBesideBFloat16) {
  for (const Case& c :
       {Case{.name = "wide decay", .B = 2, .T = 150, .state = true, .wide_decay = true},
        Case{.name = "wide decay, documents", .T = 100, .document = 30, .wide_decay = true},
        Case{.name = "wide decay, strided", .T = 50, .strided = true, .wide_decay = true}}) {
    SCOPED_TRACE(c.name);
    expect_errs_like_rounding(evaluation(c, at::kBFloat16), 1e-3);
  }
}

TEST(GatedLinearAttentionFused, RowsMayLieApart) {
  for (Case c : {Case{.name = "positions", .B = 2, .T = 70, .state = true},
                 Case{.name = "odd", .B = 2, .T = 37, .H = 5, .D = 9, .E = 33, .state = true},
                 Case{.name = "one position", .B = 2, .T = 1, .state = true},
                 Case{.name = "wide decay", .T = 37, .wide_decay = true}}) {
    SCOPED_TRACE(c.name);
    const Evaluate adjacent = evaluation(c, at::kFloat);
    c.strided = true;
    expect_same_with_rows_apart(adjacent, evaluation(c, at::kFloat));
  }
}

TEST(GatedLinearAttentionFused, IsTheSameOnAnyNumberOfThreads) {
  const Case c{.name = "threads", .B = 3, .T = 200, .state = true, .document = 70};
  expect_same_on_any_number_of_threads(evaluation(c, at::kFloat));
}

// What one document's numbers grow to must not reach the next, nor its gradients the one before.
TEST(GatedLinearAttentionFused, DocumentsShareNothingNotEvenInfinity) {
  const Case c{.name = "infinite", .T = 128};
  Problem p = make(c, at::kFloat);
  p.options.documents = at::arange(128, kLong).div(50, "floor").view({1, 128});
  for (const bool first : {true, false}) {
    Problem bad = p;
    bad.leaves[2] = bad.leaves[2].clone();
    bad.leaves[2].narrow(1, first ? 0 : 100, first ? 50 : 28).fill_(-kForgotten);
    const auto all = evaluate(bad, {.last_state = first}, "fused", at::kFloat);
    for (const size_t i : {0, 2, 3, 4, 5}) {  // the output; gradients of q, k, v and log_decay
      EXPECT_TRUE(all[i].narrow(1, first ? 50 : 0, first ? 78 : 100).isfinite().all().item<bool>())
          << i;
    }
    if (first) {
      EXPECT_TRUE(all[1].isfinite().all().item<bool>());
    }
  }
}

TEST(GatedLinearAttentionFused, LesserInstructionSetsToo) {
  EXPECT_TRUE(
      passes_on_lesser_instruction_sets("GatedLinearAttentionFused.*-*LesserInstructionSetsToo"));
}

}  // namespace
}  // namespace headloom::gated_linear_attention_test
