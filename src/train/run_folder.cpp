#include "train/run_folder.h"

#include <algorithm>
#include <filesystem>
#include <sstream>

#include "core/files.h"
#include "core/parse_number.h"
#include "core/shell.h"
#include "core/text.h"

namespace headloom {
namespace {

namespace fs = std::filesystem;

std::string config_path(const std::string& folder) { return folder + "/config.toml"; }

constexpr std::string_view kUntil = "# Until step ";

bool holds_comparison(const std::string& folder) {
  try {
    return read_toml(config_path(folder)).find("models") != nullptr;
  } catch (const Error&) {  // somebody else's config.toml
    return false;
  }
}

// The folders in `folder` that are meant, in order.
std::vector<std::string> folders_in(const std::string& folder, FolderOf meant) {
  std::vector<std::string> found;
  std::error_code error;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder, error)) {
    const std::string path = entry.path().string();
    if (!is_there(config_path(path))) continue;
    if (meant == FolderOf::either || holds_comparison(path) == (meant == FolderOf::comparison)) {
      found.push_back(path);
    }
  }
  std::sort(found.begin(), found.end());
  return found;
}

bool same_content(const std::string& a, const std::string& b) {
  return is_there(a) && is_there(b) && read_file(a) == read_file(b);
}

}  // namespace

std::string metrics_path(const std::string& folder) { return folder + "/metrics.jsonl"; }

std::string result_path(const std::string& folder) { return folder + "/result.json"; }

std::string kept_tokenizer(const std::string& folder, const std::string& file) {
  return folder + "/tokenizer" + fs::path(file).extension().string();
}

namespace {

// What a run keeps of a tokenizer: the files, each with its copy.
std::vector<std::pair<std::string, std::string>> copies_of_tokenizer(const std::string& folder,
                                                                     const std::string& file) {
  std::vector<std::pair<std::string, std::string>> out = {{file, kept_tokenizer(folder, file)}};
  for (const char* name :
       {"tokenizer_config.json", "chat_template.jinja", "generation_config.json"}) {
    const fs::path beside = fs::path(file).parent_path() / name;
    if (fs::exists(beside)) out.emplace_back(beside.string(), folder + "/" + name);
  }
  return out;
}

}  // namespace

void keep_tokenizer(const std::string& folder, const std::string& file) {
  for (const auto& [from, to] : copies_of_tokenizer(folder, file)) write_file(to, read_file(from));
}

void check_new_folder(const std::string& folder, const std::string* tokenizer, bool again) {
  if (fs::exists(folder) && !fs::is_directory(folder)) {
    usage_error(folder, ": is a file, expected a folder for the run; choose another.");
  }
  const auto refuse = [&](const std::string& name, const char* why) {
    usage_error(folder, ": holds '", name, "', ", why, "; choose another folder for the run.");
  };
  constexpr const char* kWrites = "which would be overwritten";
  constexpr const char* kModel = "as the folder of a Hugging Face model does";
  for (const auto& [name, why] :
       {std::pair("metrics.jsonl", kWrites), std::pair("result.json", kWrites),
        std::pair("origin.json", kWrites), std::pair("checkpoints", kWrites),
        std::pair("config.json", kModel), std::pair("model.safetensors", kModel),
        std::pair("model.safetensors.index.json", kModel), std::pair("pytorch_model.bin", kModel),
        std::pair("comparison.json", "as the folder of a comparison does")}) {
    if (again && std::string_view(name) == "checkpoints") continue;
    if (fs::exists(fs::path(folder) / name)) refuse(name, why);
  }
  if (tokenizer == nullptr) return;
  for (const auto& [from, to] : copies_of_tokenizer(folder, *tokenizer)) {
    if (fs::exists(from) && fs::exists(to) && !same_content(from, to)) {
      refuse(fs::path(to).filename().string(), kWrites);
    }
  }
}

std::string did_you_mean_folder(const std::string& folder, FolderOf meant) {
  const fs::path path = folder.substr(0, folder.find_last_not_of('/') + 1);
  const fs::path parent = path.parent_path();
  std::vector<std::string> names;
  for (const std::string& other : folders_in(parent.empty() ? "." : parent.string(), meant)) {
    names.push_back(fs::path(other).filename().string());
  }
  const std::string near = nearest(path.filename().string(), names);
  return near.empty() ? "." : str("; did you mean '", (parent / near).string(), "'?");
}

Node run_toml_in(const std::string& folder) {
  require(!folder.empty(), "the name of the run's folder is empty.");
  if (!is_folder(folder)) {
    fail(folder, ": is not the folder of a run", did_you_mean_folder(folder, FolderOf::run));
  }
  if (!is_there(config_path(folder)) && is_there(folder + "/config.json")) {
    fail(folder, ": is a Hugging Face folder, expected that of a run; make one of it with: ",
         program_name(), " import ", shell_word(folder), " --out RUN");
  }
  std::error_code hidden;
  if (!fs::exists(config_path(folder), hidden) && !hidden) {
    const std::vector<std::string> inside = folders_in(folder, FolderOf::run);
    fail(folder, ": is not the folder of a run, it has no config.toml",
         inside.empty() ? "." : str("; did you mean '", inside.front(), "'?"));
  }
  Node root = read_toml(config_path(folder));
  if (root.find("models") != nullptr) {
    fail(folder, ": is the folder of a comparison, expected that of one of its runs, ", folder,
         "/runs/TASK/MODEL/seed-N.");
  }
  return root;
}

