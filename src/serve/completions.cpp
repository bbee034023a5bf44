#include "serve/completions.h"

#include <cstdio>

#include "core/utf8.h"

namespace headloom::serve {
namespace {

std::vector<std::vector<int64_t>> read_prompts(const Json& object, const Codec& codec,
                                               const Limits& limits, int64_t samples) {
  const Json& prompt = at(object, "prompt");
  const char* expected = "a text, a list of texts, a list of token ids or a list of such lists";
  const auto text = [&](const Json& value) {
    std::vector<int64_t> tokens;
    try {
      tokens = codec.encode(value.get_ref<const std::string&>());
    } catch (const UsageError& error) {
      refuse(error.what());
    }
    // A model starts a document after the end of another.
    if (tokens.empty()) tokens.push_back(codec.end().value_or(0));
    return tokens;
  };
  if (prompt.is_null()) refuse("'prompt' is missing, expected ", expected, ".");
  if (prompt.is_string()) return {text(prompt)};
  if (!prompt.is_array() || prompt.empty()) wrong("prompt", prompt, expected);
  if (prompt[0].is_number()) return {read_tokens(prompt, "prompt", limits.length)};
  if (static_cast<int64_t>(prompt.size()) > limits.texts / samples) {
    refuse("'prompt' has ", prompt.size(), " prompts and n is ", samples, ", expected at most ",
           limits.texts, " texts in all.");
  }
  std::vector<std::vector<int64_t>> out;
  for (const Json& one : prompt) {
    if (one.type() != prompt[0].type() || !(one.is_string() || one.is_array())) {
      wrong("prompt", prompt, expected);
    }
    out.push_back(one.is_string() ? text(one) : read_tokens(one, "prompt", limits.length));
  }
  return out;
}

}  // namespace

Asked parse_completion(const std::string& body, const Codec& codec, const std::string& model,
                       const Limits& limits) {
  static const std::vector<std::string> known =
      common_keys({"prompt", "echo", "best_of", "suffix"});
  const Json object = parse_object(body, known);
  Asked out;
  Request& r = out.request;
  read_common(object, model, limits, out);
  read(object, "logprobs", 0, kMostLogprobs, r.logprobs);
  r.echo = read_flag(object, "echo", false);
  expect_off(object, "best_of", r.samples);
  expect_off(object, "suffix", "");
  r.prompts = read_prompts(object, codec, limits, r.samples);
  if (r.echo) {
    int64_t tokens = 0;  // both are bounded by the body
    for (const auto& prompt : r.prompts) tokens += static_cast<int64_t>(prompt.size());
    const int64_t each = r.samples * (1 + r.logprobs.value_or(0));
    if (tokens > kMostEchoed / each) {
      refuse("'echo' would give back ", tokens, " tokens, n = ", r.samples, " times with ",
             r.logprobs.value_or(0), " logprobs each, expected at most ", kMostEchoed,
             " tokens and logprobs.");
    }
  }
  return out;
}

// A token as a key: bytes that are no text by themselves as OpenAI writes them.
std::string Completion::token_name(int64_t id, const std::string& text) const {
  const std::string name = bytes_of(id, text);
  if (is_utf8(name)) return name;
  std::string out = "bytes:";
  for (const char c : name) {
    char byte[5];
    std::snprintf(byte, sizeof byte, "\\x%02x", static_cast<unsigned char>(c));
    out += byte;
  }
  return out;
}

Reply Completion::logprobs_of(const Event& event) {
  if (!logprobs_) return nullptr;
  Choice& choice = choice_of(event);
  Reply tokens = Reply::array(), own = Reply::array(), tops = Reply::array(),
        offsets = Reply::array();
  for (const Token& token : event.tokens) {
    const std::string name = token_name(token.id, token.text);
    tokens.push_back(name);
    offsets.push_back(choice.tokens.place_of(token.text));
    choice.tokens.add(token.text);
    if (!token.logprob) {
      own.push_back(nullptr);
      tops.push_back(nullptr);
      continue;
    }
    own.push_back(*token.logprob);
    // Of tokens that read the same the likeliest is told.
    Reply top = Reply::object();
    for (const auto& [id, logprob] : token.top) {
      top.emplace(id == token.id ? name : token_name(id, ""), logprob);
    }
    top.emplace(name, *token.logprob);
    tops.push_back(std::move(top));
  }
  return {{"tokens", tokens},
          {"token_logprobs", own},
          {"top_logprobs", tops},
          {"text_offset", offsets}};
}

void Completion::join(Reply& logprobs, Reply more) const {
  if (logprobs.is_null()) {
    logprobs = std::move(more);
    return;
  }
  for (auto& [key, list] : more.items()) {
    for (Reply& value : list) logprobs[key].push_back(std::move(value));
  }
}

std::vector<Reply> Completion::chunks(const Event& event) {
  const std::string text = text_of(event);
  Reply finish;
  if (!event.finish.empty()) finish = event.finish;
  Reply out = head(true);
  out["choices"] = Reply::array({{{"text", text},
                                  {"index", event.choice},
                                  {"logprobs", logprobs_of(event)},
                                  {"finish_reason", finish}}});
  if (include_usage_) out["usage"] = nullptr;
  return {std::move(out)};
}

Reply Completion::whole_choice(const Choice& choice, size_t index) const {
  return {{"text", choice.shown},
          {"index", index},
          {"logprobs", choice.logprobs},
          {"finish_reason", choice.finish}};
}

}  // namespace headloom::serve
