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
// Throws Error for what is no folder, cannot be listed, or has fewer than two classes.
std::vector<ClassPath> classes_below(const std::string& folder,
                                     const std::vector<std::string>& extensions);

// How many of `present` >= 2 examples to hold out for `share` of them: at least one, not all.
int64_t held_out_count(int64_t present, double share);

}  // namespace headloom::data
