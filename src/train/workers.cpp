#include "train/workers.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "core/error.h"
#include "train/interrupt.h"

extern char** environ;

namespace headloom {

Workers::~Workers() {
  for (const Process& process : processes_) {
    ::kill(process.id, SIGKILL);
    ::close(process.errors);
    ::waitpid(process.id, nullptr, 0);
  }
}

void Workers::start(const std::vector<std::string>& command, void* owner,
                    const std::string& label) {
  std::array<int, 2> ends{};
  if (::pipe2(ends.data(), O_CLOEXEC) != 0) {
    fail("a process cannot be started: ", std::strerror(errno), ".");
  }
  std::vector<std::string> environment;
  for (char** variable = environ; *variable != nullptr; ++variable)
    environment.push_back(*variable);
  if (std::getenv("OMP_NUM_THREADS") == nullptr) environment.push_back("OMP_NUM_THREADS=1");
  const auto pointers = [](const std::vector<std::string>& texts) {
    std::vector<char*> out;
    for (const std::string& text : texts) out.push_back(const_cast<char*>(text.c_str()));
    out.push_back(nullptr);
    return out;
  };
  posix_spawn_file_actions_t files;
  posix_spawn_file_actions_init(&files);
  posix_spawn_file_actions_addopen(&files, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_adddup2(&files, ends[1], STDOUT_FILENO);
  posix_spawn_file_actions_adddup2(&files, ends[1], STDERR_FILENO);
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP);
  posix_spawnattr_setpgroup(&attributes, 0);
  pid_t id = 0;
  const int error = ::posix_spawn(&id, command[0].c_str(), &files, &attributes,
                                  pointers(command).data(), pointers(environment).data());
  posix_spawn_file_actions_destroy(&files);
  posix_spawnattr_destroy(&attributes);
  ::close(ends[1]);
  if (error != 0) {
    ::close(ends[0]);
    fail(command[0], ": cannot be started: ", std::strerror(error), ".");
  }
  processes_.push_back({.id = id, .errors = ends[0], .line = {}, .owner = owner, .label = label});
}

void Workers::pass_on(Process& process, const char* data, size_t size) {
  process.line.append(data, size);
  for (size_t end; (end = process.line.find('\n')) != std::string::npos;) {
    if (!told_) {
      std::fputs((process.label + process.line.substr(0, end + 1)).c_str(), stderr);
    }
    process.line.erase(0, end + 1);
  }
  std::fflush(stderr);
}

Workers::Ended Workers::wait() {
  while (true) {
    if (interrupted() && !told_) {
      told_ = true;
      for (const Process& process : processes_) ::kill(process.id, SIGINT);
    }
    std::vector<pollfd> pipes;
    for (const Process& process : processes_) pipes.push_back({process.errors, POLLIN, 0});
    // An interruption may come just before the wait, which then must not be long.
    ::poll(pipes.data(), pipes.size(), 200);
    for (size_t i = 0; i < pipes.size(); ++i) {
      if (pipes[i].revents == 0) continue;
      Process& process = processes_[i];
      std::array<char, 4096> buffer{};
      const ssize_t got = ::read(process.errors, buffer.data(), buffer.size());
      if (got > 0) pass_on(process, buffer.data(), static_cast<size_t>(got));
      if (got > 0 || (got < 0 && errno == EINTR)) continue;
      if (!process.line.empty()) pass_on(process, "\n", 1);
      int status = 0;
      while (::waitpid(process.id, &status, 0) < 0 && errno == EINTR) {
      }
      Ended ended{.owner = process.owner,
                  .how = WIFSIGNALED(status) ? str("was killed by signal ", WTERMSIG(status))
                                             : str("ended with exit code ", WEXITSTATUS(status))};
      ::close(process.errors);
      processes_.erase(processes_.begin() + static_cast<int64_t>(i));
      return ended;
    }
  }
}

}  // namespace headloom
