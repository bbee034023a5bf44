// sequence: a source of random symbols -> the same symbols in another order, for encoder-decoders.
//
//   source   3 1 2          kind = "reverse"
//   inputs   ^ 2 1 3        ^ begins, $ ends the answer
//   targets  2 1 3 $
//
// Sources have between min_count and count symbols. Loss and exact match on the answer and its end.
#include <algorithm>
#include <cmath>

#include "core/error.h"
#include "core/sizes.h"
#include "data/generated.h"
#include "data/tasks/tasks.h"

namespace headloom::data {
namespace {

struct SequenceOptions {
  std::string kind = "copy";
  int64_t symbols = 16;
  int64_t count = 16;
  std::optional<int64_t> min_count;

  int64_t shortest() const { return min_count.value_or(std::max<int64_t>(1, count / 2)); }
};

class Sequence final : public GeneratedTask {
 public:
  // The begin and end tokens come after the symbols.
  Sequence(const SequenceOptions& options, uint64_t seed, int64_t eval_sequences)
      : GeneratedTask(seed, options.symbols + 2, options.count + 1, eval_sequences),
        options_(options) {}

  Goal goal() const override { return Goal::sequence; }
  int64_t source_length() const override { return options_.count; }
  Accuracy accuracy() const override { return Accuracy::sequence; }
  std::optional<int64_t> end_token() const override { return options_.symbols + 1; }
  std::vector<Floor> floors_of(const std::vector<int64_t>&) const override {
    double tokens = 0.0, symbols = 0.0, ascending = 0.0;
    for (int64_t n = options_.shortest(); n <= options_.count; ++n) {
      tokens += std::pow(static_cast<double>(vocabulary()), -static_cast<double>(n + 1));
      symbols += std::pow(static_cast<double>(options_.symbols), -static_cast<double>(n));
      ascending += likeliest_ascending(n);
    }
    const auto lengths = static_cast<double>(options_.count - options_.shortest() + 1);
    std::vector<Floor> floors{{"any tokens", tokens / lengths},
                              {"any symbols, as many as the source has", symbols / lengths}};
    if (options_.kind == "sort") {
      floors.push_back({"the likeliest symbols in ascending order, as many as the source has",
                        ascending / lengths});
    }
    return floors;
  }
  std::string describe() const override {
    const char* what = options_.kind == "copy"      ? "the same sequence"
                       : options_.kind == "reverse" ? "the sequence backwards"
                                                    : "the sequence in ascending order";
    return str("Source sequences of ", options_.shortest(), " to ", options_.count,
               " random tokens of ", options_.symbols, "; the answer is ", what, "; generated, ",
               eval_sequences(), " held out.");
  }

 protected:
  Sample draw(Random& random) const override {
    const int64_t shortest = options_.shortest();
    Sample sample;
    sample.source.resize(
        static_cast<size_t>(shortest + random.below(options_.count - shortest + 1)));
    for (int64_t& token : sample.source) token = random.below(options_.symbols);
    sample.targets = sample.source;
    if (options_.kind == "reverse") std::reverse(sample.targets.begin(), sample.targets.end());
    if (options_.kind == "sort") std::sort(sample.targets.begin(), sample.targets.end());
    sample.inputs = sample.targets;
    sample.inputs.insert(sample.inputs.begin(), options_.symbols);
    sample.targets.push_back(options_.symbols + 1);
    return sample;
  }

 private:
  // The share of the sources of n symbols that have each symbol as often as every other one, or so:
  // n! / (c_1! c_2! ...) / symbols^n, for the counts c of the symbols.
  double likeliest_ascending(int64_t n) const {
    const int64_t each = n / options_.symbols, more = n % options_.symbols;
    const auto symbols = static_cast<double>(options_.symbols), rest = static_cast<double>(more);
    const auto log_factorial = [](int64_t of) { return std::lgamma(static_cast<double>(of) + 1); };
    return std::exp(log_factorial(n) - rest * log_factorial(each + 1) -
                    (symbols - rest) * log_factorial(each) -
                    static_cast<double>(n) * std::log(symbols));
  }

  SequenceOptions options_;
};

struct SequenceSpec final : GeneratedSpec {
  SequenceOptions options;

  std::string type() const override { return "sequence"; }

 protected:
  void own_fields(Fields& f) override {
    f.field("kind", options.kind, "what the answer is", {"copy", "reverse", "sort"});
    f.field("symbols", options.symbols, "different tokens, besides the two that begin and end",
            between<int64_t>(2, int64_t{1} << 31));
    f.field("count", options.count, "tokens of the longest source", size_from(1));
    f.field("min_count", options.min_count, "tokens of the shortest source; absent: count / 2",
            size_from(1));
  }
  std::shared_ptr<Task> make(uint64_t seed) const override {
    if (options.shortest() > options.count) {
      usage_error("sequence has min_count = ", options.shortest(),
                  ", expected at most count = ", options.count, ".");
    }
    return std::make_shared<Sequence>(options, seed, eval_sequences);
  }
};

}  // namespace

std::shared_ptr<TaskSpec> sequence_spec() { return std::make_shared<SequenceSpec>(); }

}  // namespace headloom::data
