// find_span: where in a context the answer to a question begins and ends.
//
// With `path`: JSON as SQuAD 1.1 has it (Rajpurkar et al. 2016): data[].paragraphs[] with a context
// and qas[], each with a question and answers[], of which the first is learned: its text, and
// answer_start, counted in characters. A tokenizer with a start token makes "[CLS] question [SEP]
// context [SEP]", others "question end context"; a context that is too long loses its last tokens,
// and questions whose answer is then not whole are left out. White space between words is one
// space; an answer is the tokens that hold its characters. Without: a letter is asked for, the
// context is `count` different letters, each followed by one to `digits` digits; the letter and its
// digits are the answer.
#include <algorithm>

#include "core/error.h"
#include "core/json.h"
#include "core/sizes.h"
#include "core/text.h"
#include "data/examples.h"
#include "data/tasks/tasks.h"
#include "data/unicode.h"
#include "data/words.h"

namespace headloom::data {
namespace {

constexpr const char* kSpanLetters = "ABCDEFGHIJKLMNOPQRSTUVWXYZ";
constexpr const char* kOthers = "0123456789|";
constexpr int64_t kDigits = 10;

struct FindSpanOptions {
  FileOptions files{384};
  int64_t symbols = 8;
  int64_t count = 4;
  int64_t digits = 3;
};

class Entries final : public GeneratedTask {
 public:
  Entries(const FindSpanOptions& options, uint64_t seed, int64_t eval_sequences)
      : GeneratedTask(seed, options.symbols + kDigits + 1, 2 + options.count * (1 + options.digits),
                      eval_sequences,
                      std::string(kSpanLetters, static_cast<size_t>(options.symbols)) + kOthers),
        options_(options) {}

  Goal goal() const override { return Goal::span; }
  int64_t segments() const override { return 2; }
  Accuracy accuracy() const override { return Accuracy::sequence; }
  std::vector<Floor> floors_of(const std::vector<int64_t>& judged) const override {
    std::vector<Floor> floors = GeneratedTask::floors_of(judged);
    // The digits of a letter end where the next one stands.
    floors.push_back({"any letter and its digits", 1.0 / static_cast<double>(options_.count)});
    return floors;
  }
  std::string describe() const override {
    return str("A letter is asked for, and in a context of ", options_.count, " of ",
               options_.symbols, " letters it and the one to ", options_.digits,
               " digits after it are the answer; generated, ", eval_sequences(), " held out.");
  }

 protected:
  Sample draw(Random& random) const override {
    const std::vector<int64_t> letters = random.distinct(options_.symbols, options_.count);
    const int64_t asked = random.below(options_.count);
    Sample sample{.inputs = {letters[static_cast<size_t>(asked)], options_.symbols + kDigits},
                  .targets = {},
                  .second = 2};
    for (int64_t i = 0; i < options_.count; ++i) {
      const auto begin = static_cast<int64_t>(sample.inputs.size());
      sample.inputs.push_back(letters[static_cast<size_t>(i)]);
      for (int64_t left = 1 + random.below(options_.digits); left > 0; --left) {
        sample.inputs.push_back(options_.symbols + random.below(kDigits));
      }
      if (i == asked) sample.targets = {begin, static_cast<int64_t>(sample.inputs.size()) - 1};
    }
    sample.context = {2, static_cast<int64_t>(sample.inputs.size())};
    return sample;
  }

 private:
  FindSpanOptions options_;
};

// The byte at which character `index` of UTF-8 `text` begins, or npos where there is none.
size_t byte_of(std::string_view text, int64_t index) {
  size_t at = 0;
  for (; index > 0 && at < text.size(); --index) {
    at += std::max<size_t>(code_point(text.substr(at)).length, 1);
  }
  return index == 0 && at < text.size() ? at : std::string_view::npos;
}

class Questions final : public ExampleTask {
 public:
  Questions(const FindSpanOptions& options, uint64_t seed, int64_t eval_sequences)
      : ExampleTask("find_span", options.files.tokenizer, options.files.length, 2),
        path_(*options.files.path),
        split_length_(options.files.split_length()) {
    WordEncoder encoder(tokenizer());
    read(path_, encoder);
    const size_t first_apart = questions_.size();
    if (options.files.held_out_path) read(*options.files.held_out_path, encoder);
    std::vector<uint64_t> lots;
    for (const Question& q : questions_) lots.push_back(contexts_[q.context].lot);
    split_by_lot(lots, first_apart, options.files.held_out, path_, eval_sequences, seed, trained_);
  }

