// Hugging Face folders (config.json, safetensors, a tokenizer) to runs and back.
#pragma once

#include <string>
#include <vector>

namespace headloom {

struct Converted {
  std::string family = {};
  int64_t parameters = 0;
  std::string note = {};  // a sentence for the user, or ""
};

// Writes the model in `folder` as the run `out`: config.toml, checkpoints/step-0, the tokenizer.
// Throws UsageError naming the key that no model of ours expresses, or a run that is there; Error
// naming the file or tensor that is missing, of another shape, or left over.
Converted import_folder(const std::string& folder, const std::string& out);

// Writes a run's model as a folder that `transformers` loads. `family`: one of families(), or ""
// for the first that expresses the model. Throws UsageError naming what it cannot express.
Converted export_run(const std::string& run, const std::string& checkpoint,
                     const std::string& family, const std::string& out);

}  // namespace headloom
