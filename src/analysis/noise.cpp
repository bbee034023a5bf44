// Attention noise (Ye et al. 2024): how much of its attention a query that is asked something gives
// to the answer in its context, and how much to the rest.
#include <ATen/ATen.h>

#include <algorithm>
#include <optional>

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

// What is asked for in the subject's sequences. `unanswered` counts the tokens that do not stand
// before they are asked for. Throws UsageError where no question is left.
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
  if (questions.empty() && unanswered == 0) {
    usage_error("no position of what is read asks for a token, expected more of each sequence.");
  }
  if (questions.empty()) {
    usage_error("none of the ", unanswered,
                " tokens that are asked for stands earlier in its sequence, so that no attention "
                "can be on the answer.");
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

// What the maps of one layer, those after softmax or the composed ones, give to the answers.
struct MapShares {
  Tensor all;                    // the maps of all heads [B, H, T, S], without padding
  Shares shares;                 // of the heads that were asked for
  std::vector<int64_t> numbers;  // of the shares' maps
  int64_t each;                  // maps of a head

  int64_t head(int64_t map) const { return numbers[static_cast<size_t>(map)] / each; }
  // Which of its head's maps it is: " 2"; "" of a single one.
  std::string which(int64_t map) const {
    return each == 1 ? "" : str(" ", 1 + numbers[static_cast<size_t>(map)] % each);
  }
  double mean_on_answer() const { return shares.answer.mean().item<double>(); }
};

// Of the layer's maps `name` ("weights"); nothing where it has none, or where their columns are
// combinations of keys, which hold no answer.
std::optional<MapShares> map_shares(const Subject& subject, const Recording& recording,
                                    const LayerPlace& place, const std::string& name,
                                    const std::vector<Question>& questions) {
  const Tensor recorded = recording.find(place.name + "." + name);
  if (!recorded.defined() || !columns_are_positions(place, name)) return std::nullopt;
  const Tensor all = without_padding(subject.input, place, name, recorded);
  const Tensor maps = chosen_heads(subject, all, place);
  return MapShares{.all = all,
                   .shares = shares_of(maps, questions),
                   .numbers = map_numbers(subject, maps.size(1)),
                   .each = maps_of_head(*place.layer->mixer, all.size(1))};
}

// Adds a row for each map and the tensors of all. `stage` is "softmax" or "composed".
void add_map_shares(const std::string& place, const std::string& stage, const MapShares& of,
                    Table& table, Findings& out) {
  const Shares& shares = of.shares;
  for (int64_t map = 0; map < shares.answer.size(0); ++map) {
    table.rows.push_back({place, stage + of.which(map), of.head(map),
                          shares.answer[map].item<double>(), shares.rest[map].item<double>(),
                          shares.first[map].item<double>()});
  }
  out.tensors.emplace_back(str(place, ".", stage, ".answer"), shares.answer);
  out.tensors.emplace_back(str(place, ".", stage, ".rest"), shares.rest);
}

// What layers give to the answers: means over heads and questions, summed over the layers.
struct AnswerSums {
  int64_t layers = 0;                        // that have composed maps
  double composed = 0, equal = 0;            // by these maps, and by equal attention in their place
  int64_t softmax_layers = 0;                // that have maps after softmax
  double softmax = 0, softmax_composed = 0;  // by these maps, and by what is composed of them
  double most = 0;                           // by the composed map that gives most
  std::string most_place;                    // "head 3 of layer2"; "" for none
};

// Adds what a layer's composed maps give. `has_softmax`: it has maps after softmax too.
void add_composed(const MapShares& of, bool has_softmax, double equal, const std::string& place,
                  AnswerSums& sums) {
  const double mean = of.mean_on_answer();
  ++sums.layers;
  sums.composed += mean;
  sums.equal += equal;
  if (has_softmax) sums.softmax_composed += mean;
  for (int64_t map = 0; map < of.shares.answer.size(0); ++map) {
    const double own = of.shares.answer[map].item<double>();
    if (own > sums.most) {
      sums.most = own;
      sums.most_place = str("head ", of.head(map), " of ", place);
    }
  }
}

// The sums as sentences.
std::vector<std::string> noise_text(const AnswerSums& sums, int64_t questions, int64_t unanswered) {
  const auto percent = [](double share) { return formatted("%.2f%%", 100 * share); };
  const auto layers = static_cast<double>(sums.layers);
  std::string softmax;
  if (sums.softmax_layers > 0) {
    const auto of_layers = static_cast<double>(sums.softmax_layers);
    softmax = sums.softmax_layers == sums.layers
                  ? str("; the maps after softmax ", percent(sums.softmax / of_layers))
                  : str("; in the layers with softmax, their maps give ",
                        percent(sums.softmax / of_layers), " after it and ",
                        percent(sums.softmax_composed / of_layers), " composed");
  }
  std::vector<std::string> out = {
      str(counted(questions, "question"),
          unanswered > 0 ? str(" (and ", unanswered, " whose answer does not stand before them)")
                         : std::string(),
          ": the composed maps give ", percent(sums.composed / layers),
          " of their attention to the answer, mean over heads and layers", softmax,
          "; equal attention to every key that a query sees would give ",
          percent(sums.equal / layers), ".")};
  if (!sums.most_place.empty()) {
    out.push_back(str("The most, ", percent(sums.most), ", comes from ", sums.most_place, "."));
  }
  return out;
}

}  // namespace

Findings noise(const Subject& subject) {
  check_asks(subject);
  int64_t unanswered = 0;
  const std::vector<Question> questions = questions_of(subject, unanswered);
  const Recording recording = record(subject, {"scores", "weights", "weights.composed"});
  Findings out{.title = "Attention noise"};
  Table table{
      .title = "Shares of a query's attention, mean over questions",
      .columns = {"layer", "map", "head", "on the answer", "on the rest", "on the first key"}};
  AnswerSums sums;
  for (const LayerPlace& place : chosen_layers(subject)) {
    if (in_encoder(place.name)) continue;  // its queries are of the source, which asks nothing
    const auto softmax = map_shares(subject, recording, place, "weights", questions);
    if (softmax) {
      add_map_shares(place.name, "softmax", *softmax, table, out);
      ++sums.softmax_layers;
      sums.softmax += softmax->mean_on_answer();
    }
    const auto composed = map_shares(subject, recording, place, "weights.composed", questions);
    if (composed) {
      add_map_shares(place.name, "composed", *composed, table, out);
      const Tensor visible = visible_keys(recording, place, composed->all);
      const double equal = share_by_equal_attention(visible, questions);
      add_composed(*composed, softmax.has_value(), equal, place.name, sums);
    }
  }
  if (sums.layers == 0) refuse_without_maps("noise", subject);
  out.tables.push_back(std::move(table));
  out.sentences = noise_text(sums, std::ssize(questions), unanswered);
  return out;
}

}  // namespace headloom::analysis
