#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include <chrono>
#include <cstdio>
#include <iostream>
#include <iterator>

#include "cli/command.h"
#include "core/error.h"
#include "model/encoder_decoder.h"
#include "model/sampling.h"
#include "train/evaluate.h"
#include "train/load.h"
#include "train/train.h"

namespace headloom::cli {
namespace {

struct Arguments {
  std::string model, checkpoint = "best", prompt;
  int64_t tokens = 256;
  uint64_t seed = 0;
  SamplingOptions sampling;
};

// Text as tokens and back, by the tokenizer alone where the task has one.
struct Codec {
  std::shared_ptr<const data::Tokenizer> tokenizer;
  std::shared_ptr<data::Task> task;

  std::vector<int64_t> encode(const std::string& text) const {
    if (!tokenizer) return task->encode(text);
    const Tensor tokens = tokenizer->encode(text).to(at::kLong).contiguous();
    std::vector<int64_t> out;
    if (const auto start = tokenizer->start_token()) out.push_back(*start);
    const int64_t* first = tokens.const_data_ptr<int64_t>();
    out.insert(out.end(), first, first + tokens.numel());
    return out;
  }
  std::string decode(int64_t token) const {
    return tokenizer ? tokenizer->piece(token) : task->decode({token});
  }
  std::optional<int64_t> end() const {
    return tokenizer ? std::optional<int64_t>(tokenizer->end_token()) : task->end_token();
  }
};

// One step of a loop that chooses tokens: the next one after `logits` [1, V].
struct Sampler {
  SamplingOptions options;
  at::Generator generator;
  int64_t operator()(const Tensor& logits) { return sample(logits.squeeze(0), options, generator); }
};

// The last `window` tokens as a batch of one: the model sees at most the length it was built for.
Tensor newest(const std::vector<int64_t>& tokens, int64_t window) {
  const size_t seen = std::min<size_t>(static_cast<size_t>(window), tokens.size());
  return at::tensor(at::IntArrayRef(tokens).slice(tokens.size() - seen), at::kLong).unsqueeze(0);
}

// Goes on with the prompt.
int64_t write_text(const Arguments& a, LoadedRun& loaded, Sampler& sampler) {
  Codec codec{.tokenizer = loaded.config.task->tokenizer(), .task = nullptr};
  if (!codec.tokenizer) codec.task = loaded.config.build_task();
  std::vector<int64_t> tokens = codec.encode(a.prompt);
  // A model starts a document after the end of another.
  if (tokens.empty()) tokens.push_back(codec.end().value_or(0));
  const int64_t window = loaded.config.model.max_length.value_or(256);
  std::fputs(a.prompt.c_str(), stdout);
  int64_t made = 0;
  for (; made < a.tokens && !interrupted(); ++made) {
    // The prefix is computed anew each time.
    const Autocast autocast(loaded.config.train.dtype);
    const Tensor hidden = loaded.model->hidden({.tokens = newest(tokens, window)});
    const int64_t next = sampler(loaded.model->logits(hidden.select(1, -1)));
    if (codec.end() && next == *codec.end()) break;
    tokens.push_back(next);
    std::fputs(codec.decode(next).c_str(), stdout);
    std::fflush(stdout);
  }
  return made;
}

// The answer to the prompt, which is the source.
int64_t write_answer(const Arguments& a, LoadedRun& loaded, Sampler& sampler) {
  auto& model = dynamic_cast<EncoderDecoder&>(*loaded.model);
  const auto task = loaded.config.build_task();
  const std::vector<int64_t> source = task->encode(a.prompt);
  const int64_t longest = loaded.config.model.max_source_length.value_or(256);
  if (source.empty() || static_cast<int64_t>(source.size()) > longest) {
    usage_error("--prompt has ", source.size(), " tokens, expected a source of 1 to ", longest,
                ".");
  }
  // What every answer of the task begins with.
  std::vector<int64_t> tokens = {task->eval_batch(0, 1).inputs[0][0].item<int64_t>()};
  const int64_t most = std::min(a.tokens, loaded.config.model.max_length.value_or(256));
  const Autocast autocast(loaded.config.train.dtype);
  const ModelInput given{.source = newest(source, longest)};
  const Tensor memory = model.encode(given);
  for (int64_t made = 0; made < most && !interrupted(); ++made) {
    const Tensor hidden = model.decode(memory, {.tokens = newest(tokens, most)});
    const int64_t next = sampler(model.logits(hidden.select(1, -1)));
    if (next == task->end_token()) break;
    tokens.push_back(next);
  }
  tokens.erase(tokens.begin());
  std::fputs(task->decode(tokens).c_str(), stdout);
  return static_cast<int64_t>(tokens.size());
}

int run(Arguments& a) {
  LoadedRun loaded = load_run(a.model, a.checkpoint);
  const std::string& kind = loaded.config.model.kind;
  if (kind != "decoder" && kind != "encoder_decoder") {
    usage_error(a.model, ": is a model of kind \"", kind,
                "\", which writes nothing, expected a decoder or an encoder_decoder.");
  }
  if (a.prompt == "-") {
    a.prompt.assign(std::istreambuf_iterator<char>(std::cin), std::istreambuf_iterator<char>());
  }
  Sampler sampler{.options = a.sampling,
                  .generator = at::make_generator<at::CPUGeneratorImpl>(a.seed)};
  install_interrupt_handler();
  at::NoGradGuard no_grad;
  const auto start = std::chrono::steady_clock::now();
  const int64_t made =
      kind == "decoder" ? write_text(a, loaded, sampler) : write_answer(a, loaded, sampler);
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  std::fputc('\n', stdout);
  std::fprintf(stderr, "%lld tokens, %.1f tokens/s\n", static_cast<long long>(made),
               static_cast<double>(made) / std::max(seconds, 1e-9));
  return 0;
}

}  // namespace

Command generate_command() {
  return {"generate", "text from a prompt, streaming; an encoder-decoder's answer to it",
          "headloom generate runs/text --prompt 'ROMEO:' --temperature 0.7",
          [](CLI::App& app) -> std::function<int()> {
            auto a = std::make_shared<Arguments>();
            app.add_option("model", a->model, "folder of a run")->required();
            app.add_option("--prompt", a->prompt,
                           "what the text starts with, or the source; - reads standard input");
            app.add_option("--tokens", a->tokens, "tokens to write at most")
                ->check(CLI::NonNegativeNumber);
            app.add_option("--temperature", a->sampling.temperature,
                           "0: always the likeliest token")
                ->check(CLI::NonNegativeNumber)
                ->capture_default_str();
            app.add_option("--top-k", a->sampling.top_k, "sample among the k likeliest; 0: all")
                ->check(CLI::NonNegativeNumber);
            app.add_option("--top-p", a->sampling.top_p,
                           "sample among the likeliest tokens that have this probability together")
                ->check(CLI::Range(0.0, 1.0))
                ->capture_default_str();
            app.add_option("--seed", a->seed, "of the sampling")->capture_default_str();
            app.add_option("--checkpoint", a->checkpoint, "best, last or a step");
            return [a] { return run(*a); };
          }};
}

}  // namespace headloom::cli
