// torch.ops.headloom.record: a model's output with what its layers show of their inside.
// torch.ops.headloom.analyze: the analyses of src/analysis, for headloom.analysis.
#include <torch/library.h>

#include "analysis/analysis.h"
#include "model_pool.h"

namespace headloom::python {
namespace {

using Recorded =
    std::tuple<Tensor, std::vector<std::string>, std::vector<Tensor>, std::vector<Tensor>>;

// The logits, what was recorded, and in training the load of experts as model() returns it.
Recorded record(std::string_view spec, at::TensorList params, bool training,
                const std::vector<std::string>& names, const OptionalTensor& tokens,
                const OptionalTensor& lengths, const OptionalTensor& documents,
                const OptionalTensor& segments, const OptionalTensor& source,
                const OptionalTensor& source_lengths, const OptionalTensor& images) {
  ModelInput input = input_of(tokens, lengths, documents, segments, source, source_lengths, images);
  return with_model(spec, params, input, training, [&](Model& built) {
    Recording recording(names);
    input.recording = &recording;
    AuxiliaryOutputs side_outputs;
    const auto balanced = training ? built.balanced() : std::vector<int64_t>();
    if (!balanced.empty()) {
      expect_countable(built);
      input.auxiliary = &side_outputs;
    }
    Recorded out;
    std::get<0>(out) = built.forward(input);
    recording.check_all_found();
    for (const auto& [name, value] : recording.tensors()) {
      std::get<1>(out).push_back(name);
      std::get<2>(out).push_back(value);
    }
    if (computes_again()) return out;
    for (const int64_t layer : balanced) std::get<3>(out).push_back(side_outputs.load.at(layer));
    return out;
  });
}

// JSON, page, and the names and values of the tensors.
using Analyzed =
    std::tuple<std::string, std::string, std::vector<std::string>, std::vector<Tensor>>;

Analyzed result_of(const analysis::Entry& entry, const analysis::Subject& subject) {
  const analysis::Findings found = analysis::analyze(entry, subject);
  Analyzed out{
      analysis::to_json(found),
      entry.name == "maps" ? analysis::maps_page(subject, found) : analysis::to_html(found),
      {},
      {}};
  for (const auto& [name, value] : found.tensors) {
    std::get<2>(out).push_back(name);
    std::get<3>(out).push_back(value);
  }
  return out;
}

// `spec` "": without a model.
Analyzed analyze(std::string_view spec, at::TensorList params, std::string_view what,
                 const std::vector<std::string>& vocabulary, at::IntArrayRef layers,
                 at::IntArrayRef heads, int64_t top, const OptionalTensor& tokens,
                 const OptionalTensor& source, const OptionalTensor& images,
                 const OptionalTensor& targets, const OptionalTensor& answer) {
  try {
    const analysis::Entry& entry = analysis::find_analysis(std::string(what));
    // A text becomes tokens on the CPU, wherever the model is.
    const auto there = [&](const OptionalTensor& t) {
      return t && !params.empty() ? OptionalTensor(t->to(params[0].device())) : t;
    };
    analysis::Subject subject{
        .input = input_of(there(tokens), {}, {}, {}, there(source), {}, there(images)),
        .vocabulary = vocabulary,
        .targets = targets.value_or(Tensor()),
        .answer = answer.value_or(Tensor()),
        .layers = layers.vec(),
        .heads = heads.vec(),
        .top = top};
    if (spec.empty()) return result_of(entry, subject);
    return with_model(spec, params, subject.input, /*training=*/false, [&](Model& built) {
      subject.model = &built;
      return result_of(entry, subject);
    });
  } catch (const UsageError& error) {
    throw_value_error(error);
  }
}

TORCH_LIBRARY_FRAGMENT(headloom, m) {
  m.def(
      "record(str spec, Tensor[] params, bool training, str[] names, Tensor? tokens=None, "
      "Tensor? lengths=None, Tensor? documents=None, Tensor? segments=None, Tensor? source=None, "
      "Tensor? source_lengths=None, Tensor? images=None) -> (Tensor output, str[] names, "
      "Tensor[] values, Tensor[] load)");
  m.def(
      "analyze(str spec, Tensor[] params, str what, str[] vocabulary, int[] layers, int[] heads, "
      "int top, Tensor? tokens=None, Tensor? source=None, Tensor? images=None, "
      "Tensor? targets=None, Tensor? answer=None) -> (str json, str html, str[] names, "
      "Tensor[] values)");
}
TORCH_LIBRARY_IMPL(headloom, CompositeImplicitAutograd, m) {
  m.impl("record", record);
  m.impl("analyze", analyze);
}

}  // namespace
}  // namespace headloom::python
