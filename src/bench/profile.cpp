#include "bench/profile.h"

#include <ATen/ATen.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <array>
#include <limits>
#include <string_view>

#include "core/clock.h"
#include "core/platform.h"

namespace headloom::bench {
namespace {

enum Part : int {
  kEmbedding,
  kNorms,
  kLinear,
  kAttention,
  kPositions,
  kMixers,
  kActivations,
  kSums,
  kHead,
  kClipping,
  kOptimiser,
  kOther,
  kParts,
};

constexpr std::array<const char*, kParts> kNames = {
    "embedding",   "norms", "linear maps",   "attention", "rotary positions", "other mixers",
    "activations", "sums",  "head and loss", "clipping",  "optimiser",        "other operators"};

// The first prefix of an operator's name decides.
constexpr std::pair<std::string_view, Part> kPrefixes[] = {
    {"headloom::linear_cross_entropy", kHead},
    {"aten::cross_entropy_loss", kHead},
    {"aten::nll_loss", kHead},
    {"aten::_log_softmax", kHead},
    {"aten::embedding", kEmbedding},
    {"aten::index_add", kEmbedding},  // its gradient
    {"headloom::rms_norm", kNorms},
    {"headloom::gated_norm", kNorms},
    {"aten::layer_norm", kNorms},
    {"aten::native_layer_norm", kNorms},
    {"headloom::linear", kLinear},
    {"headloom::moe", kLinear},
    {"aten::linear", kLinear},
    {"aten::addmm", kLinear},
    {"aten::mm", kLinear},
    {"aten::bmm", kLinear},
    {"headloom::composed_attention", kAttention},
    {"aten::scaled_dot_product", kAttention},
    {"aten::_scaled_dot_product", kAttention},
    {"headloom::rotary", kPositions},
    {"headloom::swiglu", kActivations},
    {"headloom::gelu_tanh", kActivations},
    {"aten::gelu", kActivations},
    {"aten::relu", kActivations},
    {"aten::silu", kActivations},
    {"headloom::", kMixers},
    {"aten::_foreach_norm", kClipping},
    {"aten::_foreach_mul", kClipping},
    {"aten::linalg_vector_norm", kClipping},
    {"aten::_fused_adamw", kOptimiser},
    {"aten::_foreach_add", kOptimiser},
    {"aten::add", kSums},
    {"aten::sum", kSums},
};

Part part_of(std::string_view name) {
  for (const auto& [prefix, part] : kPrefixes) {
    if (name.starts_with(prefix)) return part;
  }
  return kOther;
}

double bytes_of(const c10::IValue& value) {
  if (value.isTensor() && value.toTensor().defined()) {
    const at::Tensor& t = value.toTensor();
    if (t.is_sparse()) return bytes_of(t._values()) + bytes_of(t._indices());
    return static_cast<double>(t.numel() * t.element_size());
  }
  double sum = 0;
  if (value.isTensorList()) {
    for (const at::Tensor& t : value.toTensorVector()) sum += bytes_of(t);
  }
  return sum;
}

// The most bytes that an operator moves of one tensor: of an embedding's table only the rows that
// are asked for, as many as the values.
double most_of_a_tensor(std::string_view name, c10::ArrayRef<const c10::IValue> inputs) {
  if (name == "aten::embedding") {
    const at::Tensor& table = inputs[0].toTensor();
    return static_cast<double>(inputs[1].toTensor().numel() * table.size(1) * table.element_size());
  }
  if (name.starts_with("aten::index_add")) return bytes_of(inputs[3]);
  return std::numeric_limits<double>::infinity();
}

struct Frame : at::ObserverContext {
  Frame* parent = nullptr;
  Part part = kOther;
  bool backward = false;
  bool counts_bytes = false;  // the outermost whose part is known
  double begin = 0, inside = 0;
};

// What is recorded on this thread, which runs the whole of a step on the CPU.
struct Recording {
  std::array<StepPart, kParts> parts;
  Frame* open = nullptr;
  double outermost = 0;
};
thread_local Recording* g_recording = nullptr;

std::unique_ptr<at::ObserverContext> enter(const at::RecordFunction& function) {
  auto frame = std::make_unique<Frame>();
  if (g_recording == nullptr) return frame;
  frame->parent = g_recording->open;
  frame->backward = function.scope() == at::RecordScope::BACKWARD_FUNCTION ||
                    std::string_view(function.name()).starts_with("autograd::engine");
  if (frame->parent != nullptr) {
    frame->part = frame->parent->part;
    frame->backward |= frame->parent->backward;
  }
  if (frame->part == kOther) {
    frame->part = part_of(function.name());
    frame->counts_bytes = frame->part != kOther;
  }
  if (frame->counts_bytes) {
    double& bytes = g_recording->parts[frame->part].bytes;
    const auto inputs = function.inputs();
    const auto schema = function.operator_schema();
    const double most = most_of_a_tensor(function.name(), inputs);
    for (size_t i = 0; i < inputs.size(); ++i) {
      const double given = std::min(bytes_of(inputs[i]), most);
      bytes += given;
      if (!schema || i >= schema->arguments().size()) continue;
      // What it changes in place it writes too. An optimiser changes its gradients only where they
      // were scaled, which they are not here.
      const c10::Argument& argument = schema->arguments()[i];
      const bool written = argument.alias_info() != nullptr && argument.alias_info()->isWrite();
      if (written && argument.name() != "grads") bytes += given;
    }
  }
  g_recording->open = frame.get();
  frame->begin = seconds_now();
  return frame;
}

void leave(const at::RecordFunction& function, at::ObserverContext* context) {
  auto* frame = static_cast<Frame*>(context);
  if (g_recording == nullptr || g_recording->open != frame) return;
  const double seconds = seconds_now() - frame->begin;
  StepPart& part = g_recording->parts[frame->part];
  (frame->backward ? part.backward : part.forward) += seconds - frame->inside;
  if (frame->counts_bytes) {
    const auto schema = function.operator_schema();
    const bool in_place = schema && schema->name().ends_with("_");
    if (!in_place) {
      for (const c10::IValue& output : function.outputs()) part.bytes += bytes_of(output);
    }
  }
  g_recording->open = frame->parent;
  (frame->parent != nullptr ? frame->parent->inside : g_recording->outermost) += seconds;
}

constexpr int64_t kFewFaults = 64, kMostWarmUps = 12;

}  // namespace

StepProfile profile_steps(const std::function<void()>& step, double seconds, int least) {
  // The allocator's memory grows for some steps, until every tensor finds a piece that is free.
  for (int64_t i = 0, faults = kFewFaults; i < kMostWarmUps && faults >= kFewFaults; ++i) {
    faults = -page_faults();
    step();
    faults += page_faults();
  }
  Recording recording;
  for (int i = 0; i < kParts; ++i) {
    recording.parts[i].name = kNames[i];
    recording.parts[i].products = i == kLinear || i == kAttention || i == kHead;
  }
  g_recording = &recording;
  const at::CallbackHandle handle = at::addThreadLocalCallback(
      at::RecordFunctionCallback(enter, leave)
          .needsInputs(true)
          .needsOutputs(true)
          .scopes({at::RecordScope::FUNCTION, at::RecordScope::BACKWARD_FUNCTION}));
  StepProfile out;
  const int64_t faults = page_faults();
  int steps = 0;
  while (steps < least || out.seconds < seconds) {
    const double begin = seconds_now();
    step();
    out.seconds += seconds_now() - begin;
    ++steps;
  }
  at::removeCallback(handle);
  g_recording = nullptr;
  const double count = steps;
  out.page_faults = static_cast<double>(page_faults() - faults) / count;
  out.seconds /= count;
  out.between = out.seconds - recording.outermost / count;
  for (StepPart& part : recording.parts) {
    part.forward /= count;
    part.backward /= count;
    part.bytes /= count;
    out.parts.push_back(std::move(part));
  }
  return out;
}

}  // namespace headloom::bench