  Goal goal() const override { return Goal::span; }
  int64_t segments() const override { return 2; }
  Accuracy accuracy() const override { return Accuracy::sequence; }
  std::string describe() const override {
    return str("Questions of ", path_, " about ", contexts_.size(), " contexts: ", counts(),
               lost_ > 0 ? str("; ", lost_, " whose answer is not whole within ", length(),
                               " tokens left out")
                         : "",
               cut_text(cut_), cut_ > 0 ? " at the end of their context" : "", ".");
  }

 protected:
  Sample sample(size_t example) const override {
    const Question& q = questions_[example];
    std::vector<int32_t> context = contexts_[q.context].tokens;
    context.resize(std::min(context.size(), room(q.tokens, length())));
    Sample out = framed(q.tokens, &context);
    const int64_t begin = out.second;
    out.context = {begin, begin + static_cast<int64_t>(context.size())};
    out.targets = {begin + static_cast<int64_t>(q.first), begin + static_cast<int64_t>(q.last)};
    return out;
  }

 private:
  struct Context {
    std::vector<int32_t> tokens;
    uint64_t lot;
  };
  struct Question {
    size_t context;
    std::vector<int32_t> tokens;
    size_t first, last;  // tokens of the context
  };

  // Tokens of a context beside a question in `length` positions.
  size_t room(const std::vector<int32_t>& question, int64_t length) const {
    const auto left = static_cast<size_t>(length - frame(2));
    return left - std::min(left, question.size());
  }

  // The child `key` of `node`, a T; `where` says what the node is.
  template <typename T>
  static const T& child(const Node& node, const char* key, const char* expected,
                        const std::string& where) {
    const Node* found = node.is_table() ? node.find(key) : nullptr;
    require(found != nullptr && std::holds_alternative<T>(found->value), where, " has ",
            found == nullptr ? "no" : str(found->type_name(), " as"), " '", key, "', expected ",
            expected, ".");
    return std::get<T>(found->value);
  }

  void read(const std::string& path, WordEncoder& encoder) {
    const Node root = read_json(path);
    const size_t before = questions_.size();
    const int64_t lost = lost_;
    for (const Node& article : child<Array>(root, "data", "a list of articles", path + ":")) {
      const std::string in_article = path + ": an article of 'data'";
      for (const Node& paragraph :
           child<Array>(article, "paragraphs", "a list of paragraphs", in_article)) {
        add(paragraph, path, encoder);
      }
    }
    require(questions_.size() > before, path, ": has ",
            lost_ > lost ? str("no question whose answer is whole within ", length(), " tokens")
                         : "no question",
            ".");
  }

