// What every operator on whole models shares.
#pragma once

#include <optional>
#include <string_view>

#include "functional_call.h"
#include "model/model.h"

namespace headloom::python {

using OptionalTensor = std::optional<Tensor>;

// The models, by the text of their [model] table.
Pool& model_pool();

// The arguments of an operator as a model takes them.
inline ModelInput input_of(const OptionalTensor& tokens, const OptionalTensor& lengths,
                           const OptionalTensor& documents, const OptionalTensor& segments,
                           const OptionalTensor& source, const OptionalTensor& source_lengths,
                           const OptionalTensor& images) {
  return {.tokens = tokens.value_or(Tensor()),
          .lengths = lengths.value_or(Tensor()),
          .documents = documents.value_or(Tensor()),
          .segments = segments.value_or(Tensor()),
          .source = source.value_or(Tensor()),
          .source_lengths = source_lengths.value_or(Tensor()),
          .images = images.value_or(Tensor())};
}

// `run(model)` of the model of `spec` with `params`, which is to read `input`.
template <typename Run>
auto with_model(std::string_view spec, at::TensorList params, const ModelInput& input,
                bool training, const Run& run) {
  return with_parameters<Model>(
      model_pool(), spec, params,
      {{"tokens", input.tokens}, {"source", input.source}, {"images", input.images}}, training,
      run);
}

}  // namespace headloom::python
