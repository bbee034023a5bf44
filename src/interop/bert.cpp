// BERT (Devlin et al. 2019) and FNet (Lee-Thorp et al. 2022), which is BERT with Fourier transforms
// for attention and a linear map after the embedding: masked tokens, a label for the whole text,
// tags of its tokens, or the span of an answer.
#include <cstring>

#include "core/error.h"
#include "core/text.h"
#include "interop/family.h"

namespace headloom {
namespace {

constexpr int64_t kBertLength = 512;  // of a configuration that does not say it

int64_t bert_depth(const Settings& c) { return c.count("num_hidden_layers", 12); }

// Ends of architectures' names, and what such a model predicts. Of several with one head the first
// is written.
constexpr std::pair<const char*, const char*> kHeads[] = {{"ForMaskedLM", "tokens"},
                                                          {"ForPreTraining", "tokens"},
                                                          {"ForSequenceClassification", "label"},
                                                          {"ForTokenClassification", "tags"},
                                                          {"ForQuestionAnswering", "span"}};

// What the file's model predicts. `kind` is "Bert" or "FNet".
std::string head_of(const Settings& c, const std::string& kind) {
  const std::string architecture = c.text("architectures.0", kind + kHeads[0].first);
  std::vector<std::string> names;
  for (const auto& [end, head] : kHeads) {
    names.push_back(kind + end);
    if (architecture == names.back()) return head;
  }
  usage_error(c.path(), ": 'architectures' names ", architecture, ", expected one of ", join(names),
              ".");
}

bool has_classes(const std::string& head) { return head == "label" || head == "tags"; }

// What both have, `mixer` aside.
Node encoder(const Settings& c, const std::string& head, const std::string& act, int64_t vocabulary,
             int64_t segments, const Node& mixer) {
  c.only("tie_word_embeddings", true);
  const bool tokens = head == "tokens";
  Node out = table({{"head", head},
                    {"vocabulary", c.count("vocab_size", vocabulary)},
                    {"max_length", c.count("max_position_embeddings", kBertLength)},
                    {"width", c.count("hidden_size", 768)},
                    {"depth", bert_depth(c)},
                    {"position", table({{"type", "learned"}})},
                    {"segments", c.integer("type_vocab_size", segments)},
                    {"norm", "layer_norm"},
                    {"norm_eps", c.real("layer_norm_eps", 1e-12)},
                    {"embedding_norm", true},
                    {"final_norm", false},
                    {"bias", true},
                    {"tied", true},
                    {"output_bias", tokens},
                    {"transform", tokens},
                    {"pool", "first"},
                    {"pooler", head == "label"}});
  const std::string activation_here = activation(c, "hidden_act", act);
  if (tokens) {  // the transform's too
    c.only("hidden_act", {"gelu", "gelu_new", "gelu_pytorch_tanh", "gelu_fast"});
    out.set("transform_activation", Value(activation_here));
  } else if (has_classes(head)) {
    out.set("classes", Value(label_count(c)));
  } else if (label_count(c) != 2) {
    usage_error(c.path(), ": has ", label_count(c),
                " labels, expected the 2 of a span, its begin and its end.");
  }
  return with_layer(out, mixer,
                    table({{"type", "mlp"},
                           {"hidden", c.count("intermediate_size", 3072)},
                           {"activation", activation_here}}),
                    table({{"type", "sequential"}, {"norm_place", "post"}}));
}

Node bert(const Settings& c) {
  c.only("position_embedding_type", std::vector<std::string>{"absolute"});
  c.only("is_decoder", false);
  c.only("add_cross_attention", false);
  return encoder(c, head_of(c, "Bert"), "gelu", 30522, 2,
                 table({{"type", "mha"}, {"heads", c.count("num_attention_heads", 12)}}));
}

Node fnet(const Settings& c) {
  // Its matrices transform a fixed length, whatever the text's is.
  c.only("use_tpu_fourier_optimizations", false);
  Node out = encoder(c, head_of(c, "FNet"), "gelu_new", 32000, 4, table({{"type", "fnet"}}));
  out.set("embedding_projection", Value(true));
  return out;
}

// `prefix` is "bert." or "fnet.", `mixed` the part whose norm follows the token mixer.
Rules encoder_rules(const Settings& c, const std::string& prefix, const std::string& head,
                    const std::string& mixed) {
  const std::string embeddings = prefix + "embeddings.";
  Rules out = {{.ours = "embedding", .theirs = {embeddings + "word_embeddings.weight"}},
               {.ours = "positions", .theirs = {embeddings + "position_embeddings.weight"}},
               {.ours = "segments", .theirs = {embeddings + "token_type_embeddings.weight"}}};
  add_norm(out, "embedding_norm", embeddings + "LayerNorm", true);
  for (int64_t i = 0; i < bert_depth(c); ++i) {
    const std::string layer = numbered(prefix + "encoder.layer.{}.", i);
    add_norm(out, at_layer(i, "mixer_norm"), layer + mixed + ".output.LayerNorm", true);
    add_linear(out, at_layer(i, "channel.up"), {layer + "intermediate.dense"}, true);
    add_linear(out, at_layer(i, "channel.down"), {layer + "output.dense"}, true);
    add_norm(out, at_layer(i, "channel_norm"), layer + "output.LayerNorm", true);
  }
  if (head == "tokens") {
    add_linear(out, "transform", {"cls.predictions.transform.dense"}, true);
    add_norm(out, "transform_norm", "cls.predictions.transform.LayerNorm", true);
    out.push_back({.ours = "output_bias", .theirs = {"cls.predictions.bias"}});
  } else if (head == "span") {
    add_linear(out, "span", {"qa_outputs"}, true);
  } else {
    if (head == "label") add_linear(out, "pooler", {prefix + "pooler.dense"}, true);
    add_linear(out, "classifier", {"classifier"}, true);
  }
  return out;
}

Rules bert_rules(const Settings& c) {
  Rules out = encoder_rules(c, "bert.", head_of(c, "Bert"), "attention");
  for (int64_t i = 0; i < bert_depth(c); ++i) {
    const std::string attention = numbered("bert.encoder.layer.{}.attention.", i);
    add_linear(out, at_layer(i, "mixer.qkv"),
               {attention + "self.query", attention + "self.key", attention + "self.value"}, true);
    add_linear(out, at_layer(i, "mixer.output"), {attention + "output.dense"}, true);
  }
  return out;
}

Rules fnet_rules(const Settings& c) {
  Rules out = encoder_rules(c, "fnet.", head_of(c, "FNet"), "fourier");
  add_linear(out, "embedding_projection", {"fnet.embeddings.projection"}, true);
  return out;
}

Node encoder_config(const Settings& m, const std::string& kind) {
  if (m.integer("segments", 0) == 0) {
    usage_error("model.segments is 0, expected at least 1, as in every model of this kind.");
  }
  const std::string head = m.text("head", "tokens");
  std::string end;
  for (const auto& [name, what] : kHeads) {
    if (end.empty() && head == what) end = name;
  }
  Node out = table({{"architectures", Node{.value = Array{Value(kind + end)}}},
                    {"vocab_size", m.integer("vocabulary")},
                    {"max_position_embeddings", m.integer("max_length", kBertLength)},
                    {"hidden_size", m.integer("width")},
                    {"num_hidden_layers", m.integer("depth")},
                    {"type_vocab_size", m.integer("segments")},
                    {"intermediate_size", m.integer("layer.0.channel.hidden", 1)},
                    {"hidden_act", their_activation(m, "layer.0.channel.activation")},
                    {"layer_norm_eps", m.real("norm_eps")}});
  if (has_classes(head)) out.set("id2label", label_names(m.integer("classes")));
  return out;
}

Node bert_config(const Settings& m) {
  Node out = encoder_config(m, "Bert");
  out.set("num_attention_heads", Value(m.integer("layer.0.mixer.heads", 1)));
  return out;
}

Node fnet_config(const Settings& m) {
  Node out = encoder_config(m, "FNet");
  out.set("pad_token_id", Value(0));  // theirs, 3, may be beyond the vocabulary
  return out;
}

// Older checkpoints, such as bert-base-uncased, call the weight of a norm gamma and its bias beta.
void name_norms(const Settings&, Weights& weights) {
  for (const auto& [theirs, ours] : {std::pair("gamma", "weight"), std::pair("beta", "bias")}) {
    const std::string end = str("LayerNorm.", theirs);
    for (const std::string& name : weights.unused()) {
      if (!name.ends_with(end)) continue;
      weights.put(name.substr(0, name.size() - std::strlen(theirs)) + ours, weights.at(name));
      weights.drop(name);
    }
  }
}

std::vector<std::string> ignored_by_bert() {
  return {"position_ids",
          "token_type_ids",
          "cls.predictions.decoder.weight",
          "cls.predictions.decoder.bias",
          "cls.seq_relationship.weight",
          "cls.seq_relationship.bias",
          "pooler.dense.weight",
          "pooler.dense.bias"};
}

}  // namespace

Family bert_family() {
  return {.name = "bert",
          .architecture = "BertForMaskedLM",
          .doc = "BERT with masked tokens, a label, tags or a span to predict",
          .kind = "encoder",
          .prefixes = {"bert."},
          .ignored = ignored_by_bert(),
          .model = bert,
          .rules = bert_rules,
          .prepare = name_norms,
          .config = bert_config};
}

Family fnet_family() {
  return {.name = "fnet",
          .architecture = "FNetForMaskedLM",
          .doc = "FNet with masked tokens, a label, tags or a span to predict",
          .kind = "encoder",
          .prefixes = {"fnet."},
          .ignored = ignored_by_bert(),
          .model = fnet,
          .rules = fnet_rules,
          .prepare = name_norms,
          .config = fnet_config};
}

}  // namespace headloom
