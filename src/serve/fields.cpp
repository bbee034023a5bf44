#include "serve/fields.h"

#include <algorithm>
#include <random>
#include <set>

#include "core/json_text.h"
#include "core/text.h"

namespace headloom::serve {
namespace {

// JSON's integers are exact where they fit int64.
std::optional<int64_t> as_integer(const Json& value) {
  if (!value.is_number_integer()) return std::nullopt;
  if (value.is_number_unsigned() && value.get<uint64_t>() > uint64_t{INT64_MAX}) {
    return std::nullopt;
  }
  return value.get<int64_t>();
}

std::vector<std::string> read_stops(const Json& object) {
  const Json& stop = at(object, "stop");
  const std::string expected = str("a text or a list of at most ", kMostStops,
                                   " texts, none empty or longer than ", kMostStopBytes, " bytes");
  if (stop.is_null()) return {};
  if (stop.is_array() && stop.size() > kMostStops) wrong("stop", stop, expected);
  std::vector<std::string> out;
  const auto add = [&](const Json& text) {
    if (!text.is_string()) wrong("stop", stop, expected);
    const auto& bytes = text.get_ref<const std::string&>();
    if (bytes.empty() || bytes.size() > kMostStopBytes) wrong("stop", stop, expected);
    out.push_back(bytes);
  };
  if (stop.is_array()) {
    for (const Json& text : stop) add(text);
  } else {
    add(stop);
  }
  return out;
}

}  // namespace

std::string limits_text() {
  return str("Limits of a request: ", kMostBody, " bytes of body, ", kMostHead,
             " of headers, JSON nested ", kMostDepth, " deep with at most ", kMostParts,
             " texts, keys, lists and objects;\n  n at most --max-batch, prompts times n at most "
             "--max-queue, max_tokens at most ",
             kMostTokens,
             " and what the model's length leaves,\n  best_of = n, logprobs and "
             "top_logprobs at most ",
             kMostLogprobs, ", stop at most ", kMostStops, " texts of ", kMostStopBytes,
             " bytes, messages at most ", kMostMessages, ";\n  echo with at most ", kMostEchoed,
             " tokens times n times (1 + logprobs); an answer that is not streamed has at most ",
             kMostAnswer, " bytes.\nA request has ", kHeadSeconds, " s for its headers and ",
             kBodySeconds,
             " s for its body; --max-batch + --max-queue + 8 connections are answered "
             "at a time, others get a 503.");
}

void wrong(const std::string& key, const Json& value, const std::string& expected) {
  const std::string is = value.is_null() ? "missing or null" : shown(value);
  refuse("'", key, "' is ", is, ", expected ", expected, ".");
}

std::string shown(const Json& value) {
  // Of a long text or list only the beginning is written.
  const auto cut = [](const std::string& text) {
    Utf8Stream whole;
    return text.size() > 60 ? whole.add(text.substr(0, 57)) + "..." : text;
  };
  if (value.is_string() && value.get_ref<const std::string&>().size() > 60) {
    return cut(Json(value.get_ref<const std::string&>().substr(0, 60))
                   .dump(-1, ' ', false, Json::error_handler_t::replace));
  }
  if (value.is_array() && value.size() > 8) return str("a list of ", value.size());
  if (value.is_object() && value.size() > 8) return str("an object of ", value.size(), " keys");
  return cut(value.dump(-1, ' ', false, Json::error_handler_t::replace));
}

std::string shown_bare(const std::string& text) {
  const std::string quoted = shown(Json(text));
  return quoted.size() > 1 && quoted.ends_with('"') ? quoted.substr(1, quoted.size() - 2) : quoted;
}

Json parse_object(const std::string& body, const std::vector<std::string>& known) {
  Json object;
  int64_t parts = 0;
  std::vector<std::set<std::string>> keys;  // of each object that is open
  try {
    object = Json::parse(body, [&](int depth, Json::parse_event_t event, const Json& value) {
      using Event = Json::parse_event_t;
      if (depth > kMostDepth) refuse("the body is nested deeper than ", kMostDepth, " levels.");
      if (event == Event::object_start) keys.emplace_back();
      if (event == Event::object_end) keys.pop_back();
      if (event == Event::key && !keys.back().insert(value.get<std::string>()).second) {
        refuse("the body has the key ", shown(value), " twice in one object.");
      }
      parts += event == Event::object_start || event == Event::array_start || event == Event::key ||
               (event == Event::value && value.is_string());
      if (parts > kMostParts) {
        refuse("the body has more than ", kMostParts, " texts, keys, lists and objects.");
      }
      return true;
    });
  } catch (const Json::parse_error& error) {
    refuse("the body is not JSON: ", json_fault(body, error.byte), ".");
  } catch (const Json::exception&) {
    refuse("the body has a number that is too large for any type.");
  }
  if (!object.is_object()) refuse("the body is ", shown(object), ", expected a JSON object.");
  check_keys(object, known);
  return object;
}

void check_keys(const Json& object, const std::vector<std::string>& known) {
  for (const auto& item : object.items()) {
    if (std::find(known.begin(), known.end(), item.key()) != known.end()) continue;
    // An answer does not repeat a long key, whose length is the client's choice.
    const bool is_long = item.key().size() > 60;
    const std::string expected = "; expected " + join(known) + ".";
    throw Refusal(400, "",
                  str("unknown key ", shown(item.key()),
                      is_long ? expected : did_you_mean(item.key(), known, expected)),
                  is_long ? std::nullopt : std::optional(item.key()));
  }
}

const Json& at(const Json& object, const char* key) {
  static const Json null;
  const auto found = object.find(key);
  return found == object.end() ? null : *found;
}

void read(const Json& object, const char* key, int64_t least, int64_t most, int64_t& out) {
  const Json& value = at(object, key);
  if (value.is_null()) return;
  const auto integer = as_integer(value);
  if (!integer || *integer < least || *integer > most) {
    wrong(key, value, str("an integer from ", least, " to ", most));
  }
  out = *integer;
}

void read(const Json& object, const char* key, int64_t least, int64_t most,
          std::optional<int64_t>& out) {
  if (at(object, key).is_null()) return;
  read(object, key, least, most, out.emplace());
}

void read(const Json& object, const char* key, double least, double most, double& out) {
  const Json& value = at(object, key);
  if (value.is_null()) return;
  const double number = value.is_number() ? value.get<double>() : std::nan("");
  if (!(number >= least && number <= most)) {
    wrong(key, value, str("a number from ", least, " to ", most));
  }
  out = number;
}

bool read_flag(const Json& object, const char* key, bool otherwise) {
  const Json& value = at(object, key);
  if (value.is_null()) return otherwise;
  if (!value.is_boolean()) wrong(key, value, "true or false");
  return value.get<bool>();
}

std::string read_text(const Json& object, const char* key) {
  const Json& value = at(object, key);
  if (value.is_null()) refuse("'", key, "' is missing, expected a text.");
  if (!value.is_string()) wrong(key, value, "a text");
  return value.get<std::string>();
}

std::vector<int64_t> read_tokens(const Json& list, const std::string& key, int64_t most) {
  if (!list.is_array()) wrong(key, list, "a list of token ids");
  if (static_cast<int64_t>(list.size()) > most) {
    throw Refusal(
        400, "context_length_exceeded",
        str("'", key, "' has a list of ", counted(static_cast<int64_t>(list.size()), "token"),
            ", more than the model's length of ", most, "."));
  }
  std::vector<int64_t> out;
  out.reserve(list.size());
  for (const Json& token : list) {
    const auto id = as_integer(token);
    if (!id) refuse("'", key, "' has the token ", shown(token), ", expected an integer.");
    out.push_back(*id);
  }
  return out;
}

void expect_off(const Json& object, const char* key, const Json& off) {
  const Json& value = at(object, key);
  if (!value.is_null() && value != off) {
    refuse("'", key, "' is not supported, expected it to be absent or ", off.dump(), ".");
  }
}

std::vector<std::string> common_keys(std::vector<std::string> more) {
  std::vector<std::string> out = {
      "model",          "max_tokens", "temperature",        "top_p",
      "top_k",          "min_p",      "repetition_penalty", "n",
      "stop",           "seed",       "logprobs",           "stream",
      "stream_options", "user",       "presence_penalty",   "frequency_penalty",
      "logit_bias"};
  out.insert(out.end(), more.begin(), more.end());
  return out;
}

void check_model(const Json& object, const std::string& model) {
  const Json& name = at(object, "model");
  if (!name.is_null() && !name.is_string()) wrong("model", name, "a text");
  if (!name.is_null() && name != model) {
    throw Refusal(404, "model_not_found",
                  str("there is no model ", shown(name), " here, but '", model, "'."));
  }
}

void read_common(const Json& object, const std::string& model, const Limits& limits, Asked& out) {
  check_model(object, model);
  Request& r = out.request;
  read(object, "max_tokens", 0, kMostTokens, r.max_tokens);
  read(object, "temperature", 0.0, 1000.0, r.sampling.temperature);
  read(object, "top_p", 0.0, 1.0, r.sampling.top_p);
  read(object, "top_k", 0, INT64_MAX, r.sampling.top_k);
  read(object, "min_p", 0.0, 1.0, r.sampling.min_p);
  read(object, "repetition_penalty", 1e-3, 1e3, r.sampling.repetition_penalty);
  const Json& n = at(object, "n");
  const auto samples = as_integer(n);
  if (!n.is_null() && (!samples || *samples < 1 || *samples > limits.samples)) {
    wrong(
        "n", n,
        str("an integer from 1 to ", limits.samples, ", the texts that are written side by side"));
  }
  r.samples = samples.value_or(1);
  std::optional<int64_t> seed;
  read(object, "seed", INT64_MIN, INT64_MAX, seed);
  r.drawn_seed = !seed;
  r.seed = seed ? static_cast<uint64_t>(*seed) : random_bits();
  r.stops = read_stops(object);
  if (const Json& user = at(object, "user"); !user.is_null() && !user.is_string()) {
    wrong("user", user, "a text");
  }
  expect_off(object, "presence_penalty", 0);
  expect_off(object, "frequency_penalty", 0);
  expect_off(object, "logit_bias", Json::object());
  out.stream = read_flag(object, "stream", false);
  const Json& options = at(object, "stream_options");
  if (options.is_null()) return;
  if (!options.is_object()) wrong("stream_options", options, "an object");
  if (!out.stream) refuse("'stream_options' needs 'stream' to be true.");
  check_keys(options, {"include_usage"});
  out.include_usage = read_flag(options, "include_usage", false);
}

uint64_t random_bits() {
  static thread_local std::random_device device;
  return (uint64_t{device()} << 32) | device();
}

Reply error_body(const Refusal& refusal) {
  const char* type = refusal.status == 404   ? "not_found_error"
                     : refusal.status == 429 ? "rate_limit_error"
                     : refusal.status >= 500 ? "server_error"
                                             : "invalid_request_error";
  const std::string message = refusal.what();
  Reply param;
  if (refusal.param) {
    param = *refusal.param;
  } else if (message.starts_with('\'')) {
    param = message.substr(1, message.find('\'', 1) - 1);
  }
  Reply code;
  if (!refusal.code.empty()) code = refusal.code;
  return {{"error", {{"message", message}, {"type", type}, {"param", param}, {"code", code}}}};
}

std::string dump(const Reply& reply) {
  return reply.dump(-1, ' ', false, Reply::error_handler_t::replace);
}

}  // namespace headloom::serve
