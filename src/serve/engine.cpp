#include "serve/engine.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <list>
#include <numeric>
#include <thread>
#include <utility>

#include "core/text.h"
#include "model/decoder.h"
#include "model/generation.h"
#include "train/device.h"

namespace headloom::serve {
namespace {

// Tokens of prompts read between two steps, which others wait for; and where nobody does.
constexpr int64_t kPieceBetweenSteps = 128, kPiece = 1024;
// Scores of the vocabulary that are held at a time.
constexpr int64_t kMostScores = int64_t{1} << 24;

// A prompt that waits or is being read.
struct Prompt {
  std::shared_ptr<Answer> answer;
  std::shared_ptr<const Request> request;
  int64_t index = 0;
  int64_t max_tokens = 0;
  std::vector<Token> scored = {};  // tokens read, where they are to be echoed with logprobs
  DecoderState state = {};
  int64_t read = 0;

  const std::vector<int64_t>& tokens() const {
    return request->prompts[static_cast<size_t>(index)];
  }
  bool writes() const { return max_tokens > 0; }
  bool scores() const { return request->echo && request->logprobs; }
};

// A text that is being written, a row of the batch.
struct Row {
  std::shared_ptr<Answer> answer;
  std::shared_ptr<const Request> request;
  int64_t choice = 0;
  // Each token of the prompt and the text once, where repetition costs; so no text is too long.
  std::vector<int64_t> seen = {};
  int64_t newest = 0;  // its last token
  int64_t left = 0;    // tokens it may still become longer by
  TextStream text;
  std::vector<at::Generator> generator = {};
  bool done = false;
};

// The bytes that could not be had, 0 where that is not known; absent: it was not memory.
std::optional<double> bytes_wanting(const std::exception& error) {
  const std::string text = error.what(), asked = "you tried to allocate ";  // PyTorch's words
  if (const size_t at = text.find(asked); at != std::string::npos) {
    return std::strtod(text.c_str() + at + asked.size(), nullptr);
  }
  if (dynamic_cast<const std::bad_alloc*>(&error) != nullptr) return 0;
  return std::nullopt;
}

// Says to one answer, and on stderr, what went wrong. Memory may have run out: it must not throw.
void fail(Answer& answer, const std::exception& error) noexcept {
  try {
    const std::optional<double> bytes = bytes_wanting(error);
    const std::string text = error.what();
    const std::string message = !bytes ? "the model failed: " + text.substr(0, text.find('\n'))
                                : *bytes > 0 ? str("out of memory: this request needs ",
                                                   human_bytes(*bytes), " more at once.")
                                             : "out of memory.";
    std::fprintf(stderr, "headloom: %s\n", message.c_str());
    answer.fail(bytes ? 503 : 500, message.c_str());
  } catch (const std::exception&) {
    answer.fail(503, "out of memory.");
  }
}

Tensor row_of(const std::vector<int64_t>& tokens, int64_t first, int64_t count) {
  return at::from_blob(const_cast<int64_t*>(tokens.data() + first), {1, count}, at::kLong).clone();
}

}  // namespace

class Engine::Loop {
 public:
  Loop(std::shared_ptr<Decoder> model, const Codec& codec, const EngineOptions& options)
      : model_(std::move(model)),
        codec_(codec),
        options_(options),
        policy_(CachePolicy::parse(options.cache, options.cache_dtype)),
        longest_(most_positions(*model_, policy_)),
        nothing_(model_->initial_state(policy_)),
        thread_([this] { run(); }) {}

  ~Loop() {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    work_.notify_one();
    thread_.join();
  }

