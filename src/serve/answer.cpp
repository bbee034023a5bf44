#include "serve/answer.h"

#include <cstdio>
#include <ctime>

namespace headloom::serve {
namespace {

std::string hex(uint64_t bits) {
  char out[17];
  std::snprintf(out, sizeof out, "%016llx", static_cast<unsigned long long>(bits));
  return out;
}

// Of a token with its logprobs, beside its likeliest ones.
constexpr size_t kBytesOfToken = 200, kBytesOfLikeliest = 100;

}  // namespace

AnswerWriter::AnswerWriter(const Codec& codec, const Asked& asked, std::string model,
                           const char* kind, const char* object, const char* chunk_object)
    : codec_(codec),
      logprobs_(asked.request.logprobs.has_value()),
      include_usage_(asked.include_usage),
      model_(std::move(model)),
      id_(kind + hex(random_bits())),
      object_(object),
      chunk_object_(chunk_object),
      created_(static_cast<int64_t>(std::time(nullptr))) {
  for (const auto& prompt : asked.request.prompts) {
    prompt_tokens_ += static_cast<int64_t>(prompt.size());
  }
  choices_.resize(asked.request.prompts.size() * static_cast<size_t>(asked.request.samples));
}

std::string AnswerWriter::text_of(const Event& event) {
  Choice& choice = choice_of(event);
  if (!event.prompt) written_ += static_cast<int64_t>(event.tokens.size());
  std::string text = choice.text.add(event.text);
  if (!event.finish.empty()) text += choice.text.rest();
  return text;
}

std::string AnswerWriter::bytes_of(int64_t id, const std::string& text) const {
  return text.empty() ? codec_.name(id) : text;
}

Reply AnswerWriter::head(bool chunk) const {
  return {{"id", id_},
          {"object", chunk ? chunk_object_ : object_},
          {"created", created_},
          {"model", model_}};
}

Reply AnswerWriter::usage() const {
  return {{"prompt_tokens", prompt_tokens_},
          {"completion_tokens", written_},
          {"total_tokens", prompt_tokens_ + written_}};
}

Reply AnswerWriter::usage_chunk() const {
  Reply out = head(true);
  out["choices"] = Reply::array();
  out["usage"] = usage();
  return out;
}

void AnswerWriter::add(const Event& event) {
  bytes_ += event.text.size();
  if (logprobs_) {
    for (const Token& token : event.tokens) {
      bytes_ += kBytesOfToken + kBytesOfLikeliest * token.top.size();
    }
  }
  if (bytes_ > kMostAnswer) {
    refuse("the answer has more than ", kMostAnswer,
           " bytes; ask for fewer 'max_tokens', or for a 'stream'.");
  }
  Choice& choice = choice_of(event);
  choice.shown += text_of(event);
  if (!event.finish.empty()) choice.finish = event.finish;
  join(choice.logprobs, logprobs_of(event));
}

Reply AnswerWriter::whole() const {
  Reply out = head(false);
  Reply choices = Reply::array();
  for (const Choice& choice : choices_) choices.push_back(whole_choice(choice, choices.size()));
  out["choices"] = std::move(choices);
  out["usage"] = usage();
  return out;
}

}  // namespace headloom::serve
