// SentencePiece behind an interface. Its library exports symbols that PyTorch's libraries export
// too, so nothing here links it: sentencepiece_library.cpp is a shared library of its own, which
// sentencepiece() opens apart.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace headloom::data {

// A SentencePiece model that was read.
class SentencePiece {
 public:
  virtual ~SentencePiece() = default;
  virtual int size() const = 0;   // of the vocabulary
  virtual int start() const = 0;  // the token before a text, or -1
  virtual int end() const = 0;    // the token after a text, or -1
  virtual std::vector<int> encode(std::string_view text) const = 0;
  virtual std::string decode(const std::vector<int>& tokens) const = 0;
  // Of a token below size().
  virtual std::string name(int token) const = 0;
  virtual bool is_control(int token) const = 0;
  virtual bool is_byte(int token) const = 0;  // its name is then <0xNN>
};

struct SentencePieceLibrary {
  // Null where `bytes` are not a model.
  std::unique_ptr<SentencePiece> (*read)(std::string_view bytes);
  // Learns a model from lines and puts its bytes into `model`. `next_line` gives null at the end.
  // Returns what is wrong, or "".
  std::string (*learn)(const std::unordered_map<std::string, std::string>& options,
                       const std::function<const std::string*()>& next_line, std::string& model);
};

// Opened at the first call. Throws Error where the library cannot be loaded.
const SentencePieceLibrary& sentencepiece();

}  // namespace headloom::data
