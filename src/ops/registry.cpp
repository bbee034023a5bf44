#include <ATen/ATen.h>

#include <algorithm>

#include "ops/case.h"

namespace headloom::ops {
namespace {

// Functions' own, so that they exist when the first file registers something.
std::vector<std::vector<OpCase> (*)()>& case_families() {
  static std::vector<std::vector<OpCase> (*)()> families;
  return families;
}

std::vector<OpInfo (*)()>& listed_operators() {
  static std::vector<OpInfo (*)()> listed;
  return listed;
}

}  // namespace

CaseFamily::CaseFamily(std::vector<OpCase> (*cases)()) { case_families().push_back(cases); }

std::vector<OpCase> all_cases() {
  std::vector<OpCase> out;
  for (const auto& family : case_families()) {
    for (OpCase& c : family()) out.push_back(std::move(c));
  }
  std::stable_sort(out.begin(), out.end(),
                   [](const OpCase& a, const OpCase& b) { return a.op < b.op; });
  return out;
}

void time_against_plain_attention(OpCase& c, int64_t length, int64_t heads, int64_t dim) {
  c.baseline_name = "plain attention";
  c.baseline_inputs = [=, type = c.dtype] {
    std::vector<at::Tensor> inputs;
    for (int i = 0; i < 3; ++i) inputs.push_back(at::randn({1, heads, length, dim}).to(type));
    return inputs;
  };
  c.baseline = [](const std::vector<at::Tensor>& x) {
    return at::scaled_dot_product_attention(x[0], x[1], x[2], {}, 0.0, true);
  };
}

void list_operator(OpInfo (*info)()) { listed_operators().push_back(info); }

std::vector<OpInfo> operators() {
  std::vector<OpInfo> out;
  for (const auto& info : listed_operators()) out.push_back(info());
  std::sort(out.begin(), out.end(),
            [](const OpInfo& a, const OpInfo& b) { return a.name < b.name; });
  return out;
}

}  // namespace headloom::ops
