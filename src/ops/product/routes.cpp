// Which route a product takes.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/version.h>
#include <unistd.h>

#include <bit>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <thread>
#include <unordered_map>

#include "core/platform.h"
#include "ops/product/blocked.h"
#include "ops/product/product.h"

namespace headloom::ops {
namespace {

using at::Tensor;

struct Route {
  std::string name;
  void (*run)(const Tensor& out, const Tensor& a, const Tensor& b, const Tensor& bias, bool add);
  // It is chosen where its time is below this share of that of the routes before it.
  double needed = 1;
};

void aten_product(const Tensor& out, const Tensor& a, const Tensor& b, const Tensor& bias,
                  bool add) {
  Tensor to = out;
  if (add) {
    at::addmm_out(to, to, a, b);
  } else if (bias.defined()) {
    at::addmm_out(to, bias, a, b);
  } else {
    at::mm_out(to, a, b);
  }
}

using PointwiseLinear = Tensor(const Tensor&, const Tensor&, const std::optional<Tensor>&,
                               c10::string_view, c10::List<std::optional<at::Scalar>>,
                               std::optional<c10::string_view>);

std::optional<c10::OperatorHandle> onednn_operator() {
  return c10::Dispatcher::singleton().findSchema({"mkldnn::_linear_pointwise", ""});
}

// oneDNN reads matrices by rows or by columns.
Tensor with_adjacent_values(const Tensor& t) {
  const bool rows = t.stride(1) == 1 && t.stride(0) >= t.size(1);
  const bool columns = t.stride(0) == 1 && t.stride(1) >= t.size(0);
  return rows || columns ? t : t.contiguous();
}

void onednn_product(const Tensor& out, const Tensor& a, const Tensor& b, const Tensor& bias,
                    bool add) {
  static const auto op = onednn_operator()->typed<PointwiseLinear>();
  const Tensor found = op.call(with_adjacent_values(a), with_adjacent_values(b).t(),
                               bias.defined() ? std::optional<Tensor>(bias) : std::nullopt, "none",
                               c10::List<std::optional<at::Scalar>>(), "");
  add ? out.add_(found) : out.copy_(found);
}

const std::vector<Route>& routes() {
  static const std::vector<Route> all = [] {
    // Noise shall not choose; and oneDNN holds the result twice and more beside it.
    std::vector<Route> out{{"blocked", blocked_product}, {"aten", aten_product, 0.95}};
    if (onednn_operator()) out.push_back({"onednn", onednn_product, 0.8});
    return out;
  }();
  return all;
}

// Null for a name that there is not.
const Route* route_named(const std::string& name) {
  for (const Route& route : routes()) {
    if (route.name == name) return &route;
  }
  return nullptr;
}

const Route& checked_route(const std::string& name, const char* what) {
  const Route* const route = route_named(name);
  std::string known;
  for (const Route& r : routes()) known += (known.empty() ? "" : ", ") + r.name;
  TORCH_CHECK_VALUE(route != nullptr, what, " is \"", name, "\", expected one of ", known, ".");
  return *route;
}

// What a product shares with others that take the same route.
struct ProductClass {
  uint64_t bits = 0;

  ProductClass(const Tensor& a, const Tensor& b, int threads) {
    const auto put = [&](uint64_t value, int width) { bits = bits << width | value; };
    const auto size = [&](int64_t s) {
      put(static_cast<uint64_t>(std::bit_width(static_cast<uint64_t>(s)) - 1) / 2, 5);
    };
    put(a.scalar_type() == at::kBFloat16, 1);
    put(a.stride(1) != 1, 1);
    put(b.stride(1) != 1, 1);
    size(a.size(0));
    size(b.size(1));
    size(a.size(1));
    put(static_cast<uint64_t>(std::min(threads, 1023)), 10);
  }

  std::string name() const {
    uint64_t rest = bits;
    const auto take = [&](int width) {
      const uint64_t value = rest & ((uint64_t{1} << width) - 1);
      rest >>= width;
      return value;
    };
    const auto size = [&] { return uint64_t{1} << 2 * take(5); };
    const uint64_t threads = take(10), k = size(), n = size(), m = size();
    const bool b = take(1) != 0, a = take(1) != 0, bfloat16 = take(1) != 0;
    return c10::str(bfloat16 ? "bfloat16 " : "float32 ", a ? "t" : "n", b ? "t" : "n", " ", m,
                    " x ", n, " x ", k, ", ", threads, threads == 1 ? " thread" : " threads");
  }
};

// Below this many multiply-adds a measurement would cost more than it could bring.
constexpr int64_t kWorthMeasuring = 1 << 18;

class Choices {
 public:
  // Never destroyed: products run until the process ends.
  static Choices& instance() {
    static Choices* const one = new Choices;
    return *one;
  }

