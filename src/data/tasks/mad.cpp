// The six tasks of MAD, the mechanistic architecture design (Poli et al. 2024, arXiv
// 2403.17844, section 3), with the settings of the authors' published code as defaults. V is the
// vocabulary and T the length.
//
// in_context_recall: T / 2 pairs of a key, of [0, V/2), and a value, of [V/2, V). Keys and the
// value of a new key are uniform; a key keeps its value in a sequence. The last key has been shown
// before. noisy_in_context_recall: the last `noise_tokens` of the vocabulary are noise. Each pair,
// but for one drawn at random and the last, is two of them with probability `noise`.
// fuzzy_in_context_recall: a key or a value is 1 to 3 different tokens in some order. One pair
// stands at a random place and again at the end; what is missing of T + 1 tokens is padding (V - 1)
// on the left. Held-out keys have 3 tokens. The pair's place is drawn such that it always comes up.
// Of the three, training predicts every next token, and held-out sequences have targets only where
// a value follows a key that has been shown.
//
// selective_copying: `tokens` random tokens of [0, V - 2) with T - 2 tokens - 1 blanks (V - 2)
// before places among them, a copy token (V - 1), and `tokens` blanks, whose targets are the
// tokens.
//
// memorization: T / 2 keys, each followed by an insert token (V - 1) whose target is the key's
// value. One map from keys to values serves all sequences and all seeds.
//
// compression: T - 1 random tokens of [0, V - 1) and the token V - 1, and the targets are the same.
// An auto-encoder gives them back from the vector of the last position.
#include <algorithm>
#include <map>

#include "core/error.h"
#include "core/sizes.h"
#include "data/generated.h"
#include "data/tasks/tasks.h"

namespace headloom::data {
namespace {

// As the authors' training and test sets have them.
constexpr int64_t kMadExamples = 12800;
constexpr int64_t kMadHeldOut = 1280;

struct MadOptions {
  int64_t vocabulary = 16;
  int64_t length = 128;
  int64_t noise_tokens = 0;
  double noise = 0.0;
  int64_t tokens = 16;
};

// Tokens and the targets of held-out sequences, which stand at the token that they predict.
struct Recalled {
  std::vector<int64_t> tokens, answers;

  void add(int64_t token, bool answer) {
    tokens.push_back(token);
    answers.push_back(answer ? token : kIgnore);
  }
  Sample sample(bool held_out) const {
    Sample sample = next_token_sample(tokens, static_cast<int64_t>(tokens.size()) - 1);
    if (held_out) sample.targets.assign(answers.begin() + 1, answers.end());
    return sample;
  }
};

class MadTask : public GeneratedTask {
 public:
  MadTask(const MadOptions& options, int64_t length, uint64_t seed, int64_t eval_sequences)
      : GeneratedTask(seed, options.vocabulary, length, eval_sequences), options_(options) {}

  Accuracy accuracy() const final { return Accuracy::token; }

 protected:
  const MadOptions options_;
};

// The two kinds of recall of pairs: keys are tokens [0, keys), values [keys, keys + values).
class PairRecall : public MadTask {
 public:
  PairRecall(const MadOptions& options, int64_t length, int64_t tokens, uint64_t seed,
             int64_t eval_sequences)
      : MadTask(options, length, seed, eval_sequences),
        keys_(tokens / 2),
        values_(tokens - keys_) {}

  std::vector<Floor> floors_of(const std::vector<int64_t>&) const final {
    std::vector<Floor> floors = {
        {"any token", 1.0 / static_cast<double>(vocabulary())},
        {"any token of values", 1.0 / static_cast<double>(values_)},
        {"the token of values that the sequence has shown most often", frequent_guess()}};
    std::stable_sort(floors.begin(), floors.end(),
                     [](const Floor& a, const Floor& b) { return a.accuracy < b.accuracy; });
    return floors;
  }

