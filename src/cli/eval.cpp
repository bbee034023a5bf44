#include <ATen/ATen.h>

#include <cmath>
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <variant>

#include "cli/arguments.h"
#include "cli/command.h"
#include "core/error.h"
#include "core/files.h"
#include "core/text.h"
#include "storage/safetensors.h"
#include "train/checkpoint.h"
#include "train/device.h"
#include "train/evaluate.h"
#include "train/load.h"
#include "train/run_session.h"

namespace headloom::cli {
namespace {

struct EvalArguments {
  std::string model, checkpoint = "best", device = "cpu", logits;
  Precision precision;
  std::vector<std::string> overrides;
  int64_t sequences = 0, context = 0, piece = 0;
  CachePolicy cache;
  bool json = false;
};

std::vector<std::string> names_of_data(RunConfig& config) {
  std::vector<std::string> names;
  for (const data::DataPath& data : config.task->data_paths()) {
    names.push_back(std::filesystem::absolute(*data.path).lexically_normal().string());
  }
  return names;
}

// The model is what it was trained to be: a key of [model] or [train] would change nothing.
void check_overrides(const std::vector<std::string>& overrides) {
  for (const std::string& assignment : overrides) {
    const std::string key = assignment.substr(0, assignment.find('='));
    if (assignment.find('=') == std::string::npos) continue;  // which apply_override() refuses
    if (key == "task" || key.starts_with("task.")) continue;
    usage_error("--set ", key,
                ": eval can change the data that a run is evaluated on, and nothing else; expected "
                "a key of [task], as in --set 'task.paths=[\"book.txt\"]'.");
  }
}

// The share of its files that a run holds out; 0 where it is no share.
double held_out_share(RunConfig& config) {
  const Node root = write_fields(config);
  const Node& task = *root.find("task");
  const Node* share = task.find("held_out");
  const bool none = config.task->data_paths().empty() || task.find("held_out_path") != nullptr;
  return share == nullptr || none ? 0 : std::get<double>(share->value);
}

// Whether `changed` names the run's own data, in another place than `run` does. `run` then names
// them there, too. The run's checkpoint knows its data by their content.
bool finds_moved_data(const std::string& folder, RunConfig& run, RunConfig& changed) {
  const std::optional<StoredData> stored = CheckpointStore(folder).data();
  if (!stored || changed.task->type() != run.task->type() || changed.missing_data()) return false;
  Node root = write_fields(run);
  const Node there = write_fields(changed);
  for (const data::DataPath& data : changed.task->data_paths()) {
    root.find("task")->set(data.key, *there.find("task")->find(data.key));
  }
  try {
    RunConfig moved = read_run_config(root);
    use_kept_tokenizer(folder, moved);
    if (data_of(moved, *moved.build_task()) != stored) return false;
    run.task = moved.task;
  } catch (const Error&) {  // other data, which the run's options do not fit
    return false;
  }
  return true;
}

// Other data than the run's own are evaluated as a whole, unless --set says which part of them.
// Returns whether `changed` evaluates what training evaluated.
bool choose_part(const std::string& folder, RunConfig& run, RunConfig& changed,
                 const std::vector<std::string>& overrides) {
  const auto names = names_of_data(changed);
  if (names == names_of_data(run) || finds_moved_data(folder, run, changed)) {
    if (to_toml(write_fields(changed)) == to_toml(write_fields(run))) return true;
    changed.task->split_as(*run.task);
    if (const double own = held_out_share(run), now = held_out_share(changed); now > own) {
      std::fprintf(
          stderr,
          "headloom: task.held_out is %g, and the run held out %g of the same data: some of "
          "what is read was trained on.\n",
          now, own);
    }
    if (run.train.eval_split == "all") return false;
    std::fprintf(stderr,
                 "headloom: --set and --context cut the sequences anew, so all held-out "
                 "sequences are read; without them it is the %s half alone.\n",
                 run.train.eval_split.c_str());
    return false;
  }
  if (names.empty()) return false;
  Node given;
  for (const std::string& assignment : overrides) {
    if (assignment.starts_with("task=") || assignment.starts_with("task.held_out") ||
        assignment.starts_with("task.eval_")) {
      apply_override(given, assignment);
    }
  }
  const Node* task = given.find("task");
  for (const char* key : {"held_out", "held_out_path", "eval_tokens", "eval_sequences"}) {
    if (task != nullptr && task->is_table() && task->find(key) != nullptr) return false;
  }
  changed.task->hold_out_all();
  return false;
}

// How much of the task's data was read.
struct Reading {
  data::DataSize all;
  int64_t read = 0;
  double bytes = 0;  // 0: not known

