#include "ops/wkv/op.h"

#include "ops/wkv/declaration.h"
#include "ops/wkv/kernel.h"

namespace headloom::ops {

void Wkv::check(const Arguments& a) {
  const Tensor& k = a.k;
  const WkvOptions& o = a.options;
  TORCH_CHECK_VALUE(k.dim() == 3 && k.sym_size(1) >= 1, "wkv: k has shape ", k.sym_sizes(),
                    ", expected [B, T, C] with T of at least 1.");
  check_floating(kName, k, "k");
  const auto like_k = [&](const Tensor& t, const char* name) {
    check_shape(kName, t, name, k.sym_sizes(), "[B, T, C]");
    check_dtype(kName, t, name, k, "k");
  };
  like_k(a.v, "v");
  if (o.receptance.defined()) like_k(o.receptance, "receptance");
  const c10::SymInt batch = k.sym_size(0), channels = k.sym_size(2);
  const auto parameter = [&](const Tensor& t, const char* name) {
    check_shape(kName, t, name, {channels}, "[C]");
    check_device(kName, t, name, k, "k");
    check_floating(kName, t, name);
  };
  parameter(a.rate, "rate");
  parameter(a.bonus, "bonus");
  if (o.state.defined()) {
    check_state(kName, o.state, {batch, 3, channels}, "[B, 3, C]", k, "k");
  }
  if (o.documents.defined()) check_documents(kName, o.documents, k, "k");
}

// The sequences are cast to the autocast type; rates and states keep theirs.
void Wkv::autocast(Arguments& a, const AutocastCast& cast) { cast(a.k, a.v, a.options.receptance); }

// The output, the state and the states that the backward starts from.
std::vector<Tensor> Wkv::outputs(const Arguments& a, bool training) {
  const c10::SymInt batch = a.k.sym_size(0), length = a.k.sym_size(1), channels = a.k.sym_size(2);
  const c10::SymInt chunks = (length + (wkv_kernel::kChunk - 1)) / wkv_kernel::kChunk;
  return {contiguous_like(a.k), contiguous_float({batch, 3, channels}, a.k),
          contiguous_float({batch, training ? chunks : 0, 3, channels}, a.k)};
}

static const Define<Wkv> wkv_operator;

std::tuple<Tensor, Tensor> wkv(const Tensor& k, const Tensor& v, const Tensor& rate,
                               const Tensor& bonus, const WkvOptions& o) {
  return call<Wkv>({k, v, rate, bonus, o}, o.backend);
}

}  // namespace headloom::ops
