#include <ATen/ATen.h>

#include <algorithm>
#include <iterator>
#include <numeric>

#include "core/error.h"
#include "core/fields.h"
#include "core/hash.h"
#include "core/text.h"
#include "data/floors.h"
#include "data/task.h"
#include "data/tasks/tasks.h"

namespace headloom::data {

const std::vector<TaskEntry>& tasks() {
  static const std::vector<TaskEntry> table = {
      {"text", "Next-token prediction on files, folders and globs: bytes or a vocabulary", "",
       text_spec},
      {"jsonl", "Continue inputs by their labels, or texts: lines of a JSONL file", "", jsonl_spec},
      {"token_shard", "Next-token prediction on a file of tokens in llm.c's format", "",
       token_shard_spec},
      {"find_block", "Find the block of letters that contains all the queried letters",
       "Golovneva et al. 2025, Multi-Token Attention, section 4.1", find_block_spec},
      {"recall", "Key-value pairs, then the values of several earlier keys (MQAR)",
       "Arora et al. 2023, Zoology", recall_spec},
      {"mqar", "recall as its authors set it up: token 0 between the queries",
       "Arora et al. 2023, Zoology, figure 2", mqar_spec},
      {"forgetting_mqar", "the task mqar where some keys get a second value, which then counts",
       "Zoology (HazyResearch/zoology)", forgetting_mqar_spec},
      {"compositional_mqar", "the task mqar with keys of two tokens, neither of which suffices",
       "Zoology (HazyResearch/zoology)", compositional_mqar_spec},
      {"in_context_recall", "Name the value that a key had before, for random pairs",
       "Poli et al. 2024, MAD", in_context_recall_spec},
      {"noisy_in_context_recall", "the task in_context_recall with tokens of noise among the pairs",
       "Poli et al. 2024, MAD", noisy_in_context_recall_spec},
      {"fuzzy_in_context_recall",
       "the task in_context_recall with keys and values of 1 to 3 tokens", "Poli et al. 2024, MAD",
       fuzzy_in_context_recall_spec},
      {"selective_copying", "Repeat tokens that stand among blanks", "Poli et al. 2024, MAD",
       selective_copying_spec},
      {"memorization", "Name the value of a key, by a map that is the same in all sequences",
       "Poli et al. 2024, MAD", memorization_spec},
      {"compression", "Give a whole sequence back from one vector, for auto-encoders",
       "Poli et al. 2024, MAD", compression_spec},
      {"head_composition",
       "Find a fact by a pattern and transform its word: the pairs of patterns and "
       "transformations",
       "Xiao et al. 2024, DCMHA, section 4.3", head_composition_spec},
      {"copy", "Repeat a random sequence after a separator", "", copy_spec},
      {"induction", "Say which token followed the marker the first time",
       "Olsson et al. 2022; as set up by Fu et al. 2023 (H3) and Gu and Dao 2023 (Mamba)",
       induction_spec},
      {"needle", "Repeat a number that was stated once at some depth of a long filler", "",
       needle_spec},
      {"masked_text", "Name the hidden tokens of files, folders and globs: bytes or a vocabulary",
       "Devlin et al. 2019, BERT", masked_text_spec},
      {"classify_text",
       "Which class a text is of: of a folder's, or which generated grammar wrote it", "",
       classify_text_spec},
      {"classify_pairs",
       "Which class two texts are of together: of a file's, or whether their letters are the same",
       "Devlin et al. 2019, BERT, section 4.1", classify_pairs_spec},
      {"tag_text",
       "The tag of each word: of a file (CoNLL), or how generated letters stand to their "
       "neighbours",
       "Tjong Kim Sang and De Meulder 2003, CoNLL-2003", tag_text_spec},
      {"find_span",
       "Where in a context the answer to a question stands: of a file (SQuAD), or generated",
       "Rajpurkar et al. 2016, SQuAD", find_span_spec},
      {"sequence", "Copy, reverse or sort a source sequence, for encoder-decoders", "",
       sequence_spec},
      {"images", "The class of a picture: generated shapes, CIFAR files or folders of images", "",
       images_spec},
  };
  return table;
}

void check_no_idle_options(const TaskSpec& spec) {
  const auto listed = [](TaskSpec& of) {
    Lister lister;
    of.fields(lister);
    return lister.options();
  };
  // A listing changes nothing.
  const std::vector<OptionInfo> given = listed(const_cast<TaskSpec&>(spec)),
                                defaults = listed(*make_task_spec(spec.type()));
  const bool reads = std::any_of(given.begin(), given.end(), [](const OptionInfo& option) {
    return option.key == "path" && !option.default_value.empty();
  });
  for (size_t i = 0; i < given.size(); ++i) {
    const OptionInfo& option = given[i];
    if (!option.doc.starts_with(reads ? kGenerated : kWithPath) ||
        option.default_value == defaults[i].default_value) {
      continue;
    }
    usage_error(spec.type(), " has '", option.key, "' ",
                reads ? "and 'path', but what is read from files has no such option; leave it out."
                      : "but no 'path', expected the files to read.");
  }
}

void check_held_out(int64_t first, int64_t count, int64_t present) {
  require(first >= 0 && count >= 0 && first + count <= present, "held-out sequences [", first, ", ",
          first + count, ") were asked for, but there are ", present, ".");
}

double Task::train_length() const {
  int64_t sequences = 0, positions = 0;
  for (const TrainLength& part : train_lengths()) {
    sequences += part.sequences;
    positions += part.sequences * part.length;
  }
  return static_cast<double>(positions) / static_cast<double>(sequences);
}

int64_t Task::train_positions(int64_t first, int64_t count) const {
  const std::vector<TrainLength> lengths = train_lengths();
  // Of the `number` sequences from 0 on.
  const auto before = [&](int64_t number) {
    int64_t sequences = 0, positions = 0;
    for (const TrainLength& part : lengths) {
      sequences += part.sequences;
      positions += part.sequences * part.length;
    }
    positions *= number / sequences;
    int64_t left = number % sequences;
    for (const TrainLength& part : lengths) {
      const int64_t taken = std::min(left, part.sequences);
      positions += taken * part.length;
      left -= taken;
    }
    return positions;
  };
  return before(first + count) - before(first);
}

std::vector<Floor> Task::floors() const {
  std::vector<int64_t> all(static_cast<size_t>(eval_sequences()));
  std::iota(all.begin(), all.end(), int64_t{0});
  return floors_of(all);
}

std::vector<Floor> Task::floors_of(const std::vector<int64_t>& judged) const {
  if (goal() == Goal::span) {
    const auto positions = static_cast<double>(length());
    return {{"any first and last position", 2.0 / (positions * (positions + 1.0))}};
  }
  if (classes() > 0) return {{"any class", 1.0 / static_cast<double>(classes())}};
  require(accuracy() != Accuracy::sequence, "a task with answers of several tokens has no floor.");
  std::vector<Floor> floors = {{"any token", 1.0 / static_cast<double>(vocabulary())}};
  std::vector<int64_t> asked;
  for (const int64_t number : judged) {
    const at::Tensor targets = eval_batch(number, 1).targets.contiguous();
    const int64_t* const first = targets.const_data_ptr<int64_t>();
    std::copy_if(first, first + targets.numel(), std::back_inserter(asked),
                 [](int64_t token) { return token != kIgnore; });
  }
  add_floor(floors, "the most frequent token", usual_share({}, asked));
  return floors;
}

TaskSizes sizes_of(const Task& task) {
  return {.goal = task.goal(),
          .vocabulary = task.vocabulary(),
          .length = task.length(),
          .source_length = task.source_length(),
          .classes = task.classes(),
          .segments = task.segments(),
          .image = task.image_shape()};
}

std::string fingerprint(const Task& task, bool pixels) {
  // The first sequences are a sample of all. They are no more than hold kMostNumbers tokens and
  // pixels, so that this needs less memory than training, which is checked before.
  constexpr int64_t kMostNumbers = int64_t{1} << 18, kMostSequences = 256;
  const auto [channels, height, width] = task.image_shape();
  const int64_t size = task.length() + task.source_length() + channels * height * width;
  const int64_t most =
      std::clamp<int64_t>(kMostNumbers / std::max<int64_t>(size, 1), 1, kMostSequences);
  Fnv1a hash;
  hash.add(static_cast<uint64_t>(task.data_size().count));
  hash.add(static_cast<uint64_t>(task.eval_sequences()));
  for (const Batch& batch :
       {task.train_batch(0, most), task.eval_batch(0, std::min(most, task.eval_sequences()))}) {
    for (const at::Tensor& t : {batch.inputs, batch.targets, batch.source, batch.images}) {
      if (!t.defined() || (t.is_same(batch.images) && !pixels)) continue;
      const at::Tensor whole = t.contiguous();
      hash.add({static_cast<const char*>(whole.const_data_ptr()), whole.nbytes()});
    }
  }
  return str(std::hex, hash.value());
}

void refuse_without(const std::string& task, const std::string& key, const std::string& what,
                    const std::string& example) {
  usage_error("the task ", task, " needs '", key, "', ", what, ", as in --set 'task.", key, "=",
              example, "'.");
}

std::optional<TaskSizes> TaskSpec::known_sizes() {
  if (!data_paths().empty()) return std::nullopt;
  return sizes_of(*build(0));
}

std::vector<std::string> task_names() {
  std::vector<std::string> names;
  for (const TaskEntry& entry : tasks()) names.push_back(entry.name);
  return names;
}

std::shared_ptr<TaskSpec> make_task_spec(const std::string& type) {
  for (const TaskEntry& entry : tasks()) {
    if (entry.name == type) return entry.make();
  }
  usage_error("there is no task '", type, "'", did_you_mean(type, task_names()));
}

}  // namespace headloom::data
