#include "data/tokenizer_json.h"

#include <utf8proc.h>

#include <algorithm>
#include <utility>

#include "core/error.h"
#include "core/json_text.h"

namespace headloom::data {
namespace {

using Json = nlohmann::json;

// GPT-2's words: what ByteLevel cuts by, unless told not to.
constexpr const char* kWords =
    "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+";

// How the families that are read call the token that ends a document.
// The last is that of byte_tokenizer_json().
constexpr std::string_view kEnds[] = {"<|endoftext|>", "<|end_of_text|>",
                                      "</s>",          "<|eos|>",
                                      "<eos>",         "[EOS]",
                                      "<|im_end|>",    "<｜end▁of▁sentence｜>",
                                      "[SEP]",         std::string_view("\0", 1)};
constexpr std::string_view kMasks[] = {"[MASK]", "<mask>"};

constexpr size_t kMostSteps = 64;  // of a pre_tokenizer
// Words longer than this are seldom met again.
constexpr size_t kLongestKnown = 64;
constexpr size_t kMostKnown = size_t{1} << 17;

// GPT-2's names of the bytes: printable characters stand for themselves, the others for U+0100 and
// on.
const std::array<char32_t, 256>& byte_names() {
  static const std::array<char32_t, 256> names = [] {
    std::array<char32_t, 256> out{};
    char32_t next = 0x100;
    for (char32_t b = 0; b < 256; ++b) {
      const bool printable =
          (b >= 0x21 && b <= 0x7e) || (b >= 0xa1 && b <= 0xac) || (b >= 0xae && b <= 0xff);
      out[b] = printable ? b : next++;
    }
    return out;
  }();
  return names;
}

std::string named_bytes(std::string_view bytes) {
  std::string out;
  for (const char c : bytes) append_utf8(out, byte_names()[static_cast<unsigned char>(c)]);
  return out;
}

// The bytes that `token` names, or the token itself where it names none.
std::string bytes_of_names(const std::string& token) {
  static const std::unordered_map<char32_t, char> byte = [] {
    std::unordered_map<char32_t, char> out;
    for (size_t b = 0; b < 256; ++b) out[byte_names()[b]] = static_cast<char>(b);
    return out;
  }();
  std::string out;
  for (size_t at = 0; at < token.size();) {
    const CodePoint c = code_point(std::string_view(token).substr(at));
    const auto found = byte.find(c.value);
    if (c.length == 0 || found == byte.end()) return token;
    out += found->second;
    at += c.length;
  }
  return out;
}

bool is_word(char32_t c) {
  switch (utf8proc_category(static_cast<utf8proc_int32_t>(c))) {
    case UTF8PROC_CATEGORY_LU:
    case UTF8PROC_CATEGORY_LL:
    case UTF8PROC_CATEGORY_LT:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_LO:
    case UTF8PROC_CATEGORY_MN:
    case UTF8PROC_CATEGORY_MC:
    case UTF8PROC_CATEGORY_ME:
    case UTF8PROC_CATEGORY_ND:
    case UTF8PROC_CATEGORY_NL:
    case UTF8PROC_CATEGORY_PC:
      return true;
    default:
      return c == 0x200c || c == 0x200d;
  }
}

// The last character of well-formed text, which must not be empty.
CodePoint last_code_point(std::string_view text) {
  size_t begin = text.size() - 1;
  while (begin > 0 && (static_cast<unsigned char>(text[begin]) & 0xc0u) == 0x80u) --begin;
  return code_point(text.substr(begin));
}

// --- Reading the file -------------------------------------------------------------------------

std::string type_of(const JsonPart& part) { return part.get("type").text(); }
std::string type_or_absent(const JsonPart& part) {
  return part.absent() ? "absent" : type_of(part);
}

bool is_set(const JsonPart& part) {
  const Json& value = part.raw();
  return !value.is_null() && value != "" && value != 0 && value != false;
}

}  // namespace

struct JsonTokenizer::Reader {
  explicit Reader(JsonTokenizer& tokenizer) : out(tokenizer) {}

