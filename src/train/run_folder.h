// What a run's folder holds beside its checkpoints: the configuration, in a form that still holds
// where the folder has been moved, and a copy of the tokenizer.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "core/config.h"
#include "core/differences.h"
#include "train/config.h"

namespace headloom {

// Where the run in `folder` has its steps and evaluations (metrics.h), and how it ended (result.h).
std::string metrics_path(const std::string& folder);
std::string result_path(const std::string& folder);

// Where the run in `folder` keeps its copy of the tokenizer that `file` names.
std::string kept_tokenizer(const std::string& folder, const std::string& file);

// Copies the tokenizer `file` there, and what stands beside it and says how it is used in a chat:
// tokenizer_config.json, chat_template.jinja and generation_config.json.
void keep_tokenizer(const std::string& folder, const std::string& file);

// Whose folders are meant.
enum class FolderOf { run, comparison, either };

// "; did you mean 'runs/text'?" for a folder that is not there, of those beside it that are meant;
// "." where none has a similar name.
std::string did_you_mean_folder(const std::string& folder, FolderOf meant);

// The content of config.toml in `folder`. Throws Error where that is not the folder of a run, and
// says what it is instead.
Node run_toml_in(const std::string& folder);

// The configuration of the run in `folder`, whose tokenizer is the copy kept there. Throws Error
// where it is not the folder of a run.
RunConfig run_config_in(const std::string& folder);
// "there is no file or folder 'a.txt', which 'task.paths' in RUN/config.toml names; put the data
// back there, or write in that line where they are now", without a stop: where data of the run in
// `folder` are missing. "" where they are all there.
std::string missing_data_text(const std::string& folder, const RunConfig& config);

// Throws UsageError where a run in `folder` would write over something that is there, or where it
// and something else would be taken for one another. Anything else may be there, and checkpoints
// where the run is to be made `again`. `tokenizer` is the file that it would keep; null: none.
void check_new_folder(const std::string& folder, const std::string* tokenizer, bool again = false);

// `config` as a run's config.toml holds it: the data's paths absolute, the tokenizer by the name of
// its copy.
Node stored_config(RunConfig& config);

// Where `config` differs from that of the run in `folder`. Throws UsageError where its tokenizer is
// not the one that the run keeps.
std::vector<Difference> differences_from(const std::string& folder, RunConfig& config);

// Takes config's tokenizer from the run in `folder`, where that keeps a copy of it. Throws
// UsageError where the file that `config` names is there and is another, and where one of the two
// has a file and the other reads bytes.
void use_kept_tokenizer(const std::string& folder, RunConfig& config);

// Writes config.toml, which begins with `comments`: lines that say where the run comes from.
void write_run_config(const std::string& folder, RunConfig& config, const std::string& comments);
// Those of the present config.toml, with a line for each of earlier_configs().
std::string config_comments(const std::string& folder);

// A configuration that is kept beside the present one: RUN/config.until-step-N.toml.
struct EarlierConfig {
  int64_t until = 0;
  std::string file;  // its name
};
// In the order of their steps.
std::vector<EarlierConfig> earlier_configs(const std::string& folder);
// Keeps `config`, the text of a configuration, as that of the steps before `step` and returns its
// file's name. Where one is kept for these already, no step was made with another.
std::string keep_config(const std::string& folder, int64_t step, const std::string& config);
// Drops the kept configurations of steps after `step`. The earliest of them becomes that of `step`,
// unless one is kept for it or `step` is 0. Returns whether there were any.
bool forget_configs_after(const std::string& folder, int64_t step);

// Whether `key` says where the data are, as "task.paths" does. The same data may be moved.
bool is_place_of_data(const std::string& key);
// The configuration without the places of its data, for what does not depend on them.
std::string toml_without_places(Node config);
// Whether a run that goes on may have another value of `key`, such as "train.steps".
bool may_change(const std::string& key);

// The folder of the comparison that the run in `folder` belongs to.
std::optional<std::string> comparison_of(const std::string& folder);

// A new run that begins with the weights of the one in `folder`: the keys of [model], the tokenizer
// and the order of the classes are that run's where `config` has none. A preset has every key.
void fill_from_run(Node& config, const std::string& folder);
// The same of the model's sizes that would be the task's.
void fill_sizes_from_run(RunConfig& config, const std::string& folder);
// Throws UsageError naming the first key in which the model or the tokenizer of `config`, complete,
// is not that of the run in `folder`. What does not belong to the weights may differ: dropout, how
// weights are drawn, the longest sequence. A mixer "mha" may have become "dcmha".
void check_same_model(RunConfig& config, const std::string& folder);

}  // namespace headloom
