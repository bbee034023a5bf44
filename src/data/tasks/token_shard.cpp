// token_shard: predict every next token of a file of tokens that llm.c and its kin write: 256
// int32, of which the first three are 20240520, the version 1 and the number of tokens, then the
// tokens as uint16, all little-endian.
#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <filesystem>
#include <limits>

#include "core/error.h"
#include "core/files.h"
#include "core/sizes.h"
#include "data/random.h"
#include "data/stream.h"
#include "data/tasks/tasks.h"

namespace headloom::data {
namespace {

constexpr int32_t kShardMagic = 20240520;
constexpr size_t kShardHeader = 256 * sizeof(int32_t);

struct ShardOptions {
  std::string path;
  std::optional<std::string> held_out_path;
  double held_out = 0.05;
  int64_t vocabulary = 50257;
  int64_t length = 256;
  int64_t eval_tokens = 131072;
};

// [N] int32. Throws Error, naming the file, for one that is not a shard or has a token that is not
// below `vocabulary`.
at::Tensor read_shard(const std::string& path, int64_t vocabulary) {
  static_assert(std::endian::native == std::endian::little);
  const std::string bytes = read_file(path);
  require(bytes.size() >= kShardHeader, path, ": has ", bytes.size(),
          " bytes, expected a token shard with a header of ", kShardHeader, ".");
  std::array<int32_t, 3> header{};
  std::memcpy(header.data(), bytes.data(), sizeof header);
  require(header[0] == kShardMagic, path, ": begins with ", header[0],
          ", expected a token shard, which begins with ", kShardMagic, ".");
  require(header[1] == 1, path, ": is a token shard of version ", header[1], ", expected 1.");
  const size_t present = (bytes.size() - kShardHeader) / sizeof(uint16_t);
  require(header[2] >= 0 && static_cast<size_t>(header[2]) == present &&
              (bytes.size() - kShardHeader) % sizeof(uint16_t) == 0,
          path, ": says that it has ", header[2], " tokens of 2 bytes, but ",
          bytes.size() - kShardHeader, " bytes follow its header.");
  at::Tensor tokens = at::empty({header[2]}, at::kInt);
  int32_t* to = tokens.data_ptr<int32_t>();
  for (size_t i = 0; i < present; ++i) {
    uint16_t token = 0;
    std::memcpy(&token, bytes.data() + kShardHeader + i * sizeof token, sizeof token);
    require(token < vocabulary, path, ": has token ", token, " at place ", i,
            ", but the task has vocabulary = ", vocabulary, ".");
    to[i] = token;
  }
  return tokens;
}

class TokenShard final : public Task {
 public:
  TokenShard(const ShardOptions& options, uint64_t seed)
      : TokenShard(options, seed, split_of(options)) {}

  int64_t vocabulary() const override { return options_.vocabulary; }
  int64_t length() const override { return options_.length; }
  Accuracy accuracy() const override { return Accuracy::token; }
  DataSize data_size() const override { return {train_.size() + held_out_.size(), "tokens"}; }
  Batch train_batch(int64_t index, int64_t batch_size) const override {
    if (!order_) usage_error("the task has held_out = 1: there is nothing to train on");
    return train_.windows(at::tensor(order_->starts(index * batch_size, batch_size), at::kLong),
                          options_.length, false);
  }
  int64_t eval_sequences() const override { return static_cast<int64_t>(eval_starts_.size()); }
  Batch eval_batch(int64_t first, int64_t count) const override {
    check_held_out(first, count, eval_sequences());
    const std::vector<int64_t> starts(eval_starts_.begin() + first,
                                      eval_starts_.begin() + first + count);
    return held_out_.full_windows(starts, options_.length, false);
  }
  std::string describe() const override {
    return str("Tokens of ", options_.path, ": ", train_.size(), " to train on and ",
               held_out_.size(), " held out, of which ", eval_sequences(), " sequences of ",
               options_.length, " are evaluated.");
  }
  std::vector<int64_t> encode(std::string_view) const override {
    usage_error("the task token_shard has no tokenizer, so that text cannot become tokens.");
  }
  std::string decode(const std::vector<int64_t>& tokens) const override {
    std::string text;
    for (int64_t token : tokens) text += str(token, " ");
    return text;
  }

