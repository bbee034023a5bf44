#include "serve/workers.h"

#include <new>
#include <system_error>

namespace headloom::serve {
namespace {

thread_local Workers::Task current_task = Workers::Task::answer;

}  // namespace

Workers::Task Workers::task() { return current_task; }

void Workers::enqueue(std::function<void()> job) {
  if (take(job)) {
    news_.notify_one();
    return;
  }
  current_task = Task::refuse_at_once;
  job();
}

// Where it returns false, `body` is as it was.
bool Workers::take(std::function<void()>& body) {
  const std::lock_guard lock(mutex_);
  try {
    if (idle_ <= jobs_.size()) {  // every idle thread has a job coming
      if (threads_.size() == most_ + kRefusing) return false;
      threads_.reserve(most_ + kRefusing);
      threads_.emplace_back([this] { work(); });
      ++idle_;
    }
    jobs_.emplace_back();
  } catch (const std::system_error&) {  // no more threads
    return false;
  } catch (const std::bad_alloc&) {
    return false;
  }
  jobs_.back().body.swap(body);
  jobs_.back().refused = answered_ == most_;
  if (!jobs_.back().refused) ++answered_;
  return true;
}

void Workers::work() {
  std::unique_lock lock(mutex_);
  while (true) {
    news_.wait(lock, [&] { return over_ || !jobs_.empty(); });
    if (jobs_.empty()) return;
    Job job;
    job.body.swap(jobs_.front().body);
    job.refused = jobs_.front().refused;
    jobs_.pop_front();
    --idle_;
    lock.unlock();
    current_task = job.refused ? Task::refuse : Task::answer;
    job.body();
    lock.lock();
    if (!job.refused) --answered_;
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
