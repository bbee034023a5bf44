#include "cli/command.h"

namespace headloom::cli {

void ConfigArguments::add(CLI::App& app, const char* doc) {
  app.add_option("config", path, doc)->required();
  app.add_option("--set", overrides,
                 "override a key of the configuration, as in --set train.steps=200; repeatable")
      ->type_name("KEY=VALUE")
      ->take_all()
      ->allow_extra_args(false);
}

Node ConfigArguments::read() const {
  Node root = read_toml(path);
  for (const std::string& assignment : overrides) apply_override(root, assignment);
  return root;
}

}  // namespace headloom::cli
