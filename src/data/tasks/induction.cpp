// induction: x x # a x x x # -> a. A marker stands once at a random place and once at the end of
// random tokens; the answer is the token that followed it. Olsson et al. 2022, In-context Learning
// and Induction Heads; as a training task Fu et al. 2023 (H3) and Gu and Dao 2023 (Mamba: 16
// tokens, T = 256).
#include "core/error.h"
#include "core/sizes.h"
#include "data/generated.h"
#include "data/tasks/tasks.h"

namespace headloom::data {
namespace {

class Induction final : public GeneratedTask {
 public:
  // The marker is the last token of the vocabulary.
  Induction(int64_t vocabulary, int64_t length, uint64_t seed, int64_t eval_sequences)
      : GeneratedTask(seed, vocabulary, length, eval_sequences) {}

  Accuracy accuracy() const override { return Accuracy::sequence; }
  std::vector<Floor> floors_of(const std::vector<int64_t>&) const override {
    const auto tokens = static_cast<double>(vocabulary());
    return {{"any token", 1.0 / tokens}, {"any token but the marker", 1.0 / (tokens - 1.0)}};
  }
  std::string describe() const override {
    return str(
        "Sequences of ", length(), " tokens of a vocabulary of ", vocabulary(),
        " that end with a marker seen once before; the answer is the token that followed it; ",
        "generated, ", eval_sequences(), " held out.");
  }

 protected:
  Sample draw(Random& random) const override {
    const int64_t marker = vocabulary() - 1;
    Sample sample;
    sample.inputs.resize(static_cast<size_t>(length()));
    for (int64_t& token : sample.inputs) token = random.below(marker);
    const size_t place = static_cast<size_t>(random.below(length() - 2));
    sample.inputs[place] = sample.inputs.back() = marker;
    sample.targets.assign(sample.inputs.size(), kIgnore);
    sample.targets.back() = sample.inputs[place + 1];
    return sample;
  }
};

struct InductionSpec final : GeneratedSpec {
  int64_t vocabulary = 16;
  int64_t length = 256;

  std::string type() const override { return "induction"; }

 protected:
  void own_fields(Fields& f) override {
    f.field("vocabulary", vocabulary, "tokens, the marker included",
            between<int64_t>(3, int64_t{1} << 31));
    f.field("length", length, "tokens in a sequence", size_from(3));
  }
  std::shared_ptr<Task> make(uint64_t seed) const override {
    return std::make_shared<Induction>(vocabulary, length, seed, eval_sequences);
  }
};

}  // namespace

std::shared_ptr<TaskSpec> induction_spec() { return std::make_shared<InductionSpec>(); }

}  // namespace headloom::data
