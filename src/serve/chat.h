// OpenAI's chat completions as JSON: requests read, answers written. Free of torch.
#pragma once

#include <string>

#include "serve/answer.h"
#include "serve/chat_template.h"

namespace headloom::serve {

// What POST /v1/chat/completions is asked: the messages become one prompt as the template spells
// them. Throws Refusal.
Asked parse_chat(const std::string& body, const Codec& codec, const ChatTemplate& chat,
                 const std::string& model, const Limits& limits);
// The text that the "messages" of a body become, alone.
std::string parse_and_spell(const std::string& body, const ChatTemplate& chat,
                            const std::string& model);

class ChatCompletion final : public AnswerWriter {
 public:
  ChatCompletion(const Codec& codec, const Asked& asked, std::string model)
      : AnswerWriter(codec, asked, std::move(model), "chatcmpl-", "chat.completion",
                     "chat.completion.chunk") {}

  std::vector<Reply> chunks(const Event& event) override;

 private:
  Reply chunk(const Event& event, Reply delta, Reply logprobs, Reply finish) const;
  Reply token_of(const std::string& bytes, float logprob) const;
  Reply logprobs_of(const Event& event) override;
  void join(Reply& logprobs, Reply more) const override;
  Reply whole_choice(const Choice& choice, size_t index) const override;
};

}  // namespace headloom::serve
