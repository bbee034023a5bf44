// Dense matrix products of every linear map, head and expert: one place that takes the fastest
// route on this machine.
//
// There are several routes to one product: Headloom's own kernel ("blocked"), ATen's at::mm
// ("aten") and oneDNN through PyTorch's dispatcher ("onednn"). None is the fastest everywhere:
// at::mm runs at 40% of the peak on processors for which MKL has no fast path, and at the peak on
// others. The first product of a class (type, layout, sizes by powers of four, number of threads)
// therefore times every route, and all later ones of the class take the fastest. The choice stays
// for the process, and a file keeps it for later ones: products-* in $XDG_CACHE_HOME/headloom or
// ~/.cache/headloom. HEADLOOM_PRODUCTS=blocked (or another route) forces one for all products.
//
// A route's results do not depend on the number of threads within "blocked", and differ from those
// of another route by rounding alone.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <map>
#include <string>
#include <vector>

namespace headloom::ops {

// out = a b + bias, or out += a b where `add` (without a bias, and out is float32), with a [M, K],
// b [K, N] of any strides, out [M, N] with adjacent columns and bias [N] or undefined; float32 or
// bfloat16 on the CPU, all of one type. b or out may be float32 where the rest is bfloat16: b is
// rounded then before it is multiplied. Sums are in float32. Knows no gradient. Throws
// c10::ValueError where HEADLOOM_PRODUCTS names no route.
void product(const at::Tensor& out, const at::Tensor& a, const at::Tensor& b,
             const at::Tensor& bias = {}, bool add = false);

// Whether products with this factor a round a float32 factor b in passing, so that a copy of it
// would only take time. For autocast.
bool rounds_weights(const at::Tensor& a);

// A factor b [K, N] that is not in memory in the type of the product: weights in fewer bits.
struct MadeFactor {
  // k0 and k1 of columns() are multiples of it, or k1 is K.
  static constexpr int64_t kStep = 32;

  // Writes columns n0 ... n1, rows k0 ... k1 of b in the type of a: the values of each column one
  // after the other. Threads call it side by side.
  std::function<void(int64_t n0, int64_t n1, int64_t k0, int64_t k1, void* to)> columns;
  at::Tensor scale = {};  // [N] float32, of the sums; undefined: 1
};
// out = (a b) scale + bias. Where the fastest route of the product is Headloom's own, b is made
// piece by piece where it is packed, and elsewhere as a whole.
void product(const at::Tensor& out, const at::Tensor& a, const MadeFactor& b,
             const at::Tensor& bias = {});

// The route of each class of products that has been used or read from the file, by the class's
// name: "float32 nt 256 x 1024 x 1024, 2 threads" has the layouts of a and b (n: rows, t: columns
// of adjacent values) and the powers of four at or below M, K and N. Types are float32, bfloat16,
// bfloat16_by_float32 (b is float32) and bfloat16_to_float32 (out is).
std::map<std::string, std::string> product_routes();
// How long this process has timed routes so far, in seconds.
double seconds_of_timing_products();
// From now on these classes take these routes, where the route exists here: a resumed run continues
// with those that it began with.
void use_product_routes(const std::map<std::string, std::string>& routes);
// From now on this process takes these routes, where the route exists here, and Headloom's own for
// all other classes. It times nothing any more, nor does it read what others have timed. (The route
// of HEADLOOM_PRODUCTS stays.) For processes that compute the same and need the same bits.
void keep_product_routes(const std::map<std::string, std::string>& routes);

// Runs one route whatever has been chosen: for tests and benchmarks. Throws c10::ValueError for a
// name that is not in routes_available().
void product_by(const std::string& route, const at::Tensor& out, const at::Tensor& a,
                const at::Tensor& b, const at::Tensor& bias = {}, bool add = false);
// "blocked", "aten" and, where this PyTorch has it, "onednn".
std::vector<std::string> routes_available();
// Those that may be the fastest for this product, which is not empty: not the ones that are many
// times slower than "blocked" in a corner of it. `out` is written to.
std::vector<std::string> routes_worth_timing(const at::Tensor& out, const at::Tensor& a,
                                             const at::Tensor& b);

}  // namespace headloom::ops
