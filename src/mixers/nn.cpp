#include "mixers/nn.h"

#include <ATen/OpMathType.h>
#include <algorithm>
#include <cmath>
#include <numbers>
#include <unordered_map>

#include "core/error.h"
#include "mixers/position_table.h"
#include "ops/documents.h"
#include "ops/linear/op.h"
#include "ops/positionwise/op.h"

namespace headloom {

std::vector<Tensor> Module::used_tensors() const {
  std::vector<Tensor> out;
  for (const auto& module : modules()) {
    for (const Tensor* slot : dynamic_cast<const Module&>(*module).slots_) out.push_back(*slot);
  }
  return out;
}

std::vector<std::vector<Tensor*>> Module::release_tensors() {
  const auto registered = named_tensors(*this);
  std::unordered_map<const at::TensorImpl*, size_t> order;
  for (size_t i = 0; i < registered.size(); ++i) {
    order.emplace(registered[i].second.unsafeGetTensorImpl(), i);
  }
  std::vector<std::vector<Tensor*>> slots(registered.size());
  for (const auto& module : modules()) {
    auto* own = dynamic_cast<Module*>(module.get());
    if (own == nullptr) continue;
    for (Tensor* slot : own->slots_) slots[order.at(slot->unsafeGetTensorImpl())].push_back(slot);
    own->parameters_.clear();
  }
  return slots;
}

void Module::to(at::Device device, bool non_blocking) {
  const auto move = [&](const Tensor& t) {
    if (!t.defined() || t.device() == device) return;  // or one of another slot that has moved
    const Tensor moved = t.detach().to(device, non_blocking);
    // As set_data() does, which takes a few types of devices alone.
    t.unsafeGetTensorImpl()->shallow_copy_from(moved.getIntrusivePtr());
  };
  for (const auto& module : modules()) {
    const auto& own = dynamic_cast<const Module&>(*module);
    for (const Tensor* slot : own.slots_) move(*slot);
    for (const Tensor* slot : own.outside_) move(*slot);
  }
}

at::Device Module::device() const {
  for (const auto& module : modules()) {
    for (const Tensor* slot : dynamic_cast<const Module&>(*module).slots_) {
      if (slot->defined()) return slot->device();
    }
  }
  return at::kCPU;
}

void Module::parameter(const std::string& name, Tensor& slot, const Tensor& value,
                       ParameterTraits traits) {
  slot = register_parameter(name, value);
  slots_.push_back(&slot);
  if (!traits.decay) undecayed_.insert(name);
}

void Module::buffer(const std::string& name, Tensor& slot, const Tensor& value) {
  slot = register_buffer(name, value);
  slots_.push_back(&slot);
}

void Module::shared_parameter(Tensor& slot, const Tensor& value) {
  slot = value;
  slots_.push_back(&slot);
}

std::vector<std::pair<std::string, Tensor>> named_tensors(const torch::nn::Module& module) {
  std::vector<std::pair<std::string, Tensor>> out;
  for (const auto& item : module.named_parameters()) out.emplace_back(item.key(), item.value());
  for (const auto& item : module.named_buffers()) out.emplace_back(item.key(), item.value());
  return out;
}

// Calls f(module, the prefix of its parameters' names) for the module and all below it.
template <typename F>
static void for_each_module(const torch::nn::Module& module, const F& f) {
  const auto call = [&](const torch::nn::Module& part, const std::string& prefix) {
    if (const auto* own = dynamic_cast<const Module*>(&part)) f(*own, prefix);
  };
  call(module, "");
  for (const auto& part : module.named_modules("", /*include_self=*/false)) {
    call(*part.value(), part.key() + ".");
  }
}

std::set<std::string> decayed_parameters(const torch::nn::Module& module) {
  std::set<std::string> names;
  for (const auto& item : module.named_parameters()) {
    if (item.value().dim() >= 2) names.insert(item.key());
  }
  for_each_module(module, [&](const Module& part, const std::string& prefix) {
    for (const std::string& name : part.undecayed()) names.erase(prefix + name);
  });
  return names;
}

std::map<std::string, ParameterCut> parameter_cuts(const torch::nn::Module& module) {
  std::map<std::string, ParameterCut> out;
  for_each_module(module, [&](const Module& part, const std::string& prefix) {
    for (const auto& [name, how] : part.cuts()) out.emplace(prefix + name, how);
  });
  return out;
}

namespace {
thread_local int g_without_values = 0, g_never_filled = 0;
}  // namespace

WithoutValues::WithoutValues(bool filled) : filled_(filled) {
  ++g_without_values;
  if (!filled_) ++g_never_filled;
}
WithoutValues::~WithoutValues() {
  --g_without_values;
  if (!filled_) --g_never_filled;
}
bool WithoutValues::on() { return g_without_values > 0; }
bool WithoutValues::never_filled() { return g_never_filled > 0; }

Tensor normal(at::IntArrayRef sizes, double std) {
  const Tensor out = at::empty(sizes);
  return WithoutValues::on() ? out : out.normal_(0, std);
}

void draw_uniform(Tensor weight, double limit) {
  if (WithoutValues::on()) return;
  at::NoGradGuard no_grad;
  weight.uniform_(-limit, limit);
}

Linear::Linear(int64_t in, int64_t out, bool with_bias, double std) {
  parameter("weight", weight, normal({out, in}, std));
  if (with_bias) parameter("bias", bias, at::zeros({out}));
  unregistered(scale);
}

Tensor Linear::forward(const Tensor& x) const {
  const bool shares = bias_share != 1 && bias.defined();
  return ops::linear(x, weight, scale, shares ? bias * bias_share : bias);
}

void Linear::cut_outputs(const std::vector<int64_t>& segments) {
  cut("weight", {.dim = 0, .segments = segments});
  if (bias.defined()) cut("bias", {.dim = 0, .segments = segments});
}

void Linear::cut_inputs(int64_t processes) {
  cut("weight", {.dim = 1, .segments = {weight.size(1)}});
  bias_share = 1 / static_cast<double>(processes);
}

Tensor Linear::outputs(const Tensor& x, int64_t from, const c10::SymInt& count) const {
  // In a graph for any length the whole is no case of its own.
  if (count.maybe_as_int() == weight.size(0)) return forward(x);
  const auto part = [&](const Tensor& t) {
    return t.defined() ? t.narrow_symint(0, from, count) : t;
  };
  return ops::linear(x, part(weight), part(scale), part(bias));
}

void Linear::convert(at::ScalarType type) {
  if (!may_narrow || scale.defined() || weight.scalar_type() == type) return;
  const auto [values, scales] = converted(weight, type);
  // In place, so that the registered parameter is the same and the wide values go.
  weight.requires_grad_(false);
  weight.set_data(values);
  scale = scales;
}

std::pair<Tensor, Tensor> converted(const Tensor& weight, at::ScalarType type) {
  if (type == at::kChar) return ops::quantized_int8(weight);
  if (type == at::ScalarType::Int4) return ops::quantized_int4(weight);
  if (!at::isFloatingType(type)) {
    usage_error("weights cannot be held as ", type,
                ", expected a floating type, Char (int8) or Int4 (four bits).");
  }
  return {weight.detach().to(type), Tensor()};
}

Norm::Norm(const std::string& norm_type, int64_t width, std::optional<double> norm_eps)
    : type(norm_type), eps(norm_eps.value_or(norm_type == "layer_norm" ? 1e-5 : 1e-6)) {
  if (type == "none") return;
  if (type != "rms_norm" && type != "layer_norm") {
    usage_error("norm is \"", type, "\", expected rms_norm, layer_norm or none.");
  }
  parameter("weight", weight, at::ones({width}));
  if (type == "layer_norm") parameter("bias", bias, at::zeros({width}));
}

Tensor Norm::forward(const Tensor& x) const {
  if (type == "none") return x;
  if (type == "layer_norm") return at::layer_norm_symint(x, {x.sym_size(-1)}, weight, bias, eps);
  return ops::rms_norm(x, weight, eps);
}

void PositionOptions::fields(Fields& f) {
  f.field("type", type, "how positions enter", {"rope", "learned", "sinusoidal", "alibi", "none"});
  f.field("base", base, "rope: base of the frequencies", positive());
  f.field("layout", layout, "rope: which dimensions pair up", {"half", "interleaved"});
  f.field("fraction", fraction, "rope: share of each head that is rotated",
          Range<double>{.low = 0, .high = 1, .open_low = true});
  f.field("scaling", scaling, "rope: how it is stretched to longer sequences",
          {"none", "linear", "llama3", "yarn"});
  if (scaling == "none") return;
  if (type != "rope") {
    usage_error("'position.scaling' is \"", scaling,
                "\", expected \"none\" where position.type is \"", type,
                "\": only rope is stretched.");
  }
  f.field("factor", factor, "lower frequencies are divided by it", positive());
  if (scaling == "linear") return;
  f.field("original_length", original_length, "positions before stretching", at_least(1));
  const bool yarn = scaling == "yarn";
  const char* const fewest = yarn ? "beta_slow" : "low_factor";
  const char* const most = yarn ? "beta_fast" : "high_factor";
  double& low = yarn ? beta_slow : low_factor;
  double& high = yarn ? beta_fast : high_factor;
  f.field(fewest, low, "frequencies with fewer turns in original_length are divided", positive());
  f.field(most, high, "frequencies with more turns in original_length stay", positive());
  if (high <= low) {
    usage_error("'position.", most, "' is ", high, ", expected more than ", fewest, " = ", low,
                ".");
  }
  if (!yarn) return;
  if (base <= 1) {
    usage_error("'position.base' is ", base, ", expected more than 1 where scaling is \"yarn\".");
  }
  f.field("attention_factor", attention_factor,
          "rotated queries and keys are multiplied with it; absent: 0.1 ln(factor) + 1",
          positive());
}

Tensor PositionOptions::scaled(const Tensor& frequency) const {
  if (scaling == "none") return frequency;
  if (scaling == "linear") return frequency / factor;
  if (scaling == "yarn") {
    // The place of the frequency that makes so many turns within original_length.
    const auto dims = static_cast<double>(2 * frequency.size(0));
    const auto place = [&](double turns) {
      const double positions = static_cast<double>(original_length) / (2 * std::numbers::pi);
      return dims * std::log(positions / turns) / (2 * std::log(base));
    };
    const double first = std::max(std::floor(place(beta_fast)), 0.0);
    const double last = std::min(std::ceil(place(beta_slow)), dims - 1);
    const Tensor at = at::arange(frequency.size(0), frequency.options());
    const Tensor divided = ((at - first) / (first == last ? 1e-3 : last - first)).clamp(0, 1);
    return frequency * (divided / factor + (1 - divided));
  }
  const Tensor turns = frequency * (static_cast<double>(original_length) / (2 * std::numbers::pi));
  const Tensor kept = ((turns - low_factor) / (high_factor - low_factor)).clamp(0, 1);
  return frequency * (kept + (1 - kept) / factor);
}

double PositionOptions::magnitude() const {
  if (scaling != "yarn") return 1;
  return attention_factor.value_or(factor > 1 ? 0.1 * std::log(factor) + 1 : 1);
}

Rotary::Rotary(const PositionOptions& options, int64_t head_dim)
    : options_(options),
      interleaved_(options.layout == "interleaved"),
      rotary_(static_cast<int64_t>(std::llround(options.fraction * static_cast<double>(head_dim)))),
      span_(static_cast<double>(rotary_)) {
  if (rotary_ < 2 || rotary_ % 2 != 0) {
    usage_error("rope rotates ", rotary_, " of the ", head_dim,
                " dimensions of a head, expected an even number of at least 2. The heads, their "
                "size and position.fraction decide how many.");
  }
}

Rotary Rotary::retention(int64_t head_dim) {
  Rotary r({.base = 10000, .layout = "interleaved"}, head_dim);
  r.span_ = static_cast<double>(std::max<int64_t>(head_dim - 2, 1));
  return r;
}

void Rotary::prepare(const c10::SymInt& length, const Tensor& like) {
  const auto type = at::toOpMathType(like.scalar_type());
  const auto rows = rows_to_make(cos_, length, type, like.device());
  if (!rows) return;
  c10::InferenceMode normal(false);  // the tables outlive a call in inference mode
  std::tie(cos_, sin_) =
      angles(at::arange(c10::Scalar(*rows), like.options().dtype(at::kDouble)), type);
}

std::pair<Tensor, Tensor> Rotary::angles(const Tensor& places, at::ScalarType type) const {
  // In double: at long positions float32 loses the high frequencies.
  const auto options = places.options().dtype(at::kDouble).requires_grad(false);
  const Tensor frequency =
      options_.scaled(at::pow(options_.base, at::arange(0, rotary_, 2, options) * (-1.0 / span_)));
  const Tensor angle = places.to(at::kDouble).unsqueeze(-1) * frequency;
  const double magnitude = options_.magnitude();
  return {angle.cos().mul_(magnitude).to(type), angle.sin().mul_(magnitude).to(type)};
}

Tensor Rotary::apply(const Tensor& x, const Positions& seen) {
  const c10::SymInt length = x.sym_size(1);
  if (beyond_table(cos_, seen, length)) {
    const Tensor places = seen.position_ids(length, x.device());  // [1, T] where all are alike
    const auto [cos, sin] = angles(seen.left_padding.defined() ? places : places.squeeze(0),
                                   at::toOpMathType(x.scalar_type()));
    return ops::rotary(x, cos, sin, interleaved_);
  }
  prepare(rows_needed(seen, length), x);
  if (seen.left_padding.defined()) return rotated(x, seen.position_ids(length, x.device()));
  // A narrow(), in one operator.
  const auto rows = [&](const Tensor& table) {
    const int64_t pairs = rotary_ / 2;
    return table.as_strided_symint({length, pairs}, {pairs, 1}, seen.longest * pairs);
  };
  return ops::rotary(x, rows(cos_), rows(sin_), interleaved_);
}

Tensor Rotary::apply_at(const Tensor& x, const Tensor& places) {
  prepare(x.sym_size(1), x);
  return rotated(x, places);
}

Tensor Rotary::rotated(const Tensor& x, const Tensor& places) const {
  return ops::rotary(x, rows_at(cos_, places), rows_at(sin_, places), interleaved_);
}

void Rotary::apply(Tensor& q, Tensor& k, const Positions& seen) {
  const bool adjacent = q.is_alias_of(k) && q.strides() == k.strides() &&
                        q.stride(2) == q.size(3) &&
                        k.storage_offset() == q.storage_offset() + q.size(2) * q.stride(2);
  if (!adjacent) {
    q = apply(q, seen);
    k = apply(k, seen);
    return;
  }
  const Tensor both = q.as_strided({q.size(0), q.size(1), q.size(2) + k.size(2), q.size(3)},
                                   q.strides(), q.storage_offset());
  auto parts = apply(both, seen).split_with_sizes({q.size(2), k.size(2)}, 2);
  q = std::move(parts[0]);
  k = std::move(parts[1]);
}

Tensor places_in_documents(const Tensor& documents) {
  const Tensor place = at::arange(c10::Scalar(documents.sym_size(1)), documents.options());
  const Tensor begins = at::constant_pad_nd(ops::id_changes(documents), {1, 0});
  return place - std::get<0>(at::cummax(begins * place, 1));
}

namespace {

// Slopes and distances are in float32 or float64, whatever the type of the bias.
at::TensorOptions alibi_options(const at::TensorOptions& bias) {
  return bias.dtype(at::toOpMathType(c10::typeMetaToScalarType(bias.dtype())));
}

}  // namespace

Tensor alibi_bias(int64_t heads, const c10::SymInt& queries, const c10::SymInt& keys,
                  const at::TensorOptions& options) {
  const c10::Scalar begin(keys - queries), end(keys);
  const auto real = alibi_options(options);
  const Tensor distance = at::arange(begin, end, real).unsqueeze(1) - at::arange(end, real);
  return alibi_bias(heads, distance.abs().unsqueeze(0), options);
}

Tensor alibi_bias(int64_t heads, const Tensor& distance, const at::TensorOptions& options) {
  const auto real = alibi_options(options);
  const Tensor slopes =
      at::pow(2.0, at::arange(1, heads + 1, real) * (-8.0 / static_cast<double>(heads)));
  return (distance.unsqueeze(1) * slopes.neg().view({heads, 1, 1})).to(options);
}

}  // namespace headloom
