// find_block: "hjnvt.qfjgt.whfxb.bjtpq#tb" -> "bjtpq", the only block with both t and b. No other
// block contains all queried letters, though many contain some. Golovneva et al. 2025, Multi-Token
// Attention, section 4.1: the matches of the L letters must be combined to find the place.
//
// Characters of a sequence: blocks * N letters, blocks - 1 separators, '#', L query letters and the
// answer. 52 blocks, N = 5, L = 2 and the whole block as answer: 260 + 51 + 1 + 2 + 5 = 319. The
// model sees all but the last, so T = 318. There is no padding and no block is cut.
#include <cmath>

#include "core/error.h"
#include "data/floors.h"
#include "data/generated.h"
#include "data/tasks/tasks.h"

namespace headloom::data {
namespace {

constexpr int64_t kBlockLetters = 26;
constexpr int64_t kSeparator = 26;
constexpr int64_t kBlockQuery = 27;
constexpr const char* kBlockCharacters = "abcdefghijklmnopqrstuvwxyz.#";

struct FindBlockOptions {
  int64_t blocks = 52;
  int64_t block_letters = 5;
  int64_t query_letters = 2;
  std::string answer = "all";

  int64_t answer_letters() const { return answer == "all" ? block_letters : 1; }
  int64_t characters() const {
    return blocks * block_letters + blocks - 1 + 1 + query_letters + answer_letters();
  }
};

class FindBlock final : public GeneratedTask {
 public:
  FindBlock(const FindBlockOptions& options, uint64_t seed, int64_t eval_sequences)
      : GeneratedTask(seed, kBlockLetters + 2, options.characters() - 1, eval_sequences,
                      kBlockCharacters),
        options_(options) {}

  Accuracy accuracy() const override { return Accuracy::sequence; }
  std::vector<Floor> floors_of(const std::vector<int64_t>&) const override {
    const auto letters = static_cast<double>(options_.block_letters);
    const auto answer = static_cast<double>(options_.answer_letters());
    std::vector<Floor> floors = {
        {"any characters", std::pow(static_cast<double>(vocabulary()), -answer)}};
    if (options_.answer == "all") {
      add_floor(floors, "one of the blocks", 1.0 / static_cast<double>(options_.blocks));
    } else {  // the query is a random choice of the block's letters in random order
      add_floor(floors, "one of the queried letters", 1.0 / letters);
    }
    return floors;
  }
  std::string describe() const override {
    const std::string answer = options_.answer == "all"
                                   ? "that block"
                                   : "the " + options_.answer + " letter of that block";
    return str("Sequences of ", options_.characters(), " characters: ", options_.blocks,
               " blocks of ", options_.block_letters, " letters, then ", options_.query_letters,
               " letters of one of them; the answer is ", answer, "; generated, ", eval_sequences(),
               " held out.");
  }

 protected:
  Sample draw(Random& random) const override {
    const int64_t letters = options_.block_letters;
    const std::vector<int64_t> target = random.distinct(kBlockLetters, letters);
    std::vector<int64_t> query;
    for (int64_t i : random.distinct(letters, options_.query_letters)) {
      query.push_back(target[static_cast<size_t>(i)]);
    }
    const int64_t place = random.below(options_.blocks);

    std::vector<int64_t> tokens;
    tokens.reserve(static_cast<size_t>(options_.characters()));
    for (int64_t i = 0; i < options_.blocks; ++i) {
      std::vector<int64_t> block = target;
      while (i != place && contains_all(block, query))
        block = random.distinct(kBlockLetters, letters);
      if (i > 0) tokens.push_back(kSeparator);
      tokens.insert(tokens.end(), block.begin(), block.end());
    }
    tokens.push_back(kBlockQuery);
    tokens.insert(tokens.end(), query.begin(), query.end());
    if (options_.answer != "last") tokens.push_back(target.front());
    if (options_.answer == "all") tokens.insert(tokens.end(), target.begin() + 1, target.end());
    if (options_.answer == "last") tokens.push_back(target.back());
    return next_token_sample(tokens, options_.answer_letters());
  }

 private:
  static bool contains_all(const std::vector<int64_t>& block, const std::vector<int64_t>& query) {
    for (int64_t letter : query) {
      if (std::find(block.begin(), block.end(), letter) == block.end()) return false;
    }
    return true;
  }

  FindBlockOptions options_;
};

struct FindBlockSpec final : GeneratedSpec {
  FindBlockOptions options;

  std::string type() const override { return "find_block"; }

 protected:
  void own_fields(Fields& f) override {
    f.field("blocks", options.blocks, "blocks in a sequence", between<int64_t>(2, 100000));
    // With all 26 letters every block would contain every query.
    f.field("block_letters", options.block_letters, "different letters in a block (N)",
            between<int64_t>(1, 25));
    f.field("query_letters", options.query_letters,
            "letters of the query (L), at most block_letters", between<int64_t>(1, 25));
    f.field("answer", options.answer, "what to say of the block", {"all", "first", "last"});
  }
  std::shared_ptr<Task> make(uint64_t seed) const override {
    if (options.query_letters > options.block_letters) {
      usage_error("find_block has query_letters = ", options.query_letters,
                  ", but a block has only block_letters = ", options.block_letters, ".");
    }
    return std::make_shared<FindBlock>(options, seed, eval_sequences);
  }
};

}  // namespace

std::shared_ptr<TaskSpec> find_block_spec() { return std::make_shared<FindBlockSpec>(); }

}  // namespace headloom::data