 protected:
  Sample draw(Random& random) const final { return draw_pairs(random, false).sample(false); }
  Sample draw_held_out(Random& random) const final { return draw_pairs(random, true).sample(true); }
  virtual Recalled draw_pairs(Random& random, bool held_out) const = 0;

  const int64_t keys_, values_;

 private:
  // By a simulation: keys may share a value, so that some values come more often than others.
  double frequent_guess() const {
    const int64_t draws = std::clamp<int64_t>((int64_t{1} << 24) / (length() * values_), 50, 4000);
    Random random({0, 0, 0});
    int64_t right = 0, asked = 0;
    for (int64_t n = 0; n < draws; ++n) {
      const Recalled drawn = draw_pairs(random, true);
      std::vector<int64_t> times(static_cast<size_t>(values_), 0);
      for (size_t i = 0; i < drawn.tokens.size(); ++i) {
        const int64_t value = drawn.tokens[i] - keys_;
        if (drawn.answers[i] != kIgnore) {
          ++asked;
          right += std::max_element(times.begin(), times.end()) - times.begin() == value;
        }
        if (value >= 0 && value < values_) ++times[static_cast<size_t>(value)];
      }
    }
    return static_cast<double>(right) / static_cast<double>(asked);
  }
};

class InContextRecall final : public PairRecall {
 public:
  InContextRecall(const MadOptions& options, uint64_t seed, int64_t eval_sequences)
      : PairRecall(options, options.length - 1, options.vocabulary - options.noise_tokens, seed,
                   eval_sequences) {}

  std::string describe() const override {
    return str("Sequences of ", options_.length / 2, " pairs of ", keys_, " keys and ", values_,
               " values",
               options_.noise > 0.0 ? str(", of which ", options_.noise, " are noise") : "",
               "; the answers are the values of keys that came before; generated, ",
               eval_sequences(), " held out.");
  }

 protected:
  Recalled draw_pairs(Random& random, bool) const override {
    constexpr int64_t kParts = int64_t{1} << 30;
    const auto noisy = static_cast<int64_t>(options_.noise * static_cast<double>(kParts));
    const int64_t pairs = options_.length / 2 - 1;
    const int64_t never_noise = random.below(pairs);
    std::map<int64_t, int64_t> shown;  // values by key
    Recalled out;
    for (int64_t i = 0; i < pairs; ++i) {
      if (noisy > 0 && i != never_noise && random.below(kParts) < noisy) {
        for (int j = 0; j < 2; ++j) {
          out.add(keys_ + values_ + random.below(options_.noise_tokens), false);
        }
        continue;
      }
      const int64_t key = random.below(keys_);
      const bool known = shown.contains(key);
      if (!known) shown[key] = keys_ + random.below(values_);
      out.add(key, false);
      out.add(shown[key], known);
    }
    auto last = shown.begin();
    std::advance(last, random.below(static_cast<int64_t>(shown.size())));
    out.add(last->first, false);
    out.add(last->second, true);
    return out;
  }
};

class FuzzyRecall final : public PairRecall {
 public:
  static constexpr int64_t kLongest = 3;  // tokens of a key, and of a value

  FuzzyRecall(const MadOptions& options, uint64_t seed, int64_t eval_sequences)
      : PairRecall(options, options.length, options.vocabulary - 1, seed, eval_sequences) {}

  std::string describe() const override {
    return str("Sequences of ", options_.length, " tokens: keys and values of 1 to ", kLongest,
               " of ", keys_, " and ", values_,
               " tokens; the answers are the values of keys that came before; generated, ",
               eval_sequences(), " held out.");
  }

 private:
  using Motif = std::vector<int64_t>;

  Motif draw_key(Random& random, bool longest) const {
    return random.distinct(keys_, longest ? kLongest : 1 + random.below(kLongest));
  }
  Motif draw_value(Random& random) const {
    Motif value = random.distinct(values_, 1 + random.below(kLongest));
    for (int64_t& token : value) token += keys_;
    return value;
  }

