#include "build.h"

#ifdef HEADLOOM_GLOO  // a PyTorch without it may lack all of c10d

#include "distributed/start.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <set>
#include <thread>

#include "core/error.h"
#include "distributed/meeting.h"

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

class Ranks {
 public:
  Ranks(int64_t count, const std::vector<std::string>& command)
      : server_(serve_store()),
        job_(str("/", ::getpid())),
        store_(part_of_job(server_, job_ + "/0")) {
    for (int64_t rank = 0; rank < count; ++rank) start(rank, count, command);
  }
  ~Ranks() {
    for (const auto& [id, rank] : running_) {
      ::kill(id, SIGKILL);
      ::waitpid(id, nullptr, 0);
    }
  }
  Ranks(const Ranks&) = delete;
  Ranks& operator=(const Ranks&) = delete;

  int wait(const std::function<bool()>& interrupted) {
    bool told = false;
    while (!running_.empty()) {
      if (interrupted() && !told) {
        told = true;
        for (const auto& [id, rank] : running_) ::kill(id, SIGINT);
      }
      int status = 0;
      const pid_t id = ::waitpid(-1, &status, WNOHANG);
      if (id > 0 && running_.contains(id)) {
        ended(id, status);
      } else {
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
      }
      // Those that are left have had time to notice; one that hangs does not.
      if (code_ != 0 && std::chrono::steady_clock::now() > end_) {
        for (const auto& [left, rank] : running_) ::kill(left, SIGKILL);
      }
    }
    return code_;
  }

 private:
  void start(int64_t rank, int64_t count, const std::vector<std::string>& command) {
    std::map<std::string, std::string> own = {{"RANK", std::to_string(rank)},
                                              {"WORLD_SIZE", std::to_string(count)},
                                              {"LOCAL_RANK", std::to_string(rank)},
                                              {"LOCAL_WORLD_SIZE", std::to_string(count)},
                                              {"MASTER_ADDR", "127.0.0.1"},
                                              {"MASTER_PORT", std::to_string(server_->getPort())},
                                              {"TORCHELASTIC_USE_AGENT_STORE", "True"},
                                              {"TORCHELASTIC_RUN_ID", std::to_string(::getpid())},
                                              {"TORCHELASTIC_RESTART_COUNT", "0"}};
    if (std::getenv("OMP_NUM_THREADS") == nullptr) {
      const auto cores = static_cast<int64_t>(std::thread::hardware_concurrency());
      own["OMP_NUM_THREADS"] = std::to_string(std::max<int64_t>(cores / count, 1));
    }
    const std::vector<std::string> environment = environment_with(own);
    posix_spawn_file_actions_t files;
    posix_spawn_file_actions_init(&files);
    posix_spawn_file_actions_addopen(&files, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
    // Ctrl-C reaches this process alone, which passes it on.
    posix_spawnattr_t attributes;
    posix_spawnattr_init(&attributes);
    posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP);
    posix_spawnattr_setpgroup(&attributes, 0);
    pid_t id = 0;
    const int error = ::posix_spawn(&id, command[0].c_str(), &files, &attributes,
                                    pointers_to(command).data(), pointers_to(environment).data());
    posix_spawn_file_actions_destroy(&files);
    posix_spawnattr_destroy(&attributes);
    if (error != 0) fail(command[0], ": cannot be started: ", std::strerror(error), ".");
    running_.emplace(id, rank);
  }

  void ended(pid_t id, int status) {
    const int64_t rank = running_.at(id);
    running_.erase(id);
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0) return;
    if (code_ == 0) {
      code_ = WIFEXITED(status) ? WEXITSTATUS(status) : 1;
      end_ = std::chrono::steady_clock::now() + std::chrono::seconds(7);
      // One that was killed says nothing itself.
      if (WIFSIGNALED(status) && store_->add("failures", 1) == 1) {
        const std::string why = str(
            "rank ", rank, " on host ", host_name(), " (process ", id, ") was killed by signal ",
            WTERMSIG(status), "; all ranks end. Go on from the last checkpoint with --resume.");
        store_->set("cause", why);
        std::fprintf(stderr, "headloom: %s\n", why.c_str());
      }
    }
  }

  const c10::intrusive_ptr<c10d::TCPStore> server_;
  const std::string job_;
  const c10::intrusive_ptr<c10d::Store> store_;
  std::map<pid_t, int64_t> running_;  // their ranks
  int code_ = 0;
  std::chrono::steady_clock::time_point end_;
};

}  // namespace

int start_ranks(int64_t count, const std::vector<std::string>& command,
                const std::function<bool()>& interrupted) {
  return Ranks(count, command).wait(interrupted);
}

}  // namespace headloom

#endif
