// What a model costs against plain attention on this machine (Xiao et al. 2024, table 6).
#pragma once

#include <string>
#include <vector>

#include "bench/timing.h"
#include "model/config.h"

namespace headloom::bench {

struct OverheadOptions {
  int64_t length = 0;  // positions of a training sequence, and before the decoded token; 0: the
                       // longest of the model
  int64_t batch = 0;   // training sequences; 0: about 2048 tokens
  double seconds = 4;  // for each pair
  std::string dtype = "float32";  // in which they train and decode
};

struct Overhead {
  std::string work;      // "training step", "decoding a token"
  std::string baseline;  // "mha, all global", "mha, the same windows"
  int64_t length = 0;
  double tokens = 0;  // that one piece of work is
  Paired timed;       // of the model and of the baseline
};

// Untrained models of `config`, complete, and of the same with every token mixer replaced by mha:
// as many score maps of the same size, with the windows that the mixers have and without any.
// Throws UsageError for a model that is no decoder.
std::vector<Overhead> measure_overhead(const ModelConfig& config, const OverheadOptions& options);

}  // namespace headloom::bench