  // Held-out keys are of the longest.
  Recalled draw_pairs(Random& random, bool longest) const override {
    const Motif probe = draw_key(random, longest);
    std::map<Motif, Motif> values{{probe, draw_value(random)}};
    const auto probe_size = static_cast<int64_t>(probe.size() + values[probe].size());
    const int64_t limit = options_.length - probe_size - 2 * kLongest;
    // No pair is longer than 2 kLongest, so that a place below this is reached before the limit.
    const int64_t place = random.below(limit - 2 * kLongest);

    std::map<Motif, bool> shown;
    Recalled pairs;
    const auto add = [&](const Motif& key) {
      const bool known = shown[key];
      for (int64_t token : key) pairs.add(token, false);
      for (int64_t token : values.at(key)) pairs.add(token, known);
      shown[key] = true;
    };
    bool placed = false;
    while (static_cast<int64_t>(pairs.tokens.size()) < limit) {
      if (!placed && static_cast<int64_t>(pairs.tokens.size()) >= place) {
        add(probe);
        placed = true;
        continue;
      }
      const Motif key = draw_key(random, longest);
      if (!values.contains(key)) values[key] = draw_value(random);
      add(key);
    }
    add(probe);

    Recalled out;
    while (out.tokens.size() + pairs.tokens.size() < static_cast<size_t>(options_.length + 1)) {
      out.add(options_.vocabulary - 1, false);
    }
    out.tokens.insert(out.tokens.end(), pairs.tokens.begin(), pairs.tokens.end());
    out.answers.insert(out.answers.end(), pairs.answers.begin(), pairs.answers.end());
    return out;
  }
};

// How many of `count` tokens that are drawn evenly from `kinds` are expected to be of the kind that
// comes most often, as a share. By a simulation.
double most_frequent_share(int64_t count, int64_t kinds) {
  const int64_t draws = std::clamp<int64_t>((int64_t{1} << 22) / count, 50, 4000);
  Random random({0, 0, 0});
  int64_t sum = 0;
  for (int64_t n = 0; n < draws; ++n) {
    std::vector<int64_t> tokens(static_cast<size_t>(count));
    for (int64_t& token : tokens) token = random.below(kinds);
    std::sort(tokens.begin(), tokens.end());
    int64_t most = 0;
    for (auto first = tokens.begin(); first != tokens.end();) {
      const auto last = std::upper_bound(first, tokens.end(), *first);
      most = std::max<int64_t>(most, last - first);
      first = last;
    }
    sum += most;
  }
  return static_cast<double>(sum) / static_cast<double>(draws * count);
}

class SelectiveCopying final : public MadTask {
 public:
  SelectiveCopying(const MadOptions& options, uint64_t seed, int64_t eval_sequences)
      : MadTask(options, options.length, seed, eval_sequences) {}

  std::vector<Floor> floors_of(const std::vector<int64_t>&) const override {
    const auto count = static_cast<double>(options_.tokens);
    const auto data = static_cast<double>(options_.vocabulary - 2);
    const double one = 1.0 / count + (1.0 - 1.0 / count) / data;
    return {{"any token", 1.0 / static_cast<double>(vocabulary())},
            {"any token but the two special ones", 1.0 / data},
            {"one of the tokens to copy", one},
            {"the token to copy that comes most often",
             std::max(one, most_frequent_share(options_.tokens, options_.vocabulary - 2))}};
  }
  std::string describe() const override {
    return str("Sequences of ", options_.length, " tokens of a vocabulary of ", options_.vocabulary,
               ": ", options_.tokens, " tokens among blanks, then the same tokens as the answer; ",
               "generated, ", eval_sequences(), " held out.");
  }

