// Which route a product takes.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/version.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <limits>
#include <mutex>
#include <sstream>
#include <thread>

#include "core/cache_folder.h"
#include "core/clock.h"
#include "core/hash.h"
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

void aten_product(const Tensor& out, const Tensor& a, const Tensor& wide_b, const Tensor& bias,
                  bool add) {
  const Tensor b = wide_b.to(a.scalar_type());
  if (out.scalar_type() != a.scalar_type()) {
    const Tensor narrow = at::empty(out.sizes(), a.options());
    aten_product(narrow, a, b, bias, /*add=*/false);
    add ? out.add_(narrow) : out.copy_(narrow);
    return;
  }
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

// oneDNN reads a left factor by rows or by columns, and a bias as adjacent values, whatever its
// stride.
Tensor with_adjacent_values(const Tensor& t) {
  const bool rows = t.stride(1) == 1 && t.stride(0) >= t.size(1);
  const bool columns = t.stride(0) == 1 && t.stride(1) >= t.size(0);
  return rows || columns ? t : t.contiguous();
}

// A matrix without gaps, by rows or by columns as before. With gaps in the right factor oneDNN
// takes its plain loops on processors without AVX-512, which are a thousand times slower.
Tensor without_gaps(const Tensor& t) {
  return t.stride(1) == 1 ? t.contiguous() : t.t().contiguous().t();
}

void onednn_product(const Tensor& out, const Tensor& a, const Tensor& b, const Tensor& bias,
                    bool add) {
  static const auto op = onednn_operator()->typed<PointwiseLinear>();
  const Tensor right = without_gaps(b.to(a.scalar_type()));
  const auto offset = bias.defined() ? std::optional<Tensor>(bias.contiguous()) : std::nullopt;
  const Tensor found = op.call(with_adjacent_values(a), right.t(), offset, "none",
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

// What a product shares with others that take the same route. Sizes are counted by powers of four.
struct ProductClass {
  // In kTypes. A library needs a copy of a factor or of the result where not all are of one type.
  int types = 0;
  bool a_by_columns = false, b_by_columns = false;
  int m = 0, n = 0, k = 0;  // exponents of 4
  int threads = 1;

  auto operator<=>(const ProductClass&) const = default;
};

// Of a class: all float32; all bfloat16; b float32 and the rest bfloat16; the result float32 and
// the factors bfloat16.
constexpr std::array kTypes{"float32", "bfloat16", "bfloat16_by_float32", "bfloat16_to_float32"};

int types_of(const Tensor& out, const Tensor& a, at::ScalarType b) {
  if (a.scalar_type() != at::kBFloat16) return 0;
  return b != at::kBFloat16 ? 2 : out.scalar_type() != at::kBFloat16 ? 3 : 1;
}

int power_of_four(int64_t size) {
  return (static_cast<int>(std::bit_width(static_cast<uint64_t>(size))) - 1) / 2;
}

ProductClass class_of(const Tensor& out, const Tensor& a, at::ScalarType b, bool b_by_columns) {
  return {.types = types_of(out, a, b),
          .a_by_columns = a.stride(1) != 1,
          .b_by_columns = b_by_columns,
          .m = power_of_four(a.size(0)),
          .n = power_of_four(out.size(1)),
          .k = power_of_four(a.size(1)),
          .threads = at::in_parallel_region() ? 1 : static_cast<int>(at::get_num_threads())};
}

std::string name_of(const ProductClass& c) {
  const auto size = [](int power) { return int64_t{1} << 2 * power; };
  return c10::str(kTypes[static_cast<size_t>(c.types)], " ", c.a_by_columns ? "t" : "n",
                  c.b_by_columns ? "t" : "n", " ", size(c.m), " x ", size(c.n), " x ", size(c.k),
                  ", ", c.threads, c.threads == 1 ? " thread" : " threads");
}

// Nothing for what name_of() does not write.
std::optional<ProductClass> class_named(const std::string& name) {
  std::istringstream text(name);
  std::string type, layouts, by, unit;
  int64_t m = 0, n = 0, k = 0;
  char comma = 0;
  ProductClass c;
  text >> type >> layouts >> m >> by >> n >> by >> k >> comma >> c.threads >> unit;
  if (!text || layouts.size() != 2 || std::min({m, n, k}) < 1) return std::nullopt;
  c.types = static_cast<int>(std::find(kTypes.begin(), kTypes.end(), type) - kTypes.begin());
  if (c.types == static_cast<int>(kTypes.size())) return std::nullopt;
  c.a_by_columns = layouts[0] == 't';
  c.b_by_columns = layouts[1] == 't';
  c.m = power_of_four(m);
  c.n = power_of_four(n);
  c.k = power_of_four(k);
  return name_of(c) == name ? std::optional(c) : std::nullopt;
}

// Below this many multiply-adds a measurement would cost more than it could bring.
constexpr int64_t kWorthMeasuring = 1 << 18;
// Runs of each route, and how long all of them may take together before the fewest are enough.
constexpr int kFewestRuns = 6, kMostRuns = 20;
constexpr double kSecondsOfRuns = 0.02;
// The share of its runs in which a library has to be faster than Headloom's own route. On a busy
// machine any route is the fastest now and then, and the file would keep that for good.
constexpr double kShareOfRuns = 0.8;
// A library that wins none of so many runs, the first that count, is given up.
constexpr int kRunsToGiveUp = 3;
// A route is not tried in full where it takes so many times as long as Headloom's own in a corner
// of the product, of so many rows and columns. ATen does in bfloat16 on a processor without
// AVX-512, where it is a hundred times slower.
constexpr double kHopeless = 8;
constexpr int64_t kCorner = 256;
// Raised when the blocked kernel becomes faster or the choice better, so that every machine
// chooses anew.
constexpr int kVersion = 8;

// Infinite for a library that has no such product on this processor, as oneDNN has none in
// bfloat16 on some of aarch64. The first route, Headloom's own, has all.
double seconds_of(const Route& route, const Tensor& out, const Tensor& a, const Tensor& b,
                  const Tensor& bias) {
  const double begin = seconds_now();
  try {
    route.run(out, a, b, bias, /*add=*/false);
  } catch (const std::exception&) {
    return std::numeric_limits<double>::infinity();
  }
  return seconds_now() - begin;
}

// The routes that may be the fastest, Headloom's own first. `out` is written to.
std::vector<const Route*> contenders(const Tensor& out, const Tensor& a, const Tensor& b,
                                     const Tensor& bias) {
  const int64_t m = std::min(a.size(0), kCorner), n = std::min(b.size(1), kCorner),
                k = std::min(a.size(1), kCorner);
  // Its factors have no gaps where those of the product have none.
  const Tensor to = out.narrow(0, 0, m).narrow(1, 0, n),
               left = without_gaps(a.narrow(0, 0, m).narrow(1, 0, k)),
               right = without_gaps(b.narrow(0, 0, k).narrow(1, 0, n)),
               offset = bias.defined() ? bias.narrow(0, 0, n) : bias;
  std::vector<const Route*> found;
  double own = 0;
  for (const Route& route : routes()) {
    seconds_of(route, to, left, right, offset);  // warms up
    const double seconds = seconds_of(route, to, left, right, offset);
    if (found.empty()) own = seconds;
    if (found.empty() || seconds < kHopeless * own) found.push_back(&route);
  }
  return found;
}

class Choices {
 public:
  // Never destroyed: products run until the process ends.
  static Choices& instance() {
    static Choices* const one = new Choices;
    return *one;
  }

  const Route& of(const Tensor& out, const Tensor& a, const Tensor& b, const Tensor& bias,
                  bool add) {
    if (const Route* const given = unmeasured(out, a)) return *given;
    const ProductClass product_class = class_of(out, a, b.scalar_type(), b.stride(1) != 1);
    // Other threads wait, so that all products of a class take one route.
    const std::lock_guard lock(mutex_);
    if (const Route* const known = measured(product_class)) return *known;
    const double begin = seconds_now();
    const Route& best = fastest(add ? at::empty_like(out) : out, a, b, bias);
    seconds_of_timing_ += seconds_now() - begin;
    read();
    const Route* const chosen = routes_.emplace(product_class, &best).first->second;
    write();
    return *chosen;
  }

  // Null for a class that is still to be measured.
  const Route* known(const Tensor& out, const Tensor& a, bool b_by_columns) {
    if (const Route* const given = unmeasured(out, a)) return given;
    const std::lock_guard lock(mutex_);
    return measured(class_of(out, a, a.scalar_type(), b_by_columns));
  }

  double seconds_of_timing() {
    const std::lock_guard lock(mutex_);
    return seconds_of_timing_;
  }

  std::map<std::string, std::string> all() {
    const std::lock_guard lock(mutex_);
    std::map<std::string, std::string> names;
    for (const auto& [product_class, route] : routes_) names[name_of(product_class)] = route->name;
    return names;
  }

  void use(const std::map<std::string, std::string>& routes_of_classes) {
    const std::lock_guard lock(mutex_);
    for (const auto& [name, route] : routes_of_classes) {
      const std::optional<ProductClass> product_class = class_named(name);
      const Route* const named = route_named(route);
      if (product_class && named != nullptr) routes_[*product_class] = named;
    }
  }

  void keep(const std::map<std::string, std::string>& routes_of_classes) {
    {
      const std::lock_guard lock(mutex_);
      routes_.clear();
      times_ = false;
    }
    use(routes_of_classes);
  }

 private:
  Choices() {
    if (const char* name = std::getenv("HEADLOOM_PRODUCTS"); name != nullptr && *name != '\0') {
      forced_ = &checked_route(name, "the environment variable HEADLOOM_PRODUCTS");
    }
    read();
  }

  // The route of a product that nobody measures, and null for others.
  const Route* unmeasured(const Tensor& out, const Tensor& a) const {
    if (forced_ != nullptr) return forced_;
    return out.numel() * a.size(1) < kWorthMeasuring ? &routes()[0] : nullptr;
  }

  // Called with the mutex held. Null for a class that is still to be measured.
  const Route* measured(const ProductClass& product_class) {
    auto known = routes_.find(product_class);
    if (known == routes_.end() && times_) {
      read();  // another process may have measured it meanwhile
      known = routes_.find(product_class);
    }
    if (known != routes_.end()) return known->second;
    return times_ ? nullptr : &routes()[0];
  }

  // The routes run in turn, so that what else the machine does meanwhile slows all of them down.
  static const Route& fastest(const Tensor& out, const Tensor& a, const Tensor& b,
                              const Tensor& bias) {
    struct Trial {
      const Route* route;
      double seconds = 0, least = std::numeric_limits<double>::infinity();
      int wins = 0;  // runs that were enough faster than the first route's
    };
    std::vector<Trial> trials;
    for (const Route* route : contenders(out, a, b, bias)) trials.push_back({route});
    double spent = 0;
    int runs = -1;  // the first warms up
    const auto goes_on = [&] {
      return runs + 1 < kFewestRuns || (runs + 1 < kMostRuns && spent < kSecondsOfRuns);
    };
    while (trials.size() > 1 && goes_on()) {
      for (Trial& trial : trials) {
        trial.seconds = seconds_of(*trial.route, out, a, b, bias);
        spent += trial.seconds;
      }
      if (++runs == 0) continue;
      for (Trial& trial : trials) {
        trial.least = std::min(trial.least, trial.seconds);
        if (trial.seconds < trial.route->needed * trials[0].seconds) ++trial.wins;
      }
      if (runs != kRunsToGiveUp) continue;
      const auto lost = [](const Trial& trial) { return trial.wins == 0; };
      trials.erase(std::remove_if(trials.begin() + 1, trials.end(), lost), trials.end());
    }
    const Trial* best = &trials[0];
    for (const Trial& trial : trials) {
      const bool often = trial.wins >= kShareOfRuns * runs;
      if (often && trial.least < trial.route->needed * best->least) best = &trial;
    }
    return *best->route;
  }

  // The processor, the PyTorch and the version that the file's choices were measured on.
  static std::string machine() {
    return c10::str("# headloom products ", kVersion, ", PyTorch ", TORCH_VERSION, ", ",
                    at::get_cpu_capability(), ", ", std::thread::hardware_concurrency(), " x ",
                    processor_name());
  }

  // A file for each machine(), because machines may share a home, and versions a machine.
  static std::filesystem::path path() {
    const std::string name = "products-" + hash_text(machine());
    const std::filesystem::path folder = cache_folder();
    return folder.empty() ? folder : folder / name;
  }

  // Lines "route class" below machine(); choices of this process stay.
  void read() {
    std::ifstream file(path());
    std::string line;
    if (!std::getline(file, line) || line != machine()) return;
    while (std::getline(file, line)) {
      const size_t gap = line.find(' ');
      if (gap == std::string::npos) continue;
      const Route* const route = route_named(line.substr(0, gap));
      const std::optional<ProductClass> product_class = class_named(line.substr(gap + 1));
      if (route != nullptr && product_class) routes_.emplace(*product_class, route);
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
    for (const auto& [product_class, route] : routes_) {
      file << route->name << " " << name_of(product_class) << "\n";
    }
    file.close();
    if (file) std::filesystem::rename(part, to, ignored);
    std::filesystem::remove(part, ignored);
  }

  const Route* forced_ = nullptr;
  std::mutex mutex_;
  std::map<ProductClass, const Route*> routes_;
  bool times_ = true;
  double seconds_of_timing_ = 0;
};

}  // namespace

void product(const Tensor& out, const Tensor& a, const Tensor& b, const Tensor& bias, bool add) {
  if (out.numel() == 0 || a.size(1) == 0) return blocked_product(out, a, b, bias, add);
  Choices::instance().of(out, a, b, bias, add).run(out, a, b, bias, add);
}

void product(const Tensor& out, const Tensor& a, const MadeFactor& b, const Tensor& bias) {
  const int64_t n = out.size(1), k = a.size(1);
  if (out.numel() == 0 || k == 0) return blocked_product(out, a, b, bias);
  const Route* const own = &routes()[0];
  if (Choices::instance().known(out, a, /*b_by_columns=*/true) == own) {
    return blocked_product(out, a, b, bias);
  }
  const Tensor whole = at::empty({n, k}, a.options());
  auto* const to = static_cast<char*>(whole.data_ptr());
  const int64_t line = k * static_cast<int64_t>(whole.element_size());
  constexpr int64_t kBytesAtOnce = 32 << 10;
  at::parallel_for(0, n, std::max<int64_t>(1, kBytesAtOnce / line),
                   [&](int64_t n0, int64_t n1) { b.columns(n0, n1, 0, k, to + n0 * line); });
  const Tensor offset = b.scale.defined() ? Tensor() : bias;
  const Route& route = Choices::instance().of(out, a, whole.t(), offset, /*add=*/false);
  // The first product of a class shall round as the later ones do, which apply the scale before
  // the sums are rounded.
  if (&route == own) return blocked_product(out, a, b, bias);
  route.run(out, a, whole.t(), offset, /*add=*/false);
  if (!b.scale.defined()) return;
  out.mul_(b.scale);
  if (bias.defined()) out.add_(bias);
}

std::map<std::string, std::string> product_routes() { return Choices::instance().all(); }

double seconds_of_timing_products() { return Choices::instance().seconds_of_timing(); }

void use_product_routes(const std::map<std::string, std::string>& routes_of_classes) {
  Choices::instance().use(routes_of_classes);
}

void keep_product_routes(const std::map<std::string, std::string>& routes_of_classes) {
  Choices::instance().keep(routes_of_classes);
}

void product_by(const std::string& route, const Tensor& out, const Tensor& a, const Tensor& b,
                const Tensor& bias, bool add) {
  const Route& chosen = checked_route(route, "route");
  if (out.numel() == 0 || a.size(1) == 0) return blocked_product(out, a, b, bias, add);
  chosen.run(out, a, b, bias, add);
}

std::vector<std::string> routes_worth_timing(const Tensor& out, const Tensor& a, const Tensor& b) {
  std::vector<std::string> names;
  for (const Route* route : contenders(out, a, b, {})) names.push_back(route->name);
  return names;
}

std::vector<std::string> routes_available() {
  std::vector<std::string> out;
  for (const Route& route : routes()) out.push_back(route.name);
  return out;
}

}  // namespace headloom::ops