  void read(const JsonPart& file) {
    const JsonPart model = file.get("model"), cutting = file.get("pre_tokenizer"),
                   decoder = file.get("decoder");
    model.table();
    const auto decodes_as = [&](const char* type) {
      require(decoder.absent() || type_of(decoder) == type, "its decoder is ",
              type_or_absent(decoder), ", expected ", type);
    };
    if (!model.get("type").absent() && type_of(model) == "WordPiece") {
      decodes_as("WordPiece");
      read_word_pieces(model, decoder);
      read_bert(file.get("normalizer"), cutting);
    } else {
      read_model(model);
      read_normalizer(file.get("normalizer"));
      read_pre_tokenizer(cutting);
      require(bytes_, "its pre_tokenizer is ", type_or_absent(cutting),
              ", expected one that ends in ByteLevel");
      decodes_as("ByteLevel");
    }
    read_added(file.get("added_tokens"));
    read_template(file.get("post_processor"));
    out.end_ = special(kEnds);
    out.mask_ = special(kMasks);
  }

 private:
  // The first of `names` that is a special token.
  template <size_t n>
  std::optional<int64_t> special(const std::string_view (&names)[n]) const {
    for (const std::string_view name : names) {
      for (size_t i = 0; i < out.pieces_.size(); ++i) {
        if (out.special_[i] && out.pieces_[i] == name) return static_cast<int64_t>(i);
      }
    }
    return std::nullopt;
  }

  void read_word_pieces(const JsonPart& model, const JsonPart& decoder) {
    WordPieces& words = out.words_.emplace();
    words.prefix = model.get("continuing_subword_prefix").text();
    const int64_t longest = model.get("max_input_chars_per_word").whole();
    require(longest >= 1, "'model.max_input_chars_per_word' is ", longest, ", expected at least 1");
    words.longest = static_cast<size_t>(longest);
    const bool cleanup = decoder.absent() || decoder.get("cleanup").flag(true);
    const Json& vocabulary = model.get("vocab").table();
    for (const auto& [token, id] : vocabulary.items()) {
      words.vocabulary[token] = number(id, vocabulary.size());
      const bool inside = !words.prefix.empty() && token.starts_with(words.prefix);
      const bool ends = cleanup && (token == "." || token == "?" || token == "!" || token == ",");
      name(words.vocabulary[token], inside ? token.substr(words.prefix.size())
                                    : ends ? token
                                           : " " + token);
    }
    const std::string unknown = model.get("unk_token").text();
    const auto found = words.vocabulary.find(unknown);
    require(found != words.vocabulary.end(), "the unknown token, '", unknown,
            "', is not in its vocabulary");
    words.unknown = found->second;
  }

  void read_bert(const JsonPart& normalizer, const JsonPart& cutting) {
    if (!normalizer.absent()) {
      require(type_of(normalizer) == "BertNormalizer", "its normalizer is ", type_of(normalizer),
              ", expected BertNormalizer or none");
      BertNormalizer& bert = out.bert_.emplace();
      bert.clean_text = normalizer.get("clean_text").flag(true);
      bert.handle_chinese_chars = normalizer.get("handle_chinese_chars").flag(true);
      bert.lowercase = normalizer.get("lowercase").flag(true);
      bert.strip_accents = normalizer.get("strip_accents").flag(bert.lowercase);
    }
    require(type_or_absent(cutting) == "BertPreTokenizer", "its pre_tokenizer is ",
            type_or_absent(cutting), ", expected BertPreTokenizer");
  }

