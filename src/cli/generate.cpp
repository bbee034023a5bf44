#include <ATen/ATen.h>

#include <algorithm>
#include <cstdio>
#include <exception>
#include <utility>

#include "cli/arguments.h"
#include "cli/command.h"
#include "core/clock.h"
#include "core/error.h"
#include "core/text.h"
#include "model/generation.h"
#include "ops/product/product.h"
#include "train/codec.h"
#include "train/device.h"
#include "train/interrupt.h"
#include "train/load.h"
#include "train/train.h"

namespace headloom::cli {
namespace {

struct GenerateArguments {
  std::string model, checkpoint = "best", device = "cpu", prompt;
  Precision precision;
  int64_t tokens = 256;
  uint64_t seed = 0;
  int64_t samples = 1;
  std::vector<std::string> stops;
  SamplingOptions sampling;
  CachePolicy cache;
};

// How long the prompt and the text took.
struct Timing {
  int64_t read = 0, written = 0;
  double read_seconds = 0, write_seconds = 0;
};

class Clock {
 public:
  // Seconds since it was made or last asked, without those of timing products, which later
  // processes do not spend.
  double lap() {
    const double now = counted_seconds();
    return now - std::exchange(last_, now);
  }

 private:
  static double counted_seconds() { return seconds_now() - ops::seconds_of_timing_products(); }

  double last_ = counted_seconds();
};

void print_now(const std::string& text) {
  std::fwrite(text.data(), 1, text.size(), stdout);  // a text may have a character 0
  std::fflush(stdout);
}

// Ends the line that was begun on standard output where an error leaves it: the error's sentence
// has a line to itself.
class OpenLine {
 public:
  OpenLine() = default;
  OpenLine(const OpenLine&) = delete;
  OpenLine& operator=(const OpenLine&) = delete;
  ~OpenLine() {
    if (open_ && std::uncaught_exceptions() > 0) print_now("\n");
  }
  void print(const std::string& text) {
    print_now(text);
    if (!text.empty()) open_ = text.back() != '\n';
  }
  void end() {
    print_now("\n");
    open_ = false;
  }

 private:
  bool open_ = false;
};

// The token that an encoder-decoder begins its answer to `source` with.
int64_t first_of_answer(const std::vector<int64_t>& source, LoadedRun& loaded,
                        GenerationOptions& options) {
  const ModelConfig& config = loaded.config.model;
  const auto count = static_cast<int64_t>(source.size());
  const int64_t longest = config.source_length();
  if (count < 1 || count > longest) {
    usage_error("--prompt has ", counted(count, "token"), ", expected a source of 1 to ", longest,
                ".");
  }
  options.sources = {source};
  options.tokens = std::min(options.tokens, config.length());
  // That of every answer of the task.
  return loaded.config.build_task()->eval_batch(0, 1).inputs[0][0].item<int64_t>();
}

// The prompt, which `tokens` stand for, as it is shown before the text that goes on with it.
std::string shown_prompt(const std::string& prompt, const std::vector<int64_t>& tokens,
                         const Codec& codec) {
  // Tasks of numbers or words write a space after each, also after the last one of the prompt.
  const bool lacks_space =
      !prompt.empty() && prompt.back() != ' ' && join(codec.pieces(tokens), "").ends_with(' ');
  return lacks_space ? prompt + ' ' : prompt;
}

// The samples on their way to standard output: one is shown as it is written, several when all are
// done. `before` is shown before each.
class ShownSamples {
 public:
  ShownSamples(const GenerateArguments& a, const Codec& codec, std::string before)
      : codec_(codec),
        before_(std::move(before)),
        streaming_(a.samples == 1),
        texts_(static_cast<size_t>(a.samples), TextStream(a.stops)),
        shown_(texts_.size()) {}

  void begin() {
    if (streaming_) line_.print(before_);
  }
  // Whether one of them has not ended.
  bool running() const {
    return std::any_of(texts_.begin(), texts_.end(),
                       [](const TextStream& t) { return !t.ended(); });
  }
  // The next token of each sample, [samples] int64; those that have ended leave it out.
  void add(const Tensor& tokens) {
    for (size_t i = 0; i < texts_.size(); ++i) {
      if (texts_[i].ended()) continue;
      const int64_t token = tokens[static_cast<int64_t>(i)].item<int64_t>();
      if (codec_.end() && token == *codec_.end()) {
        texts_[i].end();
        continue;
      }
      ++written_;
      show(i, texts_[i].add(codec_.piece(token)));
    }
  }
  // What was held back, and several samples whole.
  void end() {
    for (size_t i = 0; i < texts_.size(); ++i) {
      show(i, texts_[i].rest());
      if (!streaming_) print_now(str("--- sample ", i + 1, "\n", before_, shown_[i], "\n"));
    }
    if (streaming_) line_.end();
  }
  // Tokens of all samples.
  int64_t written() const { return written_; }

 private:
  void show(size_t i, const std::string& text) {
    if (streaming_) line_.print(text);
    shown_[i] += text;
  }

