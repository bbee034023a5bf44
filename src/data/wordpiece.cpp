#include "data/wordpiece.h"

#include <utf8proc.h>

#include "data/unicode.h"

namespace headloom::data {
namespace {

utf8proc_category_t category(char32_t c) {
  return utf8proc_category(static_cast<utf8proc_int32_t>(c));
}

// Control, format, surrogate and private characters, but for the white space among them.
bool is_control(char32_t c) {
  if (c == '\t' || c == '\n' || c == '\r') return false;
  const auto kind = category(c);
  return kind == UTF8PROC_CATEGORY_CC || kind == UTF8PROC_CATEGORY_CF ||
         kind == UTF8PROC_CATEGORY_CS || kind == UTF8PROC_CATEGORY_CO;
}

bool is_ideograph(char32_t c) {
  struct Range {
    char32_t first, last;
  };
  constexpr Range kRanges[] = {{0x4e00, 0x9fff},   {0x3400, 0x4dbf},   {0x20000, 0x2a6df},
                               {0x2a700, 0x2b73f}, {0x2b740, 0x2b81f}, {0x2b920, 0x2ceaf},
                               {0xf900, 0xfaff},   {0x2f800, 0x2fa1f}};
  for (const Range& range : kRanges) {
    if (c >= range.first && c <= range.last) return true;
  }
  return false;
}

bool is_punctuation(char32_t c) {
  if (c < 0x80) {
    return (c >= 0x21 && c <= 0x2f) || (c >= 0x3a && c <= 0x40) || (c >= 0x5b && c <= 0x60) ||
           (c >= 0x7b && c <= 0x7e);
  }
  const auto kind = category(c);
  return kind >= UTF8PROC_CATEGORY_PC && kind <= UTF8PROC_CATEGORY_PO;
}

template <typename F>
void each(std::string_view text, const F& f) {
  for (size_t at = 0; at < text.size();) {
    const CodePoint c = code_point(text.substr(at));
    f(c.value, text.substr(at, c.length));
    at += c.length;
  }
}

}  // namespace

std::string BertNormalizer::operator()(std::string_view text) const {
  std::string out;
  each(text, [&](char32_t c, std::string_view bytes) {
    if (clean_text && (c == 0 || c == 0xfffd || is_control(c))) return;
    if (clean_text && is_space(c)) {
      out += ' ';
    } else if (handle_chinese_chars && is_ideograph(c)) {
      ((out += ' ') += bytes) += ' ';
    } else {
      out += bytes;
    }
  });
  if (strip_accents) {
    const std::string apart = normalize(out, NormalForm::nfd);
    out.clear();
    each(apart, [&](char32_t c, std::string_view bytes) {
      if (category(c) != UTF8PROC_CATEGORY_MN) out += bytes;
    });
  }
  if (lowercase) {
    const std::string upper = std::move(out);
    out.clear();
    each(upper, [&](char32_t c, std::string_view) {
      append_utf8(out, static_cast<char32_t>(utf8proc_tolower(static_cast<utf8proc_int32_t>(c))));
      if (c == 0x130) append_utf8(out, 0x307);  // the one letter that becomes two: I with a dot
    });
  }
  return out;
}

void each_bert_word(std::string_view text, const std::function<void(std::string_view)>& take) {
  size_t begin = 0, end = 0;  // of a word that goes on
  const auto finish = [&] {
    if (end > begin) take(text.substr(begin, end - begin));
  };
  each(text, [&](char32_t c, std::string_view bytes) {
    const auto place = static_cast<size_t>(bytes.data() - text.data());
    if (is_space(c) || is_punctuation(c)) {
      finish();
      if (!is_space(c)) take(bytes);
      begin = end = place + bytes.size();
    } else {
      end = place + bytes.size();
    }
  });
  finish();
}

void WordPieces::encode(std::string_view word, std::vector<int32_t>& out) const {
  size_t characters = 0;
  for (const char c : word) characters += (static_cast<unsigned char>(c) & 0xc0u) != 0x80u;
  const size_t before = out.size();
  for (size_t begin = 0; begin < word.size() && characters <= longest;) {
    // No piece is longer than the rest; the search goes over whole characters.
    std::string piece = (begin > 0 ? prefix : "") + std::string(word.substr(begin));
    const size_t shortest = piece.size() - (word.size() - begin);
    auto found = vocabulary.find(piece);
    while (found == vocabulary.end() && piece.size() > shortest) {
      do {
        piece.pop_back();
      } while (piece.size() > shortest &&
               (static_cast<unsigned char>(word[begin + piece.size() - shortest]) & 0xc0u) ==
                   0x80u);
      if (piece.size() > shortest) found = vocabulary.find(piece);
    }
    if (found == vocabulary.end()) break;
    out.push_back(found->second);
    begin += piece.size() - shortest;
    if (begin == word.size()) return;
  }
  out.resize(before);
  if (!word.empty()) out.push_back(unknown);
}

}  // namespace headloom::data
