#include <ATen/Context.h>
#include <fcntl.h>
#include <torch/version.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <new>

#include "build.h"
#include "cli/arguments.h"
#include "cli/command.h"
#include "core/error.h"
#include "core/platform.h"
#include "core/problem.h"
#include "core/shell.h"
#include "core/text.h"

namespace headloom::cli {
namespace {

constexpr std::string_view kName = "headloom";  // with which examples begin (command.h)

// From the last to the first, as the library takes them. To it "--prompt=" is an option whose value
// comes next, so that an empty value is put there.
std::vector<std::string> reversed_arguments(int argc, char** argv) {
  std::vector<std::string> out;
  for (int i = argc - 1; i > 0; --i) {
    std::string argument = argv[i];
    if (argument.starts_with("--") && argument.find('=') + 1 == argument.size()) {
      out.emplace_back();
      argument.pop_back();
    }
    out.push_back(std::move(argument));
  }
  return out;
}

int run(int argc, char** argv) {
  CLI::App app("Headloom: train, compare and run the Transformer's structural variants.",
               "headloom");
  app.require_subcommand(1);
  app.set_version_flag("--version", "headloom " HEADLOOM_VERSION " with PyTorch " TORCH_VERSION);
  app.set_help_all_flag("--help-all", "help of every subcommand");
  std::vector<std::pair<CLI::App*, std::function<int()>>> runners;
  for (const Command& command :
       {train_command(), compare_command(), report_command(), generate_command(), serve_command(),
        eval_command(), describe_command(), analyze_command(), bench_command(), list_command(),
        vocabulary_command(), tokenize_command(), import_command(), export_command()}) {
    CLI::App* sub = app.add_subcommand(command.name, command.doc);
    sub->footer(str("Example:\n  ", program_name(), command.example + kName.size()));
    runners.emplace_back(sub, command.setup(*sub));
  }
  if (argc == 1) {
    std::fputs(app.help().c_str(), stderr);
    return 2;
  }
  std::vector<std::string> names;
  for (const auto& [sub, runner] : runners) names.push_back(sub->get_name());
  const bool help = std::string_view(argv[1]) == "help";
  const std::string command = !help ? argv[1] : argc > 2 ? argv[2] : "";
  if (!command.empty() && command[0] != '-' &&
      std::find(names.begin(), names.end(), command) == names.end()) {
    usage_error("there is no command '", command, "'", did_you_mean(command, names));
  }
  if (help) {
    const CLI::App* asked = &app;
    for (const auto& [sub, runner] : runners) {
      if (sub->get_name() == command) asked = sub;
    }
    std::fputs(asked->help(asked == &app ? "" : app.get_name()).c_str(), stdout);
    return 0;
  }
  for (const auto& [sub, runner] : runners) {
    if (sub->get_name() == command) check_values(*sub, {argv + 2, argv + argc});
  }
  try {
    app.parse(reversed_arguments(argc, argv));
  } catch (const CLI::Success& shown) {  // --help or --version
    return app.exit(shown);
  } catch (const CLI::ParseError& error) {
    const auto chosen = app.get_subcommands();
    usage_error(explain(error, chosen.empty() ? app : *chosen.front()));
  }
  for (const auto& [sub, runner] : runners) {
    if (sub->parsed()) return runner();
  }
  return 2;
}

}  // namespace
}  // namespace headloom::cli

#ifndef __SANITIZE_ADDRESS__  // which has its own
// A std::bad_alloc of the standard library's does not say how much was asked for. Inlined, they
// look to GCC like a free() of what another function allocated.
[[gnu::noinline]] void* operator new(size_t bytes) {
  if (void* memory = std::malloc(bytes == 0 ? 1 : bytes)) return memory;
  throw headloom::OutOfMemory(bytes);
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, size_t) noexcept { std::free(memory); }
#endif

namespace {

int guarded(int argc, char** argv) {
  // Without a copy: there may be no memory left.
  const auto say = [](std::string_view text) {
    const bool open = !text.empty() && std::string_view(".?!").find(text.back()) == text.npos;
    std::fprintf(stderr, "headloom: %.*s%s\n", static_cast<int>(text.size()), text.data(),
                 open ? "." : "");
  };
  try {
    const int code = headloom::cli::run(argc, argv);
    if (std::fflush(stdout) == 0 && !std::ferror(stdout)) return code;
    say("the result cannot be written to the standard output (is the disk full?).");
  } catch (const headloom::UsageError& error) {
    say(error.what());
    return 2;
  } catch (const std::exception& error) {
    say(headloom::problem_of(error));
  }
  return 1;
}

}  // namespace

// A descriptor that is closed would be given to the next file that is opened, and what is printed
// would be written into that. Printing to what can only be read fails, as to a closed one.
void keep_standard_descriptors() {
  for (const int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (::fcntl(fd, F_GETFD) < 0) ::open("/dev/null", O_RDONLY);
  }
}

int main(int argc, char** argv) {
  keep_standard_descriptors();
  // Gradients of a saturated softmax become smaller than 1e-38, and products of such numbers take a
  // hundred times as long on Intel's processors. They count as 0. Threads take this over from the
  // one that starts them, so it comes first.
  at::globalContext().setFlushDenormal(true);
  // Large pages for large tensors: at long sequences half the time would go into faulting in small
  // ones. LibTorch reads this at its first allocation.
  setenv("THP_MEM_ALLOC_ENABLE", "1", /*overwrite=*/0);
  headloom::keep_freed_memory();  // for the next step
  std::signal(SIGXFSZ, SIG_IGN);  // a file that may not grow is an error of its writing
  if (argc > 0) headloom::set_program_name(argv[0]);
  const int code = guarded(argc, argv);
#ifndef __SANITIZE_ADDRESS__
  // LibTorch's destructors take every operator out of the dispatcher one by one, which costs a
  // short command a third of its time. The process ends anyway, and all files are closed by now.
  std::fflush(nullptr);
  std::_Exit(code);
#endif
  return code;
}
