#include "data/tokenizer.h"

#include <ATen/ATen.h>

#include <algorithm>

namespace headloom::data {
namespace {

class ByteTokenizer final : public Tokenizer {
 public:
  int64_t vocabulary() const override { return 256; }
  int64_t end_token() const override { return 0; }
  at::Tensor encode(std::string_view text) const override {
    at::Tensor tokens = at::empty({static_cast<int64_t>(text.size())}, at::kByte);
    std::copy(text.begin(), text.end(), reinterpret_cast<char*>(tokens.data_ptr<uint8_t>()));
    return tokens;
  }
  std::string decode(const std::vector<int64_t>& tokens) const override {
    std::string text;
    for (int64_t token : tokens) {
      if (token != end_token()) text += static_cast<char>(token);
    }
    return text;
  }
};

}  // namespace

std::shared_ptr<const Tokenizer> byte_tokenizer() { return std::make_shared<ByteTokenizer>(); }

}  // namespace headloom::data