  const Codec& codec_;
  const std::string before_;
  const bool streaming_;
  std::vector<TextStream> texts_;
  std::vector<std::string> shown_;
  OpenLine line_;
  int64_t written_ = 0;
};

void say_outgrown(const Generation& text) {
  std::fprintf(stderr,
               "headloom: the text has outgrown the %lld positions that the model was built for "
               "(max_length): it goes on from its newest %s alone.\n",
               static_cast<long long>(text.most()), counted(text.newest(), "token").c_str());
}

// Goes on with the prompt, or answers it, which is then the source.
Timing write_text(const GenerateArguments& a, LoadedRun& loaded) {
  const bool answers = loaded.config.model.kind == "encoder_decoder";
  const Codec codec(loaded.config);
  std::vector<int64_t> prompt = codec.encode(a.prompt);
  Timing timing{.read = static_cast<int64_t>(prompt.size())};
  GenerationOptions options{.sampling = a.sampling,
                            .seed = a.seed,
                            .samples = a.samples,
                            .cache = a.cache,
                            .tokens = a.tokens};
  if (answers) {
    prompt = {first_of_answer(prompt, loaded, options)};
  } else if (prompt.empty()) {
    // A model starts a document after the end of another.
    prompt.push_back(codec.end().value_or(0));
  }
  ShownSamples samples(a, codec, answers ? "" : shown_prompt(a.prompt, prompt, codec));
  Clock clock;
  const Autocast autocast(loaded.config.train.dtype, loaded.model->device().type());
  Generation continuation(dynamic_cast<AutoregressiveModel&>(*loaded.model), {prompt}, options);
  timing.read_seconds = clock.lap();
  const int64_t most = continuation.most();
  const auto given = static_cast<int64_t>(prompt.size());
  if (given > most) {
    say_outgrown(continuation);
    timing.read = continuation.newest();
  }
  samples.begin();  // not before what is refused above
  int64_t made = 0;
  while (made < options.tokens && samples.running() && !interrupted()) {
    samples.add(continuation.next());
    ++made;
  }
  timing.write_seconds = clock.lap();
  timing.written = samples.written();
  samples.end();
  // Not in the middle of the text that is shown as it is written.
  if (given <= most && made > 0 && given + made - 1 > most) say_outgrown(continuation);
  if (codec.end() && made == options.tokens && made < a.tokens && samples.running()) {
    std::fprintf(stderr,
                 "headloom: the answer has not ended after %s, which is the length that the model "
                 "was built for (max_length): it stops there.\n",
                 counted(made, "token").c_str());
  }
  return timing;
}

int run_generate(GenerateArguments& a) {
  const at::Device device = find_device(a.device, "--device");
  LoadedRun loaded = load_run(a.model, a.checkpoint);
  const std::string& kind = loaded.config.model.kind;
  if (kind != "decoder" && kind != "encoder_decoder") {
    usage_error(a.model, ": is a model of kind \"", kind,
                "\", which writes nothing, expected a decoder or an encoder_decoder.");
  }
  hold_weights(loaded, a.precision);
  loaded.model->to(device);
  if (a.prompt == "-") a.prompt = read_standard_input();
  install_interrupt_handler();
  const c10::InferenceMode inference;
  const Timing t = write_text(a, loaded);
  const auto rate = [](int64_t tokens, double seconds) {
    return static_cast<double>(tokens) / std::max(seconds, 1e-9);
  };
  if (t.read > 0) {
    std::fprintf(stderr, "prompt: %s, %.1f tokens/s; ", counted(t.read, "token").c_str(),
                 rate(t.read, t.read_seconds));
  }
  std::fprintf(stderr, "text: %s, %.1f tokens/s\n", counted(t.written, "token").c_str(),
               rate(t.written, t.write_seconds));
  if (const double seconds = ops::seconds_of_timing_products(); seconds > 0.1) {
    std::fprintf(stderr,
                 "In addition, %.1f s went into choosing the fastest matrix products for this "
                 "machine, which is done once for each size.\n",
                 seconds);
  }
  if (!interrupted()) return 0;
  std::fprintf(stderr, "headloom: interrupted; the text is not complete.\n");
  return 1;
}

}  // namespace

Command generate_command() {
  return {"generate", "text from a prompt, streaming; an encoder-decoder's answer to it",
          "headloom generate runs/text --prompt 'ROMEO:' --temperature 0.7",
          [](CLI::App& app) -> std::function<int()> {
            auto a = std::make_shared<GenerateArguments>();
            app.add_option("model", a->model, "folder of a run")->required();
            app.add_option("--prompt", a->prompt,
                           "what the text starts with, or the source; - reads standard input");
            app.add_option("--tokens", a->tokens, "tokens to write at most")
                ->check(whole_number(0))
                ->capture_default_str();
            app.add_option("--temperature", a->sampling.temperature,
                           "0: always the likeliest token")
                ->check(real_number(at_least(0.0)))
                ->capture_default_str();
            app.add_option("--top-k", a->sampling.top_k, "sample among the k likeliest; 0: all")
                ->check(whole_number(0));
            app.add_option("--top-p", a->sampling.top_p,
                           "sample among the likeliest tokens that have this probability together")
                ->check(real_number(between(0.0, 1.0)))
                ->capture_default_str();
            app.add_option("--min-p", a->sampling.min_p,
                           "keep tokens at least this likely beside the likeliest")
                ->check(real_number(between(0.0, 1.0)))
                ->capture_default_str();
            app.add_option("--repetition-penalty", a->sampling.repetition_penalty,
                           "above 1: what was there already is less likely to come again")
                ->check(real_number(positive()))
                ->capture_default_str();
            repeatable(app.add_option("--stop", a->stops, "end before this text; repeatable"))
                ->check([](const std::string& text) {
                  return std::string(text.empty() ? "is empty, which would end every text." : "");
                });
            app.add_option("--samples", a->samples, "texts to write from the prompt")
                ->check(whole_number(1, 1024))
                ->capture_default_str();
            add_cache_option(app, a->cache);
            app.add_option("--seed", a->seed, "of the sampling")
                ->check(whole_number(0))
                ->capture_default_str();
            add_precision_options(app, a->precision);
            add_device_option(app, a->device);
            add_checkpoint_option(app, a->checkpoint);
            return [a] { return run_generate(*a); };
          }};
}

}  // namespace headloom::cli