  void read_model(const JsonPart& model) {
    const std::string type = model.get("type").absent() ? "BPE" : type_of(model);
    require(type == "BPE", "its model is ", type, ", expected BPE or WordPiece");
    for (const char* key : {"dropout", "continuing_subword_prefix", "end_of_word_suffix"}) {
      require(!is_set(model.get(key)), "its model sets '", key, "', expected it absent");
    }
    const Json& vocabulary = model.get("vocab").table();
    const Json& merges = model.get("merges").list();
    BytePairs& pairs = out.pairs_;
    pairs.vocabulary.reserve(vocabulary.size());
    for (const auto& [token, id] : vocabulary.items()) {
      pairs.vocabulary[token] = number(id, vocabulary.size());
      name(pairs.vocabulary[token], bytes_of_names(token));
    }
    pairs.whole_words = model.get("ignore_merges").flag(false);
    pairs.byte_fallback = model.get("byte_fallback").flag(false);
    pairs.fuse_unknown = model.get("fuse_unk").flag(false);
    if (is_set(model.get("unk_token"))) {
      pairs.unknown = known(model.get("unk_token").text(), "the unknown token");
    }
    int32_t rank = 0;
    for (const Json& merge : merges) {
      std::string left, right;
      if (merge.is_string()) {
        const std::string both = merge.get<std::string>();
        const size_t space = both.find(' ');
        require(space != std::string::npos && both.find(' ', space + 1) == std::string::npos,
                "its merge ", rank, " is '", both, "', expected two tokens with a space between");
        left = both.substr(0, space);
        right = both.substr(space + 1);
      } else {
        require(
            merge.is_array() && merge.size() == 2 && merge[0].is_string() && merge[1].is_string(),
            "its merge ", rank, " is no pair of tokens");
        left = merge[0].get<std::string>();
        right = merge[1].get<std::string>();
      }
      const int32_t a = known(left, "a token that is merged"),
                    b = known(right, "a token that is merged"),
                    both = known(left + right, "the result of a merge");
      pairs.merges[BytePairs::key(a, b)] = {rank++, both};
    }
  }

  template <typename Read>
  static void each(const JsonPart& list, const Read& read) {
    for (size_t i = 0; i < list.list().size(); ++i) read(list.get(i));
  }

  void read_normalizer(const JsonPart& part) {
    if (part.absent()) return;
    const std::string type = type_of(part);
    if (type == "Sequence") {
      each(part.get("normalizers"), [&](const JsonPart& inner) { read_normalizer(inner); });
    } else if (type == "NFC") {
      out.forms_.push_back(NormalForm::nfc);
    } else if (type == "NFD") {
      out.forms_.push_back(NormalForm::nfd);
    } else if (type == "NFKC") {
      out.forms_.push_back(NormalForm::nfkc);
    } else if (type == "NFKD") {
      out.forms_.push_back(NormalForm::nfkd);
    } else {
      fail("its normalizer is ", type, ", expected NFC, NFD, NFKC, NFKD or none");
    }
  }

  void read_pre_tokenizer(const JsonPart& part) {
    if (part.absent()) return;
    const std::string type = type_of(part);
    require(!bytes_, "its pre_tokenizer has ", type, " after ByteLevel, expected nothing there");
    // Each step cuts inside the pieces of the one before it, by a call of its own.
    require(out.steps_.size() < kMostSteps, "its pre_tokenizer has more than ", kMostSteps,
            " steps");
    if (type == "Sequence") {
      each(part.get("pretokenizers"), [&](const JsonPart& inner) { read_pre_tokenizer(inner); });
    } else if (type == "Split") {
      const JsonPart regex = part.get("pattern").get("Regex");
      out.steps_.push_back(
          {.pattern = regex.absent() ? Regex::literal(part.get("pattern").get("String").text())
                                     : Regex(regex.text()),
           .behavior = behavior(part.get("behavior").text()),
           .invert = part.get("invert").flag(false)});
    } else if (type == "Digits") {
      out.steps_.push_back({.pattern = Regex("\\p{N}"),
                            .behavior = part.get("individual_digits").flag(false)
                                            ? Behavior::isolated
                                            : Behavior::contiguous});
    } else if (type == "ByteLevel") {
      bytes_ = true;
      out.prefix_space_ = part.get("add_prefix_space").flag(true);
      if (part.get("use_regex").flag(true)) out.byte_step_ = Step{.pattern = Regex(kWords)};
    } else {
      fail("its pre_tokenizer has ", type, ", expected Split, Digits or ByteLevel");
    }
  }

