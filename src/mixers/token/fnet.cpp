// FNet (Lee-Thorp et al. 2022): tokens mixed by a Fourier transform, without parameters.
//
//   y = Re(DFT over positions (DFT over channels (x)))      both unnormalised
//
// Padding is not masked, as in the published models: what stands beyond a sequence's length takes
// part.
#include <cmath>

#include "mixers/mixer.h"

namespace headloom {
namespace {

class FNet final : public TokenMixer {
 public:
  explicit FNet(const LayerShape& shape) : width_(shape.width) {}

  Tensor compute(const Tensor& x, const MixerContext&) override {
    // MKL refuses to transform an empty batch.
    if (TORCH_GUARD_OR_FALSE(x.sym_numel().sym_eq(0))) return x.clone();
    // The transform has no bfloat16.
    const bool narrow = x.scalar_type() != at::kFloat && x.scalar_type() != at::kDouble;
    return at::real(at::fft_fft2(narrow ? x.to(at::kFloat) : x)).to(x.scalar_type());
  }

  // The customary count of a transform: 5 N log2 N for N complex numbers.
  std::vector<Cost> own_costs(int64_t length) const override {
    const auto width = static_cast<double>(width_);
    return {{.part = "Fourier transform",
             .formula = "5 C log2(C T)",
             .flops_per_token = 5 * width * std::log2(width * static_cast<double>(length))}};
  }

  double own_state_bytes(int64_t) const override { return 0; }

 private:
  const int64_t width_;
};

}  // namespace

TokenMixerEntry fnet_mixer() {
  return token_mixer<FNet>(
      "fnet", "a Fourier transform over positions and channels in place of attention",
      "Lee-Thorp et al. 2022", {.causal = false, .documents = false, .stateful = false});
}

}  // namespace headloom
