// recall, mqar, forgetting_mqar, compositional_mqar: multi-query associative recall (Arora et al.
// 2023, Zoology, section 4 and appendix; the last two are later tasks of Zoology's repository).
//
//   inputs   k1 v1 k2 v2 ... | x  k2 x  x  x  k1 x  ...
//   targets  -  -  -  -      | -  v2 -  -  -  v1 -
//
// `pairs` different keys with different values come first; keys are tokens [1, V/2), values [V/2,
// V). Then every key is asked for once, at an even distance 2g after the pairs, where g is drawn
// without replacement from p(g) ~ (g + 1)^(alpha - 1): most are asked for soon. The value is the
// target at the query's own position and is not in the inputs. All other places, that after a query
// included, hold random tokens of the whole vocabulary (recall, and the others with
// random_non_queries) or token 0 (mqar's default, as in Zoology's figure 2).
//
// With `segments` training goes through several lengths and numbers of pairs, each of a fixed
// number of examples, in order and again every epoch, and `eval_segments` may be longer: recall
// against the size of a state (Arora et al. 2024, Based, figure 2). Sequences of a batch are padded
// to its longest with token 0. The accuracy is the mean over held-out sequences of their shares of
// right answers, and every segment has as many of them.
//
// forgetting_mqar: after the pairs `updates` of the keys come again with a second value, which is
// the one that is asked for. All values are different.
//
// compositional_mqar: a key is two tokens, of [1, V/3) and [V/3, 2V/3), and values are [2V/3, V).
// The keys are all combinations of n first and n second tokens, n^2 = pairs, in random order: one
// token of a key leaves n values. A query takes three places, and the target is at its second
// token.
#include <algorithm>
#include <charconv>
#include <cmath>
#include <memory>
#include <mutex>

#include "core/error.h"
#include "core/sizes.h"
#include "core/text.h"
#include "data/generated.h"
#include "data/tasks/tasks.h"

namespace headloom::data {
namespace {

struct RecallOptions {
  int64_t vocabulary = 8192;
  int64_t length = 64;
  int64_t pairs = 4;
  double alpha = 0.01;
  bool random_non_queries = false;
  int64_t updates = 0;
  bool compound_keys = false;

  int64_t key_tokens() const { return compound_keys ? 2 : 1; }
  // Of a pair, and of the place of a query.
  int64_t stride() const { return key_tokens() + 1; }
  int64_t facts() const { return pairs + updates; }
  int64_t shortest() const { return stride() * (facts() + pairs); }
  // The first and second tokens of compound keys.
  int64_t side() const { return std::llround(std::sqrt(static_cast<double>(pairs))); }
  int64_t first_value() const { return compound_keys ? 2 * (vocabulary / 3) : vocabulary / 2; }
};

using Key = std::vector<int64_t>;

// Sequences of one length and one number of pairs.
class RecallSegment {
 public:
  explicit RecallSegment(const RecallOptions& options) : options_(options) {}

  const RecallOptions& options() const { return options_; }

  // The same guesses in the same order whatever the sizes are.
  std::vector<Floor> floors() const {
    std::vector<Floor> floors = {
        {"any token", 1.0 / static_cast<double>(options_.vocabulary)},
        {"one of the values shown", 1.0 / static_cast<double>(options_.facts())}};
    if (options_.updates > 0) {
      floors.push_back(
          {"one of the values that are still valid", 1.0 / static_cast<double>(options_.pairs)});
    }
    if (options_.compound_keys) {
      floors.push_back({"one of the values of keys with the same first token",
                        1.0 / static_cast<double>(options_.side())});
    }
    floors.push_back({"the value that is asked for most often at that place", positional_guess()});
    return floors;
  }

