// Ctrl-C and SIGTERM.
#pragma once

namespace headloom {

// From here on the first signal is only noted: train() finishes its step, saves and returns. A
// second one ends the process at once.
void install_interrupt_handler();
bool interrupted();

}  // namespace headloom
