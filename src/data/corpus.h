// Text files as documents.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace headloom::data {

struct Document {
  // The path below the folder that was asked for, or the file's name: the same on machines that
  // keep the same files in different places.
  std::string name;
  std::string path;
  std::string text;  // at least one byte, none of them 0
};

struct CorpusOptions {
  // Files, folders (all files below, hidden ones and those that are not text left out) and globs.
  std::vector<std::string> paths;
  // ".h", ".txt": in folders only files that end so; empty: every text file.
  std::vector<std::string> extensions;
  // Take files in an order given by a hash of their names, and the last in part, up to so many
  // bytes.
  std::optional<int64_t> max_bytes;
};

// The names of the files that were found and have no text of their own.
struct LeftOut {
  std::vector<std::string> not_text = {}, empty = {}, alike = {}, no_file = {};

  std::array<std::vector<std::string>*, 4> kinds() { return {&not_text, &empty, &alike, &no_file}; }
  LeftOut& operator+=(LeftOut other);
  // "left out: 'a.png', 'b.png', 'c.png' and 4 more are not text", or "" where there are none.
  std::string text() const;
  // The same in brackets after a space, for the description of a task.
  std::string in_brackets() const;
};

struct Corpus {
  std::vector<Document> documents;  // in the order of `paths` and, within one, of their names
  LeftOut left_out;
};

// The files and folders that a glob (* ? [abc]) matches, sorted.
std::vector<std::string> expand_glob(const std::string& pattern);

// Of files with the same content one is kept. Throws Error where a path is missing, cannot be read
// or is not text, or there is no text.
Corpus read_corpus(const CorpusOptions& options);

// Throws UsageError, naming the task, for an extension without its dot.
void check_extensions(const std::vector<std::string>& extensions, const std::string& task);

// A number by which to pick documents fairly: no order of names or folders shows in it. Different
// salts give unrelated numbers.
uint64_t document_lot(const std::string& name, uint64_t salt);

// The salt of the lots by which documents are held out; max_bytes draws with another.
constexpr uint64_t kSplitSalt = 1;

// Whole documents are held out from this many on: fewer cannot meet a share of some percent
// closely.
constexpr size_t kManyDocuments = 20;

}  // namespace headloom::data
