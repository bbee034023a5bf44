// Writes checkpoints in a thread of its own, so that training waits for the copy to memory alone.
#pragma once

#include <atomic>
#include <functional>
#include <future>

namespace headloom {

class CheckpointWriter {
 public:
  using Cancelled = std::atomic<bool>;

  CheckpointWriter() = default;
  CheckpointWriter(const CheckpointWriter&) = delete;
  CheckpointWriter& operator=(const CheckpointWriter&) = delete;
  // Waits, after telling the writing that nobody waits for its end. What it throws is lost.
  ~CheckpointWriter();

  // Runs `write` in a thread, after the writing before has ended. `write` should return soon after
  // its argument has become true.
  void start(std::function<void(const Cancelled&)> write);
  // Throws what a writing has thrown that has ended.
  void check();
  // Waits for the end of the writing and throws what it has thrown.
  void wait();

 private:
  Cancelled cancelled_ = false;
  std::future<void> writing_;
};

}  // namespace headloom
