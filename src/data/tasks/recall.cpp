// recall, mqar, forgetting_mqar, compositional_mqar: multi-query associative recall (Arora et al.
// 2023, Zoology, section 4 and appendix; the last two are later tasks of Zoology's repository).
//
//   inputs   k1 v1 k2 v2 ... | x  k2 x  x  x  k1 x  ...
//   targets  -  -  -  -      | -  v2 -  -  -  v1 -
//
// `pairs` different keys with different values come first; keys are tokens [1, V/2), values [V/2,
// V). Then every key is asked for once, at an even distance 2g behind the pairs, where g is drawn
// without replacement from p(g) ~ (g + 1)^(alpha - 1): most are asked for soon. The value is the
// target at the query's own position and is not in the inputs. All other places, that after a query
// included, hold random tokens of the whole vocabulary (recall, and the others with
// random_non_queries) or token 0 (mqar's default, as in Zoology's figure 2).
//
// forgetting_mqar: behind the pairs `updates` of the keys come again with a second value, which is
// the one that is asked for. All values are different.
//
// compositional_mqar: a key is two tokens, of [1, V/3) and [V/3, 2V/3), and values are [2V/3, V).
// The keys are all combinations of n first and n second tokens, n^2 = pairs, in random order: one
// token of a key leaves n values. A query takes three places, and the target is at its second
// token.
#include <algorithm>
#include <cmath>
#include <map>
#include <mutex>

#include "core/error.h"
#include "core/sizes.h"
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

class Recall final : public GeneratedTask {
 public:
  Recall(const RecallOptions& options, uint64_t seed, int64_t eval_sequences)
      : GeneratedTask(seed, options.vocabulary, options.length, eval_sequences),
        options_(options) {}

  Accuracy accuracy() const override { return Accuracy::token; }
  std::vector<Floor> floors() const override {
    std::vector<Floor> floors = {
        {"any token", 1.0 / static_cast<double>(vocabulary())},
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
    std::stable_sort(floors.begin(), floors.end(),
                     [](const Floor& a, const Floor& b) { return a.accuracy < b.accuracy; });
    return floors;
  }
  std::string describe() const override {
    return str("Sequences of ", options_.length, " tokens of a vocabulary of ", options_.vocabulary,
               ": ", options_.pairs, " key-value pairs, ",
               options_.compound_keys ? "each key two tokens, " : "",
               options_.updates > 0 ? str("a second value for ", options_.updates, " keys, ") : "",
               "then each key once more, whose value is the answer; ", "generated, ",
               eval_sequences(), " held out.");
  }

 protected:
  Sample draw(Random& random) const override {
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

    const std::vector<size_t> gaps = draw_gaps(random);
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

  // The gap before each key's query. The first keys take the small gaps most often.
  std::vector<size_t> draw_gaps(Random& random) const {
    std::call_once(weighed_, [&] { weigh_gaps(); });
    std::vector<int64_t> weights = weights_;
    int64_t total = 0;
    for (int64_t weight : weights) total += weight;
    std::vector<size_t> gaps;
    for (int64_t i = 0; i < options_.pairs; ++i) {
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
  // replacement.
  double positional_guess() const {
    // Long sequences have many places to try at each draw.
    const int64_t work = options_.pairs * options_.length;
    const int64_t draws = std::clamp<int64_t>((int64_t{1} << 25) / work, 100, 4000);
    Random random({0, 0, 0});
    std::map<size_t, std::vector<int64_t>> times;  // of each gap, how often for each key
    for (int64_t n = 0; n < draws; ++n) {
      const std::vector<size_t> gaps = draw_gaps(random);
      for (size_t i = 0; i < gaps.size(); ++i) {
        std::vector<int64_t>& keys = times[gaps[i]];
        keys.resize(gaps.size());
        ++keys[i];
      }
    }
    int64_t right = 0;
    for (const auto& [gap, keys] : times) right += *std::max_element(keys.begin(), keys.end());
    return static_cast<double>(right) / static_cast<double>(draws * options_.pairs);
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

struct RecallSpec final : GeneratedSpec {
  RecallOptions options;

  RecallSpec(std::string type, const RecallOptions& defaults)
      : options(defaults), type_(std::move(type)) {}
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
    return std::make_shared<Recall>(options, seed, eval_sequences);
  }

 private:
  std::string type_;
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
