// recall: multi-query associative recall, MQAR (Arora et al. 2023, Zoology, section 4 and
// appendix).
//
//   inputs   k1 v1 k2 v2 ... | x  k2 x  x  x  k1 x  ...
//   targets  -  -  -  -      | -  v2 -  -  -  v1 -
//
// `pairs` different keys with different values come first; keys are tokens [1, V/2), values [V/2,
// V). Then every key is asked for once, at an even distance 2g behind the pairs, where g is drawn
// without replacement from p(g) ~ (g + 1)^(alpha - 1): most are asked for soon. The value is the
// target at the query's own position and is not in the inputs; all other places hold random tokens
// of the whole vocabulary, the value after a query included.
#include <cmath>
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
};

class Recall final : public GeneratedTask {
 public:
  Recall(const RecallOptions& options, uint64_t seed, int64_t eval_sequences)
      : GeneratedTask(seed, options.vocabulary, options.length, eval_sequences),
        options_(options) {}

  Accuracy accuracy() const override { return Accuracy::token; }
  std::string describe() const override {
    return str("Sequences of ", options_.length, " tokens of a vocabulary of ", options_.vocabulary,
               ": ", options_.pairs,
               " key-value pairs, then each key once more, whose value is the answer; ",
               "generated, ", eval_sequences(), " held out.");
  }

 protected:
  Sample draw(Random& random) const override {
    const int64_t pairs = options_.pairs;
    const int64_t half = options_.vocabulary / 2;
    const std::vector<int64_t> keys = random.distinct(half - 1, pairs);
    const std::vector<int64_t> values = random.distinct(options_.vocabulary - half, pairs);
    Sample sample;
    sample.inputs.resize(static_cast<size_t>(options_.length));
    for (int64_t& token : sample.inputs) token = random.below(options_.vocabulary);
    sample.targets.assign(sample.inputs.size(), kIgnore);

    std::call_once(weighed_, [&] { weigh_gaps(); });
    std::vector<int64_t> weights = weights_;
    int64_t total = 0;
    for (int64_t weight : weights) total += weight;
    for (int64_t i = 0; i < pairs; ++i) {
      const int64_t key = 1 + keys[static_cast<size_t>(i)];
      const int64_t value = half + values[static_cast<size_t>(i)];
      sample.inputs[static_cast<size_t>(2 * i)] = key;
      sample.inputs[static_cast<size_t>(2 * i + 1)] = value;
      int64_t left = random.below(total);
      size_t gap = 0;
      while (left >= weights[gap]) left -= weights[gap++];
      total -= weights[gap];
      weights[gap] = 0;
      const size_t at = static_cast<size_t>(2 * pairs) + 2 * gap;
      sample.inputs[at] = key;
      sample.targets[at] = value;
    }
    return sample;
  }

 private:
  void weigh_gaps() const {
    const int64_t gaps = (options_.length - 2 * options_.pairs) / 2;
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

  std::string type() const override { return "recall"; }

 protected:
  void own_fields(Fields& f) override {
    f.field("vocabulary", options.vocabulary,
            "tokens; the lower half are keys, the upper half values",
            between<int64_t>(4, int64_t{1} << 31));
    f.field("length", options.length, "tokens in a sequence, at least 4 * pairs", size_from(4));
    f.field("pairs", options.pairs, "key-value pairs, each asked for once", size_from(1));
    f.field("alpha", options.alpha,
            "power law of the distance of the queries: p(gap) ~ gap^(alpha - 1); 1: uniform",
            Range<double>{.low = 0.0, .high = 1.0, .open_low = true});
  }
  std::shared_ptr<Task> make(uint64_t seed) const override {
    if (options.length < 4 * options.pairs) {
      usage_error("recall has length = ", options.length, ", but ", options.pairs,
                  " pairs and their queries need at least ", 4 * options.pairs, ".");
    }
    if (options.pairs > options.vocabulary / 2 - 1) {
      usage_error("recall has pairs = ", options.pairs, ", but a vocabulary of ",
                  options.vocabulary, " has only ", options.vocabulary / 2 - 1, " keys.");
    }
    return std::make_shared<Recall>(options, seed, eval_sequences);
  }
};

}  // namespace

std::shared_ptr<TaskSpec> recall_spec() { return std::make_shared<RecallSpec>(); }

}  // namespace headloom::data
