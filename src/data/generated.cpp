#include "data/generated.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "core/error.h"
#include "core/memory.h"
#include "core/parse_number.h"
#include "core/sizes.h"
#include "data/unicode.h"

namespace headloom::data {
namespace {

// One sequence in this many is held out.
constexpr uint64_t kHeldOutShare = 16;
// Where fewer than 1 in 1000 draws suits a stream, the options leave too few different sequences.
constexpr int kMaxDraws = 10000;

uint64_t hash_of(const Sample& sample) {
  StableHash hash;
  for (int64_t token : sample.source) hash.add(static_cast<uint64_t>(token));
  for (int64_t token : sample.inputs) hash.add(static_cast<uint64_t>(token));
  return hash.value();
}

// [B, width]: each row a sample's tokens, then `padding`.
at::Tensor rows_of(const std::vector<Sample>& samples, std::vector<int64_t> Sample::* tokens,
                   int64_t width, int64_t padding) {
  const auto count = static_cast<int64_t>(samples.size());
  at::Tensor rows = at::full({count, width}, padding, at::kLong);
  int64_t* row = rows.data_ptr<int64_t>();
  for (const Sample& sample : samples) {
    std::copy((sample.*tokens).begin(), (sample.*tokens).end(), row);
    row += width;
  }
  return rows;
}

at::Tensor sizes_of(const std::vector<Sample>& samples, std::vector<int64_t> Sample::* tokens) {
  std::vector<int64_t> sizes;
  for (const Sample& sample : samples) {
    sizes.push_back(static_cast<int64_t>((sample.*tokens).size()));
  }
  return at::tensor(sizes, at::kLong);
}

// [B, width] bool: each row true in [begin, end).
template <typename Range>
at::Tensor marked(const std::vector<Sample>& samples, int64_t width, const Range& range) {
  at::Tensor out = at::zeros({static_cast<int64_t>(samples.size()), width}, at::kBool);
  for (size_t i = 0; i < samples.size(); ++i) {
    const auto [begin, end] = range(samples[i]);
    out[static_cast<int64_t>(i)].slice(0, begin, end).fill_(true);
  }
  return out;
}

}  // namespace

Batch batch_of(const Task& task, const std::vector<Sample>& samples, int64_t length) {
  const Goal goal = task.goal();
  Batch batch{.inputs = rows_of(samples, &Sample::inputs, length, 0)};
  const int64_t targets = goal == Goal::label ? 1 : goal == Goal::span ? 2 : length;
  batch.targets = rows_of(samples, &Sample::targets, targets, kIgnore);
  if (goal == Goal::label) batch.targets = batch.targets.squeeze(1);
  const bool padded = std::any_of(samples.begin(), samples.end(), [&](const Sample& sample) {
    return static_cast<int64_t>(sample.inputs.size()) < length;
  });
  // No token sees the padding behind it, but experts would be balanced by it.
  if (goal == Goal::next_token ? padded : goal != Goal::reconstruction) {
    batch.lengths = sizes_of(samples, &Sample::inputs);
  }
  if (task.segments() > 0) {
    batch.segments = marked(samples, length, [](const Sample& sample) {
                       return std::array{sample.second, static_cast<int64_t>(sample.inputs.size())};
                     }).to(at::kLong);
  }
  if (goal == Goal::span) {
    batch.context = marked(samples, length, [](const Sample& sample) { return sample.context; });
  }
  if (goal == Goal::sequence) {
    batch.source = rows_of(samples, &Sample::source, task.source_length(), 0);
    batch.source_lengths = sizes_of(samples, &Sample::source);
  }
  return batch;
}

Sample next_token_sample(const std::vector<int64_t>& tokens, int64_t answer) {
  Sample sample;
  sample.inputs.assign(tokens.begin(), tokens.end() - 1);
  sample.targets.assign(tokens.size() - 1, kIgnore);
  std::copy(tokens.end() - answer, tokens.end(), sample.targets.end() - answer);
  return sample;
}

GeneratedTask::GeneratedTask(uint64_t seed, int64_t vocabulary, int64_t length,
                             int64_t eval_sequences, std::string characters)
    : seed_(seed),
      vocabulary_(vocabulary),
      length_(length),
      eval_sequences_(eval_sequences),
      characters_(std::move(characters)),
      same_halves_from_(eval_sequences) {}

void GeneratedTask::limit_examples(int64_t examples, bool in_order) {
  if (in_order) {
    examples_in_order_ = examples;
  } else {
    examples_.emplace(seed_, examples, 1);
  }
}

bool GeneratedTask::halves_are_apart(int64_t end) const {
  const std::lock_guard lock(mutex_);
  know_halves(end);
  return same_halves_from_ >= end;
}

std::optional<Sample> GeneratedTask::know_next() const {
  std::optional<Sample> sample = drawn(true, known_);
  if (!sample) same_halves_from_ = known_;
  ++known_;
  return sample;
}

void GeneratedTask::know_halves(int64_t end) const {
  while (known_ < std::min(end, same_halves_from_)) know_next();
}

Sample GeneratedTask::sequence(bool held_out, int64_t number) const {
  std::unique_lock lock(mutex_, std::defer_lock);
  if (held_out) {
    lock.lock();
    know_halves(number);
    if (number == known_ && number < same_halves_from_) {  // most are asked for in order
      if (std::optional<Sample> sample = know_next()) return *std::move(sample);
    }
  }
  if (std::optional<Sample> sample = drawn(held_out, number)) return *std::move(sample);
  usage_error("the options of this task (", describe(),
              ") allow too few different sequences to hold ", "some of them out; make it larger.");
}

std::optional<Sample> GeneratedTask::drawn(bool held_out, int64_t number) const {
  Random random({held_out ? 0 : seed_, held_out, static_cast<uint64_t>(number)});
  for (int i = 0; i < kMaxDraws; ++i) {
    Sample sample = draw_number(held_out, number, random);
    const uint64_t hash = hash_of(sample);
    if ((hash % kHeldOutShare == 0) != held_out) continue;
    // The half of the first number that has this sequence is its half.
    if (held_out && number < same_halves_from_ &&
        halves_.emplace(hash, is_test(number)).first->second != is_test(number)) {
      continue;
    }
    return sample;
  }
  return std::nullopt;
}

Batch GeneratedTask::batch_of(const std::vector<Sample>& samples) const {
  // Where sequences are drawn in several lengths, those of a batch have mostly the same one.
  const std::vector<TrainLength> lengths = train_lengths();
  int64_t longest = lengths.size() == 1 && lengths[0].length == length() ? length() : 0;
  for (const Sample& sample : samples) {
    longest = std::max(longest, static_cast<int64_t>(sample.inputs.size()));
  }
  return data::batch_of(*this, samples, goal() == Goal::next_token ? longest : length());
}

Batch GeneratedTask::batch(bool held_out, int64_t first, int64_t count) const {
  std::vector<Sample> samples;
  for (int64_t i = 0; i < count; ++i) samples.push_back(sequence(held_out, first + i));
  return batch_of(samples);
}

Batch GeneratedTask::train_batch(int64_t index, int64_t batch_size) const {
  const int64_t first = index * batch_size;
  if (!examples_ && examples_in_order_ == 0) return batch(false, first, batch_size);
  std::vector<Sample> samples;
  if (examples_) {
    for (int64_t number : examples_->starts(first, batch_size)) {
      samples.push_back(sequence(false, number));
    }
  } else {
    for (int64_t i = 0; i < batch_size; ++i) {
      samples.push_back(sequence(false, (first + i) % examples_in_order_));
    }
  }
  return batch_of(samples);
}

Batch GeneratedTask::eval_batch(int64_t first, int64_t count) const {
  check_held_out(first, count, eval_sequences_);
  return batch(true, first, count);
}

std::vector<int64_t> GeneratedTask::encode(std::string_view text) const {
  std::vector<int64_t> tokens;
  if (!characters_.empty()) {
    for (size_t i = 0; i < text.size(); ++i) {
      const size_t token = characters_.find(text[i]);
      if (token == std::string::npos) {
        const std::string_view rest = text.substr(i);
        usage_error("'", rest.substr(0, std::max<size_t>(1, code_point(rest).length)),
                    "' is not in this task's vocabulary, which is \"", characters_, "\".");
      }
      tokens.push_back(static_cast<int64_t>(token));
    }
    return tokens;
  }
  size_t at = 0;
  while ((at = text.find_first_not_of(" \t\n", at)) != std::string_view::npos) {
    const std::string_view word = text.substr(at, text.find_first_of(" \t\n", at) - at);
    const auto token = parse_number<int64_t>(word);
    if (!token || *token < 0 || *token >= vocabulary_) {
      usage_error("'", word, "' is not a token of this task, whose tokens are the numbers 0 to ",
                  vocabulary_ - 1, ".");
    }
    tokens.push_back(*token);
    at += word.size();
  }
  return tokens;
}

std::string GeneratedTask::decode(const std::vector<int64_t>& tokens) const {
  std::string text;
  for (int64_t token : tokens) {
    if (!characters_.empty()) {
      text += characters_.at(static_cast<size_t>(token));
    } else {
      // Every number ends with a space, so pieces can be written one after the other.
      text += std::to_string(token) + " ";
    }
  }
  return text;
}

void GeneratedSpec::fields(Fields& f) {
  own_fields(f);
  f.field("eval_sequences", eval_sequences, "held-out sequences, the same for every seed",
          size_from(1));
  f.field("examples", examples,
          "different training sequences, repeated in another order every epoch; 0: as many as are "
          "asked for",
          size_from(0));
}

std::optional<TaskSizes> GeneratedSpec::known_sizes() {
  if (!data_paths().empty()) return std::nullopt;
  return data::sizes_of(*make(0));
}

std::shared_ptr<Task> GeneratedSpec::build(uint64_t seed) const {
  check_no_idle_options(*this);
  std::shared_ptr<Task> task = make(seed);
  // Options that allow too few sequences are refused here rather than in the middle of a run.
  auto* generated = dynamic_cast<GeneratedTask*>(task.get());
  if (generated == nullptr && examples > 0) {
    usage_error(type(), " has examples = ", examples,
                ", but it reads its examples from files; remove 'examples'.");
  }
  if (generated != nullptr) {
    if (examples > 0) generated->limit_examples(examples);
    // Inputs and targets, as they are drawn and as a batch, int64 each.
    const double positions = static_cast<double>(task->length() + task->source_length());
    check_fits("one sequence of the task needs", 4 * 8 * positions,
               str(task->length() + task->source_length(), " positions"),
               "a shorter one needs less");
    task->train_batch(0, 1);
    task->eval_batch(0, 1);
  }
  return task;
}

}  // namespace headloom::data
