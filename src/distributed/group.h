// The processes of a launcher as a Communicator, over PyTorch's gloo.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "core/error.h"
#include "distributed/communicator.h"
#include "distributed/launcher.h"

namespace headloom {

// Another process does not answer: it has ended, or it hangs.
class LostRank : public Error {
 public:
  using Error::Error;
};

struct GroupOptions {
  std::string interface = {};  // "eth0"; empty: the one that reaches rank 0
  double timeout = 300;        // seconds that a process waits for the others
};

// Throws UsageError where this build has no gloo.
void check_can_distribute();

class Group : public Communicator {
 public:
  // Reaches the store where the processes meet.
  static std::unique_ptr<Group> connect(const Place& place, const GroupOptions& options);

  // Runs `body` among the others and returns its exit code. Where it throws, in this process or
  // another one, all processes end: the one that has failed first says why on stderr, with its rank
  // and its host; the others end without a word. One that was killed or hangs says nothing: it is
  // named by another. No process outlives the first failure by more than 10 seconds, or, where a
  // process hangs, `timeout` and 10 seconds.
  virtual int run(const std::function<int()>& body) = 0;

  // Connects the processes, after checking that all have the same Headloom, PyTorch, number of
  // threads and `configuration`. Throws UsageError naming the first that differs, or what is wrong
  // with the network.
  virtual void meet(const std::string& configuration) = 0;
};

}  // namespace headloom
