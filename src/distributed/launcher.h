// Where this process stands among those that a launcher has started. Free of torch.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

namespace headloom {

struct Place {
  int64_t rank = 0, size = 1;
  // Where the store is that the processes meet in.
  std::string address;
  int64_t port = 0;
  bool served = false;   // the launcher serves the store; else rank 0 does
  std::string job;       // differs between jobs on one machine
  std::string launcher;  // "torchrun"
  bool ours = false;     // start_ranks() has started it, and sets torchrun's variables and its own
};

// From the variables of torchrun (RANK), Open MPI (OMPI_COMM_WORLD_RANK), MPICH and Intel MPI
// (PMI_RANK) or Slurm's srun (SLURM_PROCID), in this order. MASTER_ADDR and MASTER_PORT say where
// the processes meet; where they are absent, it is this machine for a job on one machine and the
// first of Slurm's hosts, and a port that is drawn from the job's number. Nothing where there are
// no such variables or only one process. `variable` gives a variable's value, "" for none. Throws
// UsageError naming the variable that is wrong or missing.
std::optional<Place> place_among_ranks(
    const std::function<std::string(const std::string&)>& variable);
// Of this process's environment.
std::optional<Place> place_among_ranks();

// The first host of Slurm's list: "gpu[003-010,12],login" begins with "gpu003".
std::string first_host(const std::string& list);

}  // namespace headloom
