// Named models. Shapes follow the papers; the "-tiny" ones train in minutes on a laptop.
#include <initializer_list>
#include <utility>

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

// Pythia (Biderman et al. 2023): parallel branches with two LayerNorms, biases, GELU, rotary on a
// quarter of the head. A layer for each of `mixers`.
std::string pythia(int64_t width, int64_t depth, std::initializer_list<std::string> mixers) {
  std::string out = size(width, depth) +
                    "norm = \"layer_norm\"\nbias = true\ntied = false\n"
                    "position = { type = \"rope\", fraction = 0.25 }\n";
  for (const std::string& mixer : mixers) {
    out += layer(mixer, "type = \"mlp\"") + "block = { type = \"parallel\", norms = 2 }\n";
  }
  return out;
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
         str("norm = \"layer_norm\"\nembedding_norm = true\nposition = { type = \"none\" }\n",
             "tied = ", tied ? "true" : "false", "\n") +
         layer("type = \"rwkv\"", "type = \"rwkv_channel\"");
}

// AFT's language models: a transformer's blocks with the attention exchanged, no other positions.
std::string aft(int64_t width, int64_t depth, const char* form) {
  return size(width, depth) + "norm = \"layer_norm\"\nposition = { type = \"none\" }\n" +
         layer(str("type = \"aft\", form = \"", form, "\""), "type = \"mlp\"");
}

// BERT (Devlin et al. 2019): post-norm, learned positions, two segments, biases, GELU, a
// transform before the tied output, the first position through a pooler for labels.
std::string bert(int64_t width, int64_t depth, const std::string& mixer,
                 const char* channel = "type = \"mlp\"") {
  return "kind = \"encoder\"\n" + size(width, depth) +
         str("norm = \"layer_norm\"\nnorm_eps = 1e-12\nembedding_norm = true\nfinal_norm = "
             "false\n"
             "bias = true\noutput_bias = true\nsegments = 2\ntransform = true\npool = \"first\"\n"
             "pooler = true\ndropout = 0.1\nposition = { type = \"learned\" }\n[[layer]]\n"
             "mixer = { ",
             mixer, " }\nchannel = { ", channel,
             " }\nblock = { type = \"sequential\", norm_place = \"post\" }\n");
}

std::string bert(int64_t width, int64_t depth, int64_t heads) {
  return bert(width, depth, str("type = \"mha\", heads = ", heads));
}

// Mamba: one mixer a block and nothing else, no positions.
std::string mamba(int64_t width, int64_t depth) {
  return size(width, depth) + "norm_eps = 1e-5\nposition = { type = \"none\" }\n" +
         layer("type = \"mamba\"", "type = \"none\"");
}

// GPT-J (Wang & Komatsuzaki 2021): attention and MLP side by side below one norm, 64 dimensions
// of each head rotated in interleaved pairs, biases in the MLP and the output alone.
std::string gptj(int64_t width, int64_t depth, int64_t heads) {
  const double fraction = 64.0 / static_cast<double>(std::max(width / heads, int64_t{128}));
  return size(width, depth) +
         str("norm = \"layer_norm\"\ntied = false\noutput_bias = true\n"
             "position = { type = \"rope\", layout = \"interleaved\", fraction = ",
             fraction, " }\n[[layer]]\nmixer = { type = \"mha\", heads = ", heads,
             " }\nchannel = { type = \"mlp\", activation = \"gelu_tanh\", bias = true }\n"
             "block = { type = \"parallel\" }\n");
}

// The Transformer of Vaswani et al. 2017: post-norm, ReLU, sinusoidal positions, one embedding
// for source, target and output.
std::string vaswani(int64_t width, int64_t depth, int64_t heads, const char* type) {
  return "kind = \"encoder_decoder\"\n" + size(width, depth) +
         str("norm = \"layer_norm\"\nfinal_norm = false\nembedding_scale = true\ndropout = 0.1\n"
             "position = { type = \"sinusoidal\" }\n[[layer]]\nmixer = { type = \"",
             type, "\", heads = ", heads,
             " }\nchannel = { type = \"mlp\", activation = \"relu\", bias = true }\n"
             "block = { type = \"sequential\", norm_place = \"post\" }\n");
}