 protected:
  Sample draw(Random& random) const override {
    const auto count = static_cast<size_t>(options_.tokens);
    const int64_t blank = options_.vocabulary - 2;
    std::vector<int64_t> data(count), blanks(count, 0);
    for (int64_t& token : data) token = random.below(blank);
    for (int64_t i = options_.length - 2 * options_.tokens - 1; i > 0; --i) {
      ++blanks[static_cast<size_t>(random.below(options_.tokens))];
    }
    Sample sample;
    for (size_t i = 0; i < count; ++i) {
      sample.inputs.insert(sample.inputs.end(), static_cast<size_t>(blanks[i]), blank);
      sample.inputs.push_back(data[i]);
    }
    sample.inputs.push_back(options_.vocabulary - 1);
    sample.targets.assign(sample.inputs.size(), kIgnore);
    sample.inputs.insert(sample.inputs.end(), count, blank);
    sample.targets.insert(sample.targets.end(), data.begin(), data.end());
    return sample;
  }
};

class Memorization final : public MadTask {
 public:
  Memorization(const MadOptions& options, uint64_t seed, int64_t eval_sequences)
      : MadTask(options, options.length, seed, eval_sequences),
        keys_((options.vocabulary - 1) / 2) {
    constexpr uint64_t kMap = 12345;
    value_of_ = Random({kMap}).distinct(options.vocabulary - 1 - keys_, keys_);
  }

  std::vector<Floor> floors_of(const std::vector<int64_t>&) const override {
    return {{"any token", 1.0 / static_cast<double>(vocabulary())},
            {"any value", 1.0 / static_cast<double>(keys_)}};  // that a key has
  }
  std::string describe() const override {
    return str("Sequences of ", options_.length / 2, " of ", keys_,
               " keys, whose values, the same in all sequences, are the answers; generated, ",
               eval_sequences(), " held out.");
  }

 protected:
  Sample draw(Random& random) const override {
    Sample sample;
    for (int64_t i = 0; i < options_.length / 2; ++i) {
      const int64_t key = random.below(keys_);
      sample.inputs.insert(sample.inputs.end(), {key, options_.vocabulary - 1});
      sample.targets.insert(sample.targets.end(),
                            {kIgnore, keys_ + value_of_[static_cast<size_t>(key)]});
    }
    return sample;
  }

 private:
  int64_t keys_;
  std::vector<int64_t> value_of_;
};

class Compression final : public MadTask {
 public:
  Compression(const MadOptions& options, uint64_t seed, int64_t eval_sequences)
      : MadTask(options, options.length, seed, eval_sequences) {}

  Goal goal() const override { return Goal::reconstruction; }
  std::vector<Floor> floors_of(const std::vector<int64_t>&) const override {
    const auto length = static_cast<double>(options_.length);
    const double data = 1.0 / static_cast<double>(options_.vocabulary - 1);
    return {{"any token", 1.0 / static_cast<double>(vocabulary())},
            {"any token but the last, which is always the same",
             ((length - 1.0) * data + 1.0) / length},
            {"the token that comes most often, and the last",
             ((length - 1.0) * most_frequent_share(options_.length - 1, options_.vocabulary - 1) +
              1.0) /
                 length}};
  }
  std::string describe() const override {
    return str("Sequences of ", options_.length - 1, " of ", options_.vocabulary - 1,
               " tokens and a last one, which are the answer; generated, ", eval_sequences(),
               " held out.");
  }

 protected:
  Sample draw(Random& random) const override {
    Sample sample;
    for (int64_t i = 1; i < options_.length; ++i) {
      sample.inputs.push_back(random.below(options_.vocabulary - 1));
    }
    sample.inputs.push_back(options_.vocabulary - 1);
    sample.targets = sample.inputs;
    return sample;
  }
};

struct MadSpec final : GeneratedSpec {
  enum class Kind { recall, noisy, fuzzy, copying, memorization, compression };

  MadSpec(std::string type, Kind kind, const MadOptions& defaults, int64_t training)
      : type_(std::move(type)), kind_(kind), options_(defaults) {
    eval_sequences = kMadHeldOut;
    examples = training;
  }
  std::string type() const override { return type_; }

