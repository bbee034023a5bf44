#include "cli/command.h"

namespace headloom::cli {

Command bench_command() {
  return {"bench", "operators and models beside plain attention in one run", "headloom bench composed_attention",
          [](CLI::App&) -> std::function<int()> { return [] { return 0; }; }};
}

}  // namespace headloom::cli
