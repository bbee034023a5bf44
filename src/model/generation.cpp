#include "model/generation.h"

#include <ATen/CPUGeneratorImpl.h>

#include <algorithm>
#include <limits>

#include "core/memory.h"
#include "core/sizes.h"
#include "core/text.h"

namespace headloom {
namespace {

Tensor indices(const std::vector<int64_t>& list) {
  return at::tensor(at::IntArrayRef(list), at::kLong);
}

size_t longest_of(const std::vector<std::vector<int64_t>>& texts) {
  size_t longest = 0;
  for (const auto& text : texts) longest = std::max(longest, text.size());
  return longest;
}

// [texts, n] for the repetition penalty: shorter texts repeat their first token, which changes
// nothing.
Tensor side_by_side(const std::vector<std::vector<int64_t>>& texts) {
  const size_t longest = longest_of(texts);
  std::vector<Tensor> rows;
  for (const auto& text : texts) {
    std::vector<int64_t> row(longest - text.size(), text[0]);
    row.insert(row.end(), text.begin(), text.end());
    rows.push_back(indices(row));
  }
  return at::stack(rows);
}

Source source_of(const std::vector<std::vector<int64_t>>& sources) {
  if (sources.empty()) return {};
  const size_t longest = longest_of(sources);
  std::vector<Tensor> rows;
  std::vector<int64_t> lengths;
  for (const auto& source : sources) {
    require(!source.empty(), "an encoder-decoder cannot read nothing: the source is empty.");
    std::vector<int64_t> row = source;
    row.resize(longest, 0);
    rows.push_back(indices(row));
    lengths.push_back(static_cast<int64_t>(source.size()));
  }
  const bool even =
      *std::min_element(lengths.begin(), lengths.end()) == static_cast<int64_t>(longest);
  return {.tokens = at::stack(rows), .lengths = even ? Tensor() : indices(lengths)};
}

// Throws UsageError where the scores of the next token and what the states keep of the prompts do
// not fit this process.
void check_texts_fit(const AutoregressiveModel& model,
                     const std::vector<std::vector<int64_t>>& prompts,
                     const GenerationOptions& options) {
  const double texts = static_cast<double>(prompts.size()) * static_cast<double>(options.samples);
  int64_t kept =
      std::min(static_cast<int64_t>(longest_of(prompts)), most_positions(model, options.cache));
  if (options.cache.evicts()) kept = std::min(kept, options.cache.budget);
  double state = 0;
  for (const auto& layer : model.decoder_layers().all()) state += layer.mixer->state_bytes(kept);
  const double scores = 4 * texts * static_cast<double>(*model.config().vocabulary);
  state *= texts / 2;  // float32, but bfloat16 is possible
  check_fits(str(texts, texts == 1 ? " text needs" : " texts side by side need"), scores + state,
             str("scores ", human_bytes(scores), ", decoding states ", human_bytes(state)),
             "fewer samples or prompts at once need less");
}

// Whether the policy keeps so few of the newest positions that attention stays within the model's
// length, however long a text gets.
bool stays_near(const CachePolicy& policy, int64_t length) {
  return (policy.type == "window" || policy.type == "sinks") && policy.budget < length;
}

}  // namespace

int64_t most_positions(const AutoregressiveModel& model, const CachePolicy& policy) {
  int64_t most = std::numeric_limits<int64_t>::max();
  for (const auto& layer : model.decoder_layers().all()) {
    most = std::min(most, layer.mixer->longest().value_or(most));
  }
  // Learned positions always have a longest sequence; others where it is given. What is added to
  // the embedding beyond it is nothing that the model was trained with.
  if (!model.config().max_length) return most;
  const int64_t length = *model.config().max_length;
  const std::string& positions = model.config().position.type;
  bool limited = positions == "learned" || positions == "sinusoidal";
  for (const auto& layer : model.decoder_layers().all()) {
    const bool grows = layer.mixer->state_bytes(2 * length) > layer.mixer->state_bytes(length);
    if (grows && !stays_near(policy, length)) limited = true;
  }
  return limited ? std::min(most, length) : most;
}

int64_t most_at_once(const AutoregressiveModel& model, const CachePolicy& policy) {
  const std::optional<int64_t> length = model.config().max_length;
  if (!length || !stays_near(policy, *length)) return std::numeric_limits<int64_t>::max();
  return *length - policy.budget;
}

int64_t positions_to_expect(const AutoregressiveModel& model, const CachePolicy& policy,
                            int64_t length) {
  // Room is made in advance for as much as texts usually have; more is made when it is needed.
  const int64_t usual = 2 * model.config().length();
  return std::min({length, most_positions(model, policy), usual});
}

Generation::Generation(AutoregressiveModel& model, const std::vector<std::vector<int64_t>>& prompts,
                       const GenerationOptions& options)
    : model_(model),
      sampling_(options.sampling),
      policy_(options.cache),
      samples_(options.samples),
      window_(most_positions(model, options.cache)),
      left_(std::min(options.tokens, kLargestSize)),
      texts_(prompts) {
  check_sampling(options.sampling);
  if (samples_ < 1) usage_error("samples is ", samples_, ", expected at least 1.");
  require(!prompts.empty(), "there are no prompts, expected at least one.");
  const size_t sources = options.sources.size();
  require(sources == 0 || sources == prompts.size(), "there are ", sources, " sources for ",
          prompts.size(), " prompts, expected one for each.");
  check_texts_fit(model, prompts, options);
  std::vector<int64_t> all, repeated;
  for (size_t i = 0; i < prompts.size(); ++i) {
    require(!prompts[i].empty(), "a text cannot begin with nothing: the prompt is empty.");
    all.push_back(static_cast<int64_t>(i));
    repeated.insert(repeated.end(), static_cast<size_t>(samples_), static_cast<int64_t>(i));
  }
  begun_ = model.initial_state(policy_, source_of(options.sources));
  Reading reading = read(all, 1);
  texts_.clear();
  for (size_t i = 0; i < repeated.size(); ++i) {
    texts_.push_back(prompts[static_cast<size_t>(repeated[i])]);
    const uint64_t sample = i % static_cast<uint64_t>(samples_);
    generators_.push_back(at::make_generator<at::CPUGeneratorImpl>(options.seed + sample));
  }
  logits_ = reading.logits.index_select(0, indices(repeated));
  state_ = samples_ > 1 ? reading.state.select(indices(repeated)) : std::move(reading.state);
}

Tensor Generation::next() {
  const Tensor seen = sampling_.repetition_penalty == 1 ? Tensor() : side_by_side(texts_);
  const Tensor chosen = sample(logits_, seen, sampling_, generators_);
  --left_;
  std::vector<int64_t> fit, outgrown;
  for (size_t i = 0; i < texts_.size(); ++i) {
    const auto b = static_cast<int64_t>(i);
    texts_[i].push_back(chosen[b].item<int64_t>());
    (state_.position.of(b) < window_ ? fit : outgrown).push_back(b);
  }
  if (outgrown.empty()) {
    logits_ = logits_of(chosen.unsqueeze(1), state_);
    return chosen;
  }
  Reading anew = read(outgrown, samples_);
  if (fit.empty()) {
    state_ = std::move(anew.state);
    logits_ = anew.logits;
    return chosen;
  }
  const Tensor rows = indices(fit);
  DecoderState on = state_.select(rows);
  const Tensor logits = logits_of(chosen.index_select(0, rows).unsqueeze(1), on);
  const Tensor back = at::cat({rows, indices(outgrown)}).argsort();
  logits_ = at::cat({logits, anew.logits}).index_select(0, back);
  std::vector<DecoderState> parts;
  parts.push_back(std::move(on));
  parts.push_back(std::move(anew.state));
  state_ = DecoderState::join(parts).select(back);
  return chosen;
}

Generation::Reading Generation::read(const std::vector<int64_t>& which, int64_t samples) {
  std::map<size_t, std::vector<int64_t>> by_length;
  for (const int64_t i : which) {
    const size_t length = texts_[static_cast<size_t>(i)].size();
    const bool whole = length <= static_cast<uint64_t>(window_);
    by_length[whole ? length : static_cast<size_t>(newest())].push_back(i);
  }
  std::vector<DecoderState> states;
  std::vector<Tensor> logits;
  std::vector<int64_t> order;
  for (const auto& [length, group] : by_length) {
    std::vector<Tensor> tokens;
    std::vector<int64_t> sources;
    for (const int64_t i : group) {
      const auto& text = texts_[static_cast<size_t>(i)];
      tokens.push_back(indices({text.end() - static_cast<std::ptrdiff_t>(length), text.end()}));
      sources.push_back(i / samples);
      order.push_back(i);
    }
    states.push_back(begun_.select(indices(sources)));
    if (left_ > 0) {
      states.back().reserve(
          positions_to_expect(model_, policy_, static_cast<int64_t>(length) + left_));
    }
    Tensor text = at::stack(tokens);
    if (text.size(1) > model_.config().max_length.value_or(text.size(1))) {
      const int64_t piece = most_at_once(model_, policy_);
      while (text.size(1) > piece) {
        model_.extend(text.narrow(1, 0, piece), states.back(), 1);
        text = text.narrow(1, piece, text.size(1) - piece);
      }
    }
    logits.push_back(logits_of(text, states.back()));
  }
  if (states.size() == 1) return {.state = std::move(states[0]), .logits = logits[0]};
  // `which` ascends.
  const Tensor back = indices(order).argsort();
  return {.state = DecoderState::join(states).select(back),
          .logits = at::cat(logits).index_select(0, back)};
}

// On the CPU: sampling draws the same tokens wherever the model is, and reads a device once a step.
Tensor Generation::logits_of(const Tensor& tokens, DecoderState& state) {
  return model_.logits(model_.extend(tokens, state, 1).select(1, -1)).cpu();
}

}  // namespace headloom
