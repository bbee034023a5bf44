// The speeds that were measured of a comparison's models, as speeds.json in its folder keeps them,
// and what they depend on.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "report/comparison.h"
#include "train/config.h"

namespace headloom {

// This machine and the threads of this process: what is timed on different ones is not compared.
std::string machine_text();

// A model with a finished run of the task, and the configuration of that run but for what differs
// between seeds.
struct TimedModel {
  std::string model;
  RunConfig config;
};

// The models of `comparison` that can be measured on the task: those with a finished run below
// `folder`, on the CPU.
std::vector<TimedModel> timed_models(const std::string& task, const std::string& folder,
                                     const report::Comparison& comparison);

class KeptSpeeds {
 public:
  // As the folder has them now; none where the file is missing or damaged.
  explicit KeptSpeeds(const std::string& folder);
  // Appends the speeds of all models to `out`. False, and nothing is appended, unless the task was
  // measured in as many rounds of exactly these models, and here unless `anywhere`.
  bool take(const std::string& task, int64_t rounds, std::vector<TimedModel>& models, bool anywhere,
            std::vector<report::Speed>& out) const;
  // Writes the speeds of a task, in place of earlier ones.
  void keep(const std::string& task, int64_t rounds, std::vector<TimedModel>& models,
            const std::vector<report::Speed>& speeds);

 private:
  std::string path_;
  nlohmann::ordered_json tasks_;
};

// Fills comparison.speeds with what is kept, of this machine alone unless `anywhere`, and measures
// nothing.
void take_kept_speeds(const std::string& folder, int64_t rounds, bool anywhere,
                      report::Comparison& comparison);

}  // namespace headloom
