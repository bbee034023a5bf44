#include "distributed/launcher.h"

#include <unistd.h>

#include <array>
#include <cstdlib>

#include "core/error.h"
#include "core/hash.h"
#include "core/parse_number.h"

namespace headloom {
namespace {

using Variable = std::function<std::string(const std::string&)>;

struct LauncherVariables {
  const char* launcher;
  const char *rank, *size, *local_size;
  // What tells jobs on one machine apart. It is equal in all processes of a job. The variables of
  // another launcher need not be: where each rank is a step of Slurm, each has its own step number.
  std::array<const char*, 3> job;
};
// torchrun's go first: programs set them beside those of MPI, which they were started by.
constexpr std::array kLaunchers = {
    LauncherVariables{
        "torchrun", "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", {"TORCHELASTIC_RUN_ID"}},
    LauncherVariables{"Open MPI",
                      "OMPI_COMM_WORLD_RANK",
                      "OMPI_COMM_WORLD_SIZE",
                      "OMPI_COMM_WORLD_LOCAL_SIZE",
                      {"PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_hnp_uri"}},
    LauncherVariables{
        "MPI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS", {"PMI_JOBID", "PMIX_NAMESPACE"}},
    // Those of the step: a batch script has SLURM_NTASKS too, but is one process.
    LauncherVariables{"Slurm",
                      "SLURM_PROCID",
                      "SLURM_STEP_NUM_TASKS",
                      "SLURM_NTASKS_PER_NODE",
                      {"SLURM_JOB_ID", "SLURM_STEP_ID"}},
};

int64_t number(const Variable& variable, const std::string& name, int64_t low, int64_t high) {
  const std::string text = variable(name);
  const auto value = parse_number<int64_t>(text);
  if (!value || *value < low || *value > high) {
    usage_error("the variable ", name, " is \"", text, "\", expected a whole number from ", low,
                " to ", high, ".");
  }
  return *value;
}

std::string address(const Variable& variable, const LauncherVariables& of, int64_t size) {
  const std::string given = variable("MASTER_ADDR");
  if (!given.empty()) return given;
  const std::string step = variable("SLURM_STEP_NODELIST");
  const std::string nodes = step.empty() ? variable("SLURM_JOB_NODELIST") : step;
  if (!nodes.empty()) return first_host(nodes);
  if (variable(of.local_size) == std::to_string(size)) return "127.0.0.1";
  usage_error("the variable MASTER_ADDR is not set, and ", of.launcher,
              " does not say where rank 0 is; set it to the name or address of rank 0's machine "
              "for all ranks.");
}

std::string job(const Variable& variable, const LauncherVariables& of) {
  std::string out;
  for (const char* name : of.job) {
    const std::string value = name == nullptr ? "" : variable(name);
    if (!value.empty()) out += str("/", value);
  }
  return out;
}

// Where the launcher says nothing of the job: another one's, in which all processes are.
std::string job_around(const Variable& variable) {
  for (const char* name : {"SLURM_JOB_ID", "PMIX_NAMESPACE", "PMI_JOBID"}) {
    const std::string value = variable(name);
    if (!value.empty()) return "/" + value;
  }
  return "";
}

}  // namespace

std::string first_host(const std::string& list) {
  const size_t bracket = list.find('[');
  const size_t comma = list.find(',');
  if (bracket == std::string::npos || comma < bracket) return list.substr(0, comma);
  const size_t end = list.find_first_of(",-]", bracket);
  return list.substr(0, bracket) + list.substr(bracket + 1, end - bracket - 1);
}

std::optional<Place> place_among_ranks(const Variable& variable) {
  constexpr int64_t kMost = 100000;
  // RANK=0 alone may be somebody else's variable; another rank is not the only one.
  const std::string rank = variable("RANK");
  if (!rank.empty() && rank != "0" && variable("WORLD_SIZE").empty()) {
    usage_error("the variable RANK is \"", rank,
                "\", but WORLD_SIZE is not set; set it to the number of ranks, or unset RANK to "
                "train with one process.");
  }
  for (const LauncherVariables& of : kLaunchers) {
    if (variable(of.rank).empty() || variable(of.size).empty()) continue;
    Place place;
    place.launcher = of.launcher;
    place.ours = !variable("HEADLOOM_PROCESSES").empty();
    place.size = number(variable, of.size, 1, kMost);
    place.rank = number(variable, of.rank, 0, place.size - 1);
    if (place.size == 1) return std::nullopt;
    place.address = address(variable, of, place.size);
    place.served = variable("TORCHELASTIC_USE_AGENT_STORE") == "True";
    place.job = job(variable, of);
    const bool has_port = !variable("MASTER_PORT").empty();
    if (place.job.empty() && !has_port) place.job = job_around(variable);
    if (has_port) {
      place.port = number(variable, "MASTER_PORT", 1, 65535);
    } else if (place.job.empty() && !variable("MASTER_ADDR").empty()) {
      place.port = 29500;  // nothing else that all machines know; PyTorch's own
    } else {
      Fnv1a hash;
      // MPICH says nothing of its job: its processes on one machine have one parent.
      hash.add(place.job.empty() ? std::to_string(::getppid()) : place.job);
      // Below 32768: from there on Linux gives ports to outgoing connections, one of which could
      // hold this one.
      place.port = 20000 + static_cast<int64_t>(hash.value() % 12000);
    }
    return place;
  }
  return std::nullopt;
}

std::optional<Place> place_among_ranks() {
  return place_among_ranks([](const std::string& name) {
    const char* const value = std::getenv(name.c_str());
    return std::string(value == nullptr ? "" : value);
  });
}

}  // namespace headloom
