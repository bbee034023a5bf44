#include "build.h"

#ifdef HEADLOOM_GLOO  // a PyTorch without it may lack all of c10d

#include "distributed/start.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <thread>

#include "core/error.h"
#include "core/spawn.h"
#include "distributed/meeting.h"

namespace headloom {
namespace {

class Ranks {
 public:
  Ranks(int64_t count, const std::vector<std::string>& command)
      : server_(serve_store()), store_(part_of_job(server_, str("/", ::getpid()))) {
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
                                              {"HEADLOOM_PROCESSES", std::to_string(count)}};
    if (std::getenv("OMP_NUM_THREADS") == nullptr) {
      const auto cores = static_cast<int64_t>(std::thread::hardware_concurrency());
      own["OMP_NUM_THREADS"] = std::to_string(std::max<int64_t>(cores / count, 1));
    }
    running_.emplace(spawn(command, own), rank);
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
