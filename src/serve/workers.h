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

// A thread a connection, begun where none is idle, up to `most`. A connection beyond them, or one
// for which no thread can begin, is answered where it was accepted, with refusing() set.
class Workers final : public httplib::TaskQueue {
 public:
  explicit Workers(size_t most) : most_(most) {}

  void enqueue(std::function<void()> job) override;
  void shutdown() override;
  // Whether this thread answers a connection for which there is no room.
  static bool refusing();

 private:
  bool take(std::function<void()>& job);
  void work();

  const size_t most_;
  std::mutex mutex_;
  std::condition_variable news_;
  std::deque<std::function<void()>> jobs_;
  std::vector<std::thread> threads_;
  size_t idle_ = 0;
  bool over_ = false;
};

}  // namespace headloom::serve
