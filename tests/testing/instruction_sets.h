// Running a binary's tests again with the kernels of other instruction sets, which a process
// chooses once.
#pragma once

#include <ATen/Version.h>
#include <fnmatch.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <sstream>
#include <string>
#include <vector>

#include "ops/kernel/capability.h"

namespace headloom::test {

// Whether each pattern of `filter` before its "-" names a test of this binary. A process runs
// nothing for a pattern that names none, and succeeds: a test that is renamed would be left out.
inline ::testing::AssertionResult names_tests(const std::string& filter) {
  const ::testing::UnitTest& all = *::testing::UnitTest::GetInstance();
  std::istringstream patterns(filter.substr(0, filter.find('-')));
  for (std::string pattern; std::getline(patterns, pattern, ':');) {
    bool found = false;
    for (int s = 0; s < all.total_test_suite_count(); ++s) {
      const ::testing::TestSuite& suite = *all.GetTestSuite(s);
      for (int t = 0; t < suite.total_test_count(); ++t) {
        const std::string name = std::string(suite.name()) + "." + suite.GetTestInfo(t)->name();
        found = found || fnmatch(pattern.c_str(), name.c_str(), 0) == 0;
      }
    }
    if (!found) return ::testing::AssertionFailure() << pattern << " names no test";
  }
  return ::testing::AssertionSuccess();
}

// Whether the tests of this binary that `filter` names pass with every lesser build of the kernels
// than the one that this process runs: the AVX2 build and the portable one. Where the process uses
// tile registers, they must pass without them too. Says what failed. Other processors than x86-64
// have the portable build only.
inline ::testing::AssertionResult passes_on_lesser_instruction_sets(const std::string& filter) {
  if (const auto named = names_tests(filter); !named) return named;
#if defined(__x86_64__)
  // This process is one of those runs.
  if (std::getenv("ATEN_CPU_CAPABILITY")) return ::testing::AssertionSuccess();
  std::vector<std::string> names;
  if (ops::capability() > ops::Capability::kDefault) names.emplace_back("default");
  if (ops::capability() > ops::Capability::kAvx2) names.emplace_back("avx2");
  if (ops::has_amx()) names.emplace_back("avx512");
  for (const std::string& name : names) {
    // The filter says it all: a shard of it (CMakeLists.txt) would leave tests out.
    const std::string command =
        "env -u GTEST_TOTAL_SHARDS -u GTEST_SHARD_INDEX ATEN_CPU_CAPABILITY=" + name +
        " \"" + ::testing::internal::GetArgvs().at(0) + "\" --gtest_filter='" + filter +
        "' --gtest_brief=1 1>&2";
    if (std::system(command.c_str()) != 0) return ::testing::AssertionFailure() << command;
  }
#endif
  return ::testing::AssertionSuccess();
}

}  // namespace headloom::test
