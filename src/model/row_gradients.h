// Gradients of embeddings as rows: of a large vocabulary a batch reads few tokens, and the rows of
// their gradients are smaller than a matrix of the table's size.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>

namespace headloom {

// While one lives, the backward of an embedding offers what it would add to the gradient of its
// table: `rows` [n, C] float, to be added at the rows `places` [n] int64. Where `take` returns
// true, whoever took them adds them, and the backward adds nothing. One lives at a time.
class RowGradients {
 public:
  using Take =
      std::function<bool(const at::Tensor& table, const at::Tensor& places, const at::Tensor& rows)>;
  explicit RowGradients(Take take);
  ~RowGradients();
  RowGradients(const RowGradients&) = delete;
  RowGradients& operator=(const RowGradients&) = delete;
};

// at::embedding of a table [V, C] that is a parameter.
at::Tensor embedding_by_rows(const at::Tensor& table, const at::Tensor& tokens);

}  // namespace headloom
