// The progress line of a run on stderr: redrawn in place on a terminal, a line now and then
// elsewhere.
#pragma once

#include <chrono>
#include <string>

namespace headloom {

class Progress {
 public:
  // `silent`: nothing is shown.
  explicit Progress(std::string label, bool silent = false);
  ~Progress();
  // Whether it is time to show something again.
  bool due() const;
  // Shows `text` as the present state, where that is due.
  void update(const std::string& text);
  // Prints a line that stays.
  void line(const std::string& text);

 private:
  void clear();
  const std::string label_;
  const bool silent_, terminal_;
  bool drawn_ = false;
  std::chrono::steady_clock::time_point last_;
};

}  // namespace headloom
