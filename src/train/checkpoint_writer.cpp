#include "train/checkpoint_writer.h"

#include <chrono>

namespace headloom {

CheckpointWriter::~CheckpointWriter() {
  cancelled_ = true;
  if (writing_.valid()) writing_.wait();
}

void CheckpointWriter::start(std::function<void(const Cancelled&)> write) {
  wait();
  writing_ = std::async(std::launch::async, std::move(write), std::cref(cancelled_));
}

void CheckpointWriter::check() {
  if (!writing_.valid()) return;
  if (writing_.wait_for(std::chrono::seconds(0)) == std::future_status::ready) writing_.get();
}

void CheckpointWriter::wait() {
  if (writing_.valid()) writing_.get();
}

}  // namespace headloom
