// Hugging Face folders (config.json, safetensors, a tokenizer) to runs and back.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "model/model.h"
#include "train/config.h"

namespace headloom {

struct Converted {
  std::string family = {};
  int64_t parameters = 0;
  std::string tokenizer = {};  // of an import: its file, or ""
  std::string note = {};  // a sentence for the user, or ""
};

// A model of a Hugging Face folder.
struct ImportedModel {
  std::string family = {};
  RunConfig config = {};
  std::shared_ptr<Model> model = {};     // in evaluation mode
  std::string tokenizer = {};            // its file, or ""
  std::vector<std::string> labels = {};  // names of its classes, where the folder has them
  std::string note = {};                 // a sentence for the user, or ""
};

// Throws UsageError naming the key that no Headloom model expresses; Error naming the file or
// tensor that is missing, of another shape, or left over.
ImportedModel read_folder(const std::string& folder);

// Writes a model as the run `out`: config.toml, checkpoints/step-0 and the tokenizer, a file or "".
// Its task is what it can be evaluated on, once --set names the data; `labels` are the names of its
// classes, where they are known. Throws UsageError for a run that is there.
void write_run(const std::string& out, const ModelConfig& config, const Model& model,
               const std::string& tokenizer, const std::vector<std::string>& labels = {});

// Writes the model in `folder` as the run `out`: config.toml, checkpoints/step-0, the tokenizer.
// Throws as read_folder() and write_run() do.
Converted import_folder(const std::string& folder, const std::string& out);

// Writes a run's model as a folder that `transformers` loads. `family`: one of families(), or ""
// for the first that expresses the model. Throws UsageError naming what it cannot express.
Converted export_run(const std::string& run, const std::string& checkpoint,
                     const std::string& family, const std::string& out);

}  // namespace headloom