  static Behavior behavior(const std::string& name) {
    if (name == "Removed") return Behavior::removed;
    if (name == "Isolated") return Behavior::isolated;
    if (name == "MergedWithPrevious") return Behavior::merged_with_previous;
    if (name == "MergedWithNext") return Behavior::merged_with_next;
    if (name == "Contiguous") return Behavior::contiguous;
    fail("its pre_tokenizer cuts by '", name, "', expected Removed, Isolated, MergedWithPrevious, ",
         "MergedWithNext or Contiguous");
  }

  void read_added(const JsonPart& tokens) {
    if (tokens.absent()) return;
    const size_t count = out.pieces_.size() + tokens.size();
    each(tokens, [&](const JsonPart& entry) {
      Added token{.content = entry.get("content").text(),
                  .id = number(entry.get("id").raw(), count),
                  .single_word = entry.get("single_word").flag(false),
                  .lstrip = entry.get("lstrip").flag(false),
                  .rstrip = entry.get("rstrip").flag(false)};
      const bool special = entry.get("special").flag(false);
      name(token.id, special      ? token.content
                     : out.words_ ? " " + token.content
                                  : bytes_of_names(token.content));
      out.special_[static_cast<size_t>(token.id)] = special;
      const bool normal = entry.get("normalized").flag(!special);
      if (normal) token.content = out.normalized(token.content);
      if (token.content.empty()) return;
      auto& table = normal ? out.normal_ : out.raw_;
      table[static_cast<unsigned char>(token.content[0])].push_back(token);
    });
    for (AddedTable* table : {&out.raw_, &out.normal_}) {
      for (auto& row : *table) {
        std::stable_sort(row.begin(), row.end(), [](const Added& a, const Added& b) {
          return a.content.size() > b.content.size();
        });
      }
    }
  }

  // The token that a post_processor puts first.
  void read_template(const JsonPart& part) {
    if (part.absent()) return;
    const std::string type = type_of(part);
    if (type == "Sequence") {
      each(part.get("processors"), [&](const JsonPart& inner) { read_template(inner); });
    } else if (type == "TemplateProcessing") {
      if (part.get("single").list().empty()) return;
      const JsonPart first = part.get("single").get(size_t{0}).get("SpecialToken");
      if (first.absent()) return;
      const JsonPart special = part.get("special_tokens").get(first.get("id").text());
      out.start_ = number(special.get("ids").get(size_t{0}).raw(), out.pieces_.size());
    } else if (type == "BertProcessing" || type == "RobertaProcessing") {
      out.start_ = number(part.get("cls").get(size_t{1}).raw(), out.pieces_.size());
    } else if (type != "ByteLevel") {  // which moves no token
      fail("its post_processor is '", type, "', expected TemplateProcessing, BertProcessing, ",
           "RobertaProcessing, ByteLevel or a Sequence of them");
    }
  }

  // An id among about `count` others: one far beyond would cost memory.
  static int32_t number(const Json& id, size_t count) {
    require(id.is_number_integer() && id.get<int64_t>() >= 0 &&
                id.get<int64_t>() < static_cast<int64_t>(2 * count + 65536),
            "a token has the id ", id.dump(), ", expected one from 0 to about ", count);
    return static_cast<int32_t>(id.get<int64_t>());
  }

  int32_t known(const std::string& token, const char* what) const {
    const auto found = out.pairs_.vocabulary.find(token);
    require(found != out.pairs_.vocabulary.end(), what, ", '", token,
            "', is not in its vocabulary");
    return found->second;
  }

  void name(int32_t id, std::string piece) {
    const auto place = static_cast<size_t>(id);
    if (place >= out.pieces_.size()) {
      out.pieces_.resize(place + 1);
      out.special_.resize(place + 1, false);
    }
    out.pieces_[place] = std::move(piece);
  }

