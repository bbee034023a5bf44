// An answer as it comes together from the engine's news: what completions and chats have in common.
// Free of torch.
#pragma once

#include <string>
#include <vector>

#include "serve/fields.h"

namespace headloom::serve {

class AnswerWriter {
 public:
  virtual ~AnswerWriter() = default;

  // What a stream says of an event.
  virtual std::vector<Reply> chunks(const Event& event) = 0;
  // And at its end, where it was asked for.
  Reply usage_chunk() const;
  bool include_usage() const { return include_usage_; }
  // All of a text's events together. Throws Refusal where the answer becomes too large.
  void add(const Event& event);
  Reply whole() const;

 protected:
  struct Choice {
    Utf8Stream text, tokens;  // what is shown; and all that the tokens say, for their offsets
    std::string shown;
    Reply logprobs, finish;
    bool begun = false;  // a stream has said something of it
  };

  // `kind`: what ids begin with.
  AnswerWriter(const Codec& codec, const Asked& asked, std::string model, const char* kind,
               const char* object, const char* chunk_object);

  // The text that an event adds.
  std::string text_of(const Event& event);
  virtual Reply logprobs_of(const Event& event) = 0;
  // Puts the logprobs of an event after those of earlier ones.
  virtual void join(Reply& logprobs, Reply more) const = 0;
  virtual Reply whole_choice(const Choice& choice, size_t index) const = 0;
  Choice& choice_of(const Event& event) { return choices_[static_cast<size_t>(event.choice)]; }
  Reply head(bool chunk) const;
  // A token's text, or its name where it stands for none.
  std::string bytes_of(int64_t id, const std::string& text) const;

  const Codec& codec_;
  const bool logprobs_, include_usage_;

 private:
  Reply usage() const;

  const std::string model_, id_;
  const char *const object_, *const chunk_object_;
  const int64_t created_;
  int64_t prompt_tokens_ = 0, written_ = 0;
  size_t bytes_ = 0;  // about, of what is kept
  std::vector<Choice> choices_;
};

}  // namespace headloom::serve
