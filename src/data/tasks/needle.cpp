// needle: "orem abig =48213. tulo ...#" -> "48213". A number is stated once at some depth of a
// filler of random words without digits, and asked for at the end. Loss and exact match on its
// digits.
#include <cmath>

#include "core/error.h"
#include "core/sizes.h"
#include "data/generated.h"
#include "data/tasks/tasks.h"

namespace headloom::data {
namespace {

constexpr const char* kNeedleCharacters = "abcdefghijklmnopqrstuvwxyz =.#0123456789";
constexpr int64_t kNeedleSpace = 26;
constexpr int64_t kFact = 27;
constexpr int64_t kStop = 28;
constexpr int64_t kNeedleQuery = 29;
constexpr int64_t kZero = 30;

struct NeedleOptions {
  int64_t length = 512;
  int64_t digits = 5;
  std::optional<double> depth;

  int64_t filler() const { return length - 2 * digits - 2; }  // without "=48213." and "#48213"
};

class Needle final : public GeneratedTask {
 public:
  Needle(const NeedleOptions& options, uint64_t seed, int64_t eval_sequences)
      : GeneratedTask(seed, 40, options.length, eval_sequences, kNeedleCharacters),
        options_(options) {}

  Accuracy accuracy() const override { return Accuracy::sequence; }
  std::vector<Floor> floors_of(const std::vector<int64_t>&) const override {
    const auto digits = static_cast<double>(options_.digits);
    return {{"any characters", std::pow(static_cast<double>(vocabulary()), -digits)},
            {"any digits", std::pow(10.0, -digits)}};
  }
  std::string describe() const override {
    return str(
        "Sequences of ", options_.length + 1, " characters: filler that states a number of ",
        options_.digits, " digits once, ",
        options_.depth ? str("at depth ", *options_.depth) : std::string("at a random depth"),
        ", and at the end the number as the answer; generated, ", eval_sequences(), " held out.");
  }

 protected:
  Sample draw(Random& random) const override {
    std::vector<int64_t> number;
    for (int64_t i = 0; i < options_.digits; ++i) number.push_back(kZero + random.below(10));
    const int64_t filler = options_.filler();
    const int64_t depth = options_.depth
                              ? static_cast<int64_t>(*options_.depth * static_cast<double>(filler))
                              : random.below(filler + 1);
    std::vector<int64_t> tokens;
    tokens.reserve(static_cast<size_t>(options_.length + 1));
    int64_t word = 0;  // letters left of the current word
    for (int64_t i = 0; i <= filler; ++i) {
      if (i == depth) {
        tokens.push_back(kFact);
        tokens.insert(tokens.end(), number.begin(), number.end());
        tokens.push_back(kStop);
      }
      if (i == filler) break;
      tokens.push_back(word > 0 ? random.below(26) : kNeedleSpace);
      word = word > 0 ? word - 1 : 2 + random.below(7);
    }
    tokens.push_back(kNeedleQuery);
    tokens.insert(tokens.end(), number.begin(), number.end());
    return next_token_sample(tokens, options_.digits);
  }

 private:
  NeedleOptions options_;
};

struct NeedleSpec final : GeneratedSpec {
  NeedleOptions options;

  std::string type() const override { return "needle"; }

 protected:
  void own_fields(Fields& f) override {
    f.field("length", options.length, "characters that the model sees, at least 2 * digits + 2",
            size_from(4));
    f.field("digits", options.digits, "digits of the number", size_from(1));
    f.field("depth", options.depth,
            "place of the number as a share of the filler, 0 the beginning; absent: random",
            between(0.0, 1.0));
  }
  std::shared_ptr<Task> make(uint64_t seed) const override {
    if (options.filler() < 0) {
      usage_error("needle has length = ", options.length, ", but stating and asking for ",
                  options.digits, " digits needs at least ", options.length - options.filler(),
                  ".");
    }
    return std::make_shared<Needle>(options, seed, eval_sequences);
  }
};

}  // namespace

std::shared_ptr<TaskSpec> needle_spec() { return std::make_shared<NeedleSpec>(); }

}  // namespace headloom::data
