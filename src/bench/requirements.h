// Figures that must reach a target, each one line below the table of a benchmark, and what measures
// them: one function a family.
#pragma once

#include "bench/harness.h"

namespace headloom::bench {

// Rows of one figure each with what it should be, below a table of cases. A figure that --only
// leaves out is not measured.
class Requirements {
 public:
  using Measure = std::function<double()>;

  Requirements(const BenchOptions& a, nlohmann::ordered_json& json) : arguments_(a), json_(json) {}
  void at_most(const std::string& what, double target, const Measure& measure) {
    add(what, target, false, measure);
  }
  void at_least(const std::string& what, double target, const Measure& measure) {
    add(what, target, true, measure);
  }

 private:
  void add(const std::string& what, double target, bool at_least, const Measure& measure);

  const BenchOptions& arguments_;
  nlohmann::ordered_json& json_;
  bool begun_ = false;
};

// The cases of one operator, in a table, and its requirements.
void bench_operators(const std::string& family, const BenchOptions& a,
                     nlohmann::ordered_json& json);

// A training step of a small model with each token mixer beside plain attention.
void bench_steps(const BenchOptions& a, nlohmann::ordered_json& json);

// Training steps of GPT-2's size and of the task recall: time, memory, or with --profile where the
// time goes.
void bench_step(const BenchOptions& a, nlohmann::ordered_json& json);

// What the cases of an operator say of themselves beyond their targets: time against the bound of
// this machine, speed against the reference, growth with the length.
void bench_family_requirements(const std::vector<ops::OpCase>& cases, const BenchOptions& a,
                               Requirements& rows);

// Training steps of whole models at equal parameters, T = 2048.
void bench_model_steps(const BenchOptions& a, Requirements& rows);

// Decoding: tokens' time beside the memory's bound, in narrower types, and along the context.
void bench_decode(const BenchOptions& a, Requirements& rows);

// What composed attention must reach beside its cases: types, threads, instruction sets, memory,
// whole layers and training steps.
void bench_composed_requirements(const BenchOptions& a, Requirements& rows);

}  // namespace headloom::bench
