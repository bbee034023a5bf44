// torch.classes.headloom.Tokenizer: text as tokens and back.
#include <ATen/ATen.h>
#include <torch/custom_class.h>

#include "data/tokenizer.h"
#include "functional_call.h"

namespace headloom::python {
namespace {

Tensor as_bytes(const std::string& text) {
  const Tensor out = at::empty({static_cast<int64_t>(text.size())}, at::kByte);
  std::copy(text.begin(), text.end(), reinterpret_cast<char*>(out.mutable_data_ptr<uint8_t>()));
  return out;
}

// Text goes in and out as bytes [n] uint8: what a model writes need not be UTF-8.
class Tokenizer : public torch::CustomClassHolder {
 public:
  explicit Tokenizer(const std::string& name) {
    try {
      tokenizer_ = data::make_tokenizer(name);
    } catch (const UsageError& error) {
      throw_value_error(error);
    }
  }
  // [n] int64.
  Tensor encode(const Tensor& bytes) const {
    const Tensor text = bytes.contiguous();
    return tokenizer_
        ->encode({reinterpret_cast<const char*>(text.const_data_ptr<uint8_t>()),
                  static_cast<size_t>(text.numel())})
        .to(at::kLong);
  }
  Tensor decode(const std::vector<int64_t>& tokens) const {
    return as_bytes(tokenizer_->decode(tokens));
  }
  Tensor piece(int64_t token) const { return as_bytes(tokenizer_->piece(token)); }
  int64_t vocabulary() const { return tokenizer_->vocabulary(); }
  int64_t end_token() const { return tokenizer_->end_token(); }
  std::optional<int64_t> start_token() const { return tokenizer_->start_token(); }

 private:
  std::shared_ptr<const data::Tokenizer> tokenizer_;
};

TORCH_LIBRARY_FRAGMENT(headloom, m) {
  m.class_<Tokenizer>("Tokenizer")
      .def(torch::init<const std::string&>())
      .def("encode", &Tokenizer::encode)
      .def("decode", &Tokenizer::decode)
      .def("piece", &Tokenizer::piece)
      .def("vocabulary", &Tokenizer::vocabulary)
      .def("end_token", &Tokenizer::end_token)
      .def("start_token", &Tokenizer::start_token);
}

}  // namespace
}  // namespace headloom::python
