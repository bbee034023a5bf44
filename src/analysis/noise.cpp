// Attention noise (Ye et al. 2024): how much of its attention a query that is asked something gives
// to the answer in its context, and how much to the rest.
#include <ATen/ATen.h>

#include <algorithm>

#include "analysis/analysis.h"
#include "core/text.h"
#include "data/task.h"

namespace headloom::analysis {
namespace {

// A query and the keys that hold what it is asked for.
struct Question {
  int64_t sequence, query;
  std::vector<int64_t> answer;
};

// Where a sequence holds the token that position t is asked for: the earlier places of it whose
// surroundings agree most, counted as the asked tokens from t on that follow there and the tokens
// up to t that stand before it.
std::vector<int64_t> places_of(const int64_t* tokens, const int64_t* targets, int64_t length,
                               int64_t t) {
  constexpr int64_t kContext = 32;
  std::vector<int64_t> best;
  int64_t most = 0;
  for (int64_t s = 0; s <= t; ++s) {
    if (tokens[s] != targets[t]) continue;
    int64_t same = 0;
    for (int64_t i = 0; t + i < length && s + i <= t && targets[t + i] == tokens[s + i]; ++i)
      ++same;
    for (int64_t i = 0; i < kContext && s - 1 - i >= 0 && tokens[s - 1 - i] == tokens[t - i]; ++i) {
      ++same;
    }
    if (same > most) best.clear();
    most = std::max(most, same);
    if (same == most) best.push_back(s);
  }
  return best;
}

std::vector<Question> questions_of(const Subject& subject, int64_t& unanswered) {
  std::vector<Question> questions;
  const Tensor tokens = subject.input.tokens.to(at::kLong).contiguous();
  const int64_t batch = tokens.size(0), length = tokens.size(1);
  if (subject.answer.defined()) {
    const Tensor place = subject.answer.nonzero().flatten().to(at::kLong).contiguous();
    const int64_t* first = place.const_data_ptr<int64_t>();
    return {{.sequence = 0, .query = length - 1, .answer = {first, first + place.numel()}}};
  }
  const Tensor targets = subject.targets.to(at::kLong).contiguous();
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t* own = tokens.const_data_ptr<int64_t>() + b * length;
    const int64_t* asked = targets.const_data_ptr<int64_t>() + b * length;
    for (int64_t t = 0; t < length; ++t) {
      if (asked[t] == data::kIgnore) continue;
      std::vector<int64_t> answer = places_of(own, asked, length, t);
      if (answer.empty()) {
        ++unanswered;
      } else {
        questions.push_back({.sequence = b, .query = t, .answer = std::move(answer)});
      }
    }
  }
  return questions;
}

struct Shares {
  Tensor answer, rest, first;  // [H], means over the questions
};

// Of a row's absolute values: a negative weight on a key is attention to it.
Shares shares_of(const Tensor& maps, const std::vector<Question>& questions) {
  const int64_t heads = maps.size(1);
  Shares sum{at::zeros({heads}, at::kDouble), at::zeros({heads}, at::kDouble),
             at::zeros({heads}, at::kDouble)};
  for (const Question& q : questions) {
    const Tensor row = maps.select(0, q.sequence).select(1, q.query).to(at::kDouble).abs();
    const Tensor share = row / row.sum(-1, true).clamp_min(1e-300);
    const Tensor answer = share.index_select(1, at::tensor(q.answer, at::kLong)).sum(1);
    sum.answer += answer;
    sum.rest += share.sum(1) - answer;
    sum.first += share.select(1, 0);
  }
  const auto count = static_cast<double>(questions.size());
  return {sum.answer / count, sum.rest / count, sum.first / count};
}

// Throws UsageError where the subject has no answer, and its targets are no questions.
void check_asks(const Subject& subject) {
  if (subject.answer.defined()) return;
  if (!subject.targets.defined() || subject.targets.sizes() != subject.input.tokens.sizes()) {
    usage_error(
        "the analysis noise needs a question: a run on a task whose answers stand in the context, "
        "such as needle or recall, or a text and the answer in it.");
  }
  const int64_t all = subject.targets.ne(data::kIgnore).sum().item<int64_t>();
  if (2 * all <= subject.targets.numel()) return;
  const int64_t length = subject.targets.size(-1);
  const int64_t each = all * length / subject.targets.numel();  // sequences may differ
  usage_error("the task asks for ", each == length ? std::string("every one") : str(each),
              " of the ", length,
              " tokens of a sequence, so that no position is a question; expected a task such as "
              "needle or recall, or a text and the answer in it.");
}

// What the answers would get if a query gave the same attention to every key that it sees; the mean
// over the questions. visible [B, H, T, S] as visible_keys() has it.
double share_by_equal_attention(const Tensor& visible, const std::vector<Question>& questions) {
  const Tensor seen = visible.any(1);
  double sum = 0;
  for (const Question& q : questions) {
    const Tensor keys = seen[q.sequence][q.query];
    const Tensor answer = keys.index_select(0, at::tensor(q.answer, at::kLong));
    sum += answer.sum().item<double>() / std::max<double>(1, keys.sum().item<double>());
  }
  return sum / static_cast<double>(questions.size());
}

}  // namespace

