// A trained model back from its run folder.
#pragma once

#include <memory>
#include <string>

#include "model/model.h"
#include "train/config.h"
#include "train/run_folder.h"

namespace headloom {

struct LoadedRun {
  std::string folder;
  RunConfig config;
  std::shared_ptr<Model> model;  // in evaluation mode
  int64_t step = 0;
};

// `which`: "best" (lowest held-out loss), "last", or a step. Throws Error naming the file that is
// missing or damaged.
LoadedRun load_run(const std::string& folder, const std::string& which = "best");

// How a run computes that only generates or is evaluated from now on.
struct Precision {
  std::string dtype = {};     // "float32", "bfloat16", "float64"; "": as it was trained
  std::string quantize = {};  // "int8" or "int4": a decoder's linear maps held so; ""

  bool changes() const { return !dtype.empty() || !quantize.empty(); }
  // "int8, computing in bfloat16".
  std::string text() const;
};

// Takes run.config.train.dtype to what `p` says, holds the model in float64 where it computes in
// that, and a decoder's linear maps in bfloat16 where it computes in that, or quantized. Throws
// UsageError for other types and for quantized weights in a model that is no decoder or computes in
// float64, and Error where weights to be quantized are not finite.
void hold_weights(LoadedRun& run, const Precision& p);

}  // namespace headloom