  const Route& of(const Tensor& out, const Tensor& a, const Tensor& b, const Tensor& bias,
                  bool add) {
    if (forced_ != nullptr) return *forced_;
    if (a.size(0) * a.size(1) * b.size(1) < kWorthMeasuring) return routes()[0];
    const ProductClass product_class(
        a, b, at::in_parallel_region() ? 1 : static_cast<int>(at::get_num_threads()));
    // Other threads wait, so that all products of a class take one route.
    const std::lock_guard lock(mutex_);
    const auto known = by_bits_.find(product_class.bits);
    if (known != by_bits_.end()) return *known->second;
    const std::string name = product_class.name();
    if (!by_name_.contains(name)) read();  // another process may have measured it meanwhile
    auto found = by_name_.find(name);
    if (found == by_name_.end()) {
      found =
          by_name_.emplace(name, fastest(add ? at::empty_like(out) : out, a, b, bias)->name).first;
      read();
      write();
    }
    const Route* route = route_named(found->second);
    if (route == nullptr) route = routes().data();
    by_bits_.emplace(product_class.bits, route);
    return *route;
  }

  std::map<std::string, std::string> all() {
    const std::lock_guard lock(mutex_);
    return by_name_;
  }

  void use(const std::map<std::string, std::string>& routes_of_classes) {
    const std::lock_guard lock(mutex_);
    for (const auto& [name, route] : routes_of_classes) {
      if (route_named(route) != nullptr) by_name_[name] = route;
    }
    by_bits_.clear();
  }

 private:
  Choices() {
    if (const char* name = std::getenv("HEADLOOM_PRODUCTS"); name != nullptr && *name != '\0') {
      forced_ = &checked_route(name, "the environment variable HEADLOOM_PRODUCTS");
    }
    read();
  }

  static const Route* fastest(const Tensor& out, const Tensor& a, const Tensor& b,
                              const Tensor& bias) {
    const Route* best = nullptr;
    double least = 0;
    for (const Route& route : routes()) {
      double seconds = 0;
      for (int i = 0; i < 4; ++i) {  // the first warms up
        const auto begin = std::chrono::steady_clock::now();
        route.run(out, a, b, bias, /*add=*/false);
        const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
        if (i == 1 || (i > 1 && took.count() < seconds)) seconds = took.count();
      }
      if (best == nullptr || seconds < route.needed * least) {
        best = &route;
        least = seconds;
      }
    }
    return best;
  }

  // The processor and the PyTorch that the file's choices were measured on.
  static std::string machine() {
    return c10::str("# headloom products, PyTorch ", TORCH_VERSION, ", ", at::get_cpu_capability(),
                    ", ", std::thread::hardware_concurrency(), " x ", processor_name());
  }

  static std::filesystem::path path() {
    if (const char* cache = std::getenv("XDG_CACHE_HOME"); cache != nullptr && *cache != '\0') {
      return std::filesystem::path(cache) / "headloom" / "products";
    }
    const char* home = std::getenv("HOME");
    if (home == nullptr || *home == '\0') return {};
    return std::filesystem::path(home) / ".cache" / "headloom" / "products";
  }

  // Lines "route class" below machine(); choices of this process stay. A file of another machine
  // counts for nothing.
  void read() {
    std::ifstream file(path());
    std::string line;
    if (!std::getline(file, line) || line != machine()) return;
    while (std::getline(file, line)) {
      const size_t gap = line.find(' ');
      if (gap == std::string::npos || route_named(line.substr(0, gap)) == nullptr) continue;
      by_name_.emplace(line.substr(gap + 1), line.substr(0, gap));
    }
  }

  // What cannot be written is measured again by the next process.
  void write() const {
    const std::filesystem::path to = path();
    if (to.empty()) return;
    std::error_code ignored;
    std::filesystem::create_directories(to.parent_path(), ignored);
    const std::filesystem::path part = to.parent_path() / c10::str("products.", getpid());
    std::ofstream file(part);
    file << machine() << "\n";
    for (const auto& [name, route] : by_name_) file << route << " " << name << "\n";
    file.close();
    if (file) std::filesystem::rename(part, to, ignored);
    std::filesystem::remove(part, ignored);
  }

  const Route* forced_ = nullptr;
  std::mutex mutex_;
  std::map<std::string, std::string> by_name_;
  std::unordered_map<uint64_t, const Route*> by_bits_;
};

}  // namespace

void product(const Tensor& out, const Tensor& a, const Tensor& b, const Tensor& bias, bool add) {
  if (out.numel() == 0 || a.size(1) == 0) return blocked_product(out, a, b, bias, add);
  Choices::instance().of(out, a, b, bias, add).run(out, a, b, bias, add);
}

std::map<std::string, std::string> product_routes() { return Choices::instance().all(); }

void use_product_routes(const std::map<std::string, std::string>& routes_of_classes) {
  Choices::instance().use(routes_of_classes);
}

void product_by(const std::string& route, const Tensor& out, const Tensor& a, const Tensor& b,
                const Tensor& bias, bool add) {
  const Route& chosen = checked_route(route, "route");
  if (out.numel() == 0 || a.size(1) == 0) return blocked_product(out, a, b, bias, add);
  chosen.run(out, a, b, bias, add);
}

std::vector<std::string> routes_available() {
  std::vector<std::string> out;
  for (const Route& route : routes()) out.push_back(route.name);
  return out;
}

}  // namespace headloom::ops
