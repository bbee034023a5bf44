#include "ops/selective_scan/op.h"

#include "ops/selective_scan/declaration.h"
#include "ops/selective_scan/kernel.h"

namespace headloom::ops {
namespace {

// A parameter: u's dtype, or the one everything is computed in.
void check_parameter(const Tensor& t, const char* name, const Tensor& u, at::ScalarType wide) {
  TORCH_CHECK_TYPE(t.scalar_type() == u.scalar_type() || t.scalar_type() == wide,
                   SelectiveScan::kName, ": ", name, " has dtype ", t.scalar_type(), ", expected ",
                   wide, " or ", u.scalar_type(), " as u has.");
  check_device(SelectiveScan::kName, t, name, u, "u");
}

void check_map(const Tensor& t, const char* name, const Tensor& u, const c10::SymInt& states) {
  const c10::SymInt batch = u.sym_size(0), length = u.sym_size(1), channels = u.sym_size(2);
  TORCH_CHECK_VALUE(t.dim() >= 2 && t.dim() <= 4, SelectiveScan::kName, ": ", name, " has shape ",
                    t.sym_sizes(), ", expected [B, L, N], [B, L, G, N] or [channels, N].");
  if (t.dim() == 2) {
    check_shape(SelectiveScan::kName, t, name, {channels, states}, "[channels, N]");
  } else if (t.dim() == 3) {
    check_shape(SelectiveScan::kName, t, name, {batch, length, states}, "[B, L, N]");
  } else {
    const c10::SymInt groups = t.sym_size(2);
    check_shape(SelectiveScan::kName, t, name, {batch, length, groups, states}, "[B, L, G, N]");
    TORCH_CHECK_VALUE(groups >= 1 && channels % groups == 0, SelectiveScan::kName, ": ", name,
                      " has ", groups, " groups, expected a divisor of the ", channels,
                      " channels.");
  }
  check_dtype(SelectiveScan::kName, t, name, u, "u");
}

}  // namespace

void SelectiveScan::check(const Arguments& a) {
  const auto& [u, delta, A, B, C, o] = a;
  TORCH_CHECK_VALUE(u.dim() == 3 && u.sym_size(1) >= 1 && u.sym_size(2) >= 1, kName,
                    ": u has shape ", u.sym_sizes(),
                    ", expected [B, L, channels] with L and channels of at least 1.");
  check_floating(kName, u, "u");
  const auto wide = at::toOpMathType(u.scalar_type());
  const c10::SymInt batch = u.sym_size(0), channels = u.sym_size(2);
  check_shape(kName, delta, "delta", u.sym_sizes(), "[B, L, channels]");
  check_dtype(kName, delta, "delta", u, "u");
  TORCH_CHECK_VALUE(A.dim() == 2 && A.sym_size(0) == channels && A.sym_size(1) >= 1, kName,
                    ": A has shape ", A.sym_sizes(),
                    ", expected [channels, N] with channels = ", channels, " and N of at least 1.");
  check_parameter(A, "A", u, wide);
  check_map(B, "B", u, A.sym_size(1));
  check_map(C, "C", u, A.sym_size(1));
  TORCH_CHECK_VALUE(B.dim() != 4 || C.dim() != 4 || B.sym_size(2) == C.sym_size(2), kName,
                    ": C has ", C.dim() == 4 ? C.sym_size(2) : 1, " groups, expected ",
                    B.dim() == 4 ? B.sym_size(2) : 1, " as B has.");
  for (const auto& [t, name] : {std::pair(&o.D, "D"), std::pair(&o.delta_bias, "delta_bias")}) {
    if (!t->defined()) continue;
    check_shape(kName, *t, name, {channels}, "[channels]");
    check_parameter(*t, name, u, wide);
  }
  if (o.z.defined()) {
    check_shape(kName, o.z, "z", u.sym_sizes(), "[B, L, channels]");
    check_dtype(kName, o.z, "z", u, "u");
  }
  if (o.state.defined()) {
    check_state(kName, o.state, {batch, channels, A.sym_size(1)}, "[B, channels, N]", u, "u");
  }
  if (o.documents.defined()) check_documents(kName, o.documents, u, "u", "[B, L]");
}

// What runs along the sequence is cast to the autocast type; parameters and states keep theirs.
void SelectiveScan::autocast(Arguments& a, const AutocastCast& cast) {
  cast(a.u, a.delta, a.B, a.C, a.options.z);
}

// The output, the state and the states that the backward starts from.
std::vector<Tensor> SelectiveScan::outputs(const Arguments& a, bool training) {
  using selective_scan_kernel::kSteps;
  const c10::SymInt batch = a.u.sym_size(0), length = a.u.sym_size(1), channels = a.u.sym_size(2);
  const c10::SymInt states = a.A.sym_size(1), chunks = (length + (kSteps - 1)) / kSteps;
  return {contiguous_like(a.u), contiguous_float({batch, channels, states}, a.u),
          contiguous_float({batch, training ? chunks : 0, states, channels}, a.u)};
}

static const Define<SelectiveScan> selective_scan_operator;

std::tuple<Tensor, Tensor> selective_scan(const Tensor& u, const Tensor& delta, const Tensor& A,
                                          const Tensor& B, const Tensor& C,
                                          const SelectiveScanOptions& o) {
  return call<SelectiveScan>({u, delta, A, B, C, o}, o.backend);
}

}  // namespace headloom::ops
