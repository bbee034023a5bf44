// Processes that train runs side by side.
#pragma once

#include <sys/types.h>

#include <string>
#include <string_view>
#include <vector>

namespace headloom {

// What a process says that trains one run and was interrupted.
inline constexpr std::string_view kWorkerInterrupted =
    "headloom: interrupted; the same command goes on.\n";

// How its message ends where it has met an Obstacle.
inline constexpr std::string_view kWorkerObstacle =
    " The same command goes on once that has changed.";

class Workers {
 public:
  // How a process ended.
  struct Ended {
    void* owner = nullptr;     // as given to start()
    int code = -1;             // with which it has exited; -1: it was killed
    std::string how;           // "ended with exit code 1", "was killed by signal 9"
    std::string message = {};  // without "headloom: "; "" where it did not end with one
  };

  Workers() = default;
  // Ends the processes that are left.
  ~Workers();
  Workers(const Workers&) = delete;
  Workers& operator=(const Workers&) = delete;

  size_t running() const { return processes_.size(); }
  // Starts `command`, whose first word is the path of a program. It has one thread, unless
  // OMP_NUM_THREADS says otherwise, and a process group of its own, so that Ctrl-C reaches this
  // process alone. What it writes to stderr appears here line by line, each with `label` before it.
  // Throws Error where it cannot be started.
  void start(const std::vector<std::string>& command, void* owner, const std::string& label);
  // Waits until one has ended. An interruption of this process (interrupt.h) is passed on to all of
  // them.
  Ended wait();
  // Interrupts all of them: they save and end. kWorkerInterrupted, by which they say so, does not
  // appear; why one could not save does.
  void interrupt();

 private:
  struct Process {
    pid_t id = 0;
    int errors = -1;        // the end of the pipe to read from
    std::string line = {};  // not yet whole
    std::string last = {};  // the last that was
    void* owner = nullptr;
    std::string label;
  };
  void pass_on(Process& process, const char* data, size_t size);

  std::vector<Process> processes_;
  bool told_ = false;
};

}  // namespace headloom
