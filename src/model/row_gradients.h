// Gradients of embeddings as rows: of a large vocabulary a batch reads few tokens, and the rows of
// their gradients are smaller than a matrix of the table's size.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>

namespace headloom {

// While one lives, the backward of an embedding offers what it would add to the gradient of its
// table: `rows` [n, C] float, to be added at the rows `places` [n] int64. Where `take` returns
// true, `take` sees to it that they are added, and the backward adds nothing. One lives at a time.
class RowGradients {
 public:
  using Take = std::function<bool(const at::Tensor& table, const at::Tensor& places,
                                  const at::Tensor& rows)>;
  explicit RowGradients(Take take);
  ~RowGradients();
  RowGradients(const RowGradients&) = delete;
  RowGradients& operator=(const RowGradients&) = delete;
};

// A table that both embeds and makes scores gets two gradients: rows of the tokens, and a matrix.
// While one of these lives, autograd gets them together from what this thread computes with
// embedding_by_rows and table_for_scores, and adds the rows to the matrix: a matrix for the tokens
// is neither made nor added.
class RowsBesideScores {
 public:
  explicit RowsBesideScores(bool tied);  // false: does nothing
  ~RowsBesideScores();
  RowsBesideScores(const RowsBesideScores&) = delete;
  RowsBesideScores& operator=(const RowsBesideScores&) = delete;

 private:
  friend at::Tensor embedding_by_rows(const at::Tensor& table, const at::Tensor& tokens);
  friend at::Tensor table_for_scores(const at::Tensor& table);

  RowsBesideScores* before_;
  at::Tensor table_, for_rows_, for_scores_;  // the first one that embeds, and what stands for it
};

// at::embedding of a table [V, C] that is a parameter.
at::Tensor embedding_by_rows(const at::Tensor& table, const at::Tensor& tokens);

// What a loss of scores is to multiply by in place of the table: the table itself, unless a
// RowsBesideScores joins its two gradients.
at::Tensor table_for_scores(const at::Tensor& table);

}  // namespace headloom
