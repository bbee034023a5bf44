// Labelled examples on disk: the classes of a folder, and which examples are held out.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace headloom::data {

struct ClassPath {
  std::string name;
  std::string path;
};

// The classes below `folder`, by name: its sub-folders or, where there are none, its files. Hidden
// entries are left out, and files that do not end in one of `extensions` (none: all are taken).
// Throws Error for what is no folder, cannot be listed, has fewer than two classes, or has an entry
// that is neither, such as a broken link.
std::vector<ClassPath> classes_below(const std::string& folder,
                                     const std::vector<std::string>& extensions);

// Throws UsageError for a name that task.labels has twice.
void check_labels(const std::vector<std::string>& labels);

// The names of `classes` in the order in which a model numbers them: `given` or, where it is empty,
// as they are. Throws UsageError for a class that `given` lacks or has twice.
std::vector<std::string> class_names(const std::vector<ClassPath>& classes,
                                     const std::vector<std::string>& given);
// Where in `names` a class is, which must be among them.
int64_t class_number(const std::vector<std::string>& names, const std::string& name);

// How many of `present` >= 2 examples to hold out for `share` of them: at least one, not all.
int64_t held_out_count(int64_t present, double share);

}  // namespace headloom::data