  std::shared_ptr<Answer> submit(Request r) {
    check(r);
    const int64_t max_tokens = r.max_tokens.value_or(r.default_tokens);
    const int64_t prompts = static_cast<int64_t>(r.prompts.size());
    const int64_t texts = prompts * r.samples;
    auto answer = std::make_shared<Answer>(texts);
    const auto request = std::make_shared<const Request>(std::move(r));
    std::list<Prompt> queued;
    for (int64_t i = 0; i < prompts; ++i) {
      const int64_t room = longest_ - size(*request, i);
      queued.push_back(
          {.answer = answer,
           .request = request,
           .index = i,
           .max_tokens = request->max_tokens ? max_tokens : std::min(max_tokens, room)});
    }
    {
      const std::lock_guard lock(mutex_);
      if (waiting_ + texts > options_.max_queue) {
        throw Refusal(429, "queue_full",
                      str(waiting_, " texts are waiting and this request has ", texts,
                          ", more than the ", options_.max_queue, " that may wait; try later."));
      }
      waiting_ += texts;
      queue_.splice(queue_.end(), queued);  // all or none: this needs no memory
    }
    work_.notify_one();
    return answer;
  }

  Load load() const {
    const std::lock_guard lock(mutex_);
    return {.running = running_,
            .waiting = waiting_,
            .state_bytes = state_bytes_,
            .prompt_tokens = prompt_tokens_,
            .written = written_};
  }
  Limits limits() const {
    return {.samples = options_.max_batch, .texts = options_.max_queue, .length = longest_};
  }
  int64_t vocabulary() const { return *model_->config().vocabulary; }
  int64_t longest() const { return longest_; }

 private:
  static int64_t size(const Request& r, int64_t prompt) {
    return static_cast<int64_t>(r.prompts[static_cast<size_t>(prompt)].size());
  }

  // Throws Refusal.
  void check(const Request& r) const {
    const auto refuse = [](const auto&... parts) { throw Refusal(400, "", str(parts...)); };
    const int64_t prompts = static_cast<int64_t>(r.prompts.size());
    if (prompts == 0) refuse("there is no prompt, expected at least one.");
    if (r.samples < 1 || r.samples > options_.max_batch) {
      refuse("n is ", r.samples, ", expected 1 to ", options_.max_batch,
             ", the texts that are written side by side.");
    }
    if (prompts > options_.max_queue / r.samples) {
      refuse("the request has ", prompts, " prompts and n = ", r.samples, ", expected at most ",
             options_.max_queue, " texts.");
    }
    for (int64_t i = 0; i < prompts; ++i) {
      const auto& tokens = r.prompts[static_cast<size_t>(i)];
      const std::string name = prompts == 1 ? "the prompt" : str("prompt ", i + 1);
      if (tokens.empty()) refuse(name, " has no token, expected at least one.");
      for (const int64_t token : tokens) {
        if (token < 0 || token >= vocabulary()) {
          refuse(name, " has the token ", token, ", expected 0 to ", vocabulary() - 1, ".");
        }
      }
      // Without max_tokens, a text that ends at the length is what was asked for.
      const int64_t wanted = r.max_tokens.value_or(1);
      if (size(r, i) > longest_ || wanted > longest_ - size(r, i)) {
        const std::string asked =
            r.max_tokens
                ? str(" and ", r.max_tokens_key, " is ", wanted,
                      ", together more than the model's length of ")
                : str(", which leaves no room for a text in the model's length of ");
        throw Refusal(400, "context_length_exceeded",
                      str(name, " has ", counted(size(r, i), "token"), asked, longest_, "."));
      }
    }
  }

  void run() {
    const c10::InferenceMode inference;
    const Autocast autocast(options_.dtype, model_->device().type());
    while (wait_for_work()) {
      try {
        drop_cancelled();
        read_prompts();
        step();
      } catch (const std::exception& error) {
        // The state may have seen the last tokens in some layers only. Its memory is free before
        // the clients, which may ask again at once, are told.
        const std::vector<Row> rows = std::exchange(rows_, {});
        state_ = {};
        for (const Row& row : rows) {
          if (!row.done) fail(*row.answer, error);
        }
      }
    }
    const char* end = "the server ends.";
    if (prompt_) prompt_->answer->fail(500, end);
    for (const Prompt& p : queue_) p.answer->fail(500, end);
    for (const Row& row : rows_) row.answer->fail(500, end);
  }

  bool wait_for_work() {
    std::unique_lock lock(mutex_);
    running_ = static_cast<int64_t>(rows_.size()) + (prompt_ ? prompt_->request->samples : 0);
    state_bytes_ = state_.bytes() + (prompt_ ? prompt_->state.bytes() : 0);
    work_.wait(lock, [&] { return stop_ || running_ > 0 || !queue_.empty(); });
    return !stop_;
  }

