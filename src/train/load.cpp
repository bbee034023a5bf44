#include "train/load.h"

#include <charconv>
#include <filesystem>

#include "core/files.h"
#include "model/autoregressive.h"
#include "train/checkpoint.h"

namespace headloom {

std::string kept_tokenizer(const std::string& folder, const std::string& file) {
  return folder + "/tokenizer" + std::filesystem::path(file).extension().string();
}

void keep_tokenizer(const std::string& folder, const std::string& file) {
  namespace fs = std::filesystem;
  write_file(kept_tokenizer(folder, file), read_file(file));
  for (const char* name : {"tokenizer_config.json", "chat_template.jinja"}) {
    const fs::path beside = fs::path(file).parent_path() / name;
    if (fs::exists(beside)) write_file(folder + "/" + name, read_file(beside.string()));
  }
}

LoadedRun load_run(const std::string& folder, const std::string& which) {
  require(std::filesystem::is_directory(folder), folder, ": is not the folder of a run.");
  LoadedRun run;
  run.config = read_run_config(read_toml(folder + "/config.toml"));
  if (std::string* file = run.config.task->tokenizer_file()) {
    *file = kept_tokenizer(folder, *file);
  }
  const CheckpointStore store(folder);
  const auto steps = store.steps();
  require(!steps.empty(), folder, ": has no checkpoint yet.");
  {
    WithoutValues no_values;
    run.model = build_model(run.config.model);
  }
  run.model->eval();
  int64_t step = steps.back();
  if (which == "best") {
    step = store.best().value_or(step);
  } else if (which != "last") {
    const char* end = which.data() + which.size();
    const auto result = std::from_chars(which.data(), end, step);
    if (result.ec != std::errc() || result.ptr != end ||
        std::find(steps.begin(), steps.end(), step) == steps.end()) {
      std::vector<std::string> names;
      for (int64_t s : steps) names.push_back(std::to_string(s));
      usage_error(folder, ": has no checkpoint '", which,
                  "', expected best, last or one of the steps ", join(names), ".");
    }
  }
  run.step = store.load_weights(step, *run.model).step;
  return run;
}

std::string Precision::text() const {
  if (dtype.empty() || quantize.empty()) return str(quantize, dtype);
  return str(quantize, ", computing in ", dtype);
}

void hold_weights(LoadedRun& run, const Precision& p) {
  auto* writer = dynamic_cast<AutoregressiveModel*>(run.model.get());
  if (!p.quantize.empty() && p.quantize != "int8") {
    usage_error("weights cannot be quantized to \"", p.quantize, "\", expected int8.");
  }
  if (!p.quantize.empty() && writer == nullptr) {
    usage_error("the model is of kind \"", run.config.model.kind,
                "\", expected a decoder or an encoder_decoder for weights in int8.");
  }
  if (!p.dtype.empty()) {
    if (p.dtype != "float32" && p.dtype != "bfloat16") {
      usage_error("a model cannot compute in \"", p.dtype, "\", expected float32 or bfloat16.");
    }
    run.config.train.dtype = p.dtype;
  }
  if (writer == nullptr) return;
  if (!p.quantize.empty()) {
    writer->narrow_weights(at::kChar);
  } else if (run.config.train.dtype == "bfloat16") {
    writer->narrow_weights(at::kBFloat16);
  }
}

}  // namespace headloom
