// The keys of a request's JSON object. Whatever is wrong throws a Refusal that names the key, what
// it holds and what was expected. Free of torch.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "serve/limits.h"
#include "serve/request.h"
#include "train/codec.h"

namespace headloom::serve {

using Json = nlohmann::json;           // read
using Reply = nlohmann::ordered_json;  // written

template <typename... Args>
[[noreturn]] void refuse(const Args&... args) {
  throw Refusal(400, "", str(args...));
}
[[noreturn]] void wrong(const std::string& key, const Json& value, const std::string& expected);

// The body as an object with no keys but `known`.
Json parse_object(const std::string& body, const std::vector<std::string>& known);
void check_keys(const Json& object, const std::vector<std::string>& known);

// The value of a key, or null.
const Json& at(const Json& object, const char* key);
// A value as it stands in a message: short, valid UTF-8.
std::string shown(const Json& value);
// A text of the client's as it stands in a message without quotes: the same, on one line.
std::string shown_bare(const std::string& text);

// Leave `out` as it is where the key is absent or null.
void read(const Json& object, const char* key, int64_t least, int64_t most, int64_t& out);
void read(const Json& object, const char* key, int64_t least, int64_t most,
          std::optional<int64_t>& out);
void read(const Json& object, const char* key, double least, double most, double& out);
bool read_flag(const Json& object, const char* key, bool otherwise);
std::string read_text(const Json& object, const char* key);
// At most `most` of them.
std::vector<int64_t> read_tokens(const Json& list, const std::string& key, int64_t most);
// What others offer and we do not: taken where it changes nothing.
void expect_off(const Json& object, const char* key, const Json& off);

// What completions and chats have in common.
struct Asked {
  Request request = {};
  bool stream = false;
  bool include_usage = false;  // of a stream, at its end
};
// Refuses a body that asks for another model than the one that is served, `model`.
void check_model(const Json& object, const std::string& model);
// Names of the keys that read_common() reads, and `more`.
std::vector<std::string> common_keys(std::vector<std::string> more);
// `model`: the name of the one that is served. Without a seed one is drawn.
void read_common(const Json& object, const std::string& model, const Limits& limits, Asked& out);

uint64_t random_bits();

// {"error": {...}}.
Reply error_body(const Refusal& refusal);
// Valid UTF-8 whatever the strings hold.
std::string dump(const Reply& reply);

}  // namespace headloom::serve