  void drop_cancelled() {
    {
      const std::lock_guard lock(mutex_);
      std::erase_if(queue_, [&](const Prompt& p) {
        const bool gone = p.answer->cancelled();
        if (gone) waiting_ -= p.request->samples;
        return gone;
      });
    }
    if (prompt_ && prompt_->answer->cancelled()) prompt_.reset();
    for (Row& row : rows_) row.done = row.done || row.answer->cancelled();
    drop_done();
  }

  // The next prompt that waits, where there is room for its texts.
  bool take_prompt() {
    const std::lock_guard lock(mutex_);
    if (queue_.empty()) return false;
    const Prompt& next = queue_.front();
    const int64_t rows = static_cast<int64_t>(rows_.size());
    if (next.writes() && rows + next.request->samples > options_.max_batch) return false;
    waiting_ -= next.request->samples;
    running_ += next.request->samples;
    prompt_ = std::move(queue_.front());
    queue_.pop_front();
    return true;
  }

  void read_prompts() {
    std::vector<DecoderState> joining;
    const size_t before = rows_.size();
    int64_t budget = rows_.empty() ? kPiece : kPieceBetweenSteps;
    while (budget > 0 && (prompt_ || take_prompt())) {
      try {
        budget -= read_piece(budget, joining);
      } catch (const std::exception& error) {
        const std::shared_ptr<Answer> answer = prompt_->answer;
        prompt_.reset();  // its memory is free before its client, which may ask again, is told
        fail(*answer, error);
      }
    }
    if (joining.empty()) return;
    if (state_.layers.empty() && joining.size() == 1) {
      state_ = std::move(joining[0]);
      return;
    }
    try {
      state_.add(joining);
    } catch (const std::exception& error) {
      // There is no memory for these; the texts that are being written go on.
      joining.clear();
      for (size_t i = before; i < rows_.size(); ++i) fail(*rows_[i].answer, error);
      rows_.erase(rows_.begin() + static_cast<std::ptrdiff_t>(before), rows_.end());
      if (rows_.empty()) state_ = {};
      for (const LayerState& layer : state_.layers) {
        for (const MixerState* part : {&layer.mixer, &layer.channel}) {
          const int64_t batch = part->batch();
          if (batch != 0 && batch != static_cast<int64_t>(before)) throw;  // then nobody does
        }
      }
    }
  }

  // About `most` of the prompt's next tokens; returns how many. After its last one its texts begin,
  // and the states of those that go on are put after `joining`.
  int64_t read_piece(int64_t most, std::vector<DecoderState>& joining) {
    Prompt& p = *prompt_;
    const int64_t total = static_cast<int64_t>(p.tokens().size());
    if (p.read == 0) {
      p.state = nothing_.alias();
      p.state.reserve(positions_to_expect(*model_, policy_, total + p.max_tokens));
    }
    // Attention forgets at the end of a piece: where pieces ended would else depend on the others.
    if (policy_.evicts()) {
      most = kPieceBetweenSteps;
      const std::optional<int64_t> length = model_->config().max_length;
      if (length && total > *length) most = std::min(most, most_at_once(*model_, policy_));
    }
    const int64_t count = std::min(most, total - p.read);
    const int64_t wanted = p.scores() ? count : 1;
    const Tensor hidden = model_->extend(row_of(p.tokens(), p.read, count), p.state, wanted);
    const bool last = p.read + count == total;
    Tensor next;  // [1, V]
    if (p.scores()) {
      const int64_t at_once = std::max<int64_t>(kMostScores / vocabulary(), 1);
      for (int64_t first = 0; first < count; first += at_once) {
        const int64_t rows = std::min(at_once, count - first);
        const Tensor logits = model_->logits(hidden.narrow(1, first, rows)).squeeze(0).cpu();
        score(p, logits, p.read + first);
        if (first + rows == count) next = logits.narrow(0, rows - 1, 1);
      }
    } else if (last && p.writes()) {
      next = model_->logits(hidden.select(1, -1)).cpu();
    }
    p.read += count;
    {
      const std::lock_guard lock(mutex_);
      prompt_tokens_ += count;
    }
    if (last) {
      begin_texts(p, next, joining);
      prompt_.reset();
    }
    return count;
  }

