// Ctrl-C, SIGTERM, SIGHUP of a terminal that closes, and SIGUSR1, by which Slurm announces that a
// job's time is over.
#pragma once

#include <string_view>

namespace headloom {

// From here on the first signal is only noted: train() finishes its step, saves and returns. A
// second Ctrl-C or SIGTERM, half a second later or more, ends the process at once. `answer`,
// a constant of the program, is written to a terminal at the first.
void install_interrupt_handler(std::string_view answer = {});
bool interrupted();
// Whether SIGUSR1 was among the signals: the job shall begin again. It never ends the process.
bool to_be_requeued();

}  // namespace headloom
