// Processes that train runs side by side.
#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

namespace headloom {

class Workers {
 public:
  // How a process ended.
  struct Ended {
    void* owner = nullptr;  // as given to start()
    std::string how;        // "ended with exit code 1", "was killed by signal 9"
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
  // them: they save and end, and what they say of it does not appear.
  Ended wait();

 private:
  struct Process {
    pid_t id = 0;
    int errors = -1;   // the end of the pipe to read from
    std::string line;  // not yet whole
    void* owner = nullptr;
    std::string label;
  };
  void pass_on(Process& process, const char* data, size_t size);

  std::vector<Process> processes_;
  bool told_ = false;
};

}  // namespace headloom
