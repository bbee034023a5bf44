// The tables of operators and of their cases. One line an operator in each.
#include "ops/case.h"

#include <ATen/ATen.h>

#include "ops/aft/fused.h"
#include "ops/composed_attention/fused.h"
#include "ops/dynamic_weights/fused.h"
#include "ops/gated_norm/fused.h"
#include "ops/moe/fused.h"
#include "ops/positionwise/fused.h"
#include "ops/retention/fused.h"
#include "ops/streamed_linear/fused.h"
#include "ops/token_shift/fused.h"
#include "ops/wkv/fused.h"

namespace headloom::ops {

std::vector<OpCase> all_cases() {
  std::vector<OpCase> cases;
  for (const auto& family :
       // clang-format off
       {composed_attention_cases(),
        retention_cases(),
        wkv_cases(),
        token_shift_cases(),
        selective_scan_cases(),
        causal_conv1d_cases(),
        aft_cases(),
        moe_cases(),
        gated_norm_cases(),
        streamed_linear_cases(),
        dynamic_weights_cases(),
        positionwise_cases()}) {
    // clang-format on
    cases.insert(cases.end(), family.begin(), family.end());
  }
  return cases;
}

void time_against_plain_attention(OpCase& c, int64_t length, int64_t heads, int64_t dim) {
  c.baseline_name = "plain attention";
  c.baseline_inputs = [=, type = c.dtype] {
    std::vector<at::Tensor> inputs;
    for (int i = 0; i < 3; ++i) inputs.push_back(at::randn({1, heads, length, dim}).to(type));
    return inputs;
  };
  c.baseline = [](const std::vector<at::Tensor>& x) {
    return at::scaled_dot_product_attention(x[0], x[1], x[2], {}, 0.0, true);
  };
}

std::vector<OpInfo> operators() {
  return {
      {"composed_attention", "attention whose maps are convolved and mixed across heads",
       "Xiao et al. 2024; Golovneva et al. 2025; Shazeer et al. 2020; Ye et al. 2024",
       fused_limits()},
      {"retention", "linear attention with exponential decay: parallel, recurrent and chunkwise",
       "Sun et al. 2023", retention_limits()},
      {"wkv", "exponentially decaying averages, a channel at a time", "Peng et al. 2023 (RWKV-4)",
       wkv_fused_limits()},
      {"token_shift", "each position mixed with the one before it", "Peng et al. 2023 (RWKV-4)",
       token_shift_limits()},
      {"selective_scan", "a diagonal recurrence whose step and maps come from the sequence",
       "Gu & Dao 2023",
       "fused CPU kernels for float32 and bfloat16; the reference for other types and devices"},
      {"causal_conv1d", "a filter over the last positions for each channel", "Gu & Dao 2023",
       "fused CPU kernels for float32 and bfloat16, up to 8 taps; the reference for the rest"},
      {"aft", "attention without queries times keys: simple, local, full and conv",
       "Zhai et al. 2021", aft_limits()},
      {"moe", "SwiGLU experts, each on the tokens that chose it", "Dai et al. 2024 (DeepSeekMoE)",
       moe_limits()},
      {"gated_norm", "a norm of each head's values behind a swish gate", "Sun et al. 2023",
       gated_norm_limits()},
      {"streamed_linear", "a linear map of few rows, its weights (float or int8) read once",
       "Dettmers et al. 2022 for int8 by rows", streamed_linear_limits()},
      {"dynamic_weights", "composition weights of heads from their networks' hidden layer",
       "Xiao et al. 2024", dynamic_weights_limits()},
      {"rms_norm", "values over the root of their mean square, scaled", "Zhang & Sennrich 2019",
       positionwise_limits()},
      {"rotary", "queries and keys turned by their positions", "Su et al. 2021",
       positionwise_limits()},
      {"swiglu", "the gate of a feed-forward network", "Shazeer 2020", positionwise_limits()},
  };
}

}  // namespace headloom::ops
