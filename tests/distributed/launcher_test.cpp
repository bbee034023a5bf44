// A process's place among those that a launcher has started, from the launcher's variables.
#include "distributed/launcher.h"

#include <gtest/gtest.h>

#include <map>

#include "core/error.h"

namespace headloom {
namespace {

using Variables = std::map<std::string, std::string>;

std::optional<Place> place(const Variables& set) {
  return place_among_ranks([&](const std::string& name) {
    const auto found = set.find(name);
    return found == set.end() ? "" : found->second;
  });
}

std::string refusal(const Variables& set) {
  try {
    place(set);
  } catch (const UsageError& error) {
    return error.what();
  }
  return "";
}

TEST(Launcher, NothingWithoutVariablesOrWithOneProcess) {
  EXPECT_FALSE(place({}));
  EXPECT_FALSE(place({{"RANK", "0"}}));  // somebody else's variable
  EXPECT_FALSE(place({{"RANK", "0"}, {"WORLD_SIZE", "1"}}));
  EXPECT_TRUE(refusal({{"RANK", "1"}})
                  .starts_with("the variable RANK is \"1\", but WORLD_SIZE is not set; "));
  // A batch script of Slurm's, which is no step.
  EXPECT_FALSE(place({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "4"}}));
}

TEST(Launcher, Torchrun) {
  Variables set = {{"RANK", "3"},
                   {"WORLD_SIZE", "4"},
                   {"MASTER_ADDR", "node1"},
                   {"MASTER_PORT", "4000"},
                   {"TORCHELASTIC_USE_AGENT_STORE", "True"}};
  const auto first = place(set);
  ASSERT_TRUE(first);
  EXPECT_EQ(first->launcher, "torchrun");
  EXPECT_EQ(first->rank, 3);
  EXPECT_EQ(first->size, 4);
  EXPECT_EQ(first->address, "node1");
  EXPECT_EQ(first->port, 4000);
  EXPECT_TRUE(first->served);
  EXPECT_FALSE(first->ours);
  // Each agent counts for itself.
  set["TORCHELASTIC_RESTART_COUNT"] = "1";
  EXPECT_EQ(place(set)->job, first->job);
}

TEST(Launcher, OurRanksKnowTheirLauncherInsideAnotherJob) {
  Variables set = {
      {"RANK", "1"},           {"WORLD_SIZE", "2"},         {"MASTER_ADDR", "127.0.0.1"},
      {"MASTER_PORT", "4000"}, {"HEADLOOM_PROCESSES", "2"}, {"TORCHELASTIC_RUN_ID", "9"}};
  EXPECT_EQ(place(set)->job, "/9");
  EXPECT_TRUE(place(set)->ours);
  set["SLURM_JOB_ID"] = "77";
  EXPECT_EQ(place(set)->job, "/9");
}

TEST(Launcher, RanksOfSeveralStepsOfSlurmMeet) {
  const auto of_step = [](const char* step, const char* rank) {
    return Variables{{"RANK", rank},          {"WORLD_SIZE", "2"},
                     {"MASTER_ADDR", "a"},    {"SLURM_JOB_ID", "77"},
                     {"SLURM_STEP_ID", step}, {"PMIX_NAMESPACE", std::string("slurm.77.") + step}};
  };
  const auto first = place(of_step("0", "0")), second = place(of_step("1", "1"));
  EXPECT_EQ(first->job, second->job);
  EXPECT_EQ(first->port, second->port);
  Variables other = of_step("0", "0");
  other["SLURM_JOB_ID"] = "78";
  EXPECT_NE(place(other)->port, first->port);
  // Of mpirun's processes, whose program sets RANK itself.
  for (const char* name : {"SLURM_JOB_ID", "SLURM_STEP_ID"}) other.erase(name);
  EXPECT_EQ(place(other)->job, "/slurm.77.0");
}

TEST(Launcher, SlurmMeetsOnTheFirstHostOfTheStep) {
  Variables set = {{"SLURM_PROCID", "1"},
                   {"SLURM_STEP_NUM_TASKS", "2"},
                   {"SLURM_JOB_NODELIST", "gpu[001-004]"},
                   {"SLURM_STEP_NODELIST", "gpu[003-004]"},
                   {"SLURM_JOB_ID", "17"}};
  const auto first = place(set);
  ASSERT_TRUE(first);
  EXPECT_EQ(first->address, "gpu003");
  EXPECT_GE(first->port, 20000);
  EXPECT_LT(first->port, 32000);
  EXPECT_FALSE(first->served);
  set["SLURM_PROCID"] = "0";
  EXPECT_EQ(place(set)->port, first->port);
  set["SLURM_JOB_ID"] = "18";
  EXPECT_NE(place(set)->port, first->port);
}

TEST(Launcher, MpiOnOneMachineNeedsNoAddress) {
  const Variables open = {{"OMPI_COMM_WORLD_RANK", "1"},
                          {"OMPI_COMM_WORLD_SIZE", "2"},
                          {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                          {"PMIX_NAMESPACE", "job@1"}};
  EXPECT_EQ(place(open)->address, "127.0.0.1");
  const Variables mpich = {{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}, {"MPI_LOCALNRANKS", "2"}};
  EXPECT_EQ(place(mpich)->address, "127.0.0.1");
}

TEST(Launcher, MpiOnSeveralMachines) {
  Variables set = {{"PMI_RANK", "1"}, {"PMI_SIZE", "4"}, {"MPI_LOCALNRANKS", "2"}};
  EXPECT_NE(refusal(set).find("MASTER_ADDR is not set"), std::string::npos);
  set["MASTER_ADDR"] = "node1";
  EXPECT_EQ(place(set)->port, 29500);  // MPICH has no number of the job that all machines know
}

TEST(Launcher, WrongVariablesAreNamed) {
  const auto with = [](const char* rank, const char* size, const char* port) {
    return Variables{
        {"RANK", rank}, {"WORLD_SIZE", size}, {"MASTER_ADDR", "a"}, {"MASTER_PORT", port}};
  };
  EXPECT_EQ(refusal(with("2", "2", "1")),
            "the variable RANK is \"2\", expected a whole number from 0 to 1.");
  EXPECT_NE(refusal(with("-1", "2", "1")).find("RANK is \"-1\""), std::string::npos);
  EXPECT_NE(refusal(with("0", "two", "1")).find("WORLD_SIZE is \"two\""), std::string::npos);
  EXPECT_NE(refusal(with("0", "2", "99999")).find("MASTER_PORT is \"99999\""), std::string::npos);
  EXPECT_EQ(refusal(with("0", "2", "1")), "");
}

TEST(Launcher, TheFirstOfSlurmsHosts) {
  EXPECT_EQ(first_host("gpu[003-010,12],login"), "gpu003");
  EXPECT_EQ(first_host("gpu[7,9]"), "gpu7");
  EXPECT_EQ(first_host("login,gpu[003-010]"), "login");
  EXPECT_EQ(first_host("login"), "login");
}

}  // namespace
}  // namespace headloom
