// The table of operators' cases. One line an operator.
#include "ops/case.h"

namespace headloom::ops {

std::vector<OpCase> all_cases() {
  std::vector<OpCase> cases;
  for (const auto& family : {composed_attention_cases(), retention_cases()}) {
    cases.insert(cases.end(), family.begin(), family.end());
  }
  return cases;
}

}  // namespace headloom::ops
