// Figures over several tasks that differ in a number: how quality falls as the task gets harder,
// and what state it takes.
#pragma once

#include <string>
#include <vector>

#include "report/charts.h"

namespace headloom::report {

struct TaskGroup {
  std::string key;                        // the option that differs: "length"
  std::vector<std::string> with{};        // options that grow together with it
  std::vector<const TaskSummary*> tasks;  // by growing values of the key
  std::vector<double> values;             // of the key
};

// The groups of at least two tasks that differ in one number alone, or in several that grow
// together, once a model has a result on two of them. A task may be in several groups, as in a grid
// of two numbers. How much held-out data a task has (eval_sequences) does not count as a
// difference.
std::vector<TaskGroup> task_groups(const Summary& summary);

// In what else models that have results on several of the tasks were made or trained differently on
// them, each once: "`batch`", "the tokens of training (1.28k to 25.6k)". What was swept does not
// count.
std::vector<std::string> also_different(const Comparison& c, const TaskGroup& group);

// What the figures show: the accuracy in place of an error rate, and the metric otherwise.
std::string shown_metric(const TaskGroup& group);

// Quality against the number for every model, with 95% intervals and the floors, and beside it the
// difference from the baseline, paired by seed.
Chart difficulty_chart(const Comparison& c, const TaskGroup& group);
// Quality against the bytes of a sequence's decoding state: a point for each model and task, and a
// line through the tasks of each model.
Chart state_chart(const Comparison& c, const TaskGroup& group);

}  // namespace headloom::report
