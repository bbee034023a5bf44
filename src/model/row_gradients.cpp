#include "model/row_gradients.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <utility>

namespace headloom {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Of the process: autograd may run a backward in a thread of its own.
RowGradients::Take g_take;

struct EmbeddingByRows : torch::autograd::Function<EmbeddingByRows> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& table,
                            const at::Tensor& tokens) {
    context->saved_data["table"] = table;
    context->save_for_backward({tokens});
    return at::embedding(table, tokens);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const at::Tensor table = context->saved_data["table"].toTensor();
    const at::Tensor tokens = context->get_saved_variables()[0];
    const bool taken =
        g_take && g_take(table, tokens.flatten().to(at::kLong), gradients[0].flatten(0, -2));
    if (taken) return {at::Tensor(), at::Tensor()};
    return {at::embedding_dense_backward(gradients[0], tokens, table.size(0), -1, false),
            at::Tensor()};
  }
};

}  // namespace

RowGradients::RowGradients(Take take) { g_take = std::move(take); }
RowGradients::~RowGradients() { g_take = nullptr; }

at::Tensor embedding_by_rows(const at::Tensor& table, const at::Tensor& tokens) {
  const bool offered = g_take && at::GradMode::is_enabled() && table.requires_grad();
  return offered ? EmbeddingByRows::apply(table, tokens) : at::embedding(table, tokens);
}

}  // namespace headloom
