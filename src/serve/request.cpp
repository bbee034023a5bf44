#include "serve/request.h"

namespace headloom::serve {

std::vector<Event> Answer::wait(std::chrono::milliseconds patience) {
  std::unique_lock lock(mutex_);
  news_.wait_for(lock, patience, [&] { return !events_.empty() || open_ == 0 || status_ != 0; });
  if (status_ != 0) {
    const bool memory = status_ == 503;
    throw Refusal(status_, memory ? "out_of_memory" : "",
                  error_.empty() ? "out of memory." : error_);
  }
  return std::exchange(events_, {});
}

bool Answer::done() const {
  const std::lock_guard lock(mutex_);
  return open_ == 0 && events_.empty();
}

void Answer::cancel() {
  const std::lock_guard lock(mutex_);
  cancelled_ = true;
}

void Answer::add(Event event) {
  {
    const std::lock_guard lock(mutex_);
    if (events_.size() < kMostUnread) {
      if (!event.finish.empty()) --open_;
      events_.push_back(std::move(event));
      news_.notify_one();
      return;
    }
  }
  fail(500, "the client reads too slowly.");
}

void Answer::fail(int status, const char* message) noexcept {
  {
    const std::lock_guard lock(mutex_);
    if (status_ != 0) return;
    status_ = status;
    cancelled_ = true;  // its other texts leave too
    try {
      error_ = message;
    } catch (const std::bad_alloc&) {
      error_.clear();
    }
  }
  news_.notify_one();
}

bool Answer::cancelled() const {
  const std::lock_guard lock(mutex_);
  return cancelled_;
}

}  // namespace headloom::serve
