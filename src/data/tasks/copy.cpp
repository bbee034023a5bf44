// copy: s_1 ... s_n # -> s_1 ... s_n, for random tokens. Loss and exact match on the copy.
#include <cmath>

#include "core/error.h"
#include "core/sizes.h"
#include "data/generated.h"
#include "data/tasks/tasks.h"

namespace headloom::data {
namespace {

class Copy final : public GeneratedTask {
 public:
  // The separator is the token after the symbols.
  Copy(int64_t symbols, int64_t count, uint64_t seed, int64_t eval_sequences)
      : GeneratedTask(seed, symbols + 1, 2 * count, eval_sequences),
        symbols_(symbols),
        count_(count) {}

  Accuracy accuracy() const override { return Accuracy::sequence; }
  std::vector<Floor> floors_of(const std::vector<int64_t>&) const override {
    const auto count = static_cast<double>(count_);
    return {{"any tokens", std::pow(static_cast<double>(vocabulary()), -count)},
            {"any symbols", std::pow(static_cast<double>(symbols_), -count)}};
  }
  std::string describe() const override {
    return str("Sequences of ", count_, " random tokens of ", symbols_,
               ", a separator, and the same ", "tokens again as the answer; generated, ",
               eval_sequences(), " held out.");
  }

 protected:
  Sample draw(Random& random) const override {
    std::vector<int64_t> tokens(static_cast<size_t>(2 * count_ + 1), symbols_);
    for (size_t i = 0; i < static_cast<size_t>(count_); ++i) {
      tokens[i] = tokens[i + static_cast<size_t>(count_) + 1] = random.below(symbols_);
    }
    return next_token_sample(tokens, count_);
  }

 private:
  int64_t symbols_;
  int64_t count_;
};

struct CopySpec final : GeneratedSpec {
  int64_t symbols = 64;
  int64_t count = 64;

  std::string type() const override { return "copy"; }

 protected:
  void own_fields(Fields& f) override {
    f.field("symbols", symbols, "different tokens", between<int64_t>(2, int64_t{1} << 31));
    f.field("count", count, "tokens to copy; a sequence has twice as many positions", size_from(1));
  }
  std::shared_ptr<Task> make(uint64_t seed) const override {
    return std::make_shared<Copy>(symbols, count, seed, eval_sequences);
  }
};

}  // namespace

std::shared_ptr<TaskSpec> copy_spec() { return std::make_shared<CopySpec>(); }

}  // namespace headloom::data
