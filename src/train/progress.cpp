#include "train/progress.h"

#include <unistd.h>

#include <cstdio>

namespace headloom {

Progress::Progress(std::string label, bool silent)
    : label_(label.empty() ? "" : std::move(label) + "  "),
      silent_(silent),
      terminal_(::isatty(STDERR_FILENO)) {}

Progress::~Progress() { clear(); }

void Progress::clear() {
  if (drawn_) std::fputs("\r\033[K", stderr);
  drawn_ = false;
}

bool Progress::due() const {
  if (silent_) return false;
  const auto pause = std::chrono::milliseconds(terminal_ ? 200 : 10000);
  return last_.time_since_epoch().count() == 0 || std::chrono::steady_clock::now() - last_ >= pause;
}

void Progress::update(const std::string& text) {
  if (!due()) return;
  last_ = std::chrono::steady_clock::now();
  if (terminal_) {
    std::fprintf(stderr, "\r\033[K%s%s", label_.c_str(), text.c_str());
    drawn_ = true;
  } else {
    std::fprintf(stderr, "%s%s\n", label_.c_str(), text.c_str());
  }
  std::fflush(stderr);
}

void Progress::line(const std::string& text) {
  if (silent_) return;
  clear();
  std::fprintf(stderr, "%s%s\n", label_.c_str(), text.c_str());
  std::fflush(stderr);
  last_ = std::chrono::steady_clock::now();
}

}  // namespace headloom
