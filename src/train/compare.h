// Models x tasks x seeds at equal parameters and equal tokens.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "core/config.h"
#include "core/fields.h"
#include "report/comparison.h"

namespace headloom {

// One of the models compared: what it changes in the shared configuration.
struct ComparedModel {
  std::string name;
  std::string description;
  Node model, mixer, channel, block, cross;  // merged over [model], and over each layer's tables

  void fields(Fields& f);
};

struct ComparedTask {
  std::string name;
  Node task, train, model;  // [task], and what is merged over [train] and [model]

  void fields(Fields& f);
};

// The file `headloom compare` reads.
struct CompareConfig {
  std::string title = "Comparison";
  std::vector<int64_t> seeds = {1, 2, 3};
  bool match_parameters = true;  // to the first model's, within 1%, by the channel mixer's width
  Node model, train;             // shared
  std::vector<ComparedModel> models;
  std::vector<ComparedTask> tasks;

  void fields(Fields& f);
};

struct CompareOutcome {
  // Its runs are those that were begun. The machine, the complete TOML, the command and the date
  // are the caller's to add.
  report::Comparison comparison;
  bool interrupted = false;
  size_t planned = 0, present = 0;  // runs, and those of them that are there, perhaps unfinished
  // Folders of runs that are there and not asked for: of models, tasks and seeds that are left out,
  // and of configurations that have changed. They stay as they are.
  std::vector<std::string> left_out;
};

struct CompareControl {
  std::string folder;
  bool fresh = false;                                   // remove the runs that are there
  std::function<void(const CompareOutcome&)> progress;  // called first, then after each run
};

// Checks every combination before training any, then runs seed by seed in the folder, which is
// locked meanwhile. A run that is there with the same configuration is not repeated; one with
// another is set aside and trained anew. Throws UsageError for a bad configuration and Error for a
// folder in use; a run that fails is recorded and the others go on.
CompareOutcome compare(const CompareConfig& config, const CompareControl& control);

}  // namespace headloom
