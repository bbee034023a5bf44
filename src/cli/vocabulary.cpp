#include "data/vocabulary.h"

#include <cstdio>
#include <filesystem>

#include "cli/arguments.h"
#include "cli/command.h"
#include "core/error.h"
#include "core/files.h"
#include "core/text.h"
#include "data/tokenizer.h"

namespace headloom::cli {
namespace {

struct VocabularyArguments {
  data::CorpusOptions corpus;
  data::VocabularyOptions vocabulary;
  std::string out;
};

// Of another program's file, say, that has the same ending. An empty one is nobody's.
void keep_other_files(const std::string& path) {
  check_output_file(path);
  if (!std::filesystem::exists(path) || read_file(path).empty()) return;
  try {
    data::make_tokenizer(path);
  } catch (const Error&) {
    usage_error(path, ": is there and is no vocabulary; choose another file with --out.");
  }
}

int run_vocabulary(const VocabularyArguments& a) {
  keep_other_files(a.out);
  const auto [documents, left_out] = data::read_corpus(a.corpus);
  double bytes = 0;
  for (const data::Document& document : documents)
    bytes += static_cast<double>(document.text.size());
  std::fprintf(stderr, "learning %lld tokens from %s, %s of text%s%s\n",
               static_cast<long long>(a.vocabulary.size),
               counted(std::ssize(documents), "file").c_str(), human_bytes(bytes).c_str(),
               left_out.text().empty() ? "" : "; ", left_out.text().c_str());
  write_file(a.out, data::learn_vocabulary(documents, a.vocabulary));
  std::printf("%s\n", a.out.c_str());
  return 0;
}

}  // namespace

Command vocabulary_command() {
  return {"vocabulary", "learn a sub-word vocabulary from text, for task.tokenizer",
          "headloom vocabulary my/texts --size 8192 --out my.model",
          [](CLI::App& app) -> std::function<int()> {
            auto a = std::make_shared<VocabularyArguments>();
            app.add_option("paths", a->corpus.paths, "files, folders and globs")->required();
            app.add_option("--size", a->vocabulary.size,
                           "tokens, of which 258 are bytes, the end of a document and the unknown")
                ->check(whole_number(259, int64_t{1} << 20))
                ->capture_default_str();
            app.add_option("--method", a->vocabulary.method, "bpe or unigram")
                ->check(one_of({"bpe", "unigram"}))
                ->capture_default_str();
            app.add_option("--max-bytes", a->corpus.max_bytes,
                           "learn from a sample of at most so many bytes; all by default")
                ->check(whole_number(1));
            app.add_option("--out", a->out, "file of the model, *.model")
                ->check(ends_in(".model",
                                "by which tokenize and task.tokenizer know a vocabulary of this "
                                "kind"))
                ->required();
            return [a] { return run_vocabulary(*a); };
          }};
}

}  // namespace headloom::cli
