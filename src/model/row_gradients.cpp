#include "model/row_gradients.h"

#include <ATen/ATen.h>
#include <ATen/TensorSubclassLikeUtils.h>
#include <torch/csrc/autograd/custom_function.h>

#include <utility>

namespace headloom {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Of the process: autograd may run a backward in a thread of its own.
RowGradients::Take g_take;

thread_local RowsBesideScores* t_beside = nullptr;

// Whether EmbeddingByRows can stand in for at::embedding. Tracing, tensor subclasses and
// forward-mode differentiation do not know it. In bfloat16 the gradients of a token that appears
// several times must be added up before they are rounded.
bool is_plain(const at::Tensor& table, const at::Tensor& tokens) {
  return !at::isTensorSubclassLike(table) && !at::isTensorSubclassLike(tokens) && table.is_cpu() &&
         table.scalar_type() == at::kFloat && !table._fw_grad(/*level=*/0).defined();
}

// Whether nobody else sees what is written to a gradient.
bool is_only_ours(const at::Tensor& gradient) {
  return gradient.use_count() == 1 && gradient.has_storage() &&
         gradient.storage().use_count() == 1 && gradient.is_non_overlapping_and_dense();
}

// A table twice: for rows, whose gradient may be sparse, and for scores.
struct TableOfBoth : torch::autograd::Function<TableOfBoth> {
  static variable_list forward(AutogradContext* context, const at::Tensor& table) {
    context->set_materialize_grads(false);
    return {table.detach(), table.detach()};
  }
  static variable_list backward(AutogradContext* /*context*/, const variable_list& gradients) {
    const at::Tensor &rows = gradients[0], &scores = gradients[1];
    if (!rows.defined()) return {scores};
    if (!scores.defined()) return {rows.is_sparse() ? rows.to_dense() : rows};
    const bool in_place = !at::GradMode::is_enabled() && is_only_ours(scores);
    return {in_place ? scores.add_(rows) : scores + rows};
  }
};

struct EmbeddingByRows : torch::autograd::Function<EmbeddingByRows> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& table,
                            const at::Tensor& tokens, bool sparse) {
    context->saved_data["table"] = table;
    context->saved_data["sparse"] = sparse;
    context->save_for_backward({tokens});
    return at::embedding(table, tokens);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const at::Tensor table = context->saved_data["table"].toTensor();
    const at::Tensor tokens = context->get_saved_variables()[0];
    const bool taken =
        g_take && g_take(table, tokens.flatten().to(at::kLong), gradients[0].flatten(0, -2));
    if (taken) return {at::Tensor(), at::Tensor(), at::Tensor()};
    // A graph of gradients, and a batch of them, are of matrices that are made out of place.
    const at::Tensor& of_rows = gradients[0];
    const bool again = at::GradMode::is_enabled() || at::isTensorSubclassLike(of_rows);
    at::Tensor of_table;
    if (again || context->saved_data["sparse"].toBool()) {
      of_table = at::embedding_backward(of_rows, tokens, table.size(0), -1, false, !again);
    } else {
      // The same sums as embedding_dense_backward, which looks up every token in every thread.
      of_table = at::zeros(table.sizes(), of_rows.options())
                     .index_add_(0, tokens.flatten().to(at::kLong), of_rows.flatten(0, -2));
    }
    return {of_table, at::Tensor(), at::Tensor()};
  }
};

}  // namespace

RowGradients::RowGradients(Take take) { g_take = std::move(take); }
RowGradients::~RowGradients() { g_take = nullptr; }

RowsBesideScores::RowsBesideScores(bool tied)
    : before_(std::exchange(t_beside, tied ? this : nullptr)) {}
RowsBesideScores::~RowsBesideScores() { t_beside = before_; }

at::Tensor embedding_by_rows(const at::Tensor& table, const at::Tensor& tokens) {
  if (!at::GradMode::is_enabled() || !table.requires_grad()) return at::embedding(table, tokens);
  if (g_take) return EmbeddingByRows::apply(table, tokens, /*sparse=*/false);
  if (!is_plain(table, tokens)) return at::embedding(table, tokens);
  RowsBesideScores* const beside = t_beside;
  // Sparse gradients pay where the table has more rows than there are tokens.
  if (beside == nullptr || table.size(0) <= tokens.numel()) {
    return EmbeddingByRows::apply(table, tokens, /*sparse=*/false);
  }
  if (!beside->table_.defined()) {
    const variable_list both = TableOfBoth::apply(table);
    beside->table_ = table;
    beside->for_rows_ = both[0];
    beside->for_scores_ = both[1];
  }
  if (!beside->table_.is_same(table)) {
    return EmbeddingByRows::apply(table, tokens, /*sparse=*/false);
  }
  return EmbeddingByRows::apply(beside->for_rows_, tokens, /*sparse=*/true);
}

at::Tensor table_for_scores(const at::Tensor& table) {
  const bool known = t_beside != nullptr && t_beside->table_.is_same(table);
  return known ? t_beside->for_scores_ : table;
}

}  // namespace headloom
