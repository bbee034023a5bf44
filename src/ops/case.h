// The tables of operators and of their cases, which benchmarks time and tests check. Both fill
// themselves: operator.h and the cases.cpp of an operator's folder register what is there.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace headloom::ops {

// The least a computation must do, for its bound on a machine: matrix-product operations, bytes
// read and written once, exponentials.
struct OpWork {
  double flops = 0, bytes = 0, exponentials = 0;
};

struct OpCase {
  std::string op;    // "composed_attention"
  std::string name;  // "dcmha T=2048"
  at::ScalarType dtype = at::kFloat;
  // Leaves, drawn anew; the first `differentiable` of them take part in the backward.
  std::function<std::vector<at::Tensor>()> inputs;
  size_t differentiable = 0;
  std::function<at::Tensor(const std::vector<at::Tensor>& inputs,
                           const std::optional<std::string>& backend)>
      run;
  // What the case is timed against, on inputs of its own.
  std::string baseline_name;
  std::function<std::vector<at::Tensor>()> baseline_inputs;
  std::function<at::Tensor(const std::vector<at::Tensor>& inputs)> baseline;
  OpWork forward_work, training_work;  // training: forward and backward together
  // The type whose products bound the work, where the definition widens its inputs; else dtype.
  std::optional<at::ScalarType> product_type;
  // Largest time as a multiple of the baseline that counts as reached; 0: no target.
  double forward_target = 0, training_target = 0;
  // Largest time as a multiple of this machine's bound, forward and training.
  double bound_target = 3;
  // Least speed of forward and backward as a multiple of backend "reference"; 0: not compared.
  double reference_target = 0;
  // The case at another length, where time and memory a position should not grow with it.
  std::function<OpCase(int64_t length)> at_length;
  // Why the fused kernel cannot run it; "" when it can.
  std::string unsupported;
};

// Registers the cases of an operator's folder: `const CaseFamily cases(token_shift_cases);`
struct CaseFamily {
  explicit CaseFamily(std::vector<OpCase> (*cases)());
};

// All of them, by the names of their operators.
std::vector<OpCase> all_cases();

// Sets the baseline to plain causal attention: B = 1, `heads` heads of `dim`, float32 or `dtype`.
void time_against_plain_attention(OpCase& c, int64_t length, int64_t heads, int64_t dim);

// What `headloom list` says of an operator.
struct OpInfo {
  std::string name;
  std::string doc;
  std::string source;
  std::string backends;  // what runs where, and what goes to the reference
};
void list_operator(OpInfo (*info)());
// By name.
std::vector<OpInfo> operators();

}  // namespace headloom::ops
