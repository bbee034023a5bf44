// BERT (Devlin et al. 2019): masked tokens, or a label for the whole text.
#include "core/error.h"
#include "core/text.h"
#include "interop/family.h"

namespace headloom {
namespace {

int64_t depth_of(const Settings& c) { return c.integer("num_hidden_layers", 12); }

// What the file's model predicts: "tokens" or "label".
std::string head_of(const Settings& c) {
  const std::string architecture = c.text("architectures.0", "BertForMaskedLM");
  if (architecture == "BertForSequenceClassification") return "label";
  if (architecture == "BertForMaskedLM" || architecture == "BertForPreTraining") return "tokens";
  usage_error(c.path(), ": 'architectures' names ", architecture,
              ", expected BertForMaskedLM, BertForPreTraining or BertForSequenceClassification.");
}

// transformers counts labels by their names.
int64_t classes_of(const Settings& c) {
  int64_t count = 0;
  while (c.has(str("id2label.", count))) ++count;
  return count > 0 ? count : c.integer("num_labels", 2);
}

Node model(const Settings& c) {
  c.only("position_embedding_type", std::vector<std::string>{"absolute"});
  c.only("is_decoder", false);
  c.only("add_cross_attention", false);
  c.only("tie_word_embeddings", true);
  const std::string head = head_of(c);
  const bool tokens = head == "tokens";
  Node out = table({{"kind", "encoder"},
                    {"head", head},
                    {"vocabulary", c.integer("vocab_size", 30522)},
                    {"max_length", c.integer("max_position_embeddings", 512)},
                    {"width", c.integer("hidden_size", 768)},
                    {"depth", depth_of(c)},
                    {"position", table({{"type", "learned"}})},
                    {"segments", c.integer("type_vocab_size", 2)},
                    {"norm", "layer_norm"},
                    {"norm_eps", c.real("layer_norm_eps", 1e-12)},
                    {"embedding_norm", true},
                    {"final_norm", false},
                    {"bias", true},
                    {"tied", true},
                    {"output_bias", tokens},
                    {"transform", tokens},
                    {"pool", "first"},
                    {"pooler", !tokens}});
  if (!tokens) out.set("classes", Value(classes_of(c)));
  if (tokens) c.only("hidden_act", std::vector<std::string>{"gelu"});  // the transform's too
  return with_layer(out, table({{"type", "mha"}, {"heads", c.integer("num_attention_heads", 12)}}),
                    table({{"type", "mlp"},
                           {"hidden", c.integer("intermediate_size", 3072)},
                           {"activation", activation(c, "hidden_act", "gelu")}}),
                    table({{"type", "sequential"}, {"norm_place", "post"}}));
}

Rules rules(const Settings& c) {
  const std::string embeddings = "bert.embeddings.";
  Rules out = {{.ours = "embedding", .theirs = {embeddings + "word_embeddings.weight"}},
               {.ours = "positions", .theirs = {embeddings + "position_embeddings.weight"}},
               {.ours = "segments", .theirs = {embeddings + "token_type_embeddings.weight"}}};
  add_norm(out, "embedding_norm", embeddings + "LayerNorm", true);
  for (int64_t i = 0; i < depth_of(c); ++i) {
    const auto theirs = [&](const char* name) {
      return numbered("bert.encoder.layer.{}.", i) + name;
    };
    add_linear(out, at_layer(i, "mixer.qkv"),
               {theirs("attention.self.query"), theirs("attention.self.key"),
                theirs("attention.self.value")},
               true);
    add_linear(out, at_layer(i, "mixer.output"), {theirs("attention.output.dense")}, true);
    add_norm(out, at_layer(i, "mixer_norm"), theirs("attention.output.LayerNorm"), true);
    add_linear(out, at_layer(i, "channel.up"), {theirs("intermediate.dense")}, true);
    add_linear(out, at_layer(i, "channel.down"), {theirs("output.dense")}, true);
    add_norm(out, at_layer(i, "channel_norm"), theirs("output.LayerNorm"), true);
  }
  if (head_of(c) == "tokens") {
    add_linear(out, "transform", {"cls.predictions.transform.dense"}, true);
    add_norm(out, "transform_norm", "cls.predictions.transform.LayerNorm", true);
    out.push_back({.ours = "output_bias", .theirs = {"cls.predictions.bias"}});
  } else {
    add_linear(out, "pooler", {"bert.pooler.dense"}, true);
    add_linear(out, "classifier", {"classifier"}, true);
  }
  return out;
}

Node config(const Settings& m) {
  const bool tokens = m.text("head", "tokens") == "tokens";
  Node architectures;
  architectures.value = Array{Value(tokens ? "BertForMaskedLM" : "BertForSequenceClassification")};
  Node out = table({{"architectures", architectures},
                    {"vocab_size", m.integer("vocabulary")},
                    {"max_position_embeddings", m.integer("max_length")},
                    {"hidden_size", m.integer("width")},
                    {"num_hidden_layers", m.integer("depth")},
                    {"type_vocab_size", m.integer("segments")},
                    {"num_attention_heads", m.integer("layer.0.mixer.heads", 1)},
                    {"intermediate_size", m.integer("layer.0.channel.hidden", 1)},
                    {"hidden_act", their_activation(m, "layer.0.channel.activation")},
                    {"layer_norm_eps", m.real("norm_eps")}});
  if (!tokens) {
    Node names;
    for (int64_t i = 0; i < m.integer("classes"); ++i) {
      names.set(std::to_string(i), Value(str("LABEL_", i)));
    }
    out.set("id2label", names);
  }
  return out;
}

}  // namespace

Family bert_family() {
  return {.name = "bert",
          .architecture = "BertForMaskedLM",
          .doc = "BERT with masked tokens or a label to predict",
          .prefixes = {"bert."},
          .ignored = {"position_ids", "cls.predictions.decoder.weight",
                      "cls.predictions.decoder.bias", "cls.seq_relationship.weight",
                      "cls.seq_relationship.bias", "pooler.dense.weight", "pooler.dense.bias"},
          .model = model,
          .rules = rules,
          .config = config};
}

}  // namespace headloom
