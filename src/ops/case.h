// Cases of operators: what benchmarks time and tests check. An operator folder's cases.cpp lists
// them; all_cases() is the registry.
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
  // Least speed of forward and backward as a multiple of backend "reference"; 0: not compared.
  double reference_target = 0;
  // The case at another length, where time and memory a position should not grow with it.
  std::function<OpCase(int64_t length)> at_length;
  // Why the fused kernel cannot run it; "" when it can.
  std::string unsupported;
};

std::vector<OpCase> composed_attention_cases();
std::vector<OpCase> retention_cases();
std::vector<OpCase> wkv_cases();
std::vector<OpCase> token_shift_cases();
std::vector<OpCase> selective_scan_cases();
std::vector<OpCase> causal_conv1d_cases();
std::vector<OpCase> aft_cases();
std::vector<OpCase> moe_cases();
std::vector<OpCase> gated_norm_cases();
std::vector<OpCase> dynamic_weights_cases();
std::vector<OpCase> streamed_linear_cases();
std::vector<OpCase> positionwise_cases();

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
std::vector<OpInfo> operators();

}  // namespace headloom::ops