  Sample draw(Random& random) const {
    const std::vector<Key> keys = draw_keys(random);
    std::vector<int64_t> values =
        random.distinct(options_.vocabulary - options_.first_value(), options_.facts());
    for (int64_t& value : values) value += options_.first_value();
    Sample sample;
    sample.inputs.resize(static_cast<size_t>(options_.length));
    if (options_.random_non_queries) {
      for (int64_t& token : sample.inputs) token = random.below(options_.vocabulary);
    }
    sample.targets.assign(sample.inputs.size(), kIgnore);

    size_t end = 0;  // of the facts
    const auto state = [&](const Key& key, int64_t value) {
      end = put(sample, end, key);
      sample.inputs[end++] = value;
    };
    const auto pairs = static_cast<size_t>(options_.pairs);
    for (size_t i = 0; i < pairs; ++i) state(keys[i], values[i]);
    std::vector<int64_t> valid(values.begin(), values.begin() + options_.pairs);
    if (options_.updates > 0) {
      size_t next = pairs;
      for (int64_t i : random.distinct(options_.pairs, options_.updates)) {
        const auto updated = static_cast<size_t>(i);
        valid[updated] = values[next++];
        state(keys[updated], valid[updated]);
      }
    }

    const std::vector<size_t> gaps =
        draw_gaps(random, [](size_t, const std::vector<int64_t>&, int64_t) {});
    for (size_t i = 0; i < pairs; ++i) {
      const size_t query = end + static_cast<size_t>(options_.stride()) * gaps[i];
      sample.targets[put(sample, query, keys[i]) - 1] = valid[i];
    }
    return sample;
  }

 private:
  // Writes a key to the inputs from `at` on, and returns where it ends.
  static size_t put(Sample& sample, size_t at, const Key& key) {
    for (int64_t token : key) sample.inputs[at++] = token;
    return at;
  }

  std::vector<Key> draw_keys(Random& random) const {
    std::vector<Key> keys;
    if (!options_.compound_keys) {
      for (int64_t key : random.distinct(options_.vocabulary / 2 - 1, options_.pairs)) {
        keys.push_back({1 + key});
      }
      return keys;
    }
    const int64_t third = options_.vocabulary / 3;
    const std::vector<int64_t> seconds = random.distinct(third, options_.side());
    for (int64_t first : random.distinct(third - 1, options_.side())) {
      for (int64_t second : seconds) keys.push_back({1 + first, third + second});
    }
    random.shuffle(keys);
    return keys;
  }

  // The gap before each key's query. The first keys take the small gaps most often. `see` is shown
  // each key's number, the weights of the gaps that are left to it, and their sum.
  template <typename See>
  std::vector<size_t> draw_gaps(Random& random, const See& see) const {
    std::call_once(weighed_, [&] { weigh_gaps(); });
    std::vector<int64_t> weights = weights_;
    int64_t total = 0;
    for (int64_t weight : weights) total += weight;
    std::vector<size_t> gaps;
    for (int64_t i = 0; i < options_.pairs; ++i) {
      see(static_cast<size_t>(i), weights, total);
      int64_t left = random.below(total);
      size_t gap = 0;
      while (left >= weights[gap]) left -= weights[gap++];
      total -= weights[gap];
      weights[gap] = 0;
      gaps.push_back(gap);
    }
    return gaps;
  }

  // The accuracy of a guess that looks at the place of a query alone: it takes the value of the key
  // that is asked for there most often. By a simulation, because the gaps are drawn without
  // replacement. One half of the draws says which key that is, and the other how often it is right:
  // of the most frequent key the draws that chose it say too much.
  double positional_guess() const {
    // Long sequences have many places to try at each draw.
    const int64_t work = options_.pairs * options_.length;
    const int64_t draws = std::clamp<int64_t>((int64_t{1} << 25) / work, 100, 4000);
    Random random({0, 0, 0});
    const auto pairs = static_cast<size_t>(options_.pairs);
    std::vector<double> chances;  // [gaps, keys], sums over the first half
    for (int64_t n = 0; n < draws / 2; ++n) {
      draw_gaps(random, [&](size_t key, const std::vector<int64_t>& weights, int64_t total) {
        chances.resize(weights.size() * pairs);
        for (size_t gap = 0; gap < weights.size(); ++gap) {
          chances[gap * pairs + key] +=
              static_cast<double>(weights[gap]) / static_cast<double>(total);
        }
      });
    }
    std::vector<size_t> guesses;  // the key of each gap
    for (auto of_gap = chances.begin(); of_gap != chances.end(); of_gap += options_.pairs) {
      const auto best = std::max_element(of_gap, of_gap + options_.pairs);
      guesses.push_back(static_cast<size_t>(best - of_gap));
    }
    double right = 0;
    for (int64_t n = 0; n < draws / 2; ++n) {
      draw_gaps(random, [&](size_t key, const std::vector<int64_t>& weights, int64_t total) {
        for (size_t gap = 0; gap < weights.size(); ++gap) {
          if (guesses[gap] != key) continue;
          right += static_cast<double>(weights[gap]) / static_cast<double>(total);
        }
      });
    }
    return right / static_cast<double>(draws / 2 * options_.pairs);
  }

