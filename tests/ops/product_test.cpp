// Dense products: every route against a product in double precision on odd sizes, strides and
// types, and what is kept of the choice between them.
#include "ops/product/product.h"

#include <ATen/Parallel.h>

#include <cstring>

#include "testing/compare.h"
#include "testing/errors.h"
#include "testing/instruction_sets.h"
#include "testing/poison.h"
#include "testing/strided.h"

namespace headloom::product_test {
namespace {

using namespace test;

struct Sizes {
  int64_t m, n, k;
};

// Around the edges of panels (4, 6, 14 rows; 8, 16, 32 columns) and of blocks (384, 768, 4096
// summed), and sums so long that they are cut into parts (1536, 3072, 16384 summed).
const std::vector<Sizes> kSizes = {{1, 1, 1},       {2, 3, 0},      {0, 4, 5},      {5, 0, 3},
                                   {13, 31, 7},     {14, 32, 8},    {15, 33, 9},    {29, 65, 17},
                                   {63, 20, 383},   {64, 100, 384}, {3, 130, 385},  {200, 70, 1000},
                                   {17, 1000, 129}, {1000, 17, 63}, {5, 40, 4097},  {43, 37, 8200},
                                   {250, 260, 270}, {1, 300, 770},  {300, 1, 770},  {6, 16, 2},
                                   {31, 16, 769},   {20, 45, 3073}, {33, 14, 16385}};

// [rows, columns], laid out by rows, by columns, or with gaps in both directions.
Tensor drawn(int64_t rows, int64_t columns, int layout) {
  if (layout == 0) return at::randn({rows, columns}, kDouble);
  if (layout == 1) return at::randn({columns, rows}, kDouble).t();
  const Tensor gaps = at::full({2 * rows + 1, 3 * columns + 1}, std::nan(""), kDouble);
  return gaps.slice(0, 0, 2 * rows, 2)
      .slice(1, 0, 3 * columns, 3)
      .copy_(at::randn({rows, columns}, kDouble));
}

// The types that a route has on this processor: oneDNN has no product in bfloat16 on some of
// aarch64 and throws.
std::vector<at::ScalarType> types_of(const std::string& route) {
  if (route != "onednn") return {at::kFloat, at::kBFloat16};
  const Tensor one = at::ones({1, 1}, at::kBFloat16);
  try {
    ops::product_by(route, at::empty({1, 1}, at::kBFloat16), one, one);
  } catch (const std::exception&) {
    return {at::kFloat};
  }
  return {at::kFloat, at::kBFloat16};
}

// What a float32 product of K terms may differ by: libraries add the terms in an order of their
// own, and the rounding of such a sum grows with the root of K.
double float32_error(int64_t k) { return std::max(2e-6, 5e-8 * std::sqrt(static_cast<double>(k))); }

class EachRoute : public ::testing::TestWithParam<std::string> {};

TEST_P(EachRoute, IsTheProduct) {
  at::manual_seed(5);
  for (const Sizes& s : kSizes) {
    for (int layout = 0; layout < 9; ++layout) {
      const Tensor a = drawn(s.m, s.k, layout % 3), b = drawn(s.k, s.n, layout / 3);
      const Tensor bias = layout % 2 == 0 ? at::randn({s.n}, kDouble) : Tensor();
      for (const auto type : types_of(GetParam())) {
        const Tensor x = in_its_strides(a, type), y = in_its_strides(b, type);
        const Tensor offset = bias.defined() ? bias.to(type) : bias;
        Tensor exact = at::mm(x.to(at::kDouble), y.to(at::kDouble));
        Tensor plain = at::mm(x, y);
        if (bias.defined()) {
          exact = exact + offset.to(at::kDouble);
          plain = plain + offset;
        }
        // The rows of `out` lie apart.
        Poison poison;
        const Tensor out = at::empty({s.m, s.n + 3}, x.options()).narrow(1, 0, s.n);
        ops::product_by(GetParam(), out, x, y, offset);
        const auto message = [&] {
          return c10::str(GetParam(), " ", type, " [", s.m, ", ", s.k, "] x [", s.k, ", ", s.n,
                          "], layout ", layout);
        };
        if (type == at::kFloat) {
          EXPECT_TRUE(close(out, exact, float32_error(s.k))) << message();
        } else {
          EXPECT_TRUE(errs_like_rounding(out, plain, exact, 1e-6)) << message();
        }
      }
    }
  }
}

// A column of a matrix, whose other values are no numbers, and one value for all columns.
TEST_P(EachRoute, TakesABiasOfAnyStride) {
  at::manual_seed(12);
  const Tensor column = at::full({45, 3}, std::numeric_limits<double>::quiet_NaN(), kDouble);
  column.select(1, 1).copy_(at::randn({45}, kDouble));
  for (const auto type : types_of(GetParam())) {
    const Tensor a = at::randn({20, 70}, kDouble).to(type),
                 b = at::randn({70, 45}, kDouble).to(type);
    for (const Tensor& bias :
         {column.to(type).select(1, 1), at::randn({1}).to(type).expand({45})}) {
      const Tensor out = at::empty({20, 45}, a.options());
      ops::product_by(GetParam(), out, a, b, bias);
      const Tensor exact = at::mm(a.to(at::kDouble), b.to(at::kDouble)) + bias.to(at::kDouble);
      EXPECT_TRUE(close(out, exact, type == at::kFloat ? 2e-6 : 1e-2)) << type << bias.strides();
    }
  }
}

TEST_P(EachRoute, AddsToWhatIsThere) {
  at::manual_seed(11);
  for (const Sizes& s : kSizes) {
    const Tensor a = drawn(s.m, s.k, 1), b = drawn(s.k, s.n, 0), c = drawn(s.m, s.n, 0);
    const Tensor out = c.to(at::kFloat).clone();
    const Tensor x = in_its_strides(a, at::kFloat), y = in_its_strides(b, at::kFloat);
    ops::product_by(GetParam(), out, x, y, {}, /*add=*/true);
    EXPECT_TRUE(close(out, c + at::mm(a, b), float32_error(s.k)))
        << GetParam() << " " << s.m << " " << s.k;
  }
}

// One factor or the result is float32, and the rest bfloat16.
TEST_P(EachRoute, ConvertsInPassing) {
  if (types_of(GetParam()).size() == 1) GTEST_SKIP() << "no product in bfloat16";
  at::manual_seed(13);
  for (const Sizes& s : kSizes) {
    for (int layout = 0; layout < 9; layout += 4) {
      const Tensor a = in_its_strides(drawn(s.m, s.k, layout % 3), at::kBFloat16);
      const Tensor wide = in_its_strides(drawn(s.k, s.n, layout / 3), at::kFloat);
      const Tensor b = in_its_strides(wide, at::kBFloat16);
      const Tensor exact = at::mm(a.to(at::kDouble), b.to(at::kDouble));
      const Tensor plain = at::mm(a, b);
      Poison poison;
      const Tensor rounded = at::empty({s.m, s.n}, at::kBFloat16);
      ops::product_by(GetParam(), rounded, a, wide);
      EXPECT_TRUE(errs_like_rounding(rounded, plain, exact, 1e-6)) << s.m << " " << s.k << layout;
      const Tensor sums = at::ones({s.m, s.n}), result = at::empty({s.m, s.n});
      ops::product_by(GetParam(), result, a, b);
      EXPECT_TRUE(errs_like_rounding(result, plain, exact, 1e-6)) << s.m << " " << s.k << layout;
      ops::product_by(GetParam(), sums, a, b, {}, /*add=*/true);
      EXPECT_TRUE(errs_like_rounding(sums - 1, plain, exact, 1e-5)) << s.m << " " << s.k << layout;
    }
  }
}

TEST_P(EachRoute, PassesOnWhatIsNotFinite) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float infinity = std::numeric_limits<float>::infinity();
  for (const auto type : types_of(GetParam())) {
    for (const float bad : {nan, infinity}) {
      for (const bool in_a : {false, true}) {
        Tensor a = at::randn({20, 50}), b = at::randn({50, 40});
        (in_a ? a : b).index_put_({at::tensor(7), at::tensor(9)}, bad);
        a = a.to(type);
        b = b.to(type);
        const Tensor out = at::empty({20, 40}, a.options());
        ops::product_by(GetParam(), out, a, b);
        const Tensor expected = at::mm(a.to(at::kFloat), b.to(at::kFloat)).isfinite();
        // On processors with AMX, libraries let a NaN of one row into the row beside it.
        EXPECT_FALSE(at::any(out.isfinite() & ~expected).item<bool>()) << GetParam() << " " << type;
        if (GetParam() == "blocked") {
          EXPECT_TRUE(at::equal(out.isfinite(), expected)) << type;
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Product, EachRoute, ::testing::ValuesIn(ops::routes_available()));

TEST(Product, BlockedDoesNotDependOnTheThreads) {
  at::manual_seed(6);
  const int threads = at::get_num_threads();
  for (const auto type : {at::kFloat, at::kBFloat16}) {
    for (const Sizes& s : {Sizes{331, 523, 700}, Sizes{61, 33, 17000}}) {
      const Tensor a = at::randn({s.m, s.k}).to(type), b = at::randn({s.n, s.k}).to(type).t();
      Tensor before;
      for (const int count : {1, 2, 3, 5}) {
        at::set_num_threads(count);
        const Tensor out = at::empty({s.m, s.n}, a.options());
        ops::product_by("blocked", out, a, b);
        if (before.defined()) {
          EXPECT_TRUE(at::equal(out, before)) << count << " threads, " << s.k << " summed";
        }
        before = out;
      }
    }
    at::set_num_threads(threads);
  }
}

// Where all panels of B are too large for the caches: the first sizes with the panels of every
// instruction set, the second ones, whose sums have two parts, with those of AVX-512.
TEST(Product, BlockedTakesSeveralBlocksOfColumns) {
  at::manual_seed(14);
  for (const Sizes& s : {Sizes{1400, 5600, 384}, Sizes{700, 2800, 770}}) {
    const Tensor a = at::randn({s.m, s.k}), b = at::randn({s.n, s.k}).t(), bias = at::randn({s.n});
    const Tensor expected = at::mm(a, b) + bias;
    Poison poison;
    const Tensor out = at::empty({s.m, s.n});
    ops::product_by("blocked", out, a, b, bias);
    EXPECT_TRUE(close(out, expected, 2 * float32_error(s.k))) << s.k;  // both are rounded
  }
}

TEST(Product, AFactorThatIsMadeIsThatFactor) {
  at::manual_seed(8);
  const auto before = ops::product_routes();
  for (const Sizes& s : kSizes) {
    for (const auto type : {at::kFloat, at::kBFloat16}) {
      const Tensor a = at::randn({s.m, s.k}).to(type), b = at::randn({s.n, s.k}).to(type);
      const Tensor scale = at::rand({s.n}) + 0.5, bias = at::randn({s.n}).to(type);
      const ops::MadeFactor made{
          .columns =
              [&](int64_t n0, int64_t n1, int64_t k0, int64_t k1, void* to) {
                const Tensor part = b.narrow(0, n0, n1 - n0).narrow(1, k0, k1 - k0).contiguous();
                EXPECT_EQ(k0 % ops::MadeFactor::kStep, 0);
                std::memcpy(to, part.const_data_ptr(), part.nbytes());
              },
          .scale = scale};
      const Tensor sums = at::mm(a.to(at::kDouble), b.to(at::kDouble).t());
      const Tensor exact = sums * scale + bias.to(at::kDouble);
      const Tensor plain = (at::mm(a, b.t()) * scale).to(type) + bias;
      const auto message = [&] {
        return c10::str(type, " [", s.m, ", ", s.k, "] x [", s.k, ", ", s.n, "]");
      };
      // As a whole, if another route is the fastest, and piece by piece.
      for (const bool own : {false, true}) {
        auto routes = ops::product_routes();
        for (auto& [name, route] : routes) route = "blocked";
        if (own) ops::use_product_routes(routes);
        Poison poison;
        const Tensor out = at::empty({s.m, s.n}, a.options()), again = at::empty_like(out);
        ops::product(out, a, made, bias);
        EXPECT_TRUE(errs_like_rounding(out, plain, exact, 1e-5)) << message();
        ops::product(again, a, made, bias);
        EXPECT_TRUE(at::equal(out, again)) << message();
      }
      ops::use_product_routes(before);
    }
  }
}

TEST(Product, KeepsItsChoice) {
  at::manual_seed(7);
  const Tensor a = at::randn({300, 130}), b = at::randn({260, 130}).t();
  const Tensor first = at::empty({300, 260}), second = at::empty({300, 260});
  ops::product(first, a, b);
  ops::product(second, a, b);
  EXPECT_TRUE(at::equal(first, second));
  EXPECT_TRUE(close(first, at::mm(a, b), 2e-6));
  if (std::getenv("HEADLOOM_PRODUCTS") != nullptr) return;
  const std::string name = c10::str("float32 nt 256 x 256 x 64, ", at::get_num_threads(),
                                    at::get_num_threads() == 1 ? " thread" : " threads");
  ASSERT_TRUE(ops::product_routes().count(name)) << name;
  for (const std::string& route : ops::routes_available()) {
    ops::use_product_routes({{name, route}, {"float32 nn 1 x 1 x 1, 1 thread", "unknown"}});
    EXPECT_EQ(ops::product_routes()[name], route);
    const Tensor expected = at::empty({300, 260});
    ops::product(first, a, b);
    ops::product_by(route, expected, a, b);
    EXPECT_TRUE(at::equal(first, expected)) << route;
  }
  EXPECT_FALSE(ops::product_routes().count("float32 nn 1 x 1 x 1, 1 thread"));
}

TEST(Product, RoutesWorthTimingAreSomeOfAll) {
  const std::vector<std::string> all = ops::routes_available();
  for (at::ScalarType type : {at::kFloat, at::kBFloat16}) {
    for (int64_t n : {1, 300}) {
      const Tensor a = at::randn({n, 130}).to(type), b = at::randn({130, n}).to(type);
      const std::vector<std::string> some =
          ops::routes_worth_timing(at::empty({n, n}, a.options()), a, b);
      EXPECT_EQ(some.front(), all.front());
      for (const std::string& route : some) {
        EXPECT_EQ(std::count(all.begin(), all.end(), route), 1) << route;
      }
    }
  }
}

TEST(Product, RefusesARouteThatThereIsNot) {
  const Tensor a = at::randn({3, 3}), out = at::empty({3, 3});
  try {
    ops::product_by("fast", out, a, a);
    FAIL() << "not refused";
  } catch (const c10::ValueError& error) {
    EXPECT_NE(std::string(error.what()).find("route is \"fast\", expected one of blocked, aten"),
              std::string::npos)
        << error.what();
  }
}

TEST(Product, LesserInstructionSetsPass) {
  EXPECT_TRUE(passes_on_lesser_instruction_sets("Product*"));
}

}  // namespace
}  // namespace headloom::product_test
