// Named models. Shapes follow the papers; the "-tiny" ones train in minutes on a laptop.
#include "model/config.h"

namespace headloom {
namespace {

const char* kTransformerPP = R"(
norm = "rms_norm"
tied = true
)";

}  // namespace

const std::vector<ModelPreset>& model_presets() {
  static const std::vector<ModelPreset> presets = {
      {"transformer++", "405M: RoPE, SwiGLU, RMSNorm", "Touvron et al. 2023; Xiao et al. 2024",
       std::string("width = 1024\ndepth = 24\n") + kTransformerPP + R"(
[[layer]]
mixer = { type = "mha", heads = 16 }
channel = { type = "swiglu" }
)"},
      {"transformer++-tiny", "the same shape, width 256, 6 layers",
       "Touvron et al. 2023; Xiao et al. 2024",
       std::string("width = 256\ndepth = 6\n") + kTransformerPP + R"(
[[layer]]
mixer = { type = "mha", heads = 8 }
channel = { type = "swiglu" }
)"},
  };
  return presets;
}

}  // namespace headloom