 protected:
  void own_fields(Fields& f) override {
    f.field("vocabulary", options_.vocabulary, "tokens, special ones included",
            between<int64_t>(4, int64_t{1} << 24));
    f.field("length", options_.length,
            kind_ == Kind::fuzzy || kind_ == Kind::copying || kind_ == Kind::compression
                ? "tokens in a sequence"
                : "tokens in a sequence, an even number; the last of a pair is only a target",
            size_from(4));
    if (kind_ == Kind::noisy) {
      f.field("noise_tokens", options_.noise_tokens, "tokens of the vocabulary that are noise",
              size_from(1));
      f.field("noise", options_.noise, "share of the pairs that are noise",
              Range<double>{.low = 0.0, .high = 1.0, .open_high = true});
    }
    if (kind_ == Kind::copying) {
      f.field("tokens", options_.tokens, "tokens to copy", size_from(1));
    }
  }

  std::shared_ptr<Task> make(uint64_t seed) const override {
    const MadOptions& o = options_;
    switch (kind_) {
      case Kind::recall:
      case Kind::noisy:
        need_even_length();
        need_vocabulary(o.noise_tokens + 2);
        return std::make_shared<InContextRecall>(o, seed, eval_sequences);
      case Kind::fuzzy:
        need_vocabulary(2 * FuzzyRecall::kLongest + 1);
        need_length(6 * FuzzyRecall::kLongest + 1);
        return std::make_shared<FuzzyRecall>(o, seed, eval_sequences);
      case Kind::copying:
        need_length(2 * o.tokens + 1);
        return std::make_shared<SelectiveCopying>(o, seed, eval_sequences);
      case Kind::memorization:
        need_even_length();
        return std::make_shared<Memorization>(o, seed, eval_sequences);
      case Kind::compression:
        return std::make_shared<Compression>(o, seed, eval_sequences);
    }
    fail("the task ", type_, " has no kind.");
  }

 private:
  void need_even_length() const {
    if (options_.length % 2 == 0) return;
    usage_error(type_, " has length = ", options_.length, ", expected an even number.");
  }
  void need_length(int64_t least) const {
    if (options_.length >= least) return;
    usage_error(type_, " has length = ", options_.length, ", expected at least ", least, ".");
  }
  void need_vocabulary(int64_t least) const {
    if (options_.vocabulary >= least) return;
    usage_error(type_, " has vocabulary = ", options_.vocabulary, ", expected at least ", least,
                ".");
  }

  std::string type_;
  Kind kind_;
  MadOptions options_;
};

}  // namespace

std::shared_ptr<TaskSpec> in_context_recall_spec() {
  return std::make_shared<MadSpec>("in_context_recall", MadSpec::Kind::recall, MadOptions{},
                                   kMadExamples);
}
std::shared_ptr<TaskSpec> noisy_in_context_recall_spec() {
  return std::make_shared<MadSpec>("noisy_in_context_recall", MadSpec::Kind::noisy,
                                   MadOptions{.vocabulary = 32, .noise_tokens = 16, .noise = 0.2},
                                   kMadExamples);
}
std::shared_ptr<TaskSpec> fuzzy_in_context_recall_spec() {
  return std::make_shared<MadSpec>("fuzzy_in_context_recall", MadSpec::Kind::fuzzy, MadOptions{},
                                   kMadExamples);
}
std::shared_ptr<TaskSpec> selective_copying_spec() {
  return std::make_shared<MadSpec>("selective_copying", MadSpec::Kind::copying,
                                   MadOptions{.length = 256}, kMadExamples);
}
std::shared_ptr<TaskSpec> memorization_spec() {
  return std::make_shared<MadSpec>("memorization", MadSpec::Kind::memorization,
                                   MadOptions{.vocabulary = 256, .length = 32}, 256);
}
std::shared_ptr<TaskSpec> compression_spec() {
  return std::make_shared<MadSpec>("compression", MadSpec::Kind::compression,
                                   MadOptions{.length = 32}, kMadExamples);
}

}  // namespace headloom::data
