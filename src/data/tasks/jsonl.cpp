// jsonl: lines of a file, each a JSON object, for a decoder.
//
//   {"input": "2+2=", "label": "4"}   the label's tokens and the end token are predicted; exact
//   match
//   {"text": "Some text."}            every token and the end token are predicted; accuracy by
//   token
//
// A file has lines of one of the two kinds; other keys are not read, and empty lines are skipped.
// Sequences are padded to `length`. Of a line that is longer, a text is cut, and an input loses its
// first tokens; a label that does not fit is refused. Lines with the same tokens are never both
// trained on and held out. Empty inputs, labels and texts are refused, and a key that comes twice.
#include <algorithm>
#include <cmath>
#include <limits>
#include <set>
#include <span>
#include <unordered_map>

#include "core/error.h"
#include "core/json_text.h"
#include "core/sizes.h"
#include "data/examples.h"
#include "data/floors.h"
#include "data/random.h"
#include "data/tasks/tasks.h"

namespace headloom::data {
namespace {

// The lots of questions. Two are one lot where some of their lines are read alike.
class QuestionLots {
 public:
  // `question` stands for all of its tokens, `as_read` for those that a line reads.
  void join(uint64_t question, uint64_t as_read) {
    const uint64_t a = root(question), b = root(as_read);
    const uint64_t least = std::min({as_read, least_of(a), least_of(b)});
    parents_[a] = b;
    least_[b] = least;
  }
  // The least of what its lines read: of a question that is read whole, that is itself.
  uint64_t lot(uint64_t question) { return least_.at(root(question)); }

 private:
  uint64_t root(uint64_t x) {
    uint64_t parent = parents_.emplace(x, x).first->second;
    while (parent != x) {
      const uint64_t above = parents_.at(parent);
      parents_[x] = above;
      x = parent;
      parent = above;
    }
    return x;
  }
  uint64_t least_of(uint64_t root) const {
    const auto found = least_.find(root);
    return found == least_.end() ? std::numeric_limits<uint64_t>::max() : found->second;
  }

  std::unordered_map<uint64_t, uint64_t> parents_, least_;
};

class JsonLines final : public ExampleTask {
 public:
  JsonLines(const FileOptions& files, uint64_t seed, int64_t eval_sequences)
      : ExampleTask("jsonl", files.tokenizer, files.length, 1),
        path_(*files.path),
        split_length_(files.split_length()) {
    read(path_);
    const size_t first_apart = examples_.size();
    if (files.held_out_path) read(*files.held_out_path);
    std::vector<uint64_t> lots;
    for (const Example& example : examples_) {
      lots.push_back(labelled_ ? questions_.lot(example.lot) : example.lot);
    }
    split_by_lot(lots, first_apart, files.held_out, path_, eval_sequences, seed, lots);
  }

  Accuracy accuracy() const override { return labelled_ ? Accuracy::sequence : Accuracy::token; }
  std::vector<Floor> floors_of(const std::vector<int64_t>& judged) const override {
    if (!labelled_) return Task::floors_of(judged);
    // Exact match of answers that are as long as those of the examples.
    double sum = 0.0;
    for (const Example& example : examples_) {
      sum += std::pow(static_cast<double>(vocabulary()), -static_cast<double>(example.answer));
    }
    std::vector<Floor> floors = {{"any tokens", sum / static_cast<double>(examples_.size())}};
    const auto answers = [&](const std::vector<size_t>& examples) {
      std::vector<std::vector<int64_t>> out;
      for (const size_t i : examples) out.push_back(answer_of(examples_[i]));
      return out;
    };
    add_floor(floors, "the most frequent label",
              usual_share(answers(train()), answers(held_out(judged))));
    return floors;
  }
  std::optional<int64_t> end_token() const override { return tokenizer().end_token(); }
  std::string describe() const override {
    const char* const where = labelled_ ? " at the beginning of the input" : " at the end";
    return str(labelled_ ? "Inputs and labels" : "Texts", " of ", path_, ": ", counts(),
               cut_text(cut_), cut_ > 0 ? where : "", ".");
  }

 protected:
  Sample sample(size_t example) const override {
    return next_token_sample(examples_[example].tokens, examples_[example].answer);
  }

 private:
  struct Example {
    std::vector<int64_t> tokens;
    int64_t answer;  // so many of the last are predicted
    uint64_t lot;    // with labels: of the whole question
  };
  static std::vector<int64_t> answer_of(const Example& example) {
    return {example.tokens.end() - example.answer, example.tokens.end()};
  }

  void read(const std::string& path) {
    const std::vector<std::string> lines = lines_of(path);
    for (size_t i = 0; i < lines.size(); ++i) {
      if (lines[i].find_first_not_of(" \t\r") == std::string::npos) continue;
      add(lines[i], str(path, ", line ", i + 1));
    }
  }

