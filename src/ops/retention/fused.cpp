#include "ops/retention/fused.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>

#include "ops/dispatch.h"
#include "ops/kernel/capability.h"
#include "ops/retention/kernel.h"
#include "ops/retention/scratch.h"

namespace headloom::ops {
namespace {

using at::Tensor;
using retaining::Args;
using retaining::Chunk;
using retaining::kAlign;
using retaining::Rows;

constexpr int64_t kLargestChunk = 256;

// Holds what the pointers of Args point to.
struct Call {
  Args args{};
  std::vector<Tensor> keep;
  std::vector<Chunk> chunks;
  std::vector<int64_t> first_chunk;

  Call(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& gamma,
       const RetentionOptions& o) {
    args.B = q.size(0);
    args.T = q.size(1);
    args.H = q.size(2);
    args.D = q.size(3);
    args.E = v.size(3);
    args.type =
        q.scalar_type() == at::kBFloat16 ? retaining::Type::kBFloat16 : retaining::Type::kFloat;
    args.chunk = retaining::padded(std::min(o.chunk, kLargestChunk));
    args.chunk = std::min(args.chunk, retaining::padded(args.T));
    args.q = rows(q);
    args.k = rows(k);
    args.v = rows(v);
    args.powers = powers(gamma);
    if (o.state.defined()) args.state = hold(o.state.contiguous()).const_data_ptr<float>();
    cut(o.documents);
  }

  const Tensor& hold(Tensor t) { return keep.emplace_back(std::move(t)); }

  Rows rows(const Tensor& t) {
    const Tensor& kept = hold(t.stride(3) == 1 ? t : t.contiguous());
    return {kept.const_data_ptr(), kept.stride(0), kept.stride(1), kept.stride(2)};
  }

 private:
  // In double, since gamma is close to 1.
  const float* powers(const Tensor& gamma) {
    const Tensor exponent = at::arange(args.chunk + 1, gamma.options().dtype(at::kDouble));
    const Tensor base = gamma.detach().to(at::kDouble).contiguous();
    // Here and not in retention's own checks, which also see tensors that have no values. NaN
    // passes, to be seen in the output.
    const double *const values = base.const_data_ptr<double>(), *const end = values + args.H;
    const double* const found = std::find_if(values, end, [](double g) { return g <= 0 || g > 1; });
    TORCH_CHECK_VALUE(found == end, "retention: gamma is ", *found, " for head ", found - values,
                      ", expected more than 0 and at most 1.");
    const Tensor rising = at::pow(base.unsqueeze(1), exponent).to(at::kFloat);
    const Tensor falling = at::constant_pad_nd(rising.flip(1), {0, args.chunk - 1});
    return hold(at::cat({falling, rising.narrow(1, 0, args.chunk)}, 1)).const_data_ptr<float>();
  }

  // No chunk crosses a document's end.
  void cut(const Tensor& documents) {
    const Tensor ids = documents.defined() ? documents.contiguous() : Tensor();
    for (int64_t b = 0; b < args.B; ++b) {
      first_chunk.push_back(static_cast<int64_t>(chunks.size()));
      const int64_t* id = ids.defined() ? ids.const_data_ptr<int64_t>() + b * args.T : nullptr;
      for (int64_t t = 0; t < args.T;) {
        const bool fresh = t == 0 ? args.state == nullptr : id != nullptr && id[t] != id[t - 1];
        int64_t end = std::min(t + args.chunk, args.T);
        for (int64_t i = t + 1; id != nullptr && i < end; ++i) {
          if (id[i] != id[i - 1]) end = i;
        }
        chunks.push_back({.begin = t, .length = end - t, .fresh = fresh});
        t = end;
      }
    }
    first_chunk.push_back(static_cast<int64_t>(chunks.size()));
    args.chunks = chunks.data();
    args.first_chunk = first_chunk.data();
  }
};

void run(const Args& args, bool backward) {
  static retaining::Run* const kernel = HL_CHOOSE(retaining::run);
  const int64_t items = args.B * args.H;
  const int64_t size =
      backward ? retaining::Backward(args, nullptr).size : retaining::Forward(args, nullptr).size;
  at::parallel_for(0, items, 1, [&](int64_t begin, int64_t end) {
    const Tensor scratch = at::empty({size}, at::TensorOptions().dtype(at::kFloat));
    kernel(args, {backward, begin, end, scratch.data_ptr<float>()});
  });
}

}  // namespace

std::string retention_limits() {
  return c10::str(
      "fused CPU kernels for the chunkwise form in float32 and bfloat16; the reference for the "
      "rest: other forms, types and devices, a gamma that wants a gradient");
}

const char* retention_unsupported_reason(const Tensor& q, const Tensor& gamma,
                                         const RetentionOptions& o) {
  if (const char* reason = kernels_unsupported(q)) return reason;
  if (o.form != "chunkwise") return "the fused kernels compute the chunkwise form only";
  if (gamma.requires_grad()) return "gamma wants a gradient";
  return nullptr;
}

std::tuple<Tensor, Tensor> retention_forward(const Tensor& q, const Tensor& k, const Tensor& v,
                                             const Tensor& gamma, const RetentionOptions& o) {
  Call call(q, k, v, gamma, o);
  Args& a = call.args;
  Tensor out = at::empty({a.B, a.T, a.H, a.E}, q.options());
  Tensor state = at::empty({a.B, a.H, a.D, a.E}, q.options().dtype(at::kFloat));
  a.out = out.data_ptr();
  a.final_state = state.data_ptr<float>();
  run(a, false);
  return {out, state};
}

std::vector<Tensor> retention_grads(const Tensor& grad_out, const Tensor& grad_state,
                                    const Tensor& q, const Tensor& k, const Tensor& v,
                                    const Tensor& gamma, const RetentionOptions& o) {
  Call call(q, k, v, gamma, o);
  Args& a = call.args;
  a.grad_out = call.rows(grad_out);
  if (grad_state.defined()) {
    a.grad_final_state = call.hold(grad_state.contiguous()).const_data_ptr<float>();
  }
  std::vector<Tensor> grads = {contiguous_like(q), contiguous_like(k), contiguous_like(v)};
  a.grad_q = grads[0].data_ptr();
  a.grad_k = grads[1].data_ptr();
  a.grad_v = grads[2].data_ptr();
  if (o.state.defined()) {
    grads.push_back(contiguous_like(o.state));
    a.grad_state = grads[3].data_ptr<float>();
  }
  run(a, true);
  return grads;
}

}  // namespace headloom::ops
