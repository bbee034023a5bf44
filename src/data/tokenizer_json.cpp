#include "data/tokenizer_json.h"

#include <utf8proc.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "core/files.h"

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

const Json& member(const Json& object, const char* key) {
  static const Json null;
  const auto found = object.find(key);
  return found == object.end() ? null : *found;
}

std::string type_of(const Json& part) { return part.at("type").get<std::string>(); }

bool flag(const Json& object, const char* key, bool otherwise) {
  const Json& value = member(object, key);
  return value.is_null() ? otherwise : value.get<bool>();
}

bool is_set(const Json& object, const char* key) {
  const Json& value = member(object, key);
  return !value.is_null() && value != "" && value != 0 && value != false;
}

}  // namespace

struct JsonTokenizer::Reader {
  explicit Reader(JsonTokenizer& tokenizer) : out(tokenizer) {}

  void read(const Json& file) {
    require(file.is_object() && file.contains("model"), "it has no \"model\"");
    const Json& model = file.at("model");
    const Json& cutting = member(file, "pre_tokenizer");
    const Json& decoder = member(file, "decoder");
    const auto decodes_as = [&](const char* type) {
      require(decoder.is_null() || type_of(decoder) == type, "its decoder is ",
              decoder.is_null() ? "" : type_of(decoder), ", expected ", type);
    };
    if (!member(model, "type").is_null() && type_of(model) == "WordPiece") {
      decodes_as("WordPiece");
      read_word_pieces(model, decoder);
      read_bert(member(file, "normalizer"), cutting);
    } else {
      read_model(model);
      read_normalizer(member(file, "normalizer"));
      read_pre_tokenizer(cutting);
      require(bytes_, "its pre_tokenizer is ", cutting.is_null() ? "absent" : type_of(cutting),
              ", expected one that ends in ByteLevel");
      decodes_as("ByteLevel");
    }
    read_added(member(file, "added_tokens"));
    read_template(member(file, "post_processor"));
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

  void read_word_pieces(const Json& model, const Json& decoder) {
    WordPieces& words = out.words_.emplace();
    words.prefix = model.at("continuing_subword_prefix").get<std::string>();
    words.longest = model.at("max_input_chars_per_word").get<size_t>();
    const bool cleanup = decoder.is_null() || flag(decoder, "cleanup", true);
    const Json& vocabulary = model.at("vocab");
    require(vocabulary.is_object(), "its model is malformed, expected \"vocab\" as an object");
    for (const auto& [token, id] : vocabulary.items()) {
      words.vocabulary[token] = number(id, vocabulary.size());
      const bool inside = !words.prefix.empty() && token.starts_with(words.prefix);
      const bool ends = cleanup && (token == "." || token == "?" || token == "!" || token == ",");
      name(words.vocabulary[token], inside ? token.substr(words.prefix.size())
                                    : ends ? token
                                           : " " + token);
    }
    const std::string unknown = model.at("unk_token").get<std::string>();
    const auto found = words.vocabulary.find(unknown);
    require(found != words.vocabulary.end(), "the unknown token, '", unknown,
            "', is not in its vocabulary");
    words.unknown = found->second;
  }

  void read_bert(const Json& normalizer, const Json& cutting) {
    if (!normalizer.is_null()) {
      require(type_of(normalizer) == "BertNormalizer", "its normalizer is ", type_of(normalizer),
              ", expected BertNormalizer or none");
      BertNormalizer& bert = out.bert_.emplace();
      bert.clean_text = flag(normalizer, "clean_text", true);
      bert.handle_chinese_chars = flag(normalizer, "handle_chinese_chars", true);
      bert.lowercase = flag(normalizer, "lowercase", true);
      bert.strip_accents = flag(normalizer, "strip_accents", bert.lowercase);
    }
    require(!cutting.is_null() && type_of(cutting) == "BertPreTokenizer", "its pre_tokenizer is ",
            cutting.is_null() ? "absent" : type_of(cutting), ", expected BertPreTokenizer");
  }

  void read_model(const Json& model) {
    require(member(model, "type").is_null() || type_of(model) == "BPE", "its model is ",
            member(model, "type").is_null() ? "" : type_of(model), ", expected BPE or WordPiece");
    for (const char* key : {"dropout", "continuing_subword_prefix", "end_of_word_suffix"}) {
      require(!is_set(model, key), "its model sets '", key, "', expected it absent");
    }
    const Json& vocabulary = model.at("vocab");
    require(vocabulary.is_object() && model.at("merges").is_array(),
            "its model is malformed, expected \"vocab\" as an object and \"merges\" as a list");
    BytePairs& pairs = out.pairs_;
    pairs.vocabulary.reserve(vocabulary.size());
    for (const auto& [token, id] : vocabulary.items()) {
      pairs.vocabulary[token] = number(id, vocabulary.size());
      name(pairs.vocabulary[token], bytes_of_names(token));
    }
    pairs.whole_words = flag(model, "ignore_merges", false);
    pairs.byte_fallback = flag(model, "byte_fallback", false);
    pairs.fuse_unknown = flag(model, "fuse_unk", false);
    if (is_set(model, "unk_token")) {
      pairs.unknown = known(model.at("unk_token").get<std::string>(), "the unknown token");
    }
    int32_t rank = 0;
    for (const Json& merge : model.at("merges")) {
      std::string left, right;
      if (merge.is_string()) {
        const std::string both = merge.get<std::string>();
        const size_t space = both.find(' ');
        require(space != std::string::npos && both.find(' ', space + 1) == std::string::npos,
                "its merge ", rank, " is '", both, "', expected two tokens with a space between");
        left = both.substr(0, space);
        right = both.substr(space + 1);
      } else {
        require(merge.is_array() && merge.size() == 2, "its merge ", rank, " is no pair of tokens");
        left = merge[0].get<std::string>();
        right = merge[1].get<std::string>();
      }
      const int32_t a = known(left, "a token that is merged"),
                    b = known(right, "a token that is merged"),
                    both = known(left + right, "the result of a merge");
      pairs.merges[BytePairs::key(a, b)] = {rank++, both};
    }
  }

  void read_normalizer(const Json& part) {
    if (part.is_null()) return;
    const std::string type = type_of(part);
    if (type == "Sequence") {
      for (const Json& inner : part.at("normalizers")) read_normalizer(inner);
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

  void read_pre_tokenizer(const Json& part) {
    if (part.is_null()) return;
    const std::string type = type_of(part);
    require(!bytes_, "its pre_tokenizer has ", type, " after ByteLevel, expected nothing there");
    if (type == "Sequence") {
      for (const Json& inner : part.at("pretokenizers")) read_pre_tokenizer(inner);
    } else if (type == "Split") {
      const Json& pattern = part.at("pattern");
      out.steps_.push_back(
          {.pattern = pattern.contains("Regex")
                          ? Regex(pattern.at("Regex").get<std::string>())
                          : Regex::literal(pattern.at("String").get<std::string>()),
           .behavior = behavior(part.at("behavior").get<std::string>()),
           .invert = flag(part, "invert", false)});
    } else if (type == "Digits") {
      out.steps_.push_back({.pattern = Regex("\\p{N}"),
                            .behavior = flag(part, "individual_digits", false)
                                            ? Behavior::isolated
                                            : Behavior::contiguous});
    } else if (type == "ByteLevel") {
      bytes_ = true;
      out.prefix_space_ = flag(part, "add_prefix_space", true);
      if (flag(part, "use_regex", true)) out.byte_step_ = Step{.pattern = Regex(kWords)};
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

  void read_added(const Json& tokens) {
    if (tokens.is_null()) return;
    for (const Json& entry : tokens) {
      Added token{.content = entry.at("content").get<std::string>(),
                  .id = number(entry.at("id"), out.pieces_.size() + tokens.size()),
                  .single_word = flag(entry, "single_word", false),
                  .lstrip = flag(entry, "lstrip", false),
                  .rstrip = flag(entry, "rstrip", false)};
      const bool special = flag(entry, "special", false);
      name(token.id, special      ? token.content
                     : out.words_ ? " " + token.content
                                  : bytes_of_names(token.content));
      out.special_[static_cast<size_t>(token.id)] = special;
      const bool normal = flag(entry, "normalized", !special);
      if (normal) token.content = out.normalized(token.content);
      if (token.content.empty()) continue;
      auto& table = normal ? out.normal_ : out.raw_;
      table[static_cast<unsigned char>(token.content[0])].push_back(token);
    }
    for (AddedTable* table : {&out.raw_, &out.normal_}) {
      for (auto& row : *table) {
        std::stable_sort(row.begin(), row.end(), [](const Added& a, const Added& b) {
          return a.content.size() > b.content.size();
        });
      }
    }
  }

  // The token that a TemplateProcessing or BertProcessing puts first.
  void read_template(const Json& part) {
    if (part.is_null()) return;
    const std::string type = type_of(part);
    if (type == "Sequence") {
      for (const Json& inner : part.at("processors")) read_template(inner);
    } else if (type == "TemplateProcessing" && !part.at("single").empty()) {
      const Json& first = part.at("single").at(0);
      if (!first.contains("SpecialToken")) return;
      const Json& special =
          part.at("special_tokens").at(first.at("SpecialToken").at("id").get<std::string>());
      out.start_ = number(special.at("ids").at(0), out.pieces_.size());
    } else if (type == "BertProcessing") {
      out.start_ = number(part.at("cls").at(1), out.pieces_.size());
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

JsonTokenizer::JsonTokenizer(const std::string& path) {
  const std::string text = read_file(path);
  const Json file = Json::parse(text, nullptr, false);
  require(!file.is_discarded(), path, ": is not JSON.");
  try {
    Reader(*this).read(file);
  } catch (const Json::exception& error) {
    fail(path, ": is malformed: ", error.what(), ".");
  } catch (const Error& error) {
    fail(path, ": ", error.what(), ".");
  }
}

// --- Encoding ---------------------------------------------------------------------------------

std::string JsonTokenizer::normalized(std::string_view text) const {
  std::string out = bert_ ? (*bert_)(text) : std::string(text);
  for (const NormalForm form : forms_) out = normalize(out, form);
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
      while (begin > from) {
        const CodePoint c = last_code_point(text.substr(from, begin - from));
        if (!is_space(c.value)) break;
        begin -= c.length;
      }
    }
    if (found->rstrip) {
      while (end < text.size() && is_space(code_point(text.substr(end)).value)) {
        end += code_point(text.substr(end)).length;
      }
      at = std::max(at, end);
    }
    if (begin > from) rest(text.substr(from, begin - from));
    id(found->id);
    from = end;
  }
  if (from < text.size()) rest(text.substr(from));
}

std::vector<std::string> JsonTokenizer::cut(const Step& step, const std::string& word) {
  struct Part {
    size_t begin, end;
    bool match;
  };
  std::vector<Part> parts;
  size_t from = 0;
  for (const auto& [begin, end] : step.pattern.matches(word)) {
    if (begin > from) parts.push_back({from, begin, step.invert});
    parts.push_back({begin, end, !step.invert});
    from = end;
  }
  if (from < word.size()) parts.push_back({from, word.size(), step.invert});

  std::vector<Part> merged;
  for (const Part& part : parts) {
    if (step.behavior == Behavior::removed && part.match) continue;
    // Does this part continue the one before?
    bool joins = false;
    if (!merged.empty()) {
      const Part& last = merged.back();
      switch (step.behavior) {
        case Behavior::contiguous:
          joins = last.match == part.match;
          break;
        case Behavior::merged_with_previous:  // one match is taken, the next begins a new part
          joins = part.match && !last.match;
          break;
        case Behavior::merged_with_next:
          joins = !part.match && last.match;
          break;
        default:
          break;
      }
    }
    if (joins) {
      merged.back().end = part.end;
      merged.back().match = part.match;
    } else {
      merged.push_back(part);
    }
  }
  std::vector<std::string> words;
  for (const Part& part : merged) words.push_back(word.substr(part.begin, part.end - part.begin));
  return words;
}

void JsonTokenizer::encode_bytes(std::string_view word, Words& known,
                                 std::vector<int32_t>& out) const {
  if (words_) {
    out.push_back(words_->unknown);
    return;
  }
  const std::string names = named_bytes(word);
  const auto found = known.find(names);
  if (found != known.end()) {
    out.insert(out.end(), found->second.begin(), found->second.end());
    return;
  }
  const size_t before = out.size();
  pairs_.encode(names, out);
  if (names.size() <= kLongestKnown && known.size() < kMostKnown) {
    known.emplace(
        names, std::vector<int32_t>(out.begin() + static_cast<std::ptrdiff_t>(before), out.end()));
  }
}

void JsonTokenizer::encode_normal(std::string_view text, Words& known,
                                  std::vector<int32_t>& out) const {
  if (words_) {
    for (const std::string& word : bert_words(text)) words_->encode(word, out);
    return;
  }
  std::vector<std::string> words{std::string(text)};
  const auto apply = [&](const Step& step) {
    std::vector<std::string> pieces;
    for (const std::string& word : words) {
      for (std::string& piece : cut(step, word)) pieces.push_back(std::move(piece));
    }
    words = std::move(pieces);
  };
  for (const Step& step : steps_) apply(step);
  if (prefix_space_) {
    for (std::string& word : words) {
      if (!word.starts_with(' ')) word.insert(0, 1, ' ');
    }
  }
  if (byte_step_) apply(*byte_step_);
  for (const std::string& word : words) encode_bytes(word, known, out);
}

void JsonTokenizer::encode_valid(std::string_view text, Words& known,
                                 std::vector<int32_t>& out) const {
  const auto take = [&](int32_t id) { out.push_back(id); };
  split_added(raw_, text, take, [&](std::string_view rest) {
    const std::string normal = normalized(rest);
    split_added(normal_, normal, take,
                [&](std::string_view words) { encode_normal(words, known, out); });
  });
}

std::vector<int32_t> JsonTokenizer::encode(std::string_view text) const {
  Words known;
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
    if (at > wrong) encode_bytes(text.substr(wrong, at - wrong), known, out);
  }
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
