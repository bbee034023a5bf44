// Gated linear attention, all that knows torch: what it is to the dispatcher (ops/operator.h), its
// checks, its definition, its CPU kernels' tensors and what it is timed on.
#include "ops/gated_linear_attention/op.h"

#include <limits>

#include "ops/cpu.h"
#include "ops/cuda.h"
#include "ops/documents.h"
#include "ops/gated_linear_attention/kernel.h"
#include "ops/operator.h"

namespace headloom::ops {
namespace {

struct GatedLinearAttention {
  struct Arguments {
    Tensor q, k, v, log_decay;
    GatedLinearAttentionOptions options;
  };
  using Result = std::tuple<Tensor, Tensor>;
  static constexpr const char* kName = "gated_linear_attention";
  static constexpr const char* kDoc =
      "linear attention that decays each row of its state as the sequence says";
  static constexpr const char* kSource = "Yang et al. 2024";
  static constexpr const char* kOtherwise = "the reference for other types and devices";

  static auto arguments(Arguments& a) {
    return std::tuple(
        differentiable("q", a.q), differentiable("k", a.k), differentiable("v", a.v),
        differentiable("log_decay", a.log_decay), optional_differentiable("state", a.options.state),
        optional_constant("documents", a.options.documents),
        setting("form", a.options.form, "\"chunkwise\""), setting("chunk", a.options.chunk, "16"));
  }
  static void check(const Arguments& a);
  static void autocast(Arguments& a, const AutocastCast& cast);
  static Result reference(const Arguments& a);
  static std::vector<Tensor> outputs(const Arguments& a, bool training);
};

// --- What it takes and returns ---

void GatedLinearAttention::check(const Arguments& a) {
  const auto& [q, k, v, log_decay, o] = a;
  TORCH_CHECK_VALUE(q.dim() == 4 && q.sym_size(1) >= 1 && q.sym_size(3) >= 1, kName,
                    ": q has shape ", q.sym_sizes(),
                    ", expected [B, T, H, D] with T and D of at least 1.");
  check_floating(kName, q, "q");
  check_shape(kName, k, "k", q.sym_sizes(), "[B, T, H, D]");
  check_dtype(kName, k, "k", q);
  const c10::SymInt batch = q.sym_size(0), length = q.sym_size(1), heads = q.sym_size(2);
  TORCH_CHECK_VALUE(v.dim() == 4 && v.sym_size(3) >= 1, kName, ": v has shape ", v.sym_sizes(),
                    ", expected [B, T, H, E] with E of at least 1.");
  check_shape(kName, v, "v", {batch, length, heads, v.sym_size(3)}, "[B, T, H, E]");
  check_dtype(kName, v, "v", q);
  check_shape(kName, log_decay, "log_decay", q.sym_sizes(), "[B, T, H, D]");
  check_device(kName, log_decay, "log_decay", q);
  TORCH_CHECK_TYPE(
      log_decay.scalar_type() == at::kFloat || log_decay.scalar_type() == q.scalar_type(), kName,
      ": log_decay has dtype ", log_decay.scalar_type(), ", expected ", at::kFloat, " or ",
      q.scalar_type(), " as q has.");
  if (o.state.defined()) {
    check_state(kName, o.state, {batch, heads, q.sym_size(3), v.sym_size(3)}, "[B, H, D, E]", q);
  }
  if (o.documents.defined()) check_documents(kName, o.documents, q);
  TORCH_CHECK_VALUE(o.form == "chunkwise" || o.form == "recurrent", kName, ": form is \"", o.form,
                    "\", expected \"chunkwise\" or \"recurrent\".");
  TORCH_CHECK_VALUE(o.chunk >= 1, kName, ": chunk is ", o.chunk, ", expected at least 1.");
}

// What is multiplied is cast to the autocast type; decays and states keep theirs.
void GatedLinearAttention::autocast(Arguments& a, const AutocastCast& cast) { cast(a.q, a.k, a.v); }

// The output, the state and the states that the backward starts from.
std::vector<Tensor> GatedLinearAttention::outputs(const Arguments& a, bool training) {
  const c10::SymInt batch = a.q.sym_size(0), heads = a.q.sym_size(2), dim = a.q.sym_size(3);
  const c10::SymInt values = a.v.sym_size(3);
  const c10::SymInt groups = gated_linear_attention_kernel::group_count(a.q.sym_size(1));
  return {contiguous_like(a.v), contiguous_float({batch, heads, dim, values}, a.q),
          contiguous_float({batch, heads, training ? groups : 0, dim, values}, a.q)};
}

const Define<GatedLinearAttention> gated_linear_attention_operator;

// --- The definition ---

// Heads first, [B, H, T, ...]; a document's first position has forgotten everything, so that
// documents need no other care.
struct Rows {
  Tensor q, k, v, log_decay;
  Tensor state;  // [B, H, D, E]
};

// These return the output [B, H, T, E] and the state.
GatedLinearAttention::Result recurrent(const Rows& r) {
  // unbind and stack: the backward of T selections would add up T tensors of the whole size.
  const std::vector<Tensor> q = r.q.unsqueeze(-2).unbind(2), k = r.k.unsqueeze(-1).unbind(2),
                            v = r.v.unsqueeze(-2).unbind(2),
                            decay = r.log_decay.exp().unsqueeze(-1).unbind(2);
  std::vector<Tensor> outputs;
  Tensor state = r.state;
  for (size_t t = 0; t < q.size(); ++t) {
    state = at::addcmul(k[t] * v[t], decay[t], state);
    outputs.push_back(at::matmul(q[t], state).squeeze(-2));
  }
  return {at::stack(outputs, 2), state};
}

GatedLinearAttention::Result chunkwise(const Rows& r, int64_t chunk) {
  const int64_t length = r.q.size(2), size = std::min(chunk, length);
  const int64_t chunks = (length - 1) / size + 1;
  // [B, H, N, size, ...]; padding has the decay 1 and keys of zero, which leave the state alone.
  const auto cut = [&](const Tensor& t) {
    return at::constant_pad_nd(t, {0, 0, 0, chunks * size - length}).unflatten(2, {chunks, size});
  };
  const Tensor q = cut(r.q), k = cut(r.k), v = cut(r.v), log_decay = cut(r.log_decay);
  // What is left at position n of what m added, [B, H, N, size (n), size (m), D]; 1 where n <= m.
  // The decays between are summed pair by pair: differences of running sums would lose a small one
  // beside a large one, and be NaN beside an infinite one.
  const Tensor later = at::ones({size, size}, r.q.options().dtype(at::kBool)).tril(-1);
  const Tensor left =
      at::where(later.unsqueeze(-1), log_decay.unsqueeze(-2), at::zeros({}, r.q.options()))
          .cumsum(-3)
          .exp();
  const Tensor from_state = log_decay.cumsum(-2).exp(), to_state = left.select(-3, size - 1);
  const std::vector<Tensor> kept = from_state.select(-2, size - 1).unsqueeze(-1).unbind(2);
  const std::vector<Tensor> added =
      at::matmul((k * to_state).transpose(-1, -2), v).unbind(2);  // N of [B, H, D, E]
  std::vector<Tensor> before;
  Tensor state = r.state;
  for (size_t i = 0; i < added.size(); ++i) {
    before.push_back(state);
    state = at::addcmul(added[i], kept[i], state);
  }
  const Tensor scores = at::matmul(left * k.unsqueeze(-3), q.unsqueeze(-1)).squeeze(-1).tril();
  const Tensor output = at::matmul(scores, v) + at::matmul(q * from_state, at::stack(before, 2));
  return {output.flatten(2, 3).narrow(2, 0, length), state};
}

std::tuple<Tensor, Tensor> GatedLinearAttention::reference(const Arguments& a) {
  const GatedLinearAttentionOptions& o = a.options;
  const auto wide = at::toOpMathType(a.q.scalar_type());
  const auto heads_first = [&](const Tensor& t) { return t.to(wide).transpose(1, 2); };
  Rows r = {heads_first(a.q), heads_first(a.k), heads_first(a.v), heads_first(a.log_decay),
            o.state};
  // From zeros, not from nothing: a decay of NaN shows from the first step on.
  if (!o.state.defined()) {
    r.state = at::zeros_symint({a.q.sym_size(0), a.q.sym_size(2), a.q.sym_size(3), a.v.sym_size(3)},
                               r.q.options());
  }
  if (o.documents.defined()) {
    const Tensor begins = at::constant_pad_nd(id_changes(o.documents), {1, 0});
    r.log_decay = r.log_decay.masked_fill(begins.unsqueeze(1).unsqueeze(-1),
                                          -std::numeric_limits<double>::infinity());
  }
  const auto [output, state] = o.form == "recurrent" ? recurrent(r) : chunkwise(r, o.chunk);
  return {output.transpose(1, 2).to(a.q.scalar_type()), state};
}

// --- The CPU kernels ---

struct GatedLinearAttentionCall : Held {
  gated_linear_attention_kernel::Args args;