RunConfig run_config_in(const std::string& folder) {
  const Node root = run_toml_in(folder);
  // A run's is complete; without [model] it would be read as that of the default model.
  require(root.find("model") != nullptr, config_path(folder),
          root.table().empty() ? ": is empty" : ": has no [model]",
          ", expected the configuration of a run ([model], [task], [train]).");
  RunConfig config = read_run_config(root);
  if (std::string* file = config.task->tokenizer_file()) *file = kept_tokenizer(folder, *file);
  return config;
}

std::string missing_data_text(const std::string& folder, const RunConfig& config) {
  const std::optional<data::DataPath> missing = config.missing_data();
  if (!missing) return "";
  return str("there is no file or folder '", *missing->path, "', which 'task.", missing->key,
             "' in ", config_path(folder),
             " names; put the data back there, or write in that line ", "where they are now");
}

Node stored_config(RunConfig& config) {
  RunConfig stored = read_run_config(write_fields(config));  // whose task is its own
  for (const data::DataPath& data : stored.task->data_paths()) {
    const fs::path path = fs::absolute(*data.path);
    // What ".." goes up from may be a link.
    const bool plain =
        std::none_of(path.begin(), path.end(), [](const fs::path& part) { return part == ".."; });
    *data.path = plain ? path.lexically_normal().string() : path.string();
  }
  if (std::string* file = stored.task->tokenizer_file()) {
    *file = fs::path(kept_tokenizer("", *file)).filename().string();
  }
  return write_fields(stored);
}

namespace {

// Whether a run without a tokenizer's file has the vocabulary of bytes. A checkpoint that was
// imported without its tokenizer has a larger one.
bool is_of_bytes(const RunConfig& run) {
  return run.task->tokenizer() != nullptr && run.model.vocabulary.value_or(0) <= 257;
}

}  // namespace

void use_kept_tokenizer(const std::string& folder, RunConfig& config) {
  RunConfig run = run_config_in(folder);
  const std::string* kept = run.task->tokenizer_file();
  std::string* file = config.task->tokenizer_file();
  const auto refuse = [](const std::string& named, const std::string& made) {
    usage_error("'task.tokenizer' is \"", named, "\", but the run was made with ", made,
                "; leave it out to take that.");
  };
  if (kept == nullptr) {
    if (file != nullptr && is_of_bytes(run)) refuse(*file, "\"bytes\"");
    return;
  }
  const std::string other = "another one, " + *kept;
  if (file == nullptr) {
    if (config.task->tokenizer() != nullptr) refuse("bytes", other);
    return;
  }
  if (!is_there(*kept)) return;
  if (is_there(*file) && !same_content(*file, *kept)) refuse(*file, other);
  if (!is_there(*file) && kept_tokenizer(folder, *file) != *kept) return;  // loading it says so
  *file = *kept;
}

std::vector<Difference> differences_from(const std::string& folder, RunConfig& config) {
  // Read and written anew: an option that came after the run is at its default.
  RunConfig before = read_run_config(read_toml(config_path(folder)));
  use_kept_tokenizer(folder, config);
  return differences(stored_config(before), stored_config(config));
}

std::string config_comments(const std::string& folder) {
  std::istringstream lines(read_file(config_path(folder)));
  std::string comments, line;
  while (std::getline(lines, line) && line.starts_with('#')) {
    if (!line.starts_with(kUntil)) comments += line + "\n";
  }
  for (const EarlierConfig& earlier : earlier_configs(folder)) {
    comments += str(kUntil, earlier.until, " the configuration was ", earlier.file, ".\n");
  }
  return comments;
}

namespace {

constexpr std::string_view kBefore = "config.until-step-", kAfter = ".toml";

std::string name_of_config(int64_t until) { return str(kBefore, until, kAfter); }

}  // namespace

std::vector<EarlierConfig> earlier_configs(const std::string& folder) {
  std::vector<EarlierConfig> out;
  std::error_code error;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder, error)) {
    const std::string name = entry.path().filename().string();
    if (!name.starts_with(kBefore) || !name.ends_with(kAfter)) continue;
    const size_t digits = name.size() - kBefore.size() - kAfter.size();
    const auto until = parse_number<int64_t>(std::string_view(name).substr(kBefore.size(), digits));
    if (until) out.push_back({*until, name});
  }
  std::sort(out.begin(), out.end(),
            [](const EarlierConfig& a, const EarlierConfig& b) { return a.until < b.until; });
  return out;
}