  void weigh_gaps() const {
    const int64_t gaps = options_.length / options_.stride() - options_.facts();
    for (int64_t g = 0; g < gaps; ++g) {
      // Whole numbers: the last bit of pow() differs between mathematics libraries.
      const double weight = std::pow(static_cast<double>(g + 1), options_.alpha - 1.0);
      weights_.push_back(std::max<int64_t>(1, std::llround(weight * (1 << 30))));
    }
  }

  RecallOptions options_;
  // Of each gap. Made at the first draw: until then a task takes no memory, whatever its length.
  mutable std::once_flag weighed_;
  mutable std::vector<int64_t> weights_;
};

// How many different training sequences there are of a segment.
struct TrainingSegment {
  RecallOptions options;
  int64_t examples;
};

class Recall final : public GeneratedTask {
 public:
  // Without segments, both lists are of one element: one length and one number of pairs.
  // `examples` of that one are 0: the stream has no end, or limit_examples() sets one.
  Recall(const std::vector<TrainingSegment>& train, const std::vector<RecallOptions>& eval,
         uint64_t seed, int64_t eval_sequences)
      : GeneratedTask(seed, eval[0].vocabulary, longest(train, eval), eval_sequences) {
    int64_t examples = 0;
    for (const TrainingSegment& segment : train) {
      train_.push_back(std::make_unique<RecallSegment>(segment.options));
      ends_.push_back(examples += segment.examples);
    }
    for (const RecallOptions& options : eval) {
      held_out_.push_back(std::make_unique<RecallSegment>(options));
    }
    if (examples > 0) limit_examples(examples, /*in_order=*/true);
  }

  std::vector<TrainLength> train_lengths() const override {
    if (ends_.back() == 0) return GeneratedTask::train_lengths();
    std::vector<TrainLength> lengths;
    for (size_t i = 0; i < train_.size(); ++i) {
      lengths.push_back({.length = train_[i]->options().length, .sequences = examples_of(i)});
    }
    return lengths;
  }
  int64_t eval_group() const override {
    return held_out_.size() > 1 ? 2 * std::ssize(held_out_) : 1;
  }
  Accuracy accuracy() const override { return Accuracy::share; }
  std::vector<Floor> floors_of(const std::vector<int64_t>&) const override {
    std::vector<Floor> floors = held_out_[0]->floors();
    for (size_t i = 1; i < held_out_.size(); ++i) {
      const std::vector<Floor> more = held_out_[i]->floors();
      for (size_t j = 0; j < floors.size(); ++j) floors[j].accuracy += more[j].accuracy;
    }
    for (Floor& floor : floors) floor.accuracy /= static_cast<double>(held_out_.size());
    std::stable_sort(floors.begin(), floors.end(),
                     [](const Floor& a, const Floor& b) { return a.accuracy < b.accuracy; });
    return floors;
  }
  std::string describe() const override {
    const RecallOptions& options = train_[0]->options();
    if (ends_.back() > 0) {
      std::vector<std::string> train, held_out;
      for (size_t i = 0; i < train_.size(); ++i) {
        train.push_back(str(sizes_of_segment(*train_[i]), " (", examples_of(i), " sequences)"));
      }
      for (const auto& segment : held_out_) held_out.push_back(sizes_of_segment(*segment));
      return str("Sequences of a vocabulary of ", options.vocabulary,
                 ": key-value pairs, then each key once more, whose value is the answer; ",
                 "tokens and pairs in training ", join(train), "; held out ", join(held_out),
                 ", as many of each; generated, ", eval_sequences(), " held out.");
    }
    return str("Sequences of ", options.length, " tokens of a vocabulary of ", options.vocabulary,
               ": ", options.pairs, " key-value pairs, ",
               options.compound_keys ? "each key two tokens, " : "",
               options.updates > 0 ? str("a second value for ", options.updates, " keys, ") : "",
               "then each key once more, whose value is the answer; ", "generated, ",
               eval_sequences(), " held out.");
  }

