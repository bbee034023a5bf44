#include "ops/retention/op.h"

#include "ops/retention/declaration.h"

namespace headloom::ops {

void Retention::check(const Arguments& a) {
  const auto& [q, k, v, gamma, o] = a;
  TORCH_CHECK_VALUE(q.dim() == 4 && q.sym_size(1) >= 1 && q.sym_size(3) >= 1,
                    "retention: q has shape ", q.sym_sizes(),
                    ", expected [B, T, H, D] with T and D of at least 1.");
  check_floating(kName, q, "q");
  check_shape(kName, k, "k", q.sym_sizes(), "[B, T, H, D]");
  check_dtype(kName, k, "k", q);
  const c10::SymInt batch = q.sym_size(0), length = q.sym_size(1), heads = q.sym_size(2);
  TORCH_CHECK_VALUE(v.dim() == 4, "retention: v has shape ", v.sym_sizes(),
                    ", expected [B, T, H, E].");
  const c10::SymInt values = v.sym_size(3);
  check_shape(kName, v, "v", {batch, length, heads, values}, "[B, T, H, E]");
  check_dtype(kName, v, "v", q);
  check_shape(kName, gamma, "gamma", {heads}, "[H]");
  check_device(kName, gamma, "gamma", q);
  // A narrower type would round the decays of late heads to 1.
  TORCH_CHECK_TYPE(gamma.scalar_type() == at::kFloat || gamma.scalar_type() == at::kDouble,
                   "retention: gamma has dtype ", gamma.scalar_type(),
                   ", expected float32 or float64.");
  if (o.state.defined()) {
    check_state(kName, o.state, {batch, heads, q.sym_size(3), values}, "[B, H, D, E]", q);
  }
  if (o.documents.defined()) check_documents(kName, o.documents, q);
  TORCH_CHECK_VALUE(o.form == "chunkwise" || o.form == "parallel" || o.form == "recurrent",
                    "retention: form is \"", o.form,
                    "\", expected \"chunkwise\", \"parallel\" or \"recurrent\".");
  TORCH_CHECK_VALUE(o.chunk >= 1, "retention: chunk is ", o.chunk, ", expected at least 1.");
}

// What is multiplied is cast to the autocast type; decays and states keep theirs.
void Retention::autocast(Arguments& a, const AutocastCast& cast) { cast(a.q, a.k, a.v); }

std::vector<Tensor> Retention::outputs(const Arguments& a, bool /*training*/) {
  return {
      contiguous_like(a.v),
      contiguous_float({a.q.sym_size(0), a.q.sym_size(2), a.q.sym_size(3), a.v.sym_size(3)}, a.q)};
}

static const Define<Retention> retention_operator;

std::tuple<Tensor, Tensor> retention(const Tensor& q, const Tensor& k, const Tensor& v,
                                     const Tensor& gamma, const RetentionOptions& o) {
  return call<Retention>({q, k, v, gamma, o}, o.backend);
}

}  // namespace headloom::ops
