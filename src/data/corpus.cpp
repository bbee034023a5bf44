#include "data/corpus.h"

#include <glob.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <memory>
#include <optional>
#include <string_view>
#include <system_error>
#include <unordered_set>

#include "core/error.h"
#include "core/text.h"
#include "data/random.h"

namespace headloom::data {
namespace {

namespace fs = std::filesystem;

struct File {
  std::string name;
  std::string path;
  bool asked_for = false;  // by its own name: then it must be text
};

bool ends_with_any(const std::string& path, const std::vector<std::string>& endings) {
  return endings.empty() ||
         std::any_of(endings.begin(), endings.end(),
                     [&](const std::string& ending) { return path.ends_with(ending); });
}

// What is neither a regular file nor a folder goes to `no_file`: pipes, broken links, and links to
// folders, which are not followed.
void add_folder(const fs::path& folder, const std::vector<std::string>& extensions,
                std::vector<File>& files, std::vector<std::string>& no_file) {
  std::vector<File> found;
  std::error_code error;
  fs::recursive_directory_iterator walk(folder, error);
  while (!error && walk != fs::recursive_directory_iterator()) {
    const fs::path& path = walk->path();
    std::error_code ignored;  // an entry that cannot be looked at is no regular file
    std::string name = path.lexically_relative(folder).generic_string();
    if (path.filename().native().starts_with('.')) {
      walk.disable_recursion_pending();
    } else if (walk->is_regular_file(ignored)) {
      if (ends_with_any(path.native(), extensions)) {
        found.push_back({std::move(name), path.string()});
      }
    } else if (walk->is_directory(ignored) ? walk->is_symlink(ignored)
                                           : ends_with_any(path.native(), extensions)) {
      no_file.push_back(std::move(name));
    }
    walk.increment(error);
  }
  if (error) fail("cannot list the folder '", folder.string(), "': ", error.message(), ".");
  std::sort(found.begin(), found.end(),
            [](const File& a, const File& b) { return a.name < b.name; });
  std::sort(no_file.begin(), no_file.end());
  files.insert(files.end(), found.begin(), found.end());
}

void add_path(const std::string& path, const std::vector<std::string>& extensions,
              std::vector<File>& files, std::vector<std::string>& no_file) {
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  if (fs::is_directory(status)) {
    add_folder(fs::path(path), extensions, files, no_file);
  } else if (fs::is_regular_file(status)) {
    files.push_back({fs::path(path).filename().string(), path, true});
  } else if (!fs::exists(status)) {
    fail("there is no file or folder '", path, "' to read text from.");
  } else {
    fail("'", path, "' is neither a file nor a folder, so no text can be read from it.");
  }
}

std::vector<File> find_files(const CorpusOptions& options, std::vector<std::string>& no_file) {
  std::vector<File> files;
  for (const std::string& path : options.paths) {
    std::error_code error;
    const bool is_glob = path.find_first_of("*?[") != std::string::npos && !fs::exists(path, error);
    if (!is_glob) {
      add_path(path, options.extensions, files, no_file);
      continue;
    }
    const std::vector<std::string> found = expand_glob(path);
    if (found.empty()) fail("no file or folder matches '", path, "'.");
    for (const std::string& match : found) {
      add_path(match, options.extensions, files, no_file);
    }
  }
  return files;
}

struct Contents {
  std::string text;
  std::optional<size_t> zero;  // where a zero byte is: the file is no text
};

// At most `most` bytes. Of a file with a zero, which may be huge, no more is read.
Contents read_text(const std::string& path, size_t most) {
  const std::unique_ptr<FILE, int (*)(FILE*)> file(std::fopen(path.c_str(), "rb"), std::fclose);
  if (!file) fail("cannot open '", path, "': ", std::strerror(errno), ".");
  Contents out;
  std::string& text = out.text;
  std::error_code unknown;
  const size_t size = fs::file_size(path, unknown);
  char piece[1 << 16];
  while (const size_t count =
             std::fread(piece, 1, std::min(sizeof piece, most - text.size()), file.get())) {
    if (const size_t zero = std::string_view(piece, count).find('\0'); zero != std::string::npos) {
      out.zero = text.size() + zero;
      break;
    }
    if (text.empty() && !unknown) text.reserve(std::min(size, most));
    text.append(piece, count);
  }
  if (std::ferror(file.get())) fail("cannot read '", path, "': ", std::strerror(errno), ".");
  return out;
}

}  // namespace

std::vector<std::string> expand_glob(const std::string& pattern) {
  glob_t found{};
  const int status = ::glob(pattern.c_str(), GLOB_NOSORT, nullptr, &found);
  std::vector<std::string> paths(found.gl_pathv, found.gl_pathv + found.gl_pathc);
  ::globfree(&found);
  if (status != 0 && status != GLOB_NOMATCH) fail("cannot expand '", pattern, "'.");
  std::sort(paths.begin(), paths.end());  // by bytes; glob() would sort by the locale
  return paths;
}

void check_extensions(const std::vector<std::string>& extensions, const std::string& task) {
  for (const std::string& ending : extensions) {
    if (ending.starts_with('.')) continue;
    usage_error("'extensions' of the task ", task, " has '", ending,
                "', but an extension begins with a dot: '.", ending.empty() ? "txt" : ending, "'.");
  }
}

uint64_t document_lot(const std::string& name, uint64_t salt) {
  StableHash hash;
  hash.add(salt);
  hash.add(std::string_view(name));
  return hash.value();
}

LeftOut& LeftOut::operator+=(LeftOut other) {
  for (size_t i = 0; i < kinds().size(); ++i) {
    kinds()[i]->insert(kinds()[i]->end(), other.kinds()[i]->begin(), other.kinds()[i]->end());
  }
  return *this;
}

std::string LeftOut::text() const {
  constexpr size_t kNamed = 3;
  std::vector<std::string> parts;
  const auto add = [&](const std::vector<std::string>& names, const char* one,
                       const char* several) {
    if (names.empty()) return;
    std::string part;
    for (size_t i = 0; i < std::min(names.size(), kNamed); ++i) {
      part += str(i == 0 ? "'" : i + 1 == names.size() ? " and '" : ", '", names[i], "'");
    }
    if (names.size() > kNamed) part += str(" and ", names.size() - kNamed, " more");
    parts.push_back(part + (names.size() == 1 ? one : several));
  };
  add(not_text, " is not text", " are not text");
  add(empty, " is empty", " are empty");
  add(alike, " has the content of another file", " have the content of other files");
  add(no_file, " is no regular file", " are no regular files");
  return parts.empty() ? "" : "left out: " + join(parts, "; ");
}

std::string LeftOut::in_brackets() const {
  const std::string files = text();
  return files.empty() ? "" : " (" + files + ")";
}

Corpus read_corpus(const CorpusOptions& options) {
  LeftOut left_out;
  const std::vector<File> files = find_files(options, left_out.no_file);
  // Where not everything is taken, what is taken should be a fair sample of it.
  std::vector<size_t> order(files.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  if (options.max_bytes) {
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
      return document_lot(files[a].name, 0) < document_lot(files[b].name, 0);
    });
  }

