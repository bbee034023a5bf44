// OpenAI's completions as JSON: requests read, answers written. Free of torch.
#pragma once

#include <string>

#include "serve/answer.h"

namespace headloom::serve {

// What POST /v1/completions is asked. Throws Refusal.
Asked parse_completion(const std::string& body, const Codec& codec, const std::string& model,
                       const Limits& limits);

class Completion final : public AnswerWriter {
 public:
  Completion(const Codec& codec, const Asked& asked, std::string model)
      : AnswerWriter(codec, asked, std::move(model), "cmpl-", "text_completion",
                     "text_completion") {}

  std::vector<Reply> chunks(const Event& event) override;

 private:
  Reply logprobs_of(const Event& event) override;
  void join(Reply& logprobs, Reply more) const override;
  Reply whole_choice(const Choice& choice, size_t index) const override;
  std::string token_name(int64_t id, const std::string& text) const;
};

}  // namespace headloom::serve
