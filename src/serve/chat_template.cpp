#include "serve/chat_template.h"

#include <algorithm>
#include <filesystem>
#include <utility>

#include "core/files.h"
#include "core/parse_number.h"
#include "serve/request.h"

namespace headloom::serve {
namespace {

namespace fs = std::filesystem;
using OrderedJson = nlohmann::ordered_json;

constexpr uintmax_t kMostBytes = uintmax_t{64} << 20;  // of tokenizer_config.json

std::string read_whole(const fs::path& path) {
  require(fs::file_size(path) <= kMostBytes, path.string(), ": is larger than ", kMostBytes,
          " bytes.");
  return read_file(path.string());
}

// Empty where there is no file.
OrderedJson object_in(const fs::path& path) {
  if (!fs::exists(path)) return OrderedJson::object();
  bool deep = false;
  OrderedJson json = OrderedJson::parse(
      read_whole(path),
      [&](int depth, OrderedJson::parse_event_t, OrderedJson&) {
        deep = deep || depth > 64;
        return !deep;
      },
      false);
  require(json.is_object() && !deep, path.string(), ": is not a JSON object.");
  return json;
}

// {"bos_token": "<s>"} or {"bos_token": {"content": "<s>", ...}}; empty where there is none.
std::string token_name(const OrderedJson& config, const char* key) {
  const auto found = config.find(key);
  if (found == config.end()) return "";
  if (found->is_string()) return found->get<std::string>();
  if (found->is_object() && found->contains("content") && found->at("content").is_string()) {
    return found->at("content").get<std::string>();
  }
  return "";
}

// {"added_tokens_decoder": {"32001": {"content": "<|assistant|>", "rstrip": true, ...}, ...}}.
std::vector<NamedToken> added_tokens(const OrderedJson& config) {
  std::vector<NamedToken> out;
  const auto table = config.find("added_tokens_decoder");
  if (table == config.end() || !table->is_object()) return out;
  const auto is_set = [](const OrderedJson& token, const char* key) {
    return token.contains(key) && token.at(key) == true;
  };
  for (const auto& [id, token] : table->items()) {
    const auto number = parse_number<int64_t>(id);
    if (!number || !token.is_object()) continue;
    out.push_back({.name = token_name(token, "content"),
                   .token = *number,
                   .takes_before = is_set(token, "lstrip"),
                   .takes_after = is_set(token, "rstrip")});
  }
  return out;
}

// {"eos_token_id": 7} or {"eos_token_id": [7, 9]}.
std::vector<int64_t> end_tokens(const OrderedJson& config) {
  std::vector<int64_t> out;
  const auto found = config.find("eos_token_id");
  if (found == config.end()) return out;
  for (const OrderedJson& id : found->is_array() ? *found : OrderedJson::array({*found})) {
    if (id.is_number_integer()) out.push_back(id.get<int64_t>());
  }
  return out;
}

// Absent: there is none.
std::optional<std::string> source_in(const OrderedJson& config, const std::string& path) {
  const auto found = config.find("chat_template");
  if (found == config.end() || found->is_null()) return std::nullopt;
  if (found->is_string()) return found->get<std::string>();
  const std::string expected =
      "expected a text or a list of {\"name\": ..., \"template\": ...} with one named \"default\"";
  require(found->is_array(), path, ": 'chat_template' is ", found->type_name(), ", ", expected,
          ".");
  for (const OrderedJson& one : *found) {
    if (one.is_object() && one.contains("template") && one.at("template").is_string() &&
        one.contains("name") && one.at("name") == "default") {
      return one.at("template").get<std::string>();
    }
  }
  fail(path, ": 'chat_template' is a list of ", found->size(), ", ", expected, ".");
}

jinja::Value strftime_now(jinja::Call& call, std::optional<std::time_t> now) {
  if (call.positional.size() != 1) jinja::template_error("strftime_now() takes one format");
  const std::string& format = call.positional[0].text();
  if (format.size() > 256) jinja::template_error("strftime_now() has a format of ", format.size());
  const std::time_t time = now.value_or(std::time(nullptr));
  std::tm local{};
  localtime_r(&time, &local);
  char out[4096];
  return std::string(out, std::strftime(out, sizeof out, format.c_str(), &local));
}

jinja::Value function(const char* name, std::function<jinja::Value(jinja::Call&)> body) {
  return std::make_shared<const jinja::Function>(jinja::Function{name, std::move(body)});
}

}  // namespace

ChatTemplate::ChatTemplate(const std::string& folder, const Codec& codec) : codec_(codec) {
  try {
    read(folder);
  } catch (const std::exception& error) {
    missing_ = error.what();
    template_.reset();
  }
}

void ChatTemplate::read(const std::string& folder) {
  const fs::path config_path = fs::path(folder) / "tokenizer_config.json";
  const fs::path alone = fs::path(folder) / "chat_template.jinja";
  const OrderedJson config = object_in(config_path);
  std::optional<std::string> source;
  path_ = alone.string();
  if (fs::exists(alone)) {
    source = read_whole(alone);
  } else {
    path_ = config_path.string();
    source = source_in(config, path_);
  }
  if (!source) {
    missing_ = str("this model has no chat template: ", folder,
                   " has neither chat_template.jinja nor a tokenizer_config.json with "
                   "\"chat_template\"; /v1/completions takes a prompt as it is.");
    return;
  }
  unfound_ = codec_.unfound(added_tokens(config));
  ends_ = end_tokens(object_in(fs::path(folder) / "generation_config.json"));
  const auto named = [&](const char* key, std::optional<int64_t> own) {
    const std::string name = token_name(config, key);
    return name.empty() && own ? codec_.name(*own) : name;
  };
  const std::string end = named("eos_token", codec_.end());
  special_ = {{"bos_token", named("bos_token", codec_.start())}, {"eos_token", end}};
  for (const char* key : {"unk_token", "sep_token", "pad_token", "cls_token", "mask_token"}) {
    special_.emplace_back(key, named(key, std::nullopt));
  }
  std::erase_if(special_, [](const auto& one) { return one.second.empty(); });
  const std::vector<int64_t> tokens = codec_.encode_spelled(end, unfound_);
  if (tokens.size() == 1) ends_.push_back(tokens[0]);
  for (const char* part : {".type", "['type']", "[\"type\"]"}) {
    takes_parts_ = takes_parts_ || source->find(part) != std::string::npos;
  }
  try {
    template_.emplace(*source);
  } catch (const jinja::TemplateError& error) {
    fail(path_, ": the chat template cannot be used: ", error.what(), ".");
  }
}

std::string ChatTemplate::spelled(const nlohmann::ordered_json& messages,
                                  std::optional<std::time_t> now) const {
  if (!template_) throw Refusal(400, "no_chat_template", missing_);
  OrderedJson given = messages;
  for (OrderedJson& message : given) {
    if (takes_parts_ || !message.at("content").is_array()) continue;
    std::string whole;
    for (const OrderedJson& part : message.at("content")) {
      whole += (whole.empty() ? "" : "\n") + part.at("text").get<std::string>();
    }
    message["content"] = whole;
  }
  jinja::Dict names;
  names.set("messages", jinja::Value::from_json(given));
  names.set("add_generation_prompt", true);
  names.set("tools", jinja::None{});  // there are none, and they are defined, as in transformers
  names.set("documents", jinja::None{});
  for (const auto& [key, name] : special_) names.set(key, name);
  names.set("raise_exception", function("raise_exception", [](jinja::Call& call) -> jinja::Value {
              throw jinja::Raised(call.positional.empty() ? "" : shown(call.positional[0]));
            }));
  names.set("strftime_now",
            function("strftime_now", [now](jinja::Call& call) { return strftime_now(call, now); }));
  try {
    return template_->render(names);
  } catch (const jinja::Raised& raised) {
    Utf8Stream text;
    std::string message = text.add(std::string(raised.what()).substr(0, 500));
    std::replace(message.begin(), message.end(), '\n', ' ');
    throw Refusal(400, "",
                  str("'messages' are refused by the model's chat template: ", message,
                      message.ends_with('.') ? "" : "."));
  } catch (const jinja::TemplateError& error) {
    throw Refusal(
        400, "chat_template_failed",
        str(path_, ": the chat template cannot be used for these messages: ", error.what(), "."));
  }
}

}  // namespace headloom::serve
