#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include <chrono>
#include <cstdio>
#include <iostream>
#include <iterator>

#include "cli/command.h"
#include "core/error.h"
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

int run(Arguments& a) {
  LoadedRun loaded = load_run(a.model, a.checkpoint);
  if (loaded.config.model.kind != "decoder") {
    usage_error(a.model, ": is a model of kind \"", loaded.config.model.kind,
                "\", which writes no text, expected a decoder.");
  }
  Codec codec{.tokenizer = loaded.config.task->tokenizer(), .task = nullptr};
  if (!codec.tokenizer) codec.task = loaded.config.build_task();
  if (a.prompt == "-") {
    a.prompt.assign(std::istreambuf_iterator<char>(std::cin), std::istreambuf_iterator<char>());
  }
  std::vector<int64_t> tokens = codec.encode(a.prompt);
  // A model starts a document after the end of another.
  if (tokens.empty()) tokens.push_back(codec.end().value_or(0));
  at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(a.seed);
  const int64_t window = loaded.config.model.max_length.value_or(256);
  std::fputs(a.prompt.c_str(), stdout);
  install_interrupt_handler();
  at::NoGradGuard no_grad;
  const auto start = std::chrono::steady_clock::now();
  int64_t made = 0;
  for (; made < a.tokens && !interrupted(); ++made) {
    // The model sees at most the length it was built for; the prefix is computed anew each time.
    const int64_t seen = std::min<int64_t>(window, static_cast<int64_t>(tokens.size()));
    const Tensor input =
        at::tensor(at::IntArrayRef(tokens).slice(tokens.size() - static_cast<size_t>(seen)),
                   at::kLong)
            .unsqueeze(0);
    Autocast autocast(loaded.config.train.dtype);
    const Tensor logits =
        loaded.model->logits(loaded.model->hidden({.tokens = input}).select(1, -1)).squeeze(0);
    const int64_t next = sample(logits, a.sampling, generator);
    if (codec.end() && next == *codec.end()) break;
    tokens.push_back(next);
    std::fputs(codec.decode(next).c_str(), stdout);
    std::fflush(stdout);
  }
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  std::fputc('\n', stdout);
  std::fprintf(stderr, "%lld tokens, %.1f tokens/s\n", static_cast<long long>(made),
               static_cast<double>(made) / std::max(seconds, 1e-9));
  return 0;
}

}  // namespace

Command generate_command() {
  return {
      "generate", "text from a prompt, streaming",
      "headloom generate runs/text --prompt 'ROMEO:' --temperature 0.7",
      [](CLI::App& app) -> std::function<int()> {
        auto a = std::make_shared<Arguments>();
        app.add_option("model", a->model, "folder of a run")->required();
        app.add_option("--prompt", a->prompt, "what the text starts with; - reads standard input");
        app.add_option("--tokens", a->tokens, "tokens to write at most")
            ->check(CLI::NonNegativeNumber);
        app.add_option("--temperature", a->sampling.temperature, "0: always the likeliest token")
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