  void add(const Node& paragraph, const std::string& path, WordEncoder& encoder) {
    const std::string in_paragraph = path + ": a paragraph";
    const std::string& text = child<std::string>(paragraph, "context", "a text", in_paragraph);
    require(text.find('\0') == std::string::npos, in_paragraph, " has a character 0.");
    const std::vector<std::string_view> words = words_of(text);
    const WordTokens tokens = encoder.encode(words);
    const std::vector<int32_t>& all = tokens.tokens;
    StableHash lot;  // of all that can be read of it, whatever the question
    add_tokens(lot, std::span(all).first(std::min(all.size(), room({}, split_length_))));
    contexts_.push_back({all, lot.value()});
    for (const Node& qa : child<Array>(paragraph, "qas", "a list of questions", in_paragraph)) {
      const std::string& question =
          child<std::string>(qa, "question", "a text", path + ": a question");
      require(question.find('\0') == std::string::npos, path, ": a question has a character 0.");
      const std::string where = str(path, ": the question '", question, "'");
      const Array& answers = child<Array>(qa, "answers", "a list of answers", where);
      require(!answers.empty(), where, " has no answer, expected at least one.");
      const std::string in_answer = where + ": an answer";
      const std::string& answer = child<std::string>(answers[0], "text", "a text", in_answer);
      const int64_t start = child<int64_t>(answers[0], "answer_start", "an integer", in_answer);
      const size_t begin = start < 0 ? std::string::npos : byte_of(text, start);
      require(begin != std::string::npos, where, " has answer_start = ", start,
              ", which is not in its context.");
      require(!words_of(answer).empty() && text.compare(begin, answer.size(), answer) == 0, where,
              " has the answer '", answer, "', but its context has '",
              text.substr(begin, answer.size()), "' at answer_start = ", start, ".");
      Question q{.context = contexts_.size() - 1,
                 .tokens = encoder.encode(words_of(question)).tokens,
                 .first = 0,
                 .last = 0};
      std::tie(q.first, q.last) = place(text, words, tokens, begin, begin + answer.size(), encoder);
      if (q.first > q.last) {
        ++lost_;
        continue;
      }
      if (q.last < room(q.tokens, split_length_)) trained_.push_back(lot.value());
      if (q.last < room(q.tokens, length())) {
        cut_ += tokens.tokens.size() > room(q.tokens, length());
        questions_.push_back(std::move(q));
      } else {
        ++lost_;
      }
    }
  }

  // First and last token of the bytes [begin, end) of `text`, some of which are no white space.
  static std::pair<size_t, size_t> place(const std::string& text,
                                         const std::vector<std::string_view>& words,
                                         const WordTokens& tokens, size_t begin, size_t end,
                                         const WordEncoder& encoder) {
    const auto offset = [&](std::string_view word) {
      return static_cast<size_t>(word.data() - text.data());
    };
    size_t w = 0;
    while (offset(words[w]) + words[w].size() <= begin) ++w;
    const auto at = [&](size_t index) {
      const size_t low = offset(words[index]), high = low + words[index].size();
      return encoder.tokens_at(tokens, index, words[index], std::max(begin, low) - low,
                               std::min(end, high) - low);
    };
    const size_t first = at(w).first;
    while (w + 1 < words.size() && offset(words[w + 1]) < end) ++w;
    return {first, at(w).second};
  }

  std::string path_;
  int64_t split_length_;
  std::vector<uint64_t> trained_;  // lots of the questions whose answer is whole in that length
  std::vector<Context> contexts_;
  std::vector<Question> questions_;
  int64_t lost_ = 0, cut_ = 0;
};

struct FindSpanSpec final : ExampleSpec<FindSpanOptions> {
  std::string type() const override { return "find_span"; }
  std::optional<TaskSizes> known_sizes() override {
    if (!options.files.path) return GeneratedSpec::known_sizes();
    return TaskSizes{.goal = Goal::span,
                     .vocabulary = tokenizer()->vocabulary(),
                     .length = options.files.length,
                     .segments = 2};
  }

 protected:
  void own_fields(Fields& f) override {
    options.files.fields(f, "JSON file of contexts, questions and answers (SQuAD 1.1)");
    f.field("length", options.files.length, "with path: tokens of the longest sequence (T)",
            size_from(2));
    f.field("symbols", options.symbols, "generated: letters there are", between<int64_t>(2, 26));
    f.field("count", options.count, "generated: letters in the context", size_from(2));
    f.field("digits", options.digits, "generated: digits of the longest answer", size_from(1));
  }
  std::shared_ptr<Task> make(uint64_t seed) const override {
    if (options.files.path) return std::make_shared<Questions>(options, seed, eval_sequences);
    if (options.count > options.symbols) {
      usage_error("find_span has count = ", options.count,
                  ", expected at most symbols = ", options.symbols, ".");
    }
    return std::make_shared<Entries>(options, seed, eval_sequences);
  }
};

}  // namespace

std::shared_ptr<TaskSpec> find_span_spec() { return std::make_shared<FindSpanSpec>(); }

}  // namespace headloom::data
