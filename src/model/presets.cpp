// Named models. Shapes follow the papers; the "-tiny" ones train in minutes on a laptop.
#include "model/config.h"

namespace headloom {
namespace {

std::string size(int64_t width, int64_t depth) {
  return str("width = ", width, "\ndepth = ", depth, "\n");
}

// One kind of layer all the way down: `mixer` is the inside of its inline table.
std::string layer(const std::string& mixer, const char* channel = "type = \"swiglu\"") {
  return "[[layer]]\nmixer = { " + mixer + " }\nchannel = { " + channel + " }\n";
}

// DCFormer++ alternates a local window of 256 with global attention (Xiao et al. 2024, section 3).
std::string local_global(const std::string& mixer) {
  return layer(mixer + ", window = 256") + layer(mixer);
}

// Pythia's block (Biderman et al. 2023) as DCPythia uses it: parallel branches with two LayerNorms,
// biases, GELU, rotary on a quarter of the head, QK-norm.
std::string pythia(int64_t width, int64_t depth, int64_t heads, const char* type) {
  return size(width, depth) +
         str("norm = \"layer_norm\"\nbias = true\ntied = false\n"
             "position = { type = \"rope\", fraction = 0.25 }\n[[layer]]\nmixer = { type = \"",
             type, "\", heads = ", heads,
             ", qk_norm = true }\nchannel = { type = \"mlp\" }\n"
             "block = { type = \"parallel\", norms = 2 }\n");
}

// RetNet gives the difference of its mixer's 8 C^2 weights to attention's 4 C^2 back in a
// feed-forward network of 2 C.
std::string retnet(int64_t width, int64_t depth, int64_t heads) {
  return size(width, depth) +
         str("norm = \"layer_norm\"\nposition = { type = \"none\" }\n[[layer]]\nmixer = { type = "
             "\"retention\", heads = ",
             heads, " }\nchannel = { type = \"mlp\", hidden = ", 2 * width, " }\n");
}

// RWKV-4: LayerNorm and no positions.
std::string rwkv(int64_t width, int64_t depth, bool tied) {
  return size(width, depth) +
         str("norm = \"layer_norm\"\nposition = { type = \"none\" }\n",
             "tied = ", tied ? "true" : "false", "\n") +
         layer("type = \"rwkv\"", "type = \"rwkv_channel\"");
}

}  // namespace

const std::vector<ModelPreset>& model_presets() {
  static const std::vector<ModelPreset> presets = {
      {"transformer++", "405M: RoPE, SwiGLU, RMSNorm, no biases", "Xiao et al. 2024, table 3",
       size(1024, 24) + layer("type = \"mha\", heads = 16")},
      {"transformer++-124m", "124M, the size of GPT-2", "Radford et al. 2019",
       size(768, 12) + layer("type = \"mha\", heads = 12")},
      {"transformer++-tiny", "5M: width 256, 6 layers", "Xiao et al. 2024",
       size(256, 6) + layer("type = \"mha\", heads = 8")},
      {"dcformer++", "405M: transformer++ with composed heads, local and global layers in turn",
       "Xiao et al. 2024", size(1024, 24) + local_global("type = \"dcmha\", heads = 16")},
      {"dcformer++-tiny", "5M: dcformer++ at width 256, 6 layers", "Xiao et al. 2024",
       size(256, 6) + local_global("type = \"dcmha\", heads = 8")},
      {"pythia-tiny", "parallel blocks, LayerNorm, partial RoPE, QK-norm", "Biderman et al. 2023",
       pythia(256, 6, 8, "mha")},
      {"dcpythia-tiny", "pythia-tiny with composed heads", "Xiao et al. 2024",
       pythia(256, 6, 8, "dcmha")},
      {"dcpythia-2.8b", "2.8B: Pythia's shape with composed heads", "Xiao et al. 2024, table 3",
       pythia(2560, 32, 32, "dcmha")},
      {"talking_heads-tiny", "static head mixing before and after softmax", "Shazeer et al. 2020",
       size(256, 6) + layer("type = \"talking_heads\", heads = 8")},
      {"differential-tiny", "the difference of two attention maps a head", "Ye et al. 2024",
       size(256, 6) + "position = { type = \"rope\", layout = \"interleaved\" }\n" +
           layer("type = \"differential\", heads = 4")},
      {"multi_token-tiny", "maps convolved over queries and keys, as the paper's text has it",
       "Golovneva et al. 2025",
       size(256, 6) + "position = { type = \"rope\", layout = \"interleaved\" }\n" +
           layer("type = \"multi_token\", heads = 8")},
      {"multi_token-released-tiny", "the placement of the released models", "Golovneva et al. 2025",
       size(256, 6) + "position = { type = \"rope\", layout = \"interleaved\" }\n" +
           layer("type = \"multi_token\", preset = \"released\", heads = 8")},
      {"gqa-tiny", "grouped-query attention, 8 query and 2 key heads", "Ainslie et al. 2023",
       size(256, 6) + layer("type = \"mha\", heads = 8, kv_heads = 2")},
      {"fixed_head-tiny", "16 heads of size 64 at width 256: head size free of width / heads",
       "Bhojanapalli et al. 2020",
       size(256, 6) + layer("type = \"mha\", heads = 16, head_dim = 64", "type = \"mlp\"")},
      {"retnet-tiny", "5M: retention and a feed-forward network of 2 width, LayerNorm",
       "Sun et al. 2023", retnet(256, 6, 4)},
      {"retnet-1.3b", "1.3B: the smallest size of the paper", "Sun et al. 2023, table 2",
       retnet(2048, 24, 8)},
      {"rwkv-tiny", "5M: RWKV-4's time and channel mixing at width 256, 6 layers",
       "Peng et al. 2023", rwkv(256, 6, true)},
      {"rwkv-169m", "169M: the smallest of the released RWKV-4 models; vocabulary 50277",
       "Peng et al. 2023", rwkv(768, 12, false)},
  };
  return presets;
}

}  // namespace headloom