// The plain vision transformer of Beyer et al. 2022: two-dimensional sinusoidal positions, the
// mean of the patches, pre-norm, biases, GELU.
std::string vit(int64_t width, int64_t depth, int64_t heads, int64_t patch, const char* type) {
  return "kind = \"vit\"\n" + size(width, depth) +
         str("norm = \"layer_norm\"\nnorm_eps = 1e-6\nbias = true\n"
             "position = { type = \"sinusoidal\" }\nimage = { patch = ",
             patch, " }\n[[layer]]\nmixer = { type = \"", type, "\", heads = ", heads,
             " }\nchannel = { type = \"mlp\" }\n");
}

// The simplified block (He & Hofmann 2024) with its ReLU network and rotary positions.
std::string simplified(const char* form) {
  return layer("type = \"shaped\", heads = 8", "type = \"mlp\", activation = \"relu\"") +
         str("block = { type = \"simplified\", form = \"", form, "\" }\n");
}

// DeepSeekMoE: the first layer stays dense.
std::string deepseek_moe(int64_t width, int64_t depth, int64_t heads, int64_t dense,
                         const std::string& experts) {
  const std::string mixer = str("type = \"mha\", heads = ", heads);
  const std::string first = str("type = \"swiglu\", hidden = ", dense);
  const std::string rest = "type = \"moe\", " + experts;
  std::string out = size(width, depth) + layer(mixer, first.c_str());
  for (int64_t i = 1; i < depth; ++i) out += layer(mixer, rest.c_str());
  return out;
}

// The language models of Bhojanapalli et al. 2020: 6 layers of width 256, a ReLU network of 1024.
std::string lm1b(int64_t heads, int64_t head_dim) {
  return "vocabulary = 32000\n" + size(256, 6) +
         "norm = \"layer_norm\"\nposition = { type = \"sinusoidal\" }\n" +
         layer(str("type = \"mha\", heads = ", heads, ", head_dim = ", head_dim),
               "type = \"mlp\", hidden = 1024, activation = \"relu\"");
}

// A published size of a family. `heads` is 0 where the family has none.
struct Size {
  const char* name;
  int64_t width, depth, heads, vocabulary;
  int64_t published;  // as in ModelPreset
};

using Presets = std::vector<ModelPreset>;

// One preset for each size; `toml` makes the model's table but for its vocabulary.
void add_sizes(Presets& out, const char* doc, const char* source,
               std::string (*toml)(const Size& size), std::initializer_list<Size> sizes) {
  for (const Size& s : sizes) {
    const std::string heads = s.heads > 0 ? str(", ", s.heads, " heads") : "";
    out.push_back({s.name,
                   str(doc, ": width ", s.width, ", ", s.depth, " layers", heads, ", vocabulary ",
                       s.vocabulary),
                   source, str("vocabulary = ", s.vocabulary, "\n", toml(s)), s.published});
  }
}