  Reading(const data::Task& task, const Evaluation& e) : all(task.data_size()) {
    const bool tokens = std::string(all.unit) == "tokens";
    read = std::min(tokens ? e.sequences * task.length() : e.sequences, all.count);
    bytes = static_cast<double>(read) * task.bytes_per_token();
  }
  double share() const { return static_cast<double>(read) / static_cast<double>(all.count); }
};

// " in int4, keys and values in int8".
std::string how_it_was_read(const EvalArguments& a) {
  std::string text;
  if (a.precision.changes()) text = " in " + a.precision.text();
  if (!a.cache.dtype.empty()) {
    text += str(text.empty() ? " with" : ",", " keys and values in ", a.cache.dtype);
  }
  return text;
}

// Throws Error where a loss shows that the model is damaged, and names its weights if they are.
void check_finite(const EvalArguments& a, const LoadedRun& loaded, const Evaluation& e) {
  if (e.tokens == 0 || std::isfinite(e.loss)) return;
  CheckpointStore(a.model).check_finite(loaded.step, *loaded.model);
  fail(a.model, ": the held-out loss of step ", loaded.step,
       " is not finite: the model's weights are damaged, or its training diverged.");
}

// The configuration with sequences of `context` tokens.
Node with_context(const Node& root, int64_t context) {
  RunConfig given = read_run_config(root);
  Node out = write_fields(given);
  Node& task = *out.find("task");
  const auto refuse = [&](const auto&... why) { usage_error("--context ", context, ": ", why...); };
  if (task.find("length") == nullptr) {
    refuse("the task '", given.task->type(), "' has no key 'length'.");
  }
  for (const char* key : {"segments", "eval_segments"}) {
    const Node* segments = task.find(key);
    if (segments != nullptr && !segments->array().empty()) {
      refuse("the task '", given.task->type(), "' takes its lengths from 'task.", key, "'.");
    }
  }
  Node length;
  length.value = context;
  task.set("length", length);
  try {
    read_run_config(out);
  } catch (const UsageError& error) {
    refuse(error.what());
  }
  return out;
}

// Refuses a task whose sequences --set has made longer than the model's.
void check_length(const Node& root, const ModelConfig& model) {
  const Node* given = root.find("task") != nullptr ? root.find("task")->find("length") : nullptr;
  const int64_t* length = given != nullptr ? std::get_if<int64_t>(&given->value) : nullptr;
  if (length == nullptr || *length <= model.max_length.value_or(*length)) return;
  usage_error("'task.length' is ", *length, ", expected at most the run's 'model.max_length', ",
              *model.max_length, "; --context ", *length, " reads sequences of that length.");
}

// The run, with the data and the length that are asked for. `own`: whether it reads the part of its
// own data that training evaluated.
LoadedRun load_for_eval(const EvalArguments& a, bool& own) {
  LoadedRun loaded = load_run(a.model, a.checkpoint);
  own = true;
  if (!a.overrides.empty() || a.context > 0) {
    Node root = write_fields(loaded.config);
    for (const std::string& assignment : a.overrides) apply_override(root, assignment);
    fill_from_run(root, a.model);  // where the whole of [task] is another
    if (a.context > 0) {
      root = with_context(root, a.context);
    } else {
      check_length(root, loaded.config.model);
    }
    RunConfig changed = read_run_config(root);
    use_kept_tokenizer(a.model, changed);
    own = choose_part(a.model, loaded.config, changed, a.overrides);
    loaded.config.task = changed.task;
  }
  return loaded;
}

// How sequences are read with a decoding state, where they are.
std::optional<Pieces> pieces_of(const EvalArguments& a) {
  if (a.context == 0 && a.piece == 0 && !a.cache.evicts() && a.cache.dtype.empty()) return {};
  // A cache that forgets does so at the end of a piece: token by token, as decoding does.
  return Pieces{.length = a.piece > 0 ? a.piece : a.cache.evicts() ? 1 : 512, .cache = a.cache};
}

// Says so where the cache had nothing to forget. A model that has none is refused before.
void say_what_is_forgotten(const Pieces& pieces, const data::Task& task) {
  if (!pieces.cache.evicts() || pieces.length < task.length()) return;
  std::fprintf(stderr,
               "headloom: --cache %s forgets at the end of a piece, and with pieces of %s the "
               "sequences of %s are one piece each: nothing is forgotten.\n",
               pieces.cache.text().c_str(), counted(pieces.length, "token").c_str(),
               counted(task.length(), "token").c_str());
}

// Throws UsageError where the model cannot read in pieces, and names the option that asks for it.
void check_pieces(const EvalArguments& a, Model& model) {
  try {
    check_reads_in_pieces(model);
  } catch (const UsageError& error) {
    const std::string option = a.context > 0            ? str("--context ", a.context)
                               : a.piece > 0            ? str("--piece ", a.piece)
                               : !a.cache.dtype.empty() ? "--cache-dtype " + a.cache.dtype
                                                        : "--cache " + a.cache.text();
    usage_error(option, ": ", error.what());
  }
}

// Inputs and logits of the first sequences that are evaluated, at most so many, to the file of
// --logits.
void write_logits(const EvalArguments& a, Model& model, const data::Task& task, Split split,
                  int64_t most, const std::optional<Pieces>& pieces) {
  at::NoGradGuard no_grad;
  const int64_t count = sequences_read(task, split, most);
  const data::Batch first = to_device(split_batch(task, split, 0, count), model.device());
  NamedTensors tensors;
  for (const auto& [name, tensor] :
       {std::pair("tokens", first.inputs), std::pair("source", first.source),
        std::pair("images", first.images), std::pair("segments", first.segments),
        std::pair("lengths", first.lengths), std::pair("documents", first.documents),
        std::pair("source_lengths", first.source_lengths), std::pair("context", first.context),
        std::pair("targets", first.targets),
        std::pair("logits", batch_logits(model, first, pieces))}) {
    if (tensor.defined()) tensors.emplace_back(name, tensor);
  }
  write_safetensors(a.logits, tensors);
}

// What eval prints of a run.
struct EvalResult {
  int64_t step;
  std::string dtype;
  std::string split;  // of the held-out data: "all", "validation" or "test"
  std::shared_ptr<data::Task> task;
  std::optional<Pieces> pieces;
  Evaluation e;
  // The loss without --dtype, --quantize and --cache-dtype, where one of them is given; with
  // --cache.
  std::optional<double> trained_loss;

