#include "data/labelled.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <set>
#include <system_error>

#include "core/error.h"
#include "core/text.h"

namespace headloom::data {

namespace fs = std::filesystem;

std::vector<ClassPath> classes_below(const std::string& folder,
                                     const std::vector<std::string>& extensions) {
  std::error_code error;
  if (!fs::is_directory(folder, error)) {
    fail("there is no folder '", folder, "' whose sub-folders or files are the classes.");
  }
  std::vector<ClassPath> folders, files;
  std::vector<std::string> others;
  for (fs::directory_iterator entry(folder, error), end; !error && entry != end;
       entry.increment(error)) {
    const ClassPath found{entry->path().filename().string(), entry->path().string()};
    std::error_code ignored;  // an entry that cannot be looked at is neither
    if (found.name.starts_with('.')) continue;
    if (entry->is_directory(ignored)) {
      folders.push_back(found);
    } else if (!entry->is_regular_file(ignored)) {
      others.push_back(found.path);
    } else if (extensions.empty() ||
               std::any_of(extensions.begin(), extensions.end(), [&](const std::string& ending) {
                 return found.name.ends_with(ending);
               })) {
      files.push_back(found);
    }
  }
  if (error) fail("cannot list the folder '", folder, "': ", error.message(), ".");
  if (!others.empty()) {
    // Without it the task would be another one.
    fail("'", *std::min_element(others.begin(), others.end()),
         "' is neither a folder nor a file, so it is no class; take it away or mend its link.");
  }
  std::vector<ClassPath>& classes = folders.empty() ? files : folders;
  require(classes.size() >= 2, "the folder '", folder, "' has ",
          counted(std::ssize(folders), "sub-folder"), " and ", counted(std::ssize(files), "file"),
          extensions.empty() ? "" : " that end in " + join(extensions),
          ", expected at least two of either, each a class.");
  std::sort(classes.begin(), classes.end(),
            [](const ClassPath& a, const ClassPath& b) { return a.name < b.name; });
  return classes;
}

void check_labels(const std::vector<std::string>& labels) {
  std::set<std::string> seen;
  for (const std::string& label : labels) {
    if (!seen.insert(label).second) {
      usage_error("'task.labels' has '", label, "' twice, expected each label once.");
    }
  }
}

std::vector<std::string> class_names(const std::vector<ClassPath>& classes,
                                     const std::vector<std::string>& given) {
  check_labels(given);
  std::vector<std::string> names = given;
  for (const ClassPath& entry : classes) {
    if (given.empty()) {
      names.push_back(entry.name);
    } else if (std::find(given.begin(), given.end(), entry.name) == given.end()) {
      usage_error("'", entry.path, "' is a class that is not among labels = ", join(given), ".");
    }
  }
  return names;
}

int64_t class_number(const std::vector<std::string>& names, const std::string& name) {
  return std::find(names.begin(), names.end(), name) - names.begin();
}

int64_t held_out_count(int64_t present, double share) {
  return std::clamp<int64_t>(std::llround(share * static_cast<double>(present)), 1, present - 1);
}

}  // namespace headloom::data
