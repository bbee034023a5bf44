// How a chat becomes one text: the template that stands beside a run's tokenizer. Free of torch.
#pragma once

#include <ctime>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "serve/jinja/template.h"
#include "train/codec.h"

namespace headloom::serve {

class ChatTemplate {
 public:
  // `codec` outlives this. Of the folder of a run: chat_template.jinja, else "chat_template" of
  // tokenizer_config.json, a text or a list of named ones, of which "default" is taken. Where there
  // is none, or none that can be read, missing() says why and the others throw.
  ChatTemplate(const std::string& folder, const Codec& codec);

  // A sentence; empty where there is a template.
  const std::string& missing() const { return missing_; }
  // The messages up to where the assistant speaks next; where the template knows no parts of a
  // content, they are joined by line breaks. `now`: what strftime_now() says; absent:
  // the clock. Throws Refusal for what the template refuses, and for what it uses and is not
  // supported.
  std::string spelled(const nlohmann::ordered_json& messages,
                      std::optional<std::time_t> now = {}) const;
  // The tokens of the same.
  std::vector<int64_t> encoded(const nlohmann::ordered_json& messages) const {
    return codec_.encode_spelled(spelled(messages), unfound_);
  }
  // Tokens that end an answer beside the tokenizer's own: the "eos_token" of tokenizer_config.json
  // and the "eos_token_id" of generation_config.json.
  const std::vector<int64_t>& ends() const { return ends_; }

 private:
  void read(const std::string& folder);

  const Codec& codec_;
  std::string missing_, path_;
  bool takes_parts_ = false;  // it looks at the type of a content's parts
  std::optional<jinja::Template> template_;
  std::vector<std::pair<std::string, std::string>> special_;  // "bos_token" and its name
  std::vector<NamedToken> unfound_;
  std::vector<int64_t> ends_;
};

}  // namespace headloom::serve
