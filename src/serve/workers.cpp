#include "serve/workers.h"

#include <new>
#include <system_error>

namespace headloom::serve {
namespace {

thread_local bool in_refusal = false;

}  // namespace

bool Workers::refusing() { return in_refusal; }

void Workers::enqueue(std::function<void()> job) {
  if (take(job)) {
    news_.notify_one();
    return;
  }
  in_refusal = true;
  job();
  in_refusal = false;
}

// Where it returns false, `job` is as it was.
bool Workers::take(std::function<void()>& job) {
  const std::lock_guard lock(mutex_);
  try {
    if (idle_ <= jobs_.size()) {  // all who are idle have a job coming
      if (threads_.size() == most_) return false;
      threads_.reserve(most_);
      threads_.emplace_back([this] { work(); });
      ++idle_;
    }
    jobs_.emplace_back();
    jobs_.back().swap(job);
    return true;
  } catch (const std::system_error&) {  // no more threads
    return false;
  } catch (const std::bad_alloc&) {
    return false;
  }
}

void Workers::work() {
  while (true) {
    std::function<void()> job;
    {
      std::unique_lock lock(mutex_);
      news_.wait(lock, [&] { return over_ || !jobs_.empty(); });
      if (jobs_.empty()) return;
      job.swap(jobs_.front());
      jobs_.pop_front();
      --idle_;
    }
    job();
    const std::lock_guard lock(mutex_);
    ++idle_;
  }
}

void Workers::shutdown() {
  {
    const std::lock_guard lock(mutex_);
    over_ = true;
  }
  news_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

}  // namespace headloom::serve
