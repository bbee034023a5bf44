// The benchmarks of `headloom bench`: operators, training steps and decoding, each beside a
// baseline in the same process.
#pragma once

#include <string>
#include <vector>

#include "bench/harness.h"

namespace headloom::bench {

// Runs `families`, all where the list is empty, and prints their tables, or JSON. Throws UsageError
// for a family that there is not.
void run(const std::vector<std::string>& families, const BenchOptions& options);

}  // namespace headloom::bench