 protected:
  Sample draw(Random& random) const override { return train_[0]->draw(random); }
  Sample draw_number(bool held_out, int64_t number, Random& random) const override {
    if (held_out) {
      // Two neighbours are of one segment: one of them is validation data, the other test data.
      return held_out_[static_cast<size_t>(number / 2) % held_out_.size()]->draw(random);
    }
    if (train_.size() == 1) return draw(random);
    const auto end = std::upper_bound(ends_.begin(), ends_.end(), number);
    return train_[static_cast<size_t>(end - ends_.begin())]->draw(random);
  }

 private:
  static int64_t longest(const std::vector<TrainingSegment>& train,
                         const std::vector<RecallOptions>& eval) {
    int64_t longest = 0;
    for (const TrainingSegment& segment : train) {
      longest = std::max(longest, segment.options.length);
    }
    for (const RecallOptions& options : eval) longest = std::max(longest, options.length);
    return longest;
  }
  // Of training segment i.
  int64_t examples_of(size_t i) const { return ends_[i] - (i == 0 ? 0 : ends_[i - 1]); }
  static std::string sizes_of_segment(const RecallSegment& segment) {
    return str(segment.options().length, " and ", segment.options().pairs);
  }

  std::vector<std::unique_ptr<RecallSegment>> train_, held_out_;
  std::vector<int64_t> ends_;  // of the training segments among their examples
};

struct RecallSpec final : GeneratedSpec {
  RecallOptions options;
  std::vector<std::string> segments, eval_segments;

  RecallSpec(std::string type, const RecallOptions& defaults)
      : options(defaults), type_(std::move(type)), defaults_(defaults) {}
  std::string type() const override { return type_; }

 protected:
  void own_fields(Fields& f) override {
    f.field("vocabulary", options.vocabulary,
            options.compound_keys
                ? "tokens; the thirds are first and second tokens of keys, and values"
                : "tokens; the lower half are keys, the upper half values",
            between<int64_t>(4, int64_t{1} << 31));
    f.field("length", options.length,
            options.compound_keys ? "tokens in a sequence, at least 6 * pairs"
            : options.updates > 0 ? "tokens in a sequence, at least 4 * pairs + 2 * updates"
                                  : "tokens in a sequence, at least 4 * pairs",
            size_from(4));
    f.field("pairs", options.pairs,
            options.compound_keys ? "key-value pairs, each asked for once: a square (4, 9, 16)"
                                  : "key-value pairs, each asked for once",
            size_from(1));
    if (options.updates > 0) {
      f.field("updates", options.updates, "keys that get a second value, at most pairs",
              size_from(1));
    }
    if (mixes()) {
      f.field("segments", segments,
              "training sets \"length:pairs:examples\", gone through in order every epoch, instead "
              "of length, pairs and examples; empty: one length");
      f.field("eval_segments", eval_segments,
              "held-out sets \"length:pairs\", with as many sequences each; empty: as segments");
    }
    f.field("alpha", options.alpha,
            "power law of the distance of the queries: p(gap) ~ gap^(alpha - 1); 1: uniform",
            Range<double>{.low = 0.0, .high = 1.0, .open_low = true});
    // recall always has random tokens there.
    if (type_ != "recall") {
      f.field("random_non_queries", options.random_non_queries,
              "random tokens between the queries instead of token 0");
    }
  }
  std::shared_ptr<Task> make(uint64_t seed) const override {
    if (segments.empty()) {
      if (!eval_segments.empty()) {
        usage_error(type_, " has eval_segments but no segments, expected both or none.");
      }
      check(options);
      return std::make_shared<Recall>(std::vector{TrainingSegment{options, 0}},
                                      std::vector{options}, seed, eval_sequences);
    }
    if (options.length != defaults_.length || options.pairs != defaults_.pairs || examples > 0) {
      usage_error(type_, " has segments and ",
                  examples > 0                         ? "examples"
                  : options.length != defaults_.length ? "length"
                                                       : "pairs",
                  ", expected segments alone, which say all three.");
    }
    std::vector<TrainingSegment> train;
    std::vector<RecallOptions> eval;
    for (const std::string& segment : segments) {
      const std::vector<int64_t> sizes = sizes_of("segments", segment, 3);
      train.push_back({of_sizes(sizes), sizes[2]});
      if (eval_segments.empty()) eval.push_back(train.back().options);
    }
    for (const std::string& segment : eval_segments) {
      eval.push_back(of_sizes(sizes_of("eval_segments", segment, 2)));
    }
    const auto share = 2 * static_cast<int64_t>(eval.size());
    if (eval_sequences % share != 0) {
      usage_error(type_, " has eval_sequences = ", eval_sequences, ", expected a multiple of ",
                  share, ": as many validation and test sequences of each of ", eval.size(),
                  " segments.");
    }
    return std::make_shared<Recall>(train, eval, seed, eval_sequences);
  }

