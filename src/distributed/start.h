// Processes that this machine trains one model with, started here.
#pragma once

#include <functional>
#include <string>
#include <vector>

namespace headloom {

// Starts `command`, whose first word is the path of a program, `count` times, as the ranks of one
// job (Place), and waits until all have ended. Each has its share of the processor's cores as
// OMP_NUM_THREADS, unless that is set. They write to this process's output. `interrupted` is asked
// now and then, and passed on once. Where one of them fails, the others end; what is left of them
// after 7 seconds is killed. Returns 0, or the exit code of the first that has failed.
int start_ranks(int64_t count, const std::vector<std::string>& command,
                const std::function<bool()>& interrupted);

}  // namespace headloom