  // `place` names the file and the line, "data.jsonl, line 3".
  void add(const std::string& line, const std::string& place) {
    // The parser keeps the last of several values.
    std::set<std::string> keys;
    const auto json =
        parse_json(line, place,
                   [&](int depth, nlohmann::json::parse_event_t event, const nlohmann::json& part) {
                     if (event == nlohmann::json::parse_event_t::key && depth == 1) {
                       const auto& key = part.get_ref<const std::string&>();
                       require(keys.insert(key).second, place, ": has the key \"", key,
                               "\" twice, expected it once.");
                     }
                     return true;
                   });
    require(json.is_object(), place, ": is JSON, but not an object ({...}).");
    const bool labelled = json.contains("input") || json.contains("label");
    require(labelled != json.contains("text"), place, ": has ",
            labelled ? "\"text\" beside \"input\" or \"label\"" : "no \"text\" and no \"input\"",
            ", expected {\"input\", \"label\"} or {\"text\"}.");
    if (examples_.empty()) labelled_ = labelled;
    require(labelled == labelled_, place, ": has ", labelled ? "\"input\"" : "\"text\"",
            ", but the lines before it have ", labelled ? "\"text\"." : "\"input\" and \"label\".");

    const auto room = static_cast<size_t>(length()) + 1;
    const auto split_room = static_cast<size_t>(split_length_) + 1;
    Example example;
    if (!labelled) {
      example.tokens = tokens_of(tokenizer(), text_of(json, "text", place));
      example.tokens.push_back(tokenizer().end_token());
      example.lot =
          lot_of(std::span(example.tokens).first(std::min(example.tokens.size(), split_room)));
      if (example.tokens.size() > room) {
        example.tokens.resize(room);
        ++cut_;
      }
      example.answer = static_cast<int64_t>(example.tokens.size()) - 1;
      require(example.answer > 0, place, ": has an empty \"text\".");
    } else {
      std::vector<int64_t> input = tokens_of(tokenizer(), text_of(json, "input", place));
      std::vector<int64_t> label = tokens_of(tokenizer(), text_of(json, "label", place));
      require(!input.empty(), place, ": has an empty \"input\".");
      require(!label.empty(), place, ": has an empty \"label\".");
      label.push_back(tokenizer().end_token());
      // At least one token of the input must come before the label.
      require(label.size() < room, place, ": has a label of ", label.size(),
              " tokens with the end token, but the context is length = ", length(), " tokens.");
      const size_t kept = std::min(input.size(), room - label.size());
      if (kept < input.size()) ++cut_;
      // A question that is held out is not trained on, whatever its answer, nor is one that is read
      // alike. How much is read of a long one depends on its label.
      const size_t kept_as_trained =
          std::min(input.size(), split_room - std::min(label.size(), split_room - 1));
      example.lot = lot_of(std::span(input));
      questions_.join(example.lot, lot_of(std::span(input).last(kept_as_trained)));
      example.tokens.assign(input.end() - static_cast<int64_t>(kept), input.end());
      example.tokens.insert(example.tokens.end(), label.begin(), label.end());
      example.answer = static_cast<int64_t>(label.size());
    }
    examples_.push_back(std::move(example));
  }

  static uint64_t lot_of(std::span<const int64_t> tokens) {
    StableHash lot;
    add_tokens(lot, tokens);
    return lot.value();
  }

  static std::string text_of(const nlohmann::json& json, const char* key,
                             const std::string& place) {
    require(json.contains(key), place, ": has no \"", key, "\".");
    require(json[key].is_string(), place, ": has a \"", key, "\" that is no text.");
    auto text = json[key].get<std::string>();
    require(text.find('\0') == std::string::npos, place, ": has a character 0 in \"", key, "\".");
    return text;
  }

  std::string path_;
  int64_t split_length_;
  bool labelled_ = false;
  QuestionLots questions_;
  int64_t cut_ = 0;  // examples that are longer than `length`
  std::vector<Example> examples_;
};

struct JsonlSpec final : TaskSpec {
  FileOptions files{.length = 256};
  int64_t eval_sequences = 512;

  std::string type() const override { return "jsonl"; }
  void fields(Fields& f) override {
    files.fields(f, "file with an object {\"input\", \"label\"} or {\"text\"} a line",
                 /*generates=*/false);
    f.field("length", files.length, "tokens that the model sees (T)", size_from(2));
    f.field("eval_sequences", eval_sequences, "held-out lines, the same for every seed",
            size_from(1));
  }
  std::shared_ptr<const Tokenizer> tokenizer() const override {
    return make_tokenizer(files.tokenizer);
  }
  std::string* tokenizer_file() override { return files.tokenizer_file(); }
  std::vector<DataPath> data_paths() override { return files.data_paths(); }
  void split_as(const TaskSpec& other) override {
    if (const auto* same = dynamic_cast<const JsonlSpec*>(&other)) files.split_as(same->files);
  }
  void hold_out_all() override {
    files.hold_out_all();
    eval_sequences = std::numeric_limits<int64_t>::max();
  }
  std::optional<TaskSizes> known_sizes() override {
    return TaskSizes{.vocabulary = tokenizer()->vocabulary(), .length = files.length};
  }
  std::shared_ptr<Task> build(uint64_t seed) const override {
    if (files.path.value_or("").empty()) {
      refuse_without("jsonl", "path", "the file to read", "\"my/file\"");
    }
    return std::make_shared<JsonLines>(files, seed, eval_sequences);
  }
};

}  // namespace

std::shared_ptr<TaskSpec> jsonl_spec() { return std::make_shared<JsonlSpec>(); }

}  // namespace headloom::data
