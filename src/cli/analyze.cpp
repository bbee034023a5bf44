#include <ATen/ATen.h>

#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "analysis/analysis.h"
#include "bench/overhead.h"
#include "cli/arguments.h"
#include "cli/command.h"
#include "core/files.h"
#include "core/shell.h"
#include "core/text.h"
#include "storage/safetensors.h"
#include "train/checkpoint.h"
#include "train/codec.h"
#include "train/device.h"
#include "train/evaluate.h"
#include "train/load.h"
#include "train/run_folder.h"
#include "train/run_session.h"

namespace headloom::cli {
namespace {

using analysis::Entry;
using analysis::Findings;
using analysis::Subject;

constexpr const char* kOverhead = "overhead";
constexpr int64_t kShownTokens = 64, kReadTokens = 256;

struct AnalyzeArguments {
  std::string run, what, checkpoint = "best", device = "cpu", out;
  std::optional<std::string> text, answer;
  std::vector<int64_t> layers, heads;
  int64_t sequences = 0, length = 0;
  std::optional<int64_t> top;
  std::optional<double> seconds;
  std::string of_run;  // an option that is given and has a use only beside a run; "" for none
  bool json = false, tensors = false;
};

std::vector<std::string> analysis_names() {
  std::vector<std::string> names;
  for (const Entry& entry : analysis::analyses()) names.push_back(entry.name);
  names.emplace_back(kOverhead);
  return names;
}

// A run of its own, or the name of an analysis that needs none.
void sort_out(AnalyzeArguments& a) {
  const std::vector<std::string> names = analysis_names();
  const bool is_name = std::find(names.begin(), names.end(), a.run) != names.end();
  if (a.what.empty() && is_name && !std::filesystem::exists(a.run)) std::swap(a.run, a.what);
  if (!a.what.empty() && a.what != kOverhead) analysis::find_analysis(a.what, {kOverhead});
  const std::string near = a.what.empty() ? nearest(a.run, names) : "";
  if (!near.empty() && !std::filesystem::exists(a.run)) {
    usage_error("there is no folder and no analysis '", a.run, "'; did you mean '", near, "'?");
  }
  if (!a.run.empty()) return;
  if (a.what != "theorems") {
    usage_error("analyze: RUN, the folder of the run to look into, is missing; expected ",
                program_name(), " analyze RUN ", a.what.empty() ? "[WHAT]" : a.what, ".");
  }
  if (!a.of_run.empty()) {
    usage_error(a.of_run, " is given, but 'theorems' is computed without a run: leave it out.");
  }
}

// Whether what is asked for reads a text or held-out data of the run. Diversity reads one where it
// is given.
bool can_read(const std::string& what) {
  if (what == kOverhead) return false;
  return what.empty() || what == "diversity" || analysis::find_analysis(what).input;
}

// Where the files go; "" for nowhere.
std::string out_folder(const AnalyzeArguments& a) {
  if (!a.out.empty() || a.run.empty()) return a.out;
  return a.run + "/analysis";
}

// Refuses an option that what is asked for has no use for.
void check_use(const AnalyzeArguments& a) {
  if (a.text && !can_read(a.what)) {
    usage_error("--text is given, but '", a.what, "' reads no text: leave it out.");
  }
  if ((a.length > 0 || a.sequences > 0) && a.what != kOverhead && !can_read(a.what)) {
    usage_error(a.length > 0 ? "--length" : "--sequences", " is given, but '", a.what,
                "' reads nothing: leave it out.");
  }
  if (a.answer && !a.what.empty() && a.what != "noise") {
    usage_error("--answer is of 'noise', but '", a.what, "' asks for none: leave it out.");
  }
  if (a.answer && !a.text) usage_error("--answer is a part of --text, but --text is missing.");
  const bool lists =
      a.what.empty() || (a.what != kOverhead && analysis::find_analysis(a.what).lists);
  if (a.top && !lists) {
    usage_error("--top is given, but '", a.what, "' has no list of the highest: leave it out.");
  }
  if (a.tensors && out_folder(a).empty()) {
    usage_error("--tensors is given, but without --out nothing is written: give a folder there.");
  }
  using analysis::Choice;
  const Choice choice = a.what.empty()        ? Choice::kHeads
                        : a.what == kOverhead ? Choice::kNothing
                                              : analysis::find_analysis(a.what).choice;
  if (!a.layers.empty() && choice == Choice::kNothing) {
    usage_error("--layers is given, but '", a.what, "' is of the whole model: leave it out.");
  }
  if (!a.heads.empty() && choice != Choice::kHeads) {
    usage_error("--heads is given, but '", a.what, "' is of whole ",
                choice == Choice::kLayers ? "layers" : "models", ": leave it out.");
  }
  if (a.what != kOverhead) {
    if (a.seconds) {
      usage_error("--seconds is of '", kOverhead, "', which is not asked for: leave it out.");
    }
    return;
  }
  if (a.tensors) {
    usage_error("--tensors is given, but '", kOverhead, "' has no tensors: leave it out.");
  }
}

bool reads_one_text(const std::string& kind) {
  return kind == "decoder" || kind == "encoder" || kind == "auto_encoder";
}

// Refuses what the kind of model leaves no use for.
void check_kind(const AnalyzeArguments& a, const std::string& kind) {
  if (a.text && !reads_one_text(kind)) {
    usage_error("--text is for models that read one text, but this one is a \"", kind,
                "\": leave it out, and held-out data are read.");
  }
  if (a.length > 0 && kind == "vit") {
    usage_error("--length is of tokens, but a model of kind \"vit\" reads images: leave it out.");
  }
  if (a.text && (a.length > 0 || a.sequences > 0)) {
    usage_error(a.length > 0 ? "--length" : "--sequences",
                " is of held-out data, but --text is read whole: leave one of them out.");
  }
}

void read_text(const AnalyzeArguments& a, LoadedRun& run, const Codec& codec, Subject& subject) {
  const ModelConfig& config = run.config.model;
  const std::string text = *a.text == "-" ? read_standard_input() : *a.text;
  const std::vector<int64_t> tokens = codec.encode(text);
  const auto count = static_cast<int64_t>(tokens.size());
  if (count == 0) usage_error("--text is empty, expected at least one token.");
  if (count > config.length()) {
    usage_error("--text has ", count, " tokens, but the model reads at most ", config.length(),
                " (model.max_length).");
  }
  subject.input.tokens = at::tensor(tokens, at::kLong).unsqueeze(0);
  if (!a.answer) return;
  const std::string& answer = *a.answer;
  if (answer.empty()) usage_error("--answer is empty, expected a part of --text.");
  // The last place of the text where the answer stands.
  const std::vector<std::string> pieces = codec.pieces(tokens);
  std::string whole;
  std::vector<size_t> ends;
  for (const std::string& piece : pieces) ends.push_back((whole += piece).size());
  const size_t found = whole.rfind(answer);
  if (found == std::string::npos) {
    usage_error("--answer is '", answer, "', which does not stand in --text.");
  }
  subject.answer = at::zeros({count}, at::kBool);
  for (int64_t i = 0; i < count; ++i) {
    const size_t begin = i == 0 ? 0 : ends[static_cast<size_t>(i - 1)];
    const size_t end = ends[static_cast<size_t>(i)];
    if (end > found && begin < found + answer.size()) subject.answer[i] = true;
  }
}

std::shared_ptr<data::Task> own_task(const AnalyzeArguments& a, RunConfig& config) {
  try {
    return config.build_task();
  } catch (const UsageError&) {
    // The task of an imported model has no data. What it says itself advises an option of others.
    if (!config.task->data_paths().empty() || !reads_one_text(config.model.kind)) throw;
    usage_error(a.run, ": has no data of its own, as an imported model has none; read a text of ",
                "yours with --text.");
  }
}

// Held-out sequences of the run's own task, whole.
void read_task(const AnalyzeArguments& a, LoadedRun& run, Subject& subject) {
  const std::string missing = missing_data_text(a.run, run.config);
  if (!missing.empty()) {
    const bool text = reads_one_text(run.config.model.kind);
    fail(missing, text ? ", or read a text of yours with --text." : ".");
  }
  const auto task = own_task(a, run.config);
  say_what_changed(a.run, run.config, *task);
  const int64_t held_out = task->eval_sequences();
  if (a.sequences > held_out) {
    usage_error("--sequences is ", a.sequences, ", but the task evaluates ", held_out,
                " (task.eval_sequences, or all that are held out).");
  }
  const int64_t wanted = a.sequences > 0 ? a.sequences : a.what == "maps" ? 1 : 8;
  const data::Batch batch = task->eval_batch(0, std::min(wanted, held_out));
  subject.input = model_input(batch);
  // Classes are no tokens, and a masked token is not asked for by what stands before it.
  if (task->goal() == data::Goal::next_token) subject.targets = batch.targets;
  const Tensor &tokens = subject.input.tokens, &source = subject.input.source;
  if (!tokens.defined()) return;
  const int64_t longest = std::max(tokens.size(1), source.defined() ? source.size(1) : 0);
  if (a.length > longest) {
    usage_error("--length is ", a.length, ", but the task's sequences have ", longest, " tokens.");
  }
}

void read_input(const AnalyzeArguments& a, LoadedRun& run, Subject& subject) {
  const ModelConfig& config = run.config.model;
  check_kind(a, config.kind);
  if (config.kind != "vit") {
    const Codec codec(run.config);
    const int64_t vocabulary = config.vocabulary.value_or(0);
    for (int64_t token = 0; token < vocabulary; ++token) {
      subject.vocabulary.push_back(analysis::shown_token(codec.name(token)));
    }
    if (a.text) read_text(a, run, codec, subject);
  }
  if (!a.text) read_task(a, run, subject);
}

// The part of the task's sequences that the analysis `name` reads.
void take_part(const AnalyzeArguments& a, const std::string& name, Subject& subject) {
  ModelInput& input = subject.input;
  const bool maps = name == "maps";
  // A page of maps has one sequence.
  if (maps && a.what.empty()) {
    for (Tensor* t : input.tensors()) {
      if (t->defined()) *t = t->narrow(0, 0, 1);
    }
  }
  // A question needs the whole of its context.
  if (!input.tokens.defined() || (name == "noise" && a.length == 0)) return;
  int64_t length = a.length > 0 ? a.length : maps ? kShownTokens : kReadTokens;
  // A page has no columns of padding alone. A source may be longer than its target.
  if (maps && input.lengths.defined()) {
    int64_t longest = std::max<int64_t>(1, input.lengths.max().item<int64_t>());
    if (input.source.defined()) longest = std::max(longest, input.source.size(1));
    length = std::min(length, longest);
  }
  if (subject.targets.defined() && subject.targets.sizes() == input.tokens.sizes()) {
    subject.targets = subject.targets.narrow(1, 0, std::min(length, input.tokens.size(1)));
  }
  input = analysis::shortened(input, length);
}

Findings overhead(const AnalyzeArguments& a, const LoadedRun& run) {
  const auto rows = bench::measure_overhead(run.config.model, {.length = a.length,
                                                               .batch = a.sequences,
                                                               .seconds = a.seconds.value_or(4),
                                                               .dtype = run.config.train.dtype});
  Findings out{.title = "Overhead against plain attention"};
  analysis::Table table{
      .title = str("Untrained models of the same sizes on this machine, timed in turn in ",
                   run.config.train.dtype),
      .columns = {"work", "against", "length", "tokens/s", "plain tokens/s", "speed over plain",
                  "lowest", "highest"}};
  for (const bench::Overhead& row : rows) {
    // Speed is the inverse of time; the extremes change places.
    table.rows.push_back({row.work, row.baseline, row.length, row.tokens / row.timed.a.median,
                          row.tokens / row.timed.b.median, 1 / row.timed.ratio.median,
                          1 / row.timed.ratio.high, 1 / row.timed.ratio.low});
  }
  out.tables.push_back(std::move(table));
  out.sentences.push_back(
      "Speeds are medians of pairs, with the lowest and highest pair; 1 is as fast as plain "
      "attention (Xiao et al. 2024, table 6).");
  return out;
}

void write_files(const AnalyzeArguments& a, const std::string& name, const Subject& subject,
                 const Findings& findings) {
  const std::string folder = out_folder(a);
  if (folder.empty()) return;
  const std::string base = folder + "/" + name;
  or_tell_of_out(!a.out.empty(), "folder", [&] {
    make_folders(folder);
    const bool maps = name == "maps";
    write_file(base + ".html",
               maps ? analysis::maps_page(subject, findings) : analysis::to_html(findings));
    write_file(base + ".json", analysis::to_json(findings) + "\n");
    if (a.tensors && findings.tensors.empty()) {
      std::fprintf(stderr, "headloom: '%s' has no tensors of this model.\n", name.c_str());
    }
    if (a.tensors && !findings.tensors.empty()) {
      NamedTensors tensors;
      for (const auto& [key, value] : findings.tensors) {
        tensors.emplace_back(key, value.contiguous());
      }
      write_safetensors(base + ".safetensors", tensors);
    }
  });
  std::fprintf(stderr, "%s.html\n", base.c_str());
}

// Every analysis that the model has something for; timings are asked for by name.
void print_all(bool json, const std::function<Findings(const std::string&)>& findings_of) {
  nlohmann::ordered_json all;
  for (const Entry& entry : analysis::analyses()) {
    if (!entry.model) continue;
    try {
      const Findings found = findings_of(entry.name);
      all[entry.name] = nlohmann::ordered_json::parse(analysis::to_json(found));
      if (json) continue;
      std::printf("%-10s %s\n", entry.name.c_str(), entry.doc.c_str());
      for (const std::string& sentence : found.sentences) std::printf("  %s\n", sentence.c_str());
    } catch (const analysis::NoSuchPart&) {
      throw;  // what the user asks for is wrong, not what the model has
    } catch (const UsageError& error) {
      all[entry.name] = {{"refused", error.what()}};
      if (!json) std::printf("%-10s not here: %s\n", entry.name.c_str(), error.what());
    }
  }
  if (json) std::printf("%s\n", printed(all).c_str());
}

int run_analyze(AnalyzeArguments a) {
  sort_out(a);
  check_use(a);
  const at::Device device = find_device(a.device, "--device");
  if (a.what == kOverhead && !device.is_cpu()) {
    usage_error("overhead times the CPU, but --device is \"", a.device, "\", expected \"cpu\".");
  }
  Subject subject{.layers = a.layers, .heads = a.heads};
  if (a.top) subject.top = *a.top;
  std::optional<LoadedRun> run;
  if (!a.run.empty()) {
    run.emplace(load_run(a.run, a.checkpoint));
    if (a.what != kOverhead) CheckpointStore(a.run).check_finite(run->step, *run->model);
    run->model->to(device);
    subject.model = run->model.get();
  }
  const bool reads = run && can_read(a.what);
  const bool asks = a.text || a.length > 0 || a.sequences > 0 || a.what != "diversity";
  try {
    if (reads) read_input(a, *run, subject);
  } catch (const Error& error) {  // diversity goes without input where there are no data
    if (asks) throw;
    std::fprintf(stderr, "headloom: %s Similarities of maps are left out.\n", error.what());
  }
  std::optional<Autocast> autocast;
  if (run && a.what != kOverhead) autocast.emplace(run->config.train.dtype, device.type());
  const auto findings_of = [&](const std::string& name) {
    Subject own = subject;
    if (reads && !a.text) take_part(a, name, own);
    Findings found = name == kOverhead ? overhead(a, *run)
                                       : analysis::analyze(analysis::find_analysis(name), own);
    write_files(a, name, own, found);
    return found;
  };
  if (a.what.empty()) {
    print_all(a.json, findings_of);
  } else {
    const Findings found = findings_of(a.what);
    std::printf("%s",
                (a.json ? analysis::to_json(found) + "\n" : analysis::to_text(found)).c_str());
  }
  return 0;
}

}  // namespace

Command analyze_command() {
  return {
      "analyze", "attention maps, head diversity, rank, noise, experts, states, overhead, theorems",
      "headloom analyze runs/text maps --text 'To be, or not to be'",
      [](CLI::App& app) -> std::function<int()> {
        auto a = std::make_shared<AnalyzeArguments>();
        std::string what =
            "which analysis; without it all that the model has something for, except overhead:";
        for (const Entry& entry : analysis::analyses())
          what += str("\n", entry.name, ": ", entry.doc);
        what += str("\n", kOverhead, ": speed of training and decoding against plain attention");
        app.add_option("run", a->run, "folder of a run; theorems needs none");
        app.add_option("what", a->what, what);
        app.add_option("--text", a->text,
                       "what the model reads; - reads standard input; held-out data by default");
        app.add_option("--answer", a->answer,
                       "noise: the part of --text that its last token is to find");
        app.add_option("--layers", a->layers, "numbers of layers, as in 0,3; all by default")
            ->delimiter(',')
            ->allow_extra_args(false)
            ->check(whole_number(0));
        app.add_option("--heads", a->heads, "numbers of heads; all by default")
            ->delimiter(',')
            ->allow_extra_args(false)
            ->check(whole_number(0));
        app.add_option("--sequences", a->sequences,
                       "held-out sequences to read, 8 by default and 1 for maps; of overhead: "
                       "sequences of a training step")
            ->check(whole_number(1));
        app.add_option("--length", a->length,
                       "tokens of each, 256 by default, 64 for maps, all for noise; of overhead: "
                       "positions")
            ->check(whole_number(1));
        app.add_option("--top", a->top, "how many a list of memory or experts shows, 5 by default")
            ->check(whole_number(1));
        app.add_option("--seconds", a->seconds, "overhead: time for each measurement, 4 by default")
            ->check(real_number(positive()));
        add_device_option(app, a->device);
        add_checkpoint_option(app, a->checkpoint);
        app.add_option("--out", a->out, "folder for pages and JSON; RUN/analysis by default")
            ->check(not_empty());
        app.add_flag("--tensors", a->tensors, "also write WHAT.safetensors there");
        app.add_flag("--json", a->json, "print the result as JSON");
        return [a, &app] {
          for (const char* option : {"--device", "--checkpoint"}) {
            if (app.count(option) > 0) a->of_run = option;
          }
          return run_analyze(*a);
        };
      }};
}

}  // namespace headloom::cli
