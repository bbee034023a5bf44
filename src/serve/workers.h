// Threads that answer connections. Free of torch.
#pragma once

#include <httplib.h>

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace headloom::serve {

// A thread a connection, begun where none is idle. Connections beyond `most` are to be refused.
class Workers final : public httplib::TaskQueue {
 public:
  explicit Workers(size_t most) : most_(most) {}

  void enqueue(std::function<void()> job) override;
  void shutdown() override;

  // What this thread is to do with the connection that it got: answer it; refuse it; or refuse it
  // without waiting for anything, because it accepts the others.
  enum class Task { answer, refuse, refuse_at_once };
  static Task task();

 private:
  struct Job {
    std::function<void()> body;
    bool refused = false;
  };
  bool take(std::function<void()>& body);
  void work();

  static constexpr size_t kRefusing = 64;  // threads that refuse

  const size_t most_;
  std::mutex mutex_;
  std::condition_variable news_;
  std::deque<Job> jobs_;
  std::vector<std::thread> threads_;
  size_t idle_ = 0, answered_ = 0;  // threads; connections
  bool over_ = false;
};

}  // namespace headloom::serve
