// The tables of operators and of their cases. One line an operator in each.
#include "ops/case.h"
#include "ops/composed_attention/fused.h"

namespace headloom::ops {

std::vector<OpCase> all_cases() {
  std::vector<OpCase> cases;
  for (const auto& family : {composed_attention_cases(), retention_cases()}) {
    cases.insert(cases.end(), family.begin(), family.end());
  }
  return cases;
}

std::vector<OpInfo> operators() {
  return {
      {"composed_attention", "attention whose maps are convolved and mixed across heads",
       "Xiao et al. 2024; Golovneva et al. 2025; Shazeer et al. 2020; Ye et al. 2024",
       fused_limits()},
      {"retention", "linear attention with exponential decay: parallel, recurrent and chunkwise",
       "Sun et al. 2023", "ATen operations; no fused kernel"},
  };
}

}  // namespace headloom::ops
