// Processes that this one starts.
#pragma once

#include <sys/types.h>

#include <map>
#include <string>
#include <vector>

namespace headloom {

// Starts `command`, whose first word is the path of a program, with this process's environment and
// `variables` set in it. It has no input and a process group of its own, so that Ctrl-C reaches
// this process alone. What it writes to stdout and stderr goes to the descriptor `output`, or where
// this process's does (-1). This program (program_path()) is called there as its user has called it
// here, so that its messages name it in the same way. Throws Error where it cannot be started.
pid_t spawn(const std::vector<std::string>& command,
            const std::map<std::string, std::string>& variables, int output = -1);

}  // namespace headloom
