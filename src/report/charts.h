// The charts of one task, from its runs.
#pragma once

#include <string>
#include <vector>

#include "report/plot.h"
#include "report/summary.h"

namespace headloom::report {

// The mean over the seeds of a model's finished runs, with the band from the lowest to the highest,
// at every evaluation that all of them have. While none has finished, over its unfinished ones.
std::vector<LinePoint> mean_curve(const Row& row, double Point::* x, double Point::* y);

// The x at which the curve first reaches `level`, between evaluations by straight lines; NaN if
// never.
double first_reach(const std::vector<LinePoint>& curve, double level, bool lower_is_better);

// The CSS class number of a model.
int style_of(const Comparison& comparison, const Row& row);

// The numbers of a figure: one list of texts a row, numbers as decimals.
struct Data {
  std::string name;  // of the file, without its ending
  std::vector<std::string> columns;
  std::vector<std::vector<std::string>> rows;
};
std::string to_csv(const Data& data);   // RFC 4180
std::string to_json(const Data& data);  // a list of objects

struct Chart {
  std::vector<std::string> drawings;  // side by side; empty where nothing has been measured yet
  std::string caption;
  Data data{};
};
// Learning, accuracy and gap charts are empty while no model has two evaluations.
enum class Along { kTokens, kFlops, kSeconds };
// What is learned along training: the metric, or the loss where the metric is a fraction of right
// or wrong answers. The FLOPs are three times those of the forward pass.
Chart learning_chart(const Comparison& c, const TaskSummary& t, Along along);
// The fraction of right answers against tokens; for tasks that have answers.
Chart accuracy_chart(const Comparison& c, const TaskSummary& t);
// The difference from the baseline at every evaluation, paired by seed, with its 95% interval: what
// the learning chart is too coarse for. Between runs of equal length it ends at the verdict.
Chart gap_chart(const Comparison& c, const TaskSummary& t);
// Quality with its interval against what it costs: training speed, decoding speed and the decoding
// state of a whole sequence, as far as they are known.
Chart cost_chart(const Comparison& c, const TaskSummary& t);
// The metric on validation data against a swept key for every model, the other keys at their best.
Chart sweep_chart(const Comparison& c, const TaskSummary& t, const std::string& key);
// How evenly the experts of a model work, layer by layer; for models that have experts.
Chart expert_chart(const TaskSummary& t, const Row& row);
// The seeds' results of a row, on the scale of the task's table.
std::string seeds_strip(const Comparison& c, const TaskSummary& t, const Row& row);

}  // namespace headloom::report