  // The tokens that `logits` [n, V] say something of, those after position `first`.
  void score(Prompt& p, const Tensor& logits, int64_t first) {
    const int64_t total = static_cast<int64_t>(p.tokens().size());
    if (first == 0) p.scored.push_back({.id = p.tokens()[0]});
    const int64_t count = std::min(logits.size(0), total - 1 - first);
    if (count == 0) return;
    const Tensor wanted = row_of(p.tokens(), first + 1, count).squeeze(0);
    for (Token& token : likelihoods(logits.narrow(0, 0, count), wanted, *p.request->logprobs)) {
      p.scored.push_back(std::move(token));
    }
  }

  // Of `chosen` [n] under logits [n, V].
  std::vector<Token> likelihoods(const Tensor& logits, const Tensor& chosen, int64_t top) const {
    const Tensor logprobs = logits.to(at::kFloat).log_softmax(-1);
    const Tensor own = logprobs.gather(1, chosen.unsqueeze(1));
    const auto [best, which] = logprobs.topk(std::min(top, logprobs.size(1)), 1);
    const auto id_at = chosen.accessor<int64_t, 1>();
    const auto own_at = own.accessor<float, 2>();
    const auto best_at = best.accessor<float, 2>();
    const auto which_at = which.accessor<int64_t, 2>();
    std::vector<Token> out;
    for (int64_t i = 0; i < chosen.size(0); ++i) {
      Token token{.id = id_at[i], .logprob = own_at[i][0]};
      for (int64_t k = 0; k < best.size(1); ++k) {
        token.top.emplace_back(which_at[i][k], best_at[i][k]);
      }
      out.push_back(std::move(token));
    }
    return out;
  }

  // The texts of a prompt that is read, with their first tokens from `logits` [1, V].
  void begin_texts(Prompt& p, const Tensor& logits, std::vector<DecoderState>& joining) {
    const Request& request = *p.request;
    std::vector<Row> begun;
    for (int64_t i = 0; i < request.samples; ++i) {
      const int64_t choice = p.index * request.samples + i;
      const auto seed = request.seed + static_cast<uint64_t>(request.drawn_seed ? choice : i);
      Row row{.answer = p.answer,
              .request = p.request,
              .choice = choice,
              .left = p.max_tokens,
              .text = TextStream(request.stops),
              .generator = {at::make_generator<at::CPUGeneratorImpl>(seed)}};
      if (request.echo) echo(p, row);
      if (request.sampling.repetition_penalty != 1) {
        row.seen = p.tokens();
        std::sort(row.seen.begin(), row.seen.end());
        row.seen.erase(std::unique(row.seen.begin(), row.seen.end()), row.seen.end());
      }
      if (p.writes()) {
        write(row, logits);
      } else {
        row.answer->add({.choice = row.choice, .finish = "length"});
        row.done = true;
      }
      if (!row.done) begun.push_back(std::move(row));
    }
    if (begun.empty()) return;
    const int64_t going = static_cast<int64_t>(begun.size());
    rows_.reserve(rows_.size() + begun.size());
    joining.push_back(going == 1 ? std::move(p.state)
                                 : p.state.select(at::zeros({going}, at::kLong)));
    for (Row& row : begun) rows_.push_back(std::move(row));
  }

  void echo(const Prompt& p, const Row& row) {
    Event event{.choice = row.choice, .prompt = true, .tokens = p.scored};
    const std::vector<std::string> pieces = codec_.pieces(p.tokens());
    if (event.tokens.empty()) {
      for (const int64_t id : p.tokens()) event.tokens.push_back({.id = id});
    }
    for (size_t i = 0; i < pieces.size(); ++i) {
      event.text += pieces[i];
      event.tokens[i].text = pieces[i];
    }
    row.answer->add(std::move(event));
  }