std::string keep_config(const std::string& folder, int64_t step, const std::string& config) {
  const std::string kept = name_of_config(step);
  if (!fs::exists(folder + "/" + kept)) write_file(folder + "/" + kept, config);
  return kept;
}

bool forget_configs_after(const std::string& folder, int64_t step) {
  bool any = false;
  for (const EarlierConfig& earlier : earlier_configs(folder)) {
    if (earlier.until <= step) continue;
    any = true;
    const std::string file = folder + "/" + earlier.file,
                      kept = folder + "/" + name_of_config(step);
    // The first of them is that of the steps just before `step`.
    if (fs::exists(kept) || step == 0) {
      fs::remove(file);
    } else {
      fs::rename(file, kept);
    }
  }
  return any;
}

void write_run_config(const std::string& folder, RunConfig& config, const std::string& comments) {
  write_file(config_path(folder),
             str(comments, comments.empty() ? "" : "\n", to_toml(stored_config(config))));
}

bool is_place_of_data(const std::string& key) {
  return key == "task.paths" || key == "task.path" || key == "task.held_out_path";
}

std::string toml_without_places(Node config) {
  if (Node* task = config.find("task")) {
    std::erase_if(task->table(),
                  [](const auto& option) { return is_place_of_data("task." + option.first); });
  }
  return to_toml(config);
}

bool may_change(const std::string& key) {
  if (key == "train.batch" || key == "train.seed") return false;  // they say which data come next
  return key.starts_with("train.") || is_place_of_data(key);
}

std::optional<std::string> comparison_of(const std::string& folder) {
  // COMPARISON/runs/TASK/MODEL/seed-N, the same below robustness, or
  // COMPARISON/sweep/TASK/MODEL/seed-N with the setting
  const fs::path run = fs::absolute(folder + "/").lexically_normal().parent_path();
  const fs::path runs = run.parent_path().parent_path().parent_path();
  if (!run.filename().string().starts_with("seed-") ||
      (runs.filename() != "runs" && runs.filename() != "sweep" &&
       runs.filename() != "robustness")) {
    return std::nullopt;
  }
  const std::string comparison = runs.parent_path().string();
  return holds_comparison(comparison) ? std::optional(comparison) : std::nullopt;
}

void fill_from_run(Node& config, const std::string& folder) {
  RunConfig run = run_config_in(folder);
  const Node theirs = write_fields(run);
  Node* model = config.find("model");
  if (model == nullptr) {
    config.set("model", *theirs.find("model"));
  } else if (model->is_table() && model->find("preset") == nullptr) {
    for (const auto& [key, value] : theirs.find("model")->table()) {
      if (model->find(key) == nullptr) model->set(key, value);
    }
  }
  Node* task = config.find("task");
  if (task == nullptr || !task->is_table()) return;
  const Node* named = task->find("type");
  if (named != nullptr && !std::holds_alternative<std::string>(named->value)) return;
  const std::string type = named != nullptr ? std::get<std::string>(named->value) : "text";
  const auto take = [&](const char* key) {
    const Node* value = theirs.find("task")->find(key);
    if (value != nullptr && task->find(key) == nullptr) task->set(key, *value);
  };
  const Node options = write_fields(*data::make_task_spec(type));
  if (run.task->tokenizer_file() != nullptr && options.find("tokenizer") != nullptr) {
    take("tokenizer");
  }
  if (type == run.task->type()) take("labels");
}

void fill_sizes_from_run(RunConfig& config, const std::string& folder) {
  const ModelConfig theirs = run_config_in(folder).model;
  ModelConfig& ours = config.model;
  if (ours.kind != theirs.kind) return;
  const auto fill = [](auto& size, const auto& other) {
    if (!size) size = other;
  };
  fill(ours.vocabulary, theirs.vocabulary);
  fill(ours.max_length, theirs.max_length);
  fill(ours.max_source_length, theirs.max_source_length);
  fill(ours.classes, theirs.classes);
  fill(ours.segments, theirs.segments);
  fill(ours.head, theirs.head);
}

void check_same_model(RunConfig& config, const std::string& folder) {
  RunConfig run = run_config_in(folder);
  ModelConfig theirs_adapted = adapted(run.model, config.model);
  if (const auto other = difference_of_weights(theirs_adapted, config.model)) {
    usage_error(folder, ": its weights are of a model with ", other->was(),
                ", but the configuration has ", other->is(),
                "; leave [model] out to take it from there.");
  }
  const std::string* theirs = run.task->tokenizer_file();
  const std::string* ours = config.task->tokenizer_file();
  if (run.task->tokenizer() == nullptr || config.task->tokenizer() == nullptr) return;
  if (theirs == nullptr && !is_of_bytes(run)) return;
  const bool same =
      theirs == nullptr || ours == nullptr ? theirs == ours : same_content(*theirs, *ours);
  if (!same) {
    usage_error("'task.tokenizer' is \"", ours != nullptr ? *ours : "bytes", "\", but the run in ",
                folder, " was trained with ", theirs != nullptr ? *theirs : "\"bytes\"",
                "; leave it out to take that.");
  }
}

}  // namespace headloom