// The sizes of the papers. With a vocabulary they are the published models, ready to be counted.
void add_published(Presets& out) {
  // 405 = 302 + 2 x 51.5: input and output embeddings are counted, and they are not tied.
  add_sizes(out, "RoPE, SwiGLU, RMSNorm, no biases", "Xiao et al. 2024, table 3",
            [](const Size& s) {
              return "tied = false\n" + size(s.width, s.depth) +
                     layer(str("type = \"mha\", heads = ", s.heads));
            },
            {{"transformer++", 1024, 24, 16, 50257, 405'000'000},
             {"transformer++-834m", 1536, 24, 24, 50257, 834'000'000},
             {"transformer++-1.4b", 2048, 24, 32, 50257, 1'400'000'000}});
  // The paper names these by the size of the transformer++ that they are compared with.
  // Composition adds 2.7% to it.
  add_sizes(out, "transformer++ with composed heads, local and global layers in turn",
            "Xiao et al. 2024, table 3",
            [](const Size& s) {
              return "tied = false\n" + size(s.width, s.depth) +
                     local_global(str("type = \"dcmha\", heads = ", s.heads));
            },
            {{"dcformer++", 1024, 24, 16, 50257, 0},
             {"dcformer++-834m", 1536, 24, 24, 50257, 0},
             {"dcformer++-1.4b", 2048, 24, 32, 50257, 0}});
  add_sizes(out, "the released DCFormer-2.8B: Pythia's shape with SwiGLU and RMSNorm, QK-norm",
            "Xiao et al. 2024, section 4.2",
            [](const Size& s) {
              const std::string mixer =
                  str("type = \"dcmha\", heads = ", s.heads, ", qk_norm = true");
              const char* channel = "type = \"swiglu\", hidden = 6912";
              return "tied = false\n" + size(s.width, s.depth) +
                     layer(mixer + ", window = 256", channel) + layer(mixer, channel);
            },
            {{"dcformer++-2.8b", 2560, 32, 32, 50257, 0}});
  // The vocabularies are padded for the hardware, and more so for larger models.
  add_sizes(out, "parallel blocks, LayerNorm, rotary on a quarter of the head",
            "Biderman et al. 2023",
            [](const Size& s) {
              return pythia(s.width, s.depth, {str("type = \"mha\", heads = ", s.heads)});
            },
            {{"pythia-2.8b", 2560, 32, 32, 50304, 2'775'208'960},
             {"pythia-6.9b", 4096, 32, 32, 50432, 6'857'302'016},
             {"pythia-12b", 5120, 36, 40, 50688, 11'846'072'320}});
  add_sizes(out, "Pythia with composed heads and QK-norm, local and global layers in turn",
            "Xiao et al. 2024, section 4.2",
            [](const Size& s) {
              const std::string mixer =
                  str("type = \"dcmha\", heads = ", s.heads, ", qk_norm = true");
              return pythia(s.width, s.depth, {mixer + ", window = 256", mixer});
            },
            {{"dcpythia-2.8b", 2560, 32, 32, 50257, 0}, {"dcpythia-6.9b", 4096, 32, 32, 50257, 0}});
  // LLaMA 3's vocabulary, tied.
  add_sizes(out, "the placement of the released models", "Golovneva et al. 2025, section 4.2",
            [](const Size& s) {
              return size(s.width, s.depth) +
                     "position = { type = \"rope\", layout = \"interleaved\", base = 100000 }\n" +
                     layer(str("type = \"multi_token\", preset = \"released\", heads = ", s.heads));
            },
            {{"multi_token-880m", 1536, 24, 16, 128256, 880'000'000}});
  // The paper does not name its vocabulary; GPT-2's is a choice. With it the second size has
  // 2.65B parameters, so "2.7b" is a name and no count.
  add_sizes(out, "retention and a feed-forward network of 2 width, LayerNorm",
            "Sun et al. 2023, table 2",
            [](const Size& s) { return retnet(s.width, s.depth, s.heads); },
            {{"retnet-1.3b", 2048, 24, 8, 50257, 1'300'000'000},
             {"retnet-2.7b", 2560, 32, 10, 50257, 0},
             {"retnet-6.7b", 4096, 32, 16, 50257, 6'700'000'000}});
  add_sizes(out, "RWKV-4", "Peng et al. 2023, table 2",
            [](const Size& s) { return rwkv(s.width, s.depth, false); },
            {{"rwkv-169m", 768, 12, 0, 50277, 169'342'464},
             {"rwkv-430m", 1024, 24, 0, 50277, 430'397'440},
             {"rwkv-1.5b", 2048, 24, 0, 50277, 1'515'106'304},
             {"rwkv-3b", 2560, 32, 0, 50277, 2'984'627'200},
             {"rwkv-7b", 4096, 32, 0, 50277, 7'393'000'000},
             {"rwkv-14b", 5120, 40, 0, 50277, 14'150'000'000}});
  // The tokenizer's 50277 tokens, padded to a multiple of 8.
  add_sizes(out, "mamba blocks without channel mixers", "Gu & Dao 2023",
            [](const Size& s) { return mamba(s.width, s.depth); },
            {{"mamba-130m", 768, 24, 0, 50280, 129'135'360},
             {"mamba-370m", 1024, 48, 0, 50280, 371'516'416},
             {"mamba-790m", 1536, 48, 0, 50280, 793'204'224},
             {"mamba-1.4b", 2048, 48, 0, 50280, 1'372'178'432},
             {"mamba-2.8b", 2560, 64, 0, 50280, 2'768'345'600}});
  for (const int64_t heads : {4, 8, 16, 32, 70}) {
    out.push_back({str("fixed_head-lm1b-", heads),
                   str(heads, " heads of size 32 at width 256, 6 layers; sinusoidal positions"),
                   "Bhojanapalli et al. 2020, figure 1", lm1b(heads, 32)});
  }
  for (const int64_t heads : {4, 16, 32}) {
    out.push_back(
        {str("standard_head-lm1b-", heads),
         str("fixed_head-lm1b-", heads, " with heads of size ", 256 / heads, ", width / heads"),
         "Bhojanapalli et al. 2020, figure 3", lm1b(heads, 256 / heads)});
  }
  for (const auto& [heads, published] :
       {std::pair{8, 168'000'000}, {12, 193'000'000}, {16, 218'000'000}, {32, 319'000'000}}) {
    out.push_back({str("fixed_head-bert-", heads),
                   str("BERT of width 512, 24 layers, with ", heads, " heads of size 128"),
                   "Bhojanapalli et al. 2020, table 2",
                   "vocabulary = 30000\nmax_length = 512\n" +
                       bert(512, 24, str("type = \"mha\", heads = ", heads, ", head_dim = 128"),
                            "type = \"mlp\", hidden = 4096"),
                   published});
  }
}

Presets all_presets() {
  Presets presets = {
      {"transformer++-124m", "the size of GPT-2, vocabulary 50257", "Radford et al. 2019",
       "vocabulary = 50257\n" + size(768, 12) + layer("type = \"mha\", heads = 12"), 124'000'000},
      {"transformer++-tiny", "5M: width 256, 6 layers", "Xiao et al. 2024",
       size(256, 6) + layer("type = \"mha\", heads = 8")},
      {"dcformer++-tiny", "5M: dcformer++ at width 256, 6 layers", "Xiao et al. 2024",
       size(256, 6) + local_global("type = \"dcmha\", heads = 8")},
      {"pythia-tiny", "parallel blocks, LayerNorm, partial RoPE, QK-norm", "Biderman et al. 2023",
       pythia(256, 6, {"type = \"mha\", heads = 8, qk_norm = true"})},
      {"dcpythia-tiny", "pythia-tiny with composed heads", "Xiao et al. 2024",
       pythia(256, 6, {"type = \"dcmha\", heads = 8, qk_norm = true"})},
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
      {"fixed_head-tiny", "16 heads of size 32 at width 256: head size free of width / heads",
       "Bhojanapalli et al. 2020",
       size(256, 6) + layer("type = \"mha\", heads = 16, head_dim = 32", "type = \"mlp\"")},
      {"gptj-6b", "6B: parallel branches below one norm, partial interleaved RoPE",
       "Wang & Komatsuzaki 2021", "vocabulary = 50400\n" + gptj(4096, 28, 16), 6'050'882'784},
      {"gptj-tiny", "GPT-J at width 256, 6 layers; half of each head is rotated",
       "Wang & Komatsuzaki 2021", gptj(256, 6, 8)},
      {"bert-tiny", "4M with BERT's vocabulary: encoder, width 128, 2 layers", "Turc et al. 2019",
       bert(128, 2, 2)},
      {"bert-mini", "11M: width 256, 4 layers", "Turc et al. 2019", bert(256, 4, 4)},
      {"bert-small", "29M: width 512, 4 layers", "Turc et al. 2019", bert(512, 4, 8)},
      {"bert-base", "110M: width 768, 12 layers", "Devlin et al. 2019", bert(768, 12, 12)},
      {"fnet-tiny", "BERT's shape, Fourier transforms for attention: width 256, 4 layers",
       "Lee-Thorp et al. 2022", bert(256, 4, "type = \"fnet\"")},
      {"fnet-base", "83M with a vocabulary of 32000: width 768, 12 layers",
       "Lee-Thorp et al. 2022, table 1", bert(768, 12, "type = \"fnet\"")},
      {"linformer-tiny", "BERT's shape, keys and values projected to 64: width 256, 4 layers",
       "Wang et al. 2020", bert(256, 4, "type = \"linformer\", heads = 4, rank = 64")},
      {"bert-large", "340M: width 1024, 24 layers", "Devlin et al. 2019", bert(1024, 24, 16)},
      {"transformer-base", "encoder-decoder of 6 and 6 layers, width 512", "Vaswani et al. 2017",
       vaswani(512, 6, 8, "mha")},
      {"transformer-tiny", "transformer-base at width 128, 2 and 2 layers", "Vaswani et al. 2017",
       vaswani(128, 2, 4, "mha")},
      {"dctransformer-tiny", "transformer-tiny with composed heads, in cross-attention too",
       "Vaswani et al. 2017; Xiao et al. 2024", vaswani(128, 2, 4, "dcmha")},
      {"ViT-S/16", "22M: images in patches of 16, width 384, 12 layers",
       "Dosovitskiy et al. 2020; Beyer et al. 2022", vit(384, 12, 6, 16, "mha"), 22'000'000},
      {"ViT-M/16", "39M: width 512, 12 layers", "Xiao et al. 2024, table 7",
       vit(512, 12, 8, 16, "mha"), 39'000'000},
      {"DCViT-S/16", "ViT-S/16 with composed heads", "Xiao et al. 2024, table 7",
       vit(384, 12, 6, 16, "dcmha")},
      {"vit-tiny", "for images of 32 x 32: patches of 4, width 128, 4 layers",
       "Dosovitskiy et al. 2020", vit(128, 4, 4, 4, "mha")},
      {"dcvit-tiny", "vit-tiny with composed heads", "Xiao et al. 2024",
       vit(128, 4, 4, 4, "dcmha")},
      {"retnet-tiny", "5M: retention and a feed-forward network of 2 width, LayerNorm",
       "Sun et al. 2023", retnet(256, 6, 4)},
      {"rwkv-tiny", "5M: RWKV-4's time and channel mixing at width 256, 6 layers",
       "Peng et al. 2023", rwkv(256, 6, true)},
      {"simplified-tiny", "no skip around attention, values or output projection, ReLU, RMSNorm",
       "He & Hofmann 2024", size(256, 6) + simplified("serial")},
      {"simplified_parallel-tiny", "simplified-tiny with the feed-forward network beside attention",
       "He & Hofmann 2024", size(256, 6) + simplified("parallel")},
      {"aft-tiny", "5M: attention-free, biases learned for 32 distances", "Zhai et al. 2021",
       aft(256, 6, "local")},
      {"aft-simple-tiny", "5M: attention-free, without position biases", "Zhai et al. 2021",
       aft(256, 6, "simple")},
      {"aft-local-enwik8", "38M: the paper's model of characters, biases for 32 distances",
       "Zhai et al. 2021, section 5.2", aft(512, 12, "local"), 38'000'000},
      {"mamba-tiny", "5M: mamba blocks without channel mixers at width 256, 12 layers",
       "Gu & Dao 2023", mamba(256, 12)},
      {"gla-tiny", "5M: gated linear attention and SwiGLU at width 256, 6 layers, no positions",
       "Yang et al. 2024",
       size(256, 6) + "position = { type = \"none\" }\n" + layer("type = \"gla\"")},
      {"performer-tiny", "5M: attention by 111 random features a head, width 256, 6 layers",
       "Choromanski et al. 2021", size(256, 6) + layer("type = \"performer\", heads = 8")},
      {"synthesizer-tiny", "5M: scores made from each query alone, width 256, 6 layers",
       "Tay et al. 2021",
       size(256, 6) + "position = { type = \"learned\" }\n" +
           layer("type = \"synthesizer\", heads = 8, scores = \"dense\"")},
      {"deepseek_moe-tiny",
       "width 256, 6 layers: 16 routed experts of which 3 work, one shared, the first layer dense",
       "Dai et al. 2024",
       deepseek_moe(256, 6, 8, 688, "hidden = 176, routed = 16, shared = 1, active = 3")},
      {"deepseek_moe-16b", "16.4B, of which 2.8B work for a token: 64 routed experts, 2 shared",
       "Dai et al. 2024, section 5.1.2",
       "vocabulary = 102400\ntied = false\ninit_std = 0.006\n" +
           deepseek_moe(2048, 28, 16, 10944,
                        "hidden = 1408, routed = 64, shared = 2, active = 6, balance = 0.001"),
       16'400'000'000},
  };
  add_published(presets);
  return presets;
}

}  // namespace

const std::vector<ModelPreset>& model_presets() {
  static const Presets presets = all_presets();
  return presets;
}

}  // namespace headloom
