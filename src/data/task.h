// Tasks: what a model is trained on and how it is judged.
//
// A task is a stream of sequences that is a pure function of (seed, number): sequence n of the
// training stream is the same whatever was asked before, so the whole data cursor of a run is one
// integer and resuming is exact. The held-out sequences depend on the options only, never on the
// seed, so that runs over several seeds are judged on the same data. No sequence is in both.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <bit>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/fields.h"
#include "data/tokenizer.h"

namespace headloom::data {

// The target of a position that has no loss (the default ignore_index of at::cross_entropy_loss).
inline constexpr int64_t kIgnore = -100;

// What a task asks of a model, and with it the kind of model that can be trained on it.
enum class Goal {
  next_token,    // targets[b][t] is the token after inputs[b][0..t]: a decoder
  masked_token,  // targets[b][t] is the token that inputs[b][t] hides, kIgnore elsewhere: an
                 // encoder
  label,         // targets[b] is the class of inputs[b]: an encoder with a classification head
  tags,         // targets[b][t] is the class of inputs[b][t], kIgnore where it has none: an encoder
  span,         // targets[b] are the first and the last position of the answer in inputs[b]: an
                // encoder
  sequence,     // inputs and targets as for next_token, given source: an encoder-decoder
  image_label,  // targets[b] is the class of images[b]: a vision transformer
  reconstruction,  // targets[b] are inputs[b], from one vector: an auto-encoder
};

// B examples, in main memory. What a goal does not use is undefined.
struct Batch {
  at::Tensor inputs = {};   // [B,T] int64
  at::Tensor targets = {};  // [B,T] or, for labels, [B], for spans [B,2]; int64, kIgnore where
                            // there is no loss
  at::Tensor documents =
      {};  // [B,T] int64: attention stays among equal ids; undefined: one document a row
  at::Tensor lengths = {};   // [B] int64: inputs[b][lengths[b]..] is padding; undefined: none is
  at::Tensor segments = {};  // [B,T] int64: 0 in the first of two texts, 1 in the second;
                             // undefined: there is one
  at::Tensor context = {};   // [B,T] bool: where the answer of a span may begin and end
  at::Tensor source = {};    // [B,S] int64
  at::Tensor source_lengths = {};  // [B] int64, as lengths
  at::Tensor images = {};  // [B,channels,height,width] float32, about zero mean and unit variance

  // All of them, defined or not.
  std::array<at::Tensor*, 9> tensors() {
    return {&inputs,  &targets, &documents,      &lengths, &segments,
            &context, &source,  &source_lengths, &images};
  }
};

// What counts as one right answer.
enum class Accuracy {
  token,     // each target position by itself
  share,     // each target position, but sequences count alike however many targets they have
  sequence,  // all target positions of a sequence together (exact match)
};

// How much data a task reads in all, that for training included: tokens of text, or examples;
// 0 where the data are generated.
struct DataSize {
  int64_t count = 0;
  const char* unit = "tokens";
};

// The accuracy that a guess reaches which has learned nothing of what the task asks for. A model is
// only said to solve a part of a task by what it has above it.
struct Floor {
  std::string name;  // how is guessed, "one of the values shown"
  double accuracy;   // expected, in the sense of Task::accuracy()
};

// So many training sequences in a row have this T.
struct TrainLength {
  int64_t length = 0;
  int64_t sequences = 1;
};

class Task {
 public:
  virtual ~Task() = default;

  virtual Goal goal() const { return Goal::next_token; }
  // Tokens; 0 where there are none (images).
  virtual int64_t vocabulary() const = 0;
  // T, of every batch or of the longest; 0 where there are no tokens.
  virtual int64_t length() const = 0;
  // The lengths of training sequences in the order in which they come; after the last of them it
  // begins anew. At least one.
  virtual std::vector<TrainLength> train_lengths() const { return {{length(), 1}}; }
  // Their mean.
  double train_length() const;
  // The T of `count` training sequences from number `first` on, summed.
  int64_t train_positions(int64_t first, int64_t count) const;
  // S, of every batch of an encoder-decoder.
  virtual int64_t source_length() const { return 0; }
  // Classes of a label, an image or each token.
  virtual int64_t classes() const { return 0; }
  // Their names, where they have some.
  virtual std::vector<std::string> labels() const { return {}; }
  // Kinds of segments, where inputs are made of several.
  virtual int64_t segments() const { return 0; }
  // channels, height, width of an image.
  virtual std::array<int64_t, 3> image_shape() const { return {0, 0, 0}; }

  // Batch `index` of the training stream: sequences [index * batch_size, (index + 1) * batch_size).
  // The stream has no end; one that is drawn from a finite corpus starts a new epoch, in a new
  // order. Safe to call from several threads. batch_size >= 1, index >= 0.
  virtual Batch train_batch(int64_t index, int64_t batch_size) const = 0;

  // Held-out sequences of several kinds come in turn: so many in a row have as many of each kind,
  // also in each half of them (is_test()).
  virtual int64_t eval_group() const { return 1; }
  // Whether none of the held-out sequences before number `end` is in both halves.
  virtual bool halves_are_apart(int64_t end) const {
    (void)end;
    return true;
  }
  // Number of held-out sequences, at least 1.
  virtual int64_t eval_sequences() const = 0;
  // Held-out sequences [first, first + count), which must lie in [0, eval_sequences()). The first n
  // are a fair sample of all, for any n.
  virtual Batch eval_batch(int64_t first, int64_t count) const = 0;