  double bits_per_byte() const {  // NaN: not of text
    const double bytes = task->bytes_per_token();
    return bytes > 0 ? e.loss / std::log(2.0) / bytes : std::nan("");
  }
  bool has_perplexity() const {
    const data::Goal goal = task->goal();
    return goal == data::Goal::next_token || goal == data::Goal::masked_token ||
           goal == data::Goal::sequence;
  }
};

EvalResult evaluated(const EvalArguments& a) {
  const at::Device device = find_device(a.device, "--device");
  if (!a.logits.empty()) check_output_file(a.logits);
  check_overrides(a.overrides);
  bool own = false;
  LoadedRun loaded = load_for_eval(a, own);
  loaded.model->to(device);
  const int64_t trained = loaded.config.model.max_length.value_or(0);
  // A model that cannot read sequences of that length refuses them itself.
  if (a.context > trained) loaded.config.model.max_length = a.context;
  loaded.config.find_data();
  const auto task = loaded.config.build_task();
  const std::string split = own ? loaded.config.train.eval_split : "all";
  if (own) say_what_changed(a.model, loaded.config, *task);
  const std::optional<Pieces> pieces = pieces_of(a);
  if (pieces) check_pieces(a, *loaded.model);
  // Longer sequences, fewer side by side.
  int64_t batch = loaded.config.train.batch;
  if (a.context > 0) batch = std::max<int64_t>(batch * trained / a.context, 1);
  const int64_t sequences = a.sequences > 0 ? a.sequences : task->eval_sequences();
  const auto read_by = [&](const std::optional<Pieces>& how) {
    const Autocast autocast(loaded.config.train.dtype, device.type());
    const Evaluation e = evaluate(*loaded.model, *task, sequences, batch, how, split_named(split));
    check_finite(a, loaded, e);
    return e;
  };
  std::optional<double> trained_loss;
  if (a.precision.changes() || !a.cache.dtype.empty()) {
    std::optional<Pieces> wide = pieces;
    if (wide) wide->cache.dtype.clear();
    trained_loss = read_by(wide).loss;
    hold_weights(loaded, a.precision);
  }
  const Evaluation e = read_by(pieces);
  if (pieces) say_what_is_forgotten(*pieces, *task);
  if (!a.logits.empty()) {
    const Autocast autocast(loaded.config.train.dtype, device.type());
    const int64_t most = std::min(batch, sequences);
    write_logits(a, *loaded.model, *task, split_named(split), most, pieces);
  }
  return {.step = loaded.step,
          .dtype = loaded.config.train.dtype,
          .split = split,
          .task = task,
          .pieces = pieces,
          .e = e,
          .trained_loss = trained_loss};
}

nlohmann::ordered_json eval_json(const EvalArguments& a, const EvalResult& result) {
  const Evaluation& e = result.e;
  const Reading reading(*result.task, e);
  nlohmann::ordered_json json = {
      {"run", a.model},           {"step", result.step},       {"split", result.split},
      {"sequences", e.sequences}, {"target_tokens", e.tokens}, {"loss", e.loss}};
  if (reading.all.count > 0) {
    json["read"] = {{reading.all.unit, reading.read}, {"share", reading.share()}};
    if (reading.bytes > 0) json["read"]["bytes"] = std::llround(reading.bytes);
  }
  if (result.has_perplexity()) json["perplexity"] = std::exp(e.loss);
  const double bits = result.bits_per_byte();
  if (!std::isnan(bits)) json["bits_per_byte"] = bits;
  json["accuracy"] = e.accuracy;
  if (result.trained_loss) {
    json["dtype"] = result.dtype;
    json["quantize"] = a.precision.quantize;
    json["trained_loss"] = *result.trained_loss;
    json["costs"] = e.loss - *result.trained_loss;
  }
  if (!a.cache.dtype.empty()) json["cache_dtype"] = a.cache.dtype;
  if (result.pieces) {
    json["context"] = result.task->length();
    json["piece"] = result.pieces->length;
    json["cache"] = result.pieces->cache.text();
    json["state_bytes"] = e.state_bytes;
  }
  return json;
}

// What the accuracy is a share of.
const char* judged(const data::Task& task) {
  const data::Goal goal = task.goal();
  if (task.exact_match()) return "answers, exact match";
  if (goal == data::Goal::label || goal == data::Goal::image_label) return "labels";
  if (goal == data::Goal::tags) return "tags";
  const bool alike = task.accuracy() == data::Accuracy::share;
  return alike ? "a sequence's targets, mean" : "target tokens";
}

void print_eval(const EvalArguments& a, const EvalResult& result) {
  const Evaluation& e = result.e;
  const Reading reading(*result.task, e);
  std::printf("%s, step %lld, %s%s (%s)\n", a.model.c_str(), static_cast<long long>(result.step),
              counted(e.sequences, "held-out example").c_str(),
              result.split == "all" ? "" : (" of the " + result.split + " half").c_str(),
              counted(e.tokens, "target").c_str());
  if (reading.all.count > 0) {
    const bool tokens = std::string(reading.all.unit) == "tokens";
    std::printf("read        %s%s, %.3g%% of %s\n",
                counted(reading.read, tokens ? "token" : "example").c_str(),
                reading.bytes > 0 ? str(" (", human_bytes(reading.bytes), ")").c_str() : "",
                100 * reading.share(), tokens ? "the text" : "all there are");
  }
  std::printf("loss        %s nats a target", formatted("%.4f", e.loss).c_str());
  if (result.trained_loss) {
    std::printf("%s; %s as trained%s, so %s", how_it_was_read(a).c_str(),
                formatted("%.4f", *result.trained_loss).c_str(),
                a.cache.evicts() ? ", but with this cache" : "",
                formatted("%+.4f", e.loss - *result.trained_loss).c_str());
  }
  std::printf("\n");
  if (result.has_perplexity()) std::printf("perplexity  %.3f\n", std::exp(e.loss));
  const double bits = result.bits_per_byte();
  if (!std::isnan(bits)) std::printf("bits/byte   %s\n", formatted("%.4f", bits).c_str());
  if (result.pieces) {
    std::printf("context     %lld, read in pieces of %lld, cache %s, state of at most %s\n",
                static_cast<long long>(result.task->length()),
                static_cast<long long>(result.pieces->length), result.pieces->cache.text().c_str(),
                human_bytes(static_cast<double>(e.state_bytes)).c_str());
  }
  std::printf("accuracy    %.2f%% of %s\n", 100 * e.accuracy, judged(*result.task));
}

int run_eval(const EvalArguments& a) {
  const EvalResult result = evaluated(a);
  if (a.json) {
    std::printf("%s\n", printed(eval_json(a, result)).c_str());
  } else {
    print_eval(a, result);
  }
  return 0;
}

}  // namespace

Command eval_command() {
  return {
      "eval", "loss, perplexity, bits per byte and accuracy on held-out data",
      "headloom eval runs/text --json", [](CLI::App& app) -> std::function<int()> {
        auto a = std::make_shared<EvalArguments>();
        app.add_option("model", a->model, "folder of a run")->required();
        add_checkpoint_option(app, a->checkpoint);
        add_device_option(app, a->device);
        app.add_option("--sequences", a->sequences, "held-out sequences to read; all by default")
            ->check(whole_number(1));
        app.add_option(
               "--logits", a->logits,
               "also write inputs and logits of the first batch to this file, *.safetensors")
            ->check(ends_in(".safetensors"));
        add_precision_options(app, a->precision, "; also prints what it costs");
        app.add_option("--context", a->context,
                       "read sequences of this length piece by piece, with a decoding state")
            ->check(whole_number(1));
        app.add_option("--piece", a->piece,
                       "read sequences in pieces of so many tokens with a decoding state; 512 with "
                       "--context or --cache-dtype, 1 with a --cache that forgets, which it does "
                       "after each piece")
            ->check(whole_number(1));
        add_cache_option(app, a->cache);
        repeatable(
            app.add_option("--set", a->overrides,
                           "override a key, as in --set 'task.paths=[\"book.txt\"]'; other data "
                           "than the run's are read whole unless task.held_out says otherwise; "
                           "repeatable"))
            ->type_name("KEY=VALUE");
        app.add_flag("--json", a->json, "print the result as JSON");
        return [a] { return run_eval(*a); };
      }};
}

}  // namespace headloom::cli