Findings noise(const Subject& subject) {
  check_asks(subject);
  int64_t unanswered = 0;
  const std::vector<Question> questions = questions_of(subject, unanswered);
  if (questions.empty() && unanswered == 0) {
    usage_error("no position of what is read asks for a token, expected more of each sequence.");
  }
  if (questions.empty()) {
    usage_error("none of the ", unanswered,
                " tokens that are asked for stands earlier in its sequence, so that no attention "
                "can be on the answer.");
  }
  const Recording recording = record(subject, {"scores", "weights", "weights.composed"});
  Findings out{.title = "Attention noise"};
  Table table{
      .title = "Shares of a query's attention, mean over questions",
      .columns = {"layer", "map", "head", "on the answer", "on the rest", "on the first key"}};
  double before = 0, after_same = 0, after = 0, chance = 0, best = 0;
  std::string best_place;
  int64_t layers = 0, plain_layers = 0;
  for (const LayerPlace& place : chosen_layers(subject)) {
    if (in_encoder(place.name)) continue;  // its queries are of the source, which asks nothing
    bool has_softmax = false;
    for (const bool composed : {false, true}) {
      const std::string map = composed ? "weights.composed" : "weights";
      const Tensor recorded = recording.find(place.name + "." + map);
      // Combinations of keys hold no answer.
      if (!recorded.defined() || !columns_are_positions(place, map)) continue;
      const Reading reading = reading_of(subject.input, place.name);
      const Tensor whole = without_padding(reading, place, map, recorded);
      const Tensor maps = chosen_heads(subject, whole, place);
      const Shares shares = shares_of(maps, questions);
      const std::vector<int64_t> numbers = map_numbers(subject, maps.size(1));
      const int64_t each = maps_of_head(*place.layer->mixer, whole.size(1));
      const char* name = composed ? "composed" : "softmax";
      const double mean = shares.answer.mean().item<double>();
      if (!composed) {
        has_softmax = true;
        before += mean;
        ++plain_layers;
      } else {
        after += mean;
        ++layers;
        if (has_softmax) after_same += mean;
        chance += share_by_equal_attention(visible_keys(recording, place, whole), questions);
      }
      for (int64_t h = 0; h < maps.size(1); ++h) {
        const double own = shares.answer[h].item<double>();
        const int64_t number = numbers[static_cast<size_t>(h)], head = number / each;
        const std::string which = each == 1 ? "" : str(" ", 1 + number % each);
        table.rows.push_back({place.name, name + which, head, own, shares.rest[h].item<double>(),
                              shares.first[h].item<double>()});
        if (composed && own > best) {
          best = own;
          best_place = str("head ", head, " of ", place.name);
        }
      }
      out.tensors.emplace_back(str(place.name, ".", name, ".answer"), shares.answer);
      out.tensors.emplace_back(str(place.name, ".", name, ".rest"), shares.rest);
    }
  }
  if (layers == 0) {
    usage_error("the analysis noise reads attention maps, but ", mixers_text(subject),
                ", which have none.");
  }
  out.tables.push_back(std::move(table));
  const auto percent = [](double share) { return formatted("%.2f%%", 100 * share); };
  std::string softmax;
  if (plain_layers > 0) {
    const auto of_layers = static_cast<double>(plain_layers);
    softmax = plain_layers == layers ? str("; the maps after softmax ", percent(before / of_layers))
                                     : str("; in the layers with softmax, their maps give ",
                                           percent(before / of_layers), " after it and ",
                                           percent(after_same / of_layers), " composed");
  }
  out.sentences.push_back(
      str(counted(static_cast<int64_t>(questions.size()), "question"),
          unanswered > 0 ? str(" (and ", unanswered, " whose answer does not stand before them)")
                         : std::string(),
          ": the composed maps give ", percent(after / static_cast<double>(layers)),
          " of their attention to the answer, mean over heads and layers", softmax,
          "; equal attention to every key that a query sees would give ",
          percent(chance / static_cast<double>(layers)), "."));
  if (!best_place.empty()) {
    out.sentences.push_back(str("The most, ", percent(best), ", comes from ", best_place, "."));
  }
  return out;
}

}  // namespace headloom::analysis
