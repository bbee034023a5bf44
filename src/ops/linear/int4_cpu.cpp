// Weights of four bits on the CPU: quantised, and multiplied.
#include "ops/linear/cpu.h"

#include <cmath>

#include "ops/kernel/vec.h"
#include "ops/linear/int4.h"
#include "ops/linear/kernel.h"

namespace headloom::ops {
namespace {

// w / scale as the nearest codes from -8 to 7; `inverse` is 1 / scale.
HL_INLINE vf nearest_codes(const float* w, float inverse) {
  const vf code = vmin(bcast(7.0f), vmax(bcast(-8.0f), load(w) * bcast(inverse)));
  return code + bcast(kToInteger) - bcast(kToInteger);
}

// The scale of a group of 32 values and their codes.
float quantize_group(const float* w, int8_t* codes) {
  float furthest = 0;
  for (int64_t e = 0; e < kInt4Group; ++e) {
    if (std::abs(w[e]) > std::abs(furthest)) furthest = w[e];
  }
  float best_scale = 0, best_inverse = 0, least = INFINITY;
  for (const float steps : {8.0f, 9.0f, 8.5f, 7.5f, 7.0f}) {
    const float scale = static_cast<float>(c10::BFloat16(furthest / -steps));
    const float inverse = scale != 0 ? 1 / scale : 0;
    if (!std::isfinite(inverse)) break;
    vf sum = zero();
    for (int64_t e = 0; e < kInt4Group; e += VL) {
      const vf off = load(w + e) - bcast(scale) * nearest_codes(w + e, inverse);
      sum = sum + off * off;
    }
    const float error = hsum(sum);
    if (error >= least) continue;
    least = error;
    best_scale = scale;
    best_inverse = inverse;
  }
  float best[kInt4Group];
  for (int64_t e = 0; e < kInt4Group; e += VL) store(best + e, nearest_codes(w + e, best_inverse));
  std::copy_n(best, kInt4Group, codes);
  return best_scale;
}

}  // namespace

std::pair<Tensor, Tensor> quantized_int4(const Tensor& weight) {
  check_floating(Linear::kName, weight, "weight");
  TORCH_CHECK_VALUE(weight.dim() == 2 && weight.size(1) >= 1, "linear: a weight of shape ",
                    weight.sizes(),
                    " cannot be held in four bits, expected [O, I] with I of at least 1.");
  const Tensor wide = weight.detach().to(at::kCPU, at::kFloat).contiguous();
  TORCH_CHECK_VALUE(wide.isfinite().all().item<bool>(), "linear: a weight of shape ",
                    weight.sizes(),
                    " cannot be held in four bits because not all its values are finite.");
  const int64_t out = wide.size(0), in = wide.size(1);
  const int64_t groups = (in + kInt4Group - 1) / kInt4Group;
  const Tensor values = at::empty({out, groups * kInt4Group / 2}, wide.options().dtype(at::kByte));
  const Tensor scales = at::empty({out, groups}, wide.options().dtype(at::kBFloat16));
  const float* const from = wide.const_data_ptr<float>();
  uint8_t* const bytes = values.data_ptr<uint8_t>();
  c10::BFloat16* const scale = scales.data_ptr<c10::BFloat16>();
  at::parallel_for(0, out, 16, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin * groups; row < end * groups; row += groups) {
      for (int64_t g = 0; g < groups; ++g) {
        const int64_t first = g * kInt4Group, left = std::min(kInt4Group, in - first);
        float group[kInt4Group] = {};
        int8_t codes[kInt4Group];
        std::copy_n(from + row / groups * in + first, left, group);
        scale[row + g] = c10::BFloat16(quantize_group(group, codes));
        const int64_t before = g / kInt4Groups * kInt4Groups;
        const int64_t in_block = std::min(kInt4Groups, groups - before);
        uint8_t* to = bytes + (row + before) * (kInt4Group / 2) + 8 * (g - before);
        for (int64_t half = 0; half < 2; ++half, to += 8 * in_block) {
          for (int64_t j = 0; j < 8; ++j) {
            const int low = codes[8 * half + j] + 8, high = codes[16 + 8 * half + j] + 8;
            to[j] = static_cast<uint8_t>(low | high << 4);
          }
        }
      }
    }
  });
  return {values.to(weight.device()), scales.to(weight.device())};
}

Tensor dequantized_int4(const Tensor& values, const Tensor& scale, int64_t in) {
  check_int4(values, scale, in);
  const int64_t out = values.size(0), groups = scale.size(1);
  const int64_t whole = groups / kInt4Groups * kInt4Groups;
  // [O, blocks, h, g, j] with the four bits in front of h -> [O, groups, 32].
  const auto part = [&](int64_t first, int64_t count, int64_t in_block) {
    const Tensor bytes = values.narrow(1, first * kInt4Group / 2, count * kInt4Group / 2)
                             .reshape({out, in_block > 0 ? count / in_block : 0, 2, in_block, 8});
    return at::stack({bytes.bitwise_and(15), bytes.bitwise_right_shift(4)}, 2)
        .permute({0, 1, 4, 2, 3, 5})
        .reshape({out, count, kInt4Group});
  };
  const Tensor codes =
      at::cat({part(0, whole, kInt4Groups), part(whole, groups - whole, groups - whole)}, 1);
  return ((codes.to(at::kFloat) - 8) * scale.to(at::kFloat).unsqueeze(-1))
      .flatten(1)
      .narrow(1, 0, in);
}

std::vector<Tensor> int4_forward(const Linear::Arguments& a) {
  using namespace linear_kernel;
  static PrepareInt4* const prepare = HL_CHOOSE(prepare_int4);
  static RunInt4* const run = HL_CHOOSE(run_int4);
  Held held;
  const int64_t in = a.x.size(-1), out = a.weight.size(0);
  const int64_t rows =
      in > 0 ? a.x.numel() / in
             : c10::multiply_integers(a.x.sizes().slice(0, static_cast<size_t>(a.x.dim() - 1)));
  Int4Args args{.rows = rows,
                .in = in,
                .out = out,
                .type = kernel_type(a.x),
                .x = held.whole(a.x),
                .weight = held.whole<uint8_t>(a.weight),
                .scale = static_cast<const uint16_t*>(held.whole(a.scale)),
                .bias = held.whole(a.bias),
                .y = nullptr,
                .past_cache = fetches_past_cache()};
  const int64_t fewest = args.type == Type::kBFloat16 ? 2 : 3;
  std::vector<Tensor> y = Linear::outputs(a, false);
  for (args.planes = fewest; rows <= kStreamedRows && args.planes <= 3; ++args.planes) {
    const Tensor prepared =
        at::empty({rows * prepared_row(in, args.planes)}, at::TensorOptions().dtype(at::kByte));
    args.prepared = static_cast<char*>(prepared.data_ptr());
    std::vector<int64_t> fit, unfit;
    for (int64_t row = 0; row < rows; ++row) {
      (prepare(args, row, row + 1) ? fit : unfit).push_back(row);
    }
    if (unfit.empty()) {
      args.y = y[0].data_ptr();
      for_runs_of_outputs(out, a.weight.size(1),
                          [&](int64_t begin, int64_t end) { run(args, begin, end); });
      return y;
    }
    if (rows == 1) continue;
    // Each by itself, so that the results of the others have the same bits as without them.
    const Tensor result = y[0].view({rows, out});
    if (!fit.empty()) compute_rows(a, fit, result);
    for (const int64_t row : unfit) compute_rows(a, {row}, result);
    return y;
  }
  dense_product(a, y[0].view({rows, out}));
  return y;
}

}  // namespace headloom::ops
