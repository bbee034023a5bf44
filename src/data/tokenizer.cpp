#include "data/tokenizer.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <climits>

#include "core/error.h"
#include "core/files.h"
#include "data/sentencepiece.h"
#include "data/tokenizer_json.h"

namespace headloom::data {
namespace {

template <typename Int>
at::Tensor as_tensor(const std::vector<Int>& tokens, int64_t vocabulary) {
  const at::Tensor wide = at::from_blob(const_cast<Int*>(tokens.data()),
                                        {static_cast<int64_t>(tokens.size())}, at::kInt);
  const auto type = vocabulary <= 256 ? at::kByte : vocabulary <= SHRT_MAX ? at::kShort : at::kInt;
  return wide.to(at::TensorOptions().dtype(type), /*non_blocking=*/false, /*copy=*/true);
}

// Of tokens that a file does not name.
std::string unnamed(int64_t token) { return str("<|token ", token, "|>"); }

class ByteTokenizer final : public Tokenizer {
 public:
  ByteTokenizer() : Tokenizer("") {}

  int64_t vocabulary() const override { return 256; }
  int64_t end_token() const override { return 0; }
  at::Tensor encode(std::string_view text) const override {
    at::Tensor tokens = at::empty({static_cast<int64_t>(text.size())}, at::kByte);
    std::copy(text.begin(), text.end(), reinterpret_cast<char*>(tokens.data_ptr<uint8_t>()));
    return tokens;
  }
  std::string piece(int64_t token) const override {
    return token > 0 && token < 256 ? std::string(1, static_cast<char>(token)) : "";
  }
  std::string name(int64_t token) const override {
    return token == 0 ? std::string(1, '\0') : unnamed(token);
  }
};

class HuggingFaceTokenizer final : public Tokenizer {
 public:
  HuggingFaceTokenizer(const std::string& file, const std::string& path)
      : Tokenizer(file), json_(file, path) {}

  int64_t vocabulary() const override { return json_.vocabulary() + (json_.end_token() ? 0 : 1); }
  int64_t end_token() const override { return json_.end_token().value_or(json_.vocabulary()); }
  std::optional<int64_t> start_token() const override { return json_.start_token(); }
  std::optional<int64_t> mask_token() const override { return json_.mask_token(); }
  at::Tensor encode(std::string_view text) const override {
    return as_tensor(json_.encode(text), vocabulary());
  }
  std::string piece(int64_t token) const override {
    const bool text = token >= 0 && token < json_.vocabulary() && !json_.is_special(token);
    return text ? json_.piece(token) : "";
  }
  std::string name(int64_t token) const override {
    const bool named = token >= 0 && token < json_.vocabulary() && !json_.piece(token).empty();
    return named ? json_.piece(token) : unnamed(token);
  }
  std::string decode(const std::vector<int64_t>& tokens) const override {
    const std::string text = Tokenizer::decode(tokens);
    return json_.is_word_piece() && text.starts_with(' ') ? text.substr(1) : text;
  }

 private:
  const JsonTokenizer json_;
};

class SentencePieceTokenizer final : public Tokenizer {
 public:
  SentencePieceTokenizer(const std::string& file, const std::string& path)
      : Tokenizer(file), model_(sentencepiece().read(file)) {
    require(model_ != nullptr, path, ": is not a SentencePiece model, or it is damaged.");
    size_ = model_->size();
  }

  int64_t vocabulary() const override { return size_ + (model_->end() >= 0 ? 0 : 1); }
  int64_t end_token() const override { return model_->end() >= 0 ? model_->end() : size_; }
  std::optional<int64_t> start_token() const override {
    if (model_->start() < 0) return std::nullopt;
    return model_->start();
  }
  std::vector<int64_t> unfound() const override {
    std::vector<int64_t> out;
    for (int token = 0; token < size_; ++token) {
      if (model_->is_control(token)) out.push_back(token);
    }
    return out;
  }
  at::Tensor encode(std::string_view text) const override {
    return as_tensor(model_->encode(text), vocabulary());
  }
  std::string piece(int64_t token) const override {
    if (token < 0 || token >= size_) return "";
    const int id = static_cast<int>(token);
    if (model_->is_control(id)) return "";
    const std::string name = model_->name(id);
    if (model_->is_byte(id)) {  // <0xNN>
      return std::string(1, static_cast<char>(std::stoi(name.substr(3, 2), nullptr, 16)));
    }
    constexpr std::string_view kSpace = "\xe2\x96\x81";
    std::string text;
    for (size_t at = 0; at < name.size();) {
      const bool space = name.compare(at, kSpace.size(), kSpace) == 0;
      text += space ? ' ' : name[at];
      at += space ? kSpace.size() : 1;
    }
    return text;
  }
  std::string name(int64_t token) const override {
    const bool named = token >= 0 && token < size_;
    return named ? model_->name(static_cast<int>(token)) : unnamed(token);
  }
  std::string decode(const std::vector<int64_t>& tokens) const override {
    std::vector<int> ids;
    for (const int64_t token : tokens) {
      if (token >= 0 && token < size_) ids.push_back(static_cast<int>(token));
    }
    return model_->decode(ids);
  }

 private:
  const std::unique_ptr<SentencePiece> model_;
  int64_t size_ = 0;
};

}  // namespace

std::vector<int64_t> tokens_of(const Tokenizer& tokenizer, std::string_view text) {
  const at::Tensor tokens = tokenizer.encode(text).to(at::kLong).contiguous();
  const int64_t* first = tokens.const_data_ptr<int64_t>();
  return {first, first + tokens.numel()};
}

std::shared_ptr<const Tokenizer> byte_tokenizer() { return std::make_shared<ByteTokenizer>(); }

std::shared_ptr<const Tokenizer> make_tokenizer(const std::string& name) {
  if (name == "bytes") return byte_tokenizer();
  if (name.ends_with(".json")) return std::make_shared<HuggingFaceTokenizer>(read_file(name), name);
  if (name.ends_with(".model"))
    return std::make_shared<SentencePieceTokenizer>(read_file(name), name);
  usage_error("the tokenizer is '", name,
              "', expected \"bytes\", a tokenizer.json or a SentencePiece *.model.");
}

}  // namespace headloom::data
