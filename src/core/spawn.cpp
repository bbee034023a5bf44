#include "core/spawn.h"

#include <fcntl.h>
#include <spawn.h>
#include <unistd.h>

#include <cstring>

#include "core/error.h"
#include "core/platform.h"
#include "core/shell.h"

extern char** environ;

namespace headloom {
namespace {

std::vector<char*> pointers_to(const std::vector<std::string>& texts) {
  std::vector<char*> out;
  for (const std::string& text : texts) out.push_back(const_cast<char*>(text.c_str()));
  out.push_back(nullptr);
  return out;
}

// This process's environment with some variables set.
std::vector<std::string> environment_with(const std::map<std::string, std::string>& own) {
  std::vector<std::string> out;
  for (char** variable = environ; *variable != nullptr; ++variable) {
    const std::string text = *variable;
    if (!own.contains(text.substr(0, text.find('=')))) out.push_back(text);
  }
  for (const auto& [name, value] : own) out.push_back(name + "=" + value);
  return out;
}

}  // namespace

pid_t spawn(const std::vector<std::string>& command,
            const std::map<std::string, std::string>& variables, int output) {
  std::vector<std::string> words = command;
  if (words[0] == program_path()) words[0] = called_as();
  const std::vector<std::string> environment = environment_with(variables);
  posix_spawn_file_actions_t files;
  posix_spawn_file_actions_init(&files);
  posix_spawn_file_actions_addopen(&files, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  if (output >= 0) {
    posix_spawn_file_actions_adddup2(&files, output, STDOUT_FILENO);
    posix_spawn_file_actions_adddup2(&files, output, STDERR_FILENO);
  }
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP);
  posix_spawnattr_setpgroup(&attributes, 0);
  pid_t id = 0;
  const int error = ::posix_spawn(&id, command[0].c_str(), &files, &attributes,
                                  pointers_to(words).data(), pointers_to(environment).data());
  posix_spawn_file_actions_destroy(&files);
  posix_spawnattr_destroy(&attributes);
  if (error != 0) fail(command[0], ": cannot be started: ", std::strerror(error), ".");
  return id;
}

}  // namespace headloom