 private:
  using Parts = std::pair<at::Tensor, at::Tensor>;  // to train on, held out

  static Parts split_of(const ShardOptions& options) {
    const at::Tensor tokens = read_shard(options.path, options.vocabulary);
    Parts parts;
    if (options.held_out_path) {
      std::error_code none;
      require(!std::filesystem::equivalent(options.path, *options.held_out_path, none),
              options.path,
              ": is both 'path' and 'held_out_path', expected other data to hold out.");
      parts = {tokens, read_shard(*options.held_out_path, options.vocabulary)};
      require(!at::equal(parts.first, parts.second), options.path,
              ": holds the same tokens as 'held_out_path', expected other data to hold out.");
    } else {
      const auto wanted =
          static_cast<int64_t>(options.held_out * static_cast<double>(tokens.size(0)));
      const int64_t cut = tokens.size(0) - wanted;
      parts = {tokens.slice(0, 0, cut), tokens.slice(0, cut)};
    }
    const bool trains = options.held_out < 1.0 || options.held_out_path;
    for (const auto& part : {parts.first, parts.second}) {
      require(part.size(0) > options.length || (part.size(0) == 0 && !trains), options.path,
              ": leaves ", part.size(0), " tokens to train on or to hold out, expected more than ",
              "length = ", options.length, " for each.");
    }
    return parts;
  }

  static PackedStream stream_of(const at::Tensor& tokens) {
    return {tokens, at::tensor({tokens.size(0)}, at::kLong)};
  }

  TokenShard(const ShardOptions& options, uint64_t seed, const Parts& parts)
      : options_(options), train_(stream_of(parts.first)), held_out_(stream_of(parts.second)) {
    if (train_.size() > 0) order_.emplace(seed, train_.size(), options.length);
    // Of a file that is held out as a whole every token but the first is predicted.
    const int64_t least = train_.size() == 0 ? 1 : options_.length;
    for (int64_t start = 0; start + least < held_out_.size(); start += options_.length) {
      eval_starts_.push_back(start);
    }
    // Whatever part of it is evaluated should be a fair sample.
    Random random({0});
    random.shuffle(eval_starts_);
    const auto most =
        static_cast<size_t>(std::max<int64_t>(1, options.eval_tokens / options.length));
    eval_starts_.resize(std::min(eval_starts_.size(), most));
  }

  ShardOptions options_;
  PackedStream train_, held_out_;
  std::optional<WindowOrder> order_;
  std::vector<int64_t> eval_starts_;
};

struct TokenShardSpec final : TaskSpec {
  ShardOptions options;

  std::string type() const override { return "token_shard"; }
  void fields(Fields& f) override {
    f.field("path", options.path, "file of tokens in llm.c's format");
    f.field("held_out_path", options.held_out_path, "a file alike to evaluate on; absent: a share");
    f.field("held_out", options.held_out,
            "share at the end kept for evaluation where no file is named; 1: all, to evaluate only",
            Range<double>{.low = 0.0, .high = 1.0, .open_low = true});
    f.field("vocabulary", options.vocabulary, "tokens of the tokenizer that wrote the file",
            between<int64_t>(1, 65536));
    f.field("length", options.length, "tokens in a sequence (T)", size_from(1));
    f.field("eval_tokens", options.eval_tokens, "evaluate on at most so many held-out tokens",
            at_least(1));
  }
  std::vector<DataPath> data_paths() override {
    if (options.path.empty()) return {};
    std::vector<DataPath> paths = {{"path", &options.path}};
    if (options.held_out_path) paths.push_back({"held_out_path", &*options.held_out_path});
    return paths;
  }
  void hold_out_all() override {
    options.held_out = 1.0;
    options.held_out_path.reset();
    options.eval_tokens = std::numeric_limits<int64_t>::max();
  }
  std::optional<TaskSizes> known_sizes() override {
    return TaskSizes{.vocabulary = options.vocabulary, .length = options.length};
  }
  std::shared_ptr<Task> build(uint64_t seed) const override {
    if (options.path.empty()) {
      refuse_without("token_shard", "path", "the file to read", "\"my/file\"");
    }
    return std::make_shared<TokenShard>(options, seed);
  }
};

}  // namespace

std::shared_ptr<TaskSpec> token_shard_spec() { return std::make_shared<TokenShardSpec>(); }

}  // namespace headloom::data
