#include "serve/chat.h"

namespace headloom::serve {
namespace {

constexpr int64_t kDefaultTokens = 4096;
// Keys of OpenAI's answers, which clients send back as part of the conversation.
constexpr const char* kOfAnswers[] = {"refusal", "annotations", "audio", "function_call",
                                      "tool_calls"};

// "content" as the template gets it: a text, or parts of type text.
Reply content_of(const Json& message, const std::string& place) {
  const std::string key = place + ".content", expected = "a text or a list of parts of type text";
  const Json& content = at(message, "content");
  if (content.is_string()) return content.get<std::string>();
  if (!content.is_array()) wrong(key, content, expected);
  Reply out = Reply::array();
  for (const Json& part : content) {
    if (!part.is_object()) wrong(key, part, expected);
    if (at(part, "type") != "text") {
      refuse("'", key, "' has a part of type ", shown(at(part, "type")), ", expected \"text\".");
    }
    check_keys(part, {"type", "text"});
    if (!at(part, "text").is_string()) wrong(key + ".text", at(part, "text"), "a text");
    out.push_back({{"type", "text"}, {"text", part.at("text").get<std::string>()}});
  }
  return out;
}

Reply read_messages(const Json& object) {
  const Json& messages = at(object, "messages");
  const std::string expected =
      str("a list of 1 to ", kMostMessages, " messages with \"role\" and \"content\"");
  if (messages.is_null()) refuse("'messages' is missing, expected ", expected, ".");
  if (!messages.is_array() || messages.empty() || messages.size() > kMostMessages) {
    wrong("messages", messages, expected);
  }
  Reply out = Reply::array();
  for (size_t i = 0; i < messages.size(); ++i) {
    const std::string place = str("messages[", i, "]");
    if (!messages[i].is_object()) wrong(place, messages[i], "an object");
    std::vector<std::string> keys = {"role", "content", "name"};
    for (const char* key : kOfAnswers) {
      const Json& value = at(messages[i], key);
      const bool nothing = value.is_null() || (value.is_array() && value.empty());
      if (!nothing) wrong(str(place, ".", key), value, "it to be absent or null");
      if (messages[i].contains(key)) keys.emplace_back(key);
    }
    check_keys(messages[i], keys);
    const Json& role = at(messages[i], "role");
    if (!role.is_string() || role == "") {
      wrong(place + ".role", role, "a text, such as \"user\", \"assistant\" or \"system\"");
    }
    Reply message = {{"role", role.get<std::string>()},
                     {"content", content_of(messages[i], place)}};
    if (const Json& name = at(messages[i], "name"); !name.is_null()) {
      if (!name.is_string()) wrong(place + ".name", name, "a text");
      message["name"] = name.get<std::string>();
    }
    out.push_back(std::move(message));
  }
  return out;
}

}  // namespace

std::string parse_and_spell(const std::string& body, const ChatTemplate& chat,
                            const std::string& model) {
  const Json object = parse_object(body, {"messages", "model"});
  check_model(object, model);
  return chat.spelled(read_messages(object));
}

Asked parse_chat(const std::string& body, const Codec& codec, const ChatTemplate& chat,
                 const std::string& model, const Limits& limits) {
  static const std::vector<std::string> known =
      common_keys({"messages", "max_completion_tokens", "top_logprobs", "response_format", "tools",
                   "tool_choice", "functions", "function_call", "store", "metadata"});
  const Json object = parse_object(body, known);
  Asked out;
  Request& r = out.request;
  read_common(object, model, limits, out);
  if (r.max_tokens && !at(object, "max_completion_tokens").is_null()) {
    refuse("'max_completion_tokens' and 'max_tokens' are both given, expected one.");
  }
  read(object, "max_completion_tokens", 0, kMostTokens, r.max_tokens);
  if (!at(object, "max_completion_tokens").is_null()) r.max_tokens_key = "max_completion_tokens";
  r.default_tokens = kDefaultTokens;
  std::optional<int64_t> top;
  read(object, "top_logprobs", 0, kMostLogprobs, top);
  if (read_flag(object, "logprobs", false)) {
    r.logprobs = top.value_or(0);
  } else if (top) {
    refuse("'top_logprobs' needs 'logprobs' to be true.");
  }
  expect_off(object, "response_format", {{"type", "text"}});
  expect_off(object, "tools", Json::array());
  expect_off(object, "tool_choice", "none");
  expect_off(object, "functions", Json::array());
  expect_off(object, "function_call", "none");
  expect_off(object, "store", false);
  expect_off(object, "metadata", Json::object());
  std::vector<int64_t> prompt = chat.encoded(read_messages(object));
  if (prompt.empty()) prompt.push_back(codec.end().value_or(0));
  r.prompts = {std::move(prompt)};
  r.ends = chat.ends();
  return out;
}

Reply ChatCompletion::token_of(const std::string& bytes, float logprob) const {
  Utf8Stream text;
  const std::string shown = text.add(bytes);
  Reply list = Reply::array();
  for (const char c : bytes) list.push_back(static_cast<unsigned char>(c));
  return {{"token", shown + text.rest()}, {"logprob", logprob}, {"bytes", std::move(list)}};
}

Reply ChatCompletion::logprobs_of(const Event& event) {
  if (!logprobs_) return nullptr;
  Reply list = Reply::array();
  for (const Token& token : event.tokens) {
    Reply one = token_of(bytes_of(token.id, token.text), token.logprob.value_or(0));
    Reply top = Reply::array();
    for (const auto& [id, logprob] : token.top) top.push_back(token_of(bytes_of(id, ""), logprob));
    one["top_logprobs"] = std::move(top);
    list.push_back(std::move(one));
  }
  return {{"content", std::move(list)}, {"refusal", nullptr}};
}

void ChatCompletion::join(Reply& logprobs, Reply more) const {
  if (logprobs.is_null()) {
    logprobs = std::move(more);
    return;
  }
  for (Reply& token : more["content"]) logprobs["content"].push_back(std::move(token));
}

Reply ChatCompletion::chunk(const Event& event, Reply delta, Reply logprobs, Reply finish) const {
  Reply out = head(true);
  out["choices"] = Reply::array({{{"index", event.choice},
                                  {"delta", std::move(delta)},
                                  {"logprobs", std::move(logprobs)},
                                  {"finish_reason", std::move(finish)}}});
  if (include_usage_) out["usage"] = nullptr;
  return out;
}

std::vector<Reply> ChatCompletion::chunks(const Event& event) {
  std::vector<Reply> out;
  Choice& choice = choice_of(event);
  if (!std::exchange(choice.begun, true)) {
    out.push_back(chunk(event, {{"role", "assistant"}, {"content", ""}}, nullptr, nullptr));
  }
  const std::string text = text_of(event);
  Reply logprobs = logprobs_of(event);
  if (!text.empty() || logprobs_) {
    out.push_back(chunk(event, {{"content", text}}, std::move(logprobs), nullptr));
  }
  if (!event.finish.empty()) {
    out.push_back(chunk(event, Reply::object(), nullptr, event.finish));
  }
  return out;
}

Reply ChatCompletion::whole_choice(const Choice& choice, size_t index) const {
  return {{"index", index},
          {"message", {{"role", "assistant"}, {"content", choice.shown}, {"refusal", nullptr}}},
          {"logprobs", choice.logprobs},
          {"finish_reason", choice.finish}};
}

}  // namespace headloom::serve