  explicit GatedLinearAttentionCall(const GatedLinearAttention::Arguments& a) {
    args.B = a.q.size(0);
    args.T = a.q.size(1);
    args.H = a.q.size(2);
    args.D = a.q.size(3);
    args.E = a.v.size(3);
    args.type = kernel_type(a.q);
    args.decay_type = kernel_type(a.log_decay);
    args.q = head_sequence(a.q);
    args.k = head_sequence(a.k);
    args.v = head_sequence(a.v);
    args.log_decay = head_sequence(a.log_decay);
    args.documents = whole<int64_t>(a.options.documents);
    args.state = whole<float>(a.options.state);
  }

  void run(bool backward) const {
    static gated_linear_attention_kernel::Run* const kernel =
        HL_CHOOSE(gated_linear_attention_kernel::run);
    const int64_t each = grain(args.T * args.D * args.E);
    at::parallel_for(0, args.B * args.H, each, [&](int64_t begin, int64_t end) {
      const Tensor scratch = at::empty({scratch_size(args, backward)}, at::kFloat);
      kernel(args, {backward, begin, end, scratch.data_ptr<float>()});
    });
  }
};

std::vector<Tensor> forward(const GatedLinearAttention::Arguments& a, bool training) {
  GatedLinearAttentionCall call(a);
  std::vector<Tensor> outputs = GatedLinearAttention::outputs(a, training);
  call.args.out = outputs[0].data_ptr();
  call.args.last = outputs[1].data_ptr<float>();
  if (training) call.args.kept = outputs[2].data_ptr<float>();
  call.run(false);
  return outputs;
}

void backward(const GatedLinearAttention::Arguments& a, Backward<GatedLinearAttention>& b) {
  GatedLinearAttentionCall call(a);
  call.args.grad_out = call.head_sequence(b.grads[0]);
  call.args.grad_last = call.whole<float>(b.grads[1]);
  call.args.kept = const_cast<float*>(call.whole<float>(b.kept[0]));
  GatedLinearAttention::Arguments& to = b.gradients;
  to.q = contiguous_like(a.q);
  to.k = contiguous_like(a.k);
  to.v = contiguous_like(a.v);
  to.log_decay = contiguous_float(a.log_decay.sym_sizes(), a.log_decay);
  call.args.grad_q = to.q.data_ptr();
  call.args.grad_k = to.k.data_ptr();
  call.args.grad_v = to.v.data_ptr();
  call.args.grad_log_decay = to.log_decay.data_ptr<float>();
  if (a.options.state.defined()) {
    to.options.state = contiguous_like(a.options.state);
    call.args.grad_state = to.options.state.data_ptr<float>();
  }
  call.run(true);
}

const Kernels<GatedLinearAttention> gated_linear_attention_cpu({.forward = forward,
                                                                .backward = backward});

const CudaKernels<GatedLinearAttention> gated_linear_attention_cuda(
    {.limits = "chunkwise, without documents, float32 only where TF32 is allowed, by "
               "flash-linear-attention",
     .unsupported = fla_reason<GatedLinearAttention>});

// --- What it is timed on: as retention, beside plain attention with as many heads ---

OpCase gated_linear_attention_case(int64_t length, double forward_target, double training_target,
                                   at::ScalarType type = at::kFloat) {
  constexpr int64_t kHeads = 8, kDim = 64, kValues = 128;
  OpCase c;
  c.op = GatedLinearAttention::kName;
  c.name = "T=" + std::to_string(length) + (type == at::kBFloat16 ? " bfloat16" : "");
  c.dtype = type;
  // Decays as the mixer starts.
  c.inputs = [=] {
    const auto random = [&](int64_t width) {
      return at::randn({1, length, kHeads, width}).to(type);
    };
    return std::vector<Tensor>{random(kDim) * 0.125, random(kDim), random(kValues),
                               at::log_sigmoid(at::randn({1, length, kHeads, kDim})) / 16};
  };
  c.differentiable = 4;
  c.run = [](const std::vector<Tensor>& x, const std::optional<std::string>& backend) {
    return std::get<0>(gated_linear_attention(x[0], x[1], x[2], x[3], {.backend = backend}));
  };
  time_against_plain_attention(c, length, kHeads, kDim);
  // A position and head, whatever the form: the state read and added to; in the backward it or its
  // gradient read for q, k, v and the decay, and the gradient added to.
  const auto positions = static_cast<double>(length * kHeads);
  const auto state = static_cast<double>(2 * kDim * kValues);
  const auto element = static_cast<double>(at::elementSize(type));
  const auto rows = static_cast<double>(2 * kDim + 2 * kValues);  // q, k, v and the output
  const auto grads = static_cast<double>(2 * kDim + kValues);     // of q, k and v
  const auto decays = static_cast<double>(kDim), bytes = 4 * decays;
  c.forward_work = {.flops = positions * 2 * state,
                    .bytes = positions * (rows * element + bytes),
                    .exponentials = positions * decays};
  c.training_work = {.flops = positions * 7 * state,
                     .bytes = positions * ((2 * rows + grads) * element + 3 * bytes),
                     .exponentials = positions * 2 * decays};
  c.forward_target = forward_target;
  c.training_target = training_target;
  c.at_length = [=](int64_t other) { return gated_linear_attention_case(other, 0, 0, type); };
  return c;
}

std::vector<OpCase> gated_linear_attention_cases() {
  return {gated_linear_attention_case(2048, 0.35, 0.35),
          gated_linear_attention_case(4096, 0.18, 0.22),
          gated_linear_attention_case(2048, 0, 0, at::kBFloat16)};
}

const CaseFamily gated_linear_attention_registered(gated_linear_attention_cases);

}  // namespace

std::tuple<Tensor, Tensor> gated_linear_attention(const Tensor& q, const Tensor& k, const Tensor& v,
                                                  const Tensor& log_decay,
                                                  const GatedLinearAttentionOptions& o) {
  return call<GatedLinearAttention>({q, k, v, log_decay, o}, o.backend);
}

}  // namespace headloom::ops