 private:
  // Whether sequences of several sizes can be mixed.
  bool mixes() const { return defaults_.updates == 0 && !defaults_.compound_keys; }

  RecallOptions of_sizes(const std::vector<int64_t>& sizes) const {
    RecallOptions out = options;
    out.length = sizes[0];
    out.pairs = sizes[1];
    check(out);
    return out;
  }

  // The `count` numbers of "64:4:100000", each at least 1.
  std::vector<int64_t> sizes_of(const char* key, const std::string& text, size_t count) const {
    std::vector<int64_t> sizes;
    const char* const end = text.data() + text.size();
    for (const char* at = text.data(); at < end; ++at) {
      int64_t size = 0;
      const auto [after, error] = std::from_chars(at, end, size);
      if (error != std::errc() || size < 1 || (after != end && *after != ':')) break;
      sizes.push_back(size);
      at = after;
      if (at == end && sizes.size() == count) return sizes;
    }
    usage_error(
        type_, " has \"", text, "\" in ", key, ", expected numbers like ",
        count == 3 ? "\"64:4:100000\" (length:pairs:examples)." : "\"64:4\" (length:pairs).");
  }

  // Throws UsageError where one sequence does not fit its own sizes.
  void check(const RecallOptions& options) const {
    const int64_t pairs = options.pairs;
    if (options.length < options.shortest()) {
      usage_error(type_, " has length = ", options.length, ", but ", pairs, " pairs",
                  options.updates > 0 ? str(", ", options.updates, " updates") : "",
                  " and their queries need at least ", options.shortest(), ".");
    }
    if (options.updates > pairs) {
      usage_error(type_, " has updates = ", options.updates, ", expected at most pairs = ", pairs,
                  ".");
    }
    if (options.compound_keys && options.side() * options.side() != pairs) {
      usage_error(type_, " has pairs = ", pairs, ", expected a square such as 4, 9 or 16.");
    }
    // Of one kind: keys, or first tokens of keys.
    const int64_t needed = options.compound_keys ? options.side() : pairs;
    const int64_t keys = options.vocabulary / (options.key_tokens() + 1) - 1;
    if (needed > keys) {
      usage_error(type_, " has pairs = ", pairs, ", but a vocabulary of ", options.vocabulary,
                  " has only ", keys, options.compound_keys ? " first tokens of keys." : " keys.");
    }
    const int64_t values = options.vocabulary - options.first_value();
    if (options.facts() > values) {
      usage_error(type_, " needs ", options.facts(), " different values, but a vocabulary of ",
                  options.vocabulary, " has only ", values, ".");
    }
  }

  std::string type_;
  RecallOptions defaults_;
};

}  // namespace

std::shared_ptr<TaskSpec> recall_spec() {
  return std::make_shared<RecallSpec>("recall", RecallOptions{.random_non_queries = true});
}
std::shared_ptr<TaskSpec> mqar_spec() {
  return std::make_shared<RecallSpec>("mqar", RecallOptions{});
}
std::shared_ptr<TaskSpec> forgetting_mqar_spec() {
  return std::make_shared<RecallSpec>(
      "forgetting_mqar", RecallOptions{.pairs = 8, .random_non_queries = true, .updates = 4});
}
std::shared_ptr<TaskSpec> compositional_mqar_spec() {
  return std::make_shared<RecallSpec>(
      "compositional_mqar", RecallOptions{.random_non_queries = true, .compound_keys = true});
}

}  // namespace headloom::data
