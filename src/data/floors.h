// What is reached by guessing the most frequent class: floors of tasks whose classes are not
// equally frequent.
#pragma once

#include <cstdint>
#include <vector>

#include "data/task.h"

namespace headloom::data {

// Floors of a task with one class per example. `trained` and `judged` are the classes, in [0,
// classes), of the examples that are trained on and of those that are judged. The most frequent
// class is that of `trained` or, where nothing is trained on, of `judged`. It is a floor where it
// is right more often than any class.
std::vector<Floor> class_floors(int64_t classes, const std::vector<int64_t>& trained,
                                const std::vector<int64_t>& judged);

struct TaggedWord {
  uint64_t word;  // a number of its own, or a hash
  int64_t tag;    // in [0, classes)
};

// The same of a task with tags, and beside it each word's own most frequent tag, the usual baseline
// of taggers (Jurafsky and Martin, Speech and Language Processing, chapter 17). A word that is not
// among `trained` has the tag that is most frequent over all.
std::vector<Floor> tag_floors(int64_t classes, const std::vector<TaggedWord>& trained,
                              const std::vector<TaggedWord>& judged);

}  // namespace headloom::data
