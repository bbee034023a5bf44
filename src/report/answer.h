// What a comparison says in words. Labels are marked by backticks.
#pragma once

#include <string>

#include "report/summary.h"

namespace headloom::report {

// The answer for one task, from rows sorted best first with their verdicts.
std::string answer(const TaskSummary& summary);

// Which model to take for the task, from what has been tested alone.
std::string recommendation(const TaskSummary& summary);

// Whether the ranking and the claims of a task hold in `again`, its summary under a second
// initialisation, which `changes` says. One sentence.
std::string robustness_answer(const TaskSummary& summary, const TaskSummary& again,
                              const std::string& changes);

// What is small, early or not swept about the experiment; empty where nothing was compared.
std::string limits(const Comparison& comparison, const Summary& summary);

// The largest difference that the data still allow: the end of the interval farther from zero.
double largest_difference(const TaskInfo& task, const Estimate& difference);
// "0.030", "2.1 points": a difference of the task's metric without its sign.
std::string difference_text(const TaskInfo& task, double difference);
// "0.017 to 0.043": the interval of the difference, with its sign turned unless `rising`.
std::string interval_text(const TaskInfo& task, const Estimate& difference, bool rising);

}  // namespace headloom::report