  // One more token of each text.
  void step() {
    if (rows_.empty()) return;
    std::vector<int64_t> newest;
    for (const Row& row : rows_) newest.push_back(row.newest);
    const Tensor tokens = at::tensor(at::IntArrayRef(newest), at::kLong).unsqueeze(1);
    const Tensor logits = model_->logits(model_->extend(tokens, state_).select(1, -1)).cpu();
    for (size_t i = 0; i < rows_.size(); ++i) {
      try {
        write(rows_[i], logits.narrow(0, static_cast<int64_t>(i), 1));
      } catch (const std::exception& error) {  // scores that are no numbers, say
        fail(*rows_[i].answer, error);
        rows_[i].done = true;
      }
    }
    drop_done();
  }

  // A text's next token, from logits [1, V].
  void write(Row& row, const Tensor& logits) {
    const Request& request = *row.request;
    const Tensor seen =
        row.seen.empty() ? Tensor() : row_of(row.seen, 0, static_cast<int64_t>(row.seen.size()));
    const auto token = sample(logits, seen, request.sampling, row.generator).item<int64_t>();
    row.newest = token;
    --row.left;
    if (request.sampling.repetition_penalty != 1) {
      const auto place = std::lower_bound(row.seen.begin(), row.seen.end(), token);
      if (place == row.seen.end() || *place != token) row.seen.insert(place, token);
    }
    {
      const std::lock_guard lock(mutex_);
      ++written_;
    }
    Event event{.choice = row.choice};
    if (request.logprobs) {
      event.tokens = likelihoods(logits, at::full({1}, token, at::kLong), *request.logprobs);
    } else {
      event.tokens = {{.id = token}};
    }
    const bool end =
        std::find(request.ends.begin(), request.ends.end(), token) != request.ends.end();
    if (end || (codec_.end() && token == *codec_.end())) {
      row.text.end();
    } else {
      event.tokens[0].text = codec_.piece(token);
      event.text = row.text.add(event.tokens[0].text);
    }
    row.done = row.text.ended() || row.left == 0;
    if (row.done) {
      event.finish = row.text.ended() ? "stop" : "length";
      event.text += row.text.rest();
    }
    row.answer->add(std::move(event));
  }

  void drop_done() {
    // The last rows take the places of those that leave, so that no other row moves.
    std::vector<int64_t> place(rows_.size());
    std::iota(place.begin(), place.end(), 0);
    for (size_t i = 0; i < rows_.size();) {
      if (!rows_[i].done) {
        ++i;
        continue;
      }
      if (i + 1 < rows_.size()) {
        rows_[i] = std::move(rows_.back());
        place[i] = place[rows_.size() - 1];
      }
      rows_.pop_back();
    }
    if (rows_.size() == place.size()) return;
    place.resize(rows_.size());
    if (rows_.empty()) {
      state_ = {};
    } else {
      state_.keep(place);
    }
  }

  const std::shared_ptr<Decoder> model_;
  const Codec& codec_;
  const EngineOptions options_;
  const CachePolicy policy_;
  const int64_t longest_;
  const DecoderState nothing_;  // what every text begins with

  mutable std::mutex mutex_;
  std::condition_variable work_;
  std::list<Prompt> queue_;
  int64_t waiting_ = 0, running_ = 0;  // texts
  int64_t state_bytes_ = 0, prompt_tokens_ = 0, written_ = 0;
  bool stop_ = false;

  // The thread's own.
  std::optional<Prompt> prompt_;  // being read
  std::vector<Row> rows_;
  DecoderState state_;  // of rows_

  std::thread thread_;  // last: it uses the others
};

Engine::Engine(std::shared_ptr<Decoder> model, const Codec& codec, const EngineOptions& options)
    : loop_(std::make_unique<Loop>(std::move(model), codec, options)) {}

Engine::~Engine() = default;

std::shared_ptr<Answer> Engine::submit(Request request) {
  return loop_->submit(std::move(request));
}

Engine::Load Engine::load() const { return loop_->load(); }

int64_t Engine::vocabulary() const { return loop_->vocabulary(); }

Limits Engine::limits() const { return loop_->limits(); }

std::optional<int64_t> Engine::max_length() const {
  const int64_t longest = loop_->longest();
  if (longest == std::numeric_limits<int64_t>::max()) return std::nullopt;
  return longest;
}

}  // namespace headloom::serve