  virtual Accuracy accuracy() const = 0;
  bool exact_match() const { return accuracy() == Accuracy::sequence; }
  // At least one, in ascending order; on the held-out sequences of these numbers, where it depends
  // on them. Without an override: a uniform guess for one class, token or span, and the most
  // frequent token; a task whose answers are sequences of tokens overrides it.
  virtual std::vector<Floor> floors_of(const std::vector<int64_t>& judged) const;
  // On all held-out sequences.
  std::vector<Floor> floors() const;
  virtual DataSize data_size() const { return {}; }
  // bits per byte = loss / ln 2 / bytes_per_token(); 0 where that means nothing.
  virtual double bytes_per_token() const { return 0.0; }

  // One sentence: what data, its sizes, the split.
  virtual std::string describe() const = 0;

  // Text as tokens and back, for prompts and for showing what a model wrote. encode() throws
  // UsageError for text that the vocabulary cannot express; decode() is defined for every token
  // below vocabulary().
  virtual std::vector<int64_t> encode(std::string_view text) const = 0;
  virtual std::string decode(const std::vector<int64_t>& tokens) const = 0;
  // The token that ends a document, where the task has one: generation may stop at it.
  virtual std::optional<int64_t> end_token() const { return std::nullopt; }
};

// Whether a held-out sequence is test data, where they are judged by halves; validation data
// otherwise. Of each pair 2 n, 2 n + 1 one is in each half, in the order of Thue and Morse: one
// half is as hard as the other, also where the data change along their numbers.
inline bool is_test(int64_t number) {
  return std::popcount(static_cast<uint64_t>(number)) % 2 == 1;
}

// Throws Error unless [first, first + count) lies in the `present` held-out sequences.
void check_held_out(int64_t first, int64_t count, int64_t present);

// What a model takes from its task. 0: nothing, or not known without the data.
struct TaskSizes {
  Goal goal = Goal::next_token;
  int64_t vocabulary = 0, length = 0, source_length = 0, classes = 0, segments = 0;
  std::array<int64_t, 3> image = {0, 0, 0};
};
TaskSizes sizes_of(const Task& task);

// A hash of a sample of what a task gives, to tell whether data have changed. It does not depend on
// where they are. `pixels`: whether those of images count. Machines may differ in them, because one
// version of the JPEG library rounds otherwise than another.
std::string fingerprint(const Task& task, bool pixels);

// A file, folder or glob that a task reads, and the option that names it.
struct DataPath {
  const char* key;
  std::string* path;
};

// Throws UsageError: the task has no data, because its option `key`, which names `what`, is empty.
// `example` is a value for it.
[[noreturn]] void refuse_without(const std::string& task, const std::string& key,
                                 const std::string& what, const std::string& example);

// The options of a task, as a config holds them: [task] type = "find_block" ...
struct TaskSpec {
  virtual ~TaskSpec() = default;
  // The name in the registry.
  virtual std::string type() const = 0;
  virtual void fields(Fields& f) = 0;
  // Reads what there is to read and checks the options together. `seed` orders the training stream.
  // Throws UsageError for options that do not fit, Error for files that cannot be used.
  virtual std::shared_ptr<Task> build(uint64_t seed) const = 0;
  // How text becomes tokens where that needs none of the task's files, else nullptr: a trained
  // model generates without its corpus.
  virtual std::shared_ptr<const Tokenizer> tokenizer() const { return nullptr; }
  // The option that names the tokenizer's file, nullptr where none is used: a run keeps a copy.
  virtual std::string* tokenizer_file() { return nullptr; }
  // The options that name the data; none where they are generated.
  virtual std::vector<DataPath> data_paths() { return {}; }
  // Sets the options so that all of the data is evaluated and nothing is left to train on, where
  // the data do not come split.
  virtual void hold_out_all() {}
  // Holds out what `other` does, a spec of the same data, whatever the length of the sequences.
  virtual void split_as(const TaskSpec& other) { (void)other; }
  // What is known of the sizes without reading the data; nothing where that is not all of them.
  virtual std::optional<TaskSizes> known_sizes();
  // The option that names the classes in their order, nullptr where there is none: a run keeps
  // those that were found, so that other data is read by them.
  virtual std::vector<std::string>* labels() { return nullptr; }
};

// --- The registry (registry.cpp): one line a task --------------------------------------------

struct TaskEntry {
  std::string name;
  std::string doc;     // one sentence
  std::string source;  // where the task was described, "" for none
  std::shared_ptr<TaskSpec> (*make)();
};

const std::vector<TaskEntry>& tasks();
std::vector<std::string> task_names();
// A spec with its defaults. Throws UsageError, with the nearest name, for an unknown type.
std::shared_ptr<TaskSpec> make_task_spec(const std::string& type);

// How the descriptions of options begin that count only with files to read, or only without.
constexpr std::string_view kWithPath = "with path: ", kGenerated = "generated: ";
// Throws UsageError for an option of the other of the two that is not at its default.
void check_no_idle_options(const TaskSpec& spec);

}  // namespace headloom::data