  std::vector<Document> documents(files.size());
  std::unordered_set<std::string_view> seen;  // views of documents' texts, which do not move
  int64_t left = options.max_bytes.value_or(INT64_MAX);
  for (size_t i : order) {
    if (left == 0) break;
    auto [text, zero] = read_text(files[i].path, static_cast<size_t>(left));
    if (zero) {
      if (files[i].asked_for) {
        fail("'", files[i].path, "' is not text: byte ", *zero, " is zero.");
      }
      left_out.not_text.push_back(files[i].name);
      continue;
    }
    const bool known = seen.contains(text);
    if (text.empty() || known) {
      (known ? left_out.alike : left_out.empty).push_back(files[i].name);
      continue;
    }
    left -= static_cast<int64_t>(text.size());
    documents[i] = {files[i].name, files[i].path, std::move(text)};
    seen.insert(documents[i].text);
  }
  std::erase_if(documents, [](const Document& document) { return document.text.empty(); });
  if (documents.empty()) {
    const std::string found = files.empty() ? "no file was found"
                              : files.size() == 1
                                  ? "the one file found is empty or not text"
                                  : str("the ", files.size(), " files found are empty or not text");
    const std::string others = LeftOut{.no_file = left_out.no_file}.text();
    fail("there is no text in ", join(options.paths), ": ", found,
         options.extensions.empty() ? "" : " (looking for " + join(options.extensions) + ")",
         others.empty() ? "." : "; " + others + ".");
  }
  return {std::move(documents), std::move(left_out)};
}

}  // namespace headloom::data
