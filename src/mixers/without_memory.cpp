#include "mixers/without_memory.h"

#include <cmath>
#include <cstring>

#include "core/error.h"
#include "core/memory.h"
#include "core/text.h"

namespace headloom {
namespace {

thread_local int g_without_memory = 0;

[[noreturn]] void too_big(const char* which, double count) {
  usage_error("the model would have ", which, " ", count, " parameters, expected at most ",
              kMostParameters, "; a smaller width, depth or vocabulary has fewer.");
}

}  // namespace

WithoutMemory::WithoutMemory() { ++g_without_memory; }
WithoutMemory::~WithoutMemory() { --g_without_memory; }
bool WithoutMemory::on() { return g_without_memory > 0; }

double parameter_count(const torch::nn::Module& module) {
  double count = 0;
  for (const Tensor& p : module.parameters()) count += static_cast<double>(p.numel());
  return count;
}

void check_countable(const torch::nn::Module& module) {
  const double count = parameter_count(module);
  if (count > kMostParameters) too_big("about", count);
}

void check_overflow(const c10::Error& error) {
  // "Storage size calculation overflowed", "integer multiplication overflow".
  if (std::strstr(error.what_without_backtrace(), "overflow") != nullptr) {
    too_big("more than", std::ldexp(1.0, 61));
  }
}

void check_weights_fit(const torch::nn::Module& module, const char* what) {
  if (WithoutValues::never_filled()) return;
  double count = parameter_count(module);
  for (const Tensor& b : module.buffers()) count += static_cast<double>(b.numel());
  const auto type = at::get_default_dtype_as_scalartype();
  const std::string name = type == at::kDouble  ? "float64"
                           : type == at::kFloat ? "float32"
                                                : "16 bits";
  check_fits(str(what, " needs"), static_cast<double>(at::elementSize(type)) * count,
             str(human_count(count), " parameters in ", name),
             "a smaller width, depth or vocabulary needs less");
}

}  // namespace headloom
