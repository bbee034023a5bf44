#include "ops/aft/op.h"

#include "ops/aft/declaration.h"
#include "ops/aft/kernel.h"

namespace headloom::ops {
namespace {

c10::SymInt state_rows(const AftOptions& o) {
  if (!Aft::stateful(o)) return 0;
  return o.form == "simple" ? c10::SymInt(3) : 2 * o.bias.sym_size(1) + 1;
}

void check_bias(const Tensor& q, const AftOptions& o) {
  if (o.form == "simple") {
    TORCH_CHECK_VALUE(!o.bias.defined(), "aft: bias is given, but form \"simple\" has none.");
    return;
  }
  TORCH_CHECK_VALUE(o.bias.defined() && o.bias.dim() == 2, "aft: bias has shape ",
                    o.bias.defined() ? c10::str(o.bias.sym_sizes()) : "none", ", form \"", o.form,
                    "\" expects ",
                    o.form == "full"    ? "[L, L]"
                    : o.form == "local" ? "[L, W]"
                                        : "[H, W]",
                    ".");
  check_floating(Aft::kName, o.bias, "bias");
  check_device(Aft::kName, o.bias, "bias", q);
  const c10::SymInt rows = o.bias.sym_size(0), columns = o.bias.sym_size(1);
  if (o.form == "conv") {
    TORCH_CHECK_VALUE(rows >= 1 && q.sym_size(2) % rows == 0, "aft: bias has ", rows,
                      " heads, expected a divisor of the ", q.sym_size(2), " channels.");
  } else {
    // Without a sum that could overflow.
    TORCH_CHECK_VALUE(rows - q.sym_size(1) >= o.offset, "aft: bias is for ", rows,
                      " positions, but the sequence has ", q.sym_size(1),
                      o.offset > 0 ? c10::str(" from offset ", o.offset, " on") : "", ".");
  }
  if (o.form == "full") {
    TORCH_CHECK_VALUE(columns == rows, "aft: bias has shape ", o.bias.sym_sizes(),
                      ", form \"full\" expects [L, L].");
  } else {
    TORCH_CHECK_VALUE(columns >= 1 && (o.causal || columns % 2 == 1), "aft: bias has ", columns,
                      " columns, expected ",
                      o.causal ? "at least 1." : "an odd number, 2W - 1, where it is not causal.");
  }
}

}  // namespace

bool Aft::stateful(const AftOptions& o) {
  return o.causal && (o.form == "simple" || o.form == "local");
}

void Aft::check(const Arguments& a) {
  const auto& [q, k, v, o] = a;
  TORCH_CHECK_VALUE(q.dim() == 3 && q.sym_size(1) >= 1, "aft: q has shape ", q.sym_sizes(),
                    ", expected [B, T, C] with T of at least 1.");
  check_floating(kName, q, "q");
  check_shape(kName, k, "k", q.sym_sizes(), "[B, T, C]");
  check_dtype(kName, k, "k", q);
  check_shape(kName, v, "v", q.sym_sizes(), "[B, T, C]");
  check_dtype(kName, v, "v", q);
  TORCH_CHECK_VALUE(o.form == "simple" || o.form == "local" || o.form == "full" || o.form == "conv",
                    "aft: form is \"", o.form,
                    "\", expected \"simple\", \"local\", \"full\" or \"conv\".");
  TORCH_CHECK_VALUE(o.offset >= 0, "aft: offset is ", o.offset, ", expected at least 0.");
  check_bias(q, o);
  const c10::SymInt batch = q.sym_size(0);
  if (o.lengths.defined()) {
    check_ids(kName, o.lengths, "lengths", q);
    check_shape(kName, o.lengths, "lengths", {batch}, "[B]");
  }
  if (o.documents.defined()) check_documents(kName, o.documents, q);
  if (o.state.defined()) {
    TORCH_CHECK_VALUE(stateful(o),
                      "aft: state is given, but only causal \"simple\" and \"local\" "
                      "have one.");
    check_state(kName, o.state, {batch, state_rows(o), q.sym_size(2)}, "[B, 3 + 2(W - 1), C]", q);
  }
}

// The sequences are cast to the autocast type; the bias and states keep theirs.
void Aft::autocast(Arguments& a, const AutocastCast& cast) { cast(a.q, a.k, a.v); }

// The output, the state and the running sums that the backward starts from, or the sums of all
// positions.
std::vector<Tensor> Aft::outputs(const Arguments& a, bool training) {
  using aft_kernel::kChannels, aft_kernel::kChunk;
  const c10::SymInt batch = a.q.sym_size(0), length = a.q.sym_size(1), channels = a.q.sym_size(2);
  std::vector<c10::SymInt> kept = {batch, (length + (kChunk - 1)) / kChunk, 3, channels};
  if (a.options.form == "full") {
    kept = {batch, (channels + (kChannels - 1)) / kChannels, length, 3, kChannels};
  }
  if (!training) kept[1] = 0;
  return {contiguous_like(a.q), contiguous_float({batch, state_rows(a.options), channels}, a.q),
          contiguous_float(kept, a.q)};
}

// A state that a form does not have has no gradient either, as in the definition.
std::tuple<Tensor, Tensor> Aft::result(const Arguments& a, const std::vector<Tensor>& outputs) {
  return {outputs[0], stateful(a.options) ? outputs[1] : outputs[1].detach()};
}

static const Define<Aft> aft_operator;

std::tuple<Tensor, Tensor> aft(const Tensor& q, const Tensor& k, const Tensor& v,
                               const AftOptions& o) {
  return call<Aft>({q, k, v, o}, o.backend);
}

}  // namespace headloom::ops