  JsonTokenizer& out;
  bool bytes_ = false;  // ByteLevel was met
};

JsonTokenizer::JsonTokenizer(const std::string& text, const std::string& path) {
  const Json file = parse_json(text, path);
  require(file.is_object(), path, ": is JSON, but not an object ({...}).");
  try {
    Reader(*this).read({file, ""});
  } catch (const Error& error) {
    fail(path, ": ", error.what(), ".");
  }
}

// --- Encoding ---------------------------------------------------------------------------------

std::string JsonTokenizer::normalized(std::string_view text) const {
  if (!bert_ && forms_.empty()) return std::string(text);
  // In parts that end with a line, which no normal form joins to the next: what is made of a whole
  // book on the way has four bytes a character.
  constexpr size_t kPart = size_t{1} << 16;
  std::string out;
  for (size_t begin = 0; begin < text.size();) {
    const size_t line = text.find('\n', std::min(begin + kPart, text.size()));
    const size_t end = line == std::string_view::npos ? text.size() : line + 1;
    const std::string_view part = text.substr(begin, end - begin);
    std::string normal = bert_ ? (*bert_)(part) : std::string(part);
    for (const NormalForm form : forms_) normal = normalize(normal, form);
    out += normal;
    begin = end;
  }
  return out;
}

template <typename Id, typename Text>
void JsonTokenizer::split_added(const AddedTable& table, std::string_view text, const Id& id,
                                const Text& rest) {
  size_t from = 0;  // what is before was handed on
  for (size_t at = 0; at < text.size();) {
    const Added* found = nullptr;
    for (const Added& token : table[static_cast<unsigned char>(text[at])]) {
      if (text.substr(at).starts_with(token.content)) {
        found = &token;
        break;
      }
    }
    if (found == nullptr) {
      ++at;
      continue;
    }
    size_t begin = at, end = at + found->content.size();
    at = end;
    const std::string_view before = text.substr(0, begin), after = text.substr(end);
    if (found->single_word && ((!before.empty() && is_word(last_code_point(before).value)) ||
                               (!after.empty() && is_word(code_point(after).value)))) {
      continue;
    }
    if (found->lstrip) {
      if (begin < from) continue;
      while (begin > from) {
        const CodePoint c = last_code_point(text.substr(from, begin - from));
        if (!is_space(c.value)) break;
        begin -= c.length;
      }
    }
    if (found->rstrip) {
      // A token of white space is found there all the same unless it strips to its left, as by the
      // tokenizers package.
      while (end < text.size() && is_space(code_point(text.substr(end)).value)) {
        end += code_point(text.substr(end)).length;
      }
    }
    if (begin > from) rest(text.substr(from, begin - from));
    id(found->id);
    from = end;
  }
  if (from < text.size()) rest(text.substr(from));
}

template <typename Take>
void JsonTokenizer::cut(const Step& step, std::string_view word, const Take& take) {
  struct Part {
    size_t begin, end;
    bool match;
  };
  std::optional<Part> last;  // which what comes may continue
  const auto finish = [&] {
    if (last && last->end > last->begin) take(word.substr(last->begin, last->end - last->begin));
  };
  const auto add = [&](const Part& part) {
    if (step.behavior == Behavior::removed && part.match) return;
    bool joins = false;
    if (last) {
      switch (step.behavior) {
        case Behavior::contiguous:
          joins = last->match == part.match;
          break;
        case Behavior::merged_with_previous:  // one match is taken, the next begins a new part
          joins = part.match && !last->match;
          break;
        case Behavior::merged_with_next:
          joins = !part.match && last->match;
          break;
        default:
          break;
      }
    }
    if (joins) {
      last->end = part.end;
      last->match = part.match;
    } else {
      finish();
      last = part;
    }
  };
  size_t from = 0;
  step.pattern.each_match(word, [&](Regex::Range match) {
    if (match.begin > from) add({from, match.begin, step.invert});
    add({match.begin, match.end, !step.invert});
    from = match.end;
  });
  if (from < word.size()) add({from, word.size(), step.invert});
  finish();
}

void JsonTokenizer::encode_word(std::string_view word, Words& known,
                                std::vector<int32_t>& out) const {
  const auto found = known.find(word);
  if (found != known.end()) {
    out.insert(out.end(), found->second.begin(), found->second.end());
    return;
  }
  const size_t before = out.size();
  if (words_) {
    words_->encode(word, out);
  } else {
    pairs_.encode(named_bytes(word), out);
  }
  if (word.size() <= kLongestKnown && known.size() < kMostKnown) {
    known.emplace(
        word, std::vector<int32_t>(out.begin() + static_cast<std::ptrdiff_t>(before), out.end()));
  }
}

void JsonTokenizer::encode_normal(std::string_view text, size_t step, Words& known,
                                  std::vector<int32_t>& out) const {
  const auto encode = [&](std::string_view word) { encode_word(word, known, out); };
  if (words_) {
    each_bert_word(text, encode);
  } else if (step < steps_.size()) {
    cut(steps_[step], text,
        [&](std::string_view word) { encode_normal(word, step + 1, known, out); });
  } else if (prefix_space_ && !text.starts_with(' ')) {
    encode_normal(str(' ', text), step, known, out);
  } else if (byte_step_) {
    cut(*byte_step_, text, encode);
  } else {
    encode(text);
  }
}

void JsonTokenizer::encode_valid(std::string_view text, Words& known,
                                 std::vector<int32_t>& out) const {
  const auto take = [&](int32_t id) { out.push_back(id); };
  split_added(raw_, text, take, [&](std::string_view rest) {
    const auto encode = [&](std::string_view part) { encode_normal(part, 0, known, out); };
    if (bert_ || !forms_.empty()) {
      split_added(normal_, normalized(rest), take, encode);
    } else {
      split_added(normal_, rest, take, encode);
    }
  });
}

JsonTokenizer::Words JsonTokenizer::take_known() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return std::exchange(known_, {});
}

