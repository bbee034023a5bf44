#include "train/load.h"

#include "model/autoregressive.h"
#include "train/checkpoint.h"
#include "train/device.h"

namespace headloom {

LoadedRun load_run(const std::string& folder, const std::string& which) {
  LoadedRun run;
  run.folder = folder;
  run.config = run_config_in(folder);
  const CheckpointStore store(folder);
  store.find(which);  // says what is wrong before a model is built
  {
    const WithoutValues no_values(/*filled=*/true);
    run.model = build_model(run.config.model);
  }
  hold_in(run.config.train.dtype, *run.model);
  run.model->eval();
  run.step = store.load_weights(which, *run.model).step;
  return run;
}

std::string Precision::text() const {
  if (dtype.empty() || quantize.empty()) return str(quantize, dtype);
  return str(quantize, ", computing in ", dtype);
}

void hold_weights(LoadedRun& run, const Precision& p) {
  auto* decoder = dynamic_cast<AutoregressiveModel*>(run.model.get());
  if (!p.quantize.empty() && p.quantize != "int8" && p.quantize != "int4") {
    usage_error("weights cannot be quantized to \"", p.quantize, "\", expected int8 or int4.");
  }
  if (!p.quantize.empty() && decoder == nullptr) {
    usage_error("the model is of kind \"", run.config.model.kind,
                "\", expected a decoder or an encoder_decoder for weights in ", p.quantize, ".");
  }
  if (!p.dtype.empty()) {
    if (p.dtype != "float32" && p.dtype != "bfloat16" && p.dtype != "float64") {
      usage_error("a model cannot compute in \"", p.dtype,
                  "\", expected float32, bfloat16 or float64.");
    }
    run.config.train.dtype = p.dtype;
    hold_in(p.dtype, *run.model);
  }
  if (!p.quantize.empty() && run.config.train.dtype == "float64") {
    usage_error("weights in ", p.quantize,
                " cannot be computed with in float64, expected --dtype float32 or bfloat16.");
  }
  if (decoder == nullptr) return;
  if (!p.quantize.empty()) {
    CheckpointStore(run.folder).check_finite(run.step, *run.model);
    decoder->convert_weights(p.quantize == "int4" ? at::ScalarType::Int4 : at::kChar);
  } else if (run.config.train.dtype == "bfloat16") {
    decoder->convert_weights(at::kBFloat16);
  }
}

}  // namespace headloom
