// What the tasks have in common whose sequences are made up on the fly.
#pragma once

#include <mutex>
#include <optional>
#include <unordered_map>

#include "data/random.h"
#include "data/stream.h"
#include "data/task.h"

namespace headloom::data {

struct Sample {
  std::vector<int64_t> inputs;   // T tokens or fewer
  std::vector<int64_t> targets;  // as many, kIgnore where there is no loss; one label; or first and
                                 // last position
  std::vector<int64_t> source = {};         // Goal::sequence: S tokens or fewer
  int64_t second = 0;                       // where the second segment begins; 0: there is one
  std::array<int64_t, 2> context = {0, 0};  // Goal::span: [begin, end) of what may be the answer
};

// Samples as a batch of `task`, padded to `length` and to the task's source_length(); goals whose
// sequences see what is after them say how long each is.
Batch batch_of(const Task& task, const std::vector<Sample>& samples, int64_t length);

// inputs and targets of predicting each token from those before it, with loss on the last `answer`
// tokens only.
Sample next_token_sample(const std::vector<int64_t>& tokens, int64_t answer);

// Sequences are split by a hash of source and inputs: one in 16 of all possible ones is for the
// held-out stream, the others for training, and each stream draws until it meets one of its own.
// Where few sequences are possible, a held-out one occurs again and again, but in one half only,
// unless there are too few for two halves.
class GeneratedTask : public Task {
 public:
  // Tokens are written as numbers unless `characters` names them: token i is characters[i].
  // The training stream is endless unless limit_examples() is called.
  GeneratedTask(uint64_t seed, int64_t vocabulary, int64_t length, int64_t eval_sequences,
                std::string characters = "");

  int64_t vocabulary() const final { return vocabulary_; }
  int64_t length() const final { return length_; }
  int64_t eval_sequences() const final { return eval_sequences_; }
  Batch train_batch(int64_t index, int64_t batch_size) const final;
  bool halves_are_apart(int64_t end) const final;
  Batch eval_batch(int64_t first, int64_t count) const final;
  std::vector<int64_t> encode(std::string_view text) const override;
  std::string decode(const std::vector<int64_t>& tokens) const override;

  // Training repeats the first `examples` sequences of its stream, in an order of its own every
  // epoch or always in their own. examples >= 1; called before the first batch.
  void limit_examples(int64_t examples, bool in_order = false);

 protected:
  // One sequence of length() positions or, where a task has several lengths, fewer; from `random`
  // alone.
  virtual Sample draw(Random& random) const = 0;
  // The same for the held-out stream, where a task asks for other targets there.
  virtual Sample draw_held_out(Random& random) const { return draw(random); }
  // The same for sequence `number` of a stream, where its sequences are not all of one kind.
  virtual Sample draw_number(bool held_out, int64_t number, Random& random) const {
    (void)number;
    return held_out ? draw_held_out(random) : draw(random);
  }

  // Sequence `number` of a stream.
  Sample sequence(bool held_out, int64_t number) const;

 private:
  // As long as the longest of them where they predict next tokens, else length().
  Batch batch_of(const std::vector<Sample>& samples) const;
  Batch batch(bool held_out, int64_t first, int64_t count) const;
  // Sequence `number`, where know_halves() knows those before it; nothing where no draw gives one.
  std::optional<Sample> drawn(bool held_out, int64_t number) const;
  // Finds the half of sequence `known_`, and gives it; nothing where there is none for its half.
  std::optional<Sample> know_next() const;
  // Finds the halves of the held-out sequences before `end`.
  void know_halves(int64_t end) const;

  uint64_t seed_;
  int64_t vocabulary_;
  int64_t length_;
  int64_t eval_sequences_;
  std::string characters_;
  std::optional<WindowOrder> examples_;  // the order of a fixed set of examples
  int64_t examples_in_order_ = 0;        // how many, where they keep their order; else 0
  // Of the held-out sequences before `known_`: whether each is test data, by its hash.
  mutable std::unordered_map<uint64_t, bool> halves_;
  mutable int64_t known_ = 0;
  // From this number on sequences are in both halves: there was none for one of them. Else their
  // number.
  mutable int64_t same_halves_from_;
  mutable std::mutex mutex_;
};

struct GeneratedSpec : TaskSpec {
  int64_t eval_sequences = 512;
  int64_t examples = 0;

  void fields(Fields& f) final;
  std::optional<TaskSizes> known_sizes() override;
  std::shared_ptr<Task> build(uint64_t seed) const final;

 protected:
  virtual void own_fields(Fields& f) = 0;
  // Checks the options together. Where nothing is read, it takes neither time nor memory.
  virtual std::shared_ptr<Task> make(uint64_t seed) const = 0;
};

}  // namespace headloom::data