void JsonTokenizer::keep_known(Words known) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (known.size() > known_.size()) known_ = std::move(known);
}

std::vector<int32_t> JsonTokenizer::encode(std::string_view text) const {
  Words known = take_known();
  std::vector<int32_t> out;
  for (size_t at = 0; at < text.size();) {
    const size_t begin = at;
    while (at < text.size()) {
      const size_t length = code_point(text.substr(at)).length;
      if (length == 0) break;
      at += length;
    }
    if (at > begin) encode_valid(text.substr(begin, at - begin), known, out);
    const size_t wrong = at;
    while (at < text.size() && code_point(text.substr(at)).length == 0) ++at;
    if (at == wrong) continue;
    if (words_) {
      out.push_back(words_->unknown);
    } else {
      encode_word(text.substr(wrong, at - wrong), known, out);
    }
  }
  keep_known(std::move(known));
  return out;
}

std::string byte_tokenizer_json(bool mask) {
  Json vocabulary = Json::object(), added = Json::array();
  for (int byte = 0; byte < 256; ++byte) {
    vocabulary[byte == 0 ? std::string(1, '\0')
                         : named_bytes(std::string(1, static_cast<char>(byte)))] = byte;
  }
  const auto add = [&](int id, const std::string& content) {
    vocabulary[content] = id;
    added.push_back({{"id", id},
                     {"content", content},
                     {"single_word", false},
                     {"lstrip", false},
                     {"rstrip", false},
                     {"normalized", false},
                     {"special", true}});
  };
  add(0, std::string(1, '\0'));
  if (mask) add(256, "[MASK]");
  const Json bytes = {{"type", "ByteLevel"},
                      {"add_prefix_space", false},
                      {"trim_offsets", false},
                      {"use_regex", false}};
  const Json none;
  return Json{{"version", "1.0"},
              {"truncation", none},
              {"padding", none},
              {"added_tokens", added},
              {"normalizer", none},
              {"pre_tokenizer", bytes},
              {"post_processor", none},
              {"decoder", bytes},
              {"model",
               {{"type", "BPE"},
                {"dropout", none},
                {"unk_token", none},
                {"continuing_subword_prefix", none},
                {"end_of_word_suffix", none},
                {"fuse_unk", false},
                {"byte_fallback", false},
                {"vocab", vocabulary},
                {"merges", Json::array()}}}}
             .dump(1) +
         "\n";
}

}  // namespace headloom::data
