// headloom import and export: Hugging Face folders.
#include <cstdio>
#include <filesystem>

#include "cli/arguments.h"
#include "cli/command.h"
#include "core/text.h"
#include "interop/convert.h"

namespace headloom::cli {
namespace {

struct InteropArguments {
  std::string from, out, checkpoint = "best", family;
};

int report(const Converted& result, const std::string& out) {
  if (!result.note.empty()) std::fprintf(stderr, "%s\n", result.note.c_str());
  const std::string tokenizer = std::filesystem::path(result.tokenizer).filename().string();
  std::printf("%s (%s, %s parameters%s%s)\n", out.c_str(), result.family.c_str(),
              human_count(static_cast<double>(result.parameters)).c_str(),
              tokenizer.empty() ? "" : ", ", tokenizer.c_str());
  return 0;
}

}  // namespace

Command import_command() {
  return {
      "import", "a Hugging Face folder as a run that eval and generate understand",
      "headloom import pythia-70m --out runs/pythia", [](CLI::App& app) -> std::function<int()> {
        auto a = std::make_shared<InteropArguments>();
        app.add_option("folder", a->from, "config.json, weights and a tokenizer")->required();
        app.add_option("--out", a->out, "folder of the new run")->check(not_empty())->required();
        return [a] { return report(import_folder(a->from, a->out), a->out); };
      }};
}

Command export_command() {
  return {"export", "a run as a folder that Hugging Face transformers loads",
          "headloom export runs/text --out my-model", [](CLI::App& app) -> std::function<int()> {
            auto a = std::make_shared<InteropArguments>();
            app.add_option("model", a->from, "folder of a run")->required();
            app.add_option("--out", a->out, "new folder")->check(not_empty())->required();
            app.add_option("--as", a->family,
                           "model_type, as in --as llama; the first that fits by default")
                ->check(not_empty());
            add_checkpoint_option(app, a->checkpoint);
            return [a] {
              return report(export_run(a->from, a->checkpoint, a->family, a->out), a->out);
            };
          }};
}

}  // namespace headloom::cli
