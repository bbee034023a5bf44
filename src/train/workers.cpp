#include "train/workers.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <utility>

#include "core/error.h"
#include "core/spawn.h"
#include "train/interrupt.h"

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
  std::map<std::string, std::string> variables;
  if (std::getenv("OMP_NUM_THREADS") == nullptr) variables["OMP_NUM_THREADS"] = "1";
  Process process{.errors = ends[0], .owner = owner, .label = label};
  try {
    process.id = spawn(command, variables, ends[1]);
  } catch (...) {
    ::close(ends[0]);
    ::close(ends[1]);
    throw;
  }
  ::close(ends[1]);
  processes_.push_back(std::move(process));
}

void Workers::pass_on(Process& process, const char* data, size_t size) {
  process.line.append(data, size);
  for (size_t end; (end = process.line.find('\n')) != std::string::npos;) {
    const std::string line = process.line.substr(0, end + 1);
    process.line.erase(0, end + 1);
    process.last = line.substr(0, end);
    if (!told_ || line != kWorkerInterrupted) std::fputs((process.label + line).c_str(), stderr);
  }
  std::fflush(stderr);
}

void Workers::interrupt() {
  if (told_) return;
  told_ = true;
  for (const Process& process : processes_) ::kill(process.id, SIGINT);
}

Workers::Ended Workers::wait() {
  while (true) {
    if (interrupted()) interrupt();
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
                  .code = WIFEXITED(status) ? WEXITSTATUS(status) : -1,
                  .how = WIFSIGNALED(status) ? str("was killed by signal ", WTERMSIG(status))
                                             : str("ended with exit code ", WEXITSTATUS(status))};
      constexpr std::string_view kMessage = "headloom: ";
      if (process.last.starts_with(kMessage)) ended.message = process.last.substr(kMessage.size());
      ::close(process.errors);
      processes_.erase(processes_.begin() + static_cast<int64_t>(i));
      return ended;
    }
  }
}

}  // namespace headloom
