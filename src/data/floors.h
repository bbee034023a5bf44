// What is reached by guessing the most frequent class: floors of tasks whose classes are not
// equally frequent.
#pragma once

#include <cstdint>
#include <vector>

#include "data/generated.h"
#include "data/task.h"

namespace headloom::data {

// Floors of a task with one class per example. `trained` and `judged` are the classes, in [0,
// classes), of the examples that are trained on and of those that are judged. The most frequent
// class is that of `trained` or, where nothing is trained on, of `judged`. It is a floor where it
// is right more often than any class.
std::vector<Floor> class_floors(int64_t classes, const std::vector<int64_t>& trained,
                                const std::vector<int64_t>& judged);

// The same of a task with tags, and beside it each word's own most frequent tag, the usual baseline
// of taggers (Jurafsky and Martin, Speech and Language Processing, chapter 17). A word is the
// tokens from a tag on to the next. One that is not among `trained` has the tag that is most
// frequent over all.
std::vector<Floor> tag_floors(int64_t classes, const std::vector<Sample>& trained,
                              const std::vector<Sample>& judged);

}  // namespace headloom::data
