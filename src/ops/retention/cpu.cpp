// retention's chunkwise form on its CPU kernels.
#include "ops/cpu.h"
#include "ops/retention/declaration.h"
#include "ops/retention/kernel.h"
#include "ops/retention/scratch.h"

namespace headloom::ops {
namespace {

using retention_kernel::padded;

constexpr int64_t kLargestChunk = 256;

struct RetentionCall : Held {
  retention_kernel::Args args{};
  std::vector<retention_kernel::Chunk> chunks;
  std::vector<int64_t> first_chunk;

  explicit RetentionCall(const Retention::Arguments& a) {
    args.B = a.q.size(0);
    args.T = a.q.size(1);
    args.H = a.q.size(2);
    args.D = a.q.size(3);
    args.E = a.v.size(3);
    args.type = kernel_type(a.q);
    // The rounding of factors comes to nothing in sums of many products. In few it shows, and there
    // is no time to be gained: the padded factors are mostly zeros.
    args.narrow = std::min({args.T, args.D, args.E}) >= retention_kernel::kAlign;
    args.amx = args.type == Type::kBFloat16 && args.narrow && has_amx();
    args.chunk = std::min(padded(std::min(a.options.chunk, kLargestChunk)), padded(args.T));
    args.q = head_sequence(a.q);
    args.k = head_sequence(a.k);
    args.v = head_sequence(a.v);
    args.powers = powers_of(a.gamma);
    args.state = whole<float>(a.options.state);
    cut(whole<int64_t>(a.options.documents));
  }

  void run(bool backward) const {
    static retention_kernel::Run* const kernel = HL_CHOOSE(retention_kernel::run);
    const int64_t size = backward ? retention_kernel::Backward(args, nullptr).size
                                  : retention_kernel::Forward(args, nullptr).size;
    const int64_t each = grain(args.T * args.D * args.E);
    at::parallel_for(0, args.B * args.H, each, [&](int64_t begin, int64_t end) {
      const Tensor scratch = at::empty({size}, at::kFloat);
      kernel(args, {backward, begin, end, scratch.data_ptr<float>()});
    });
  }

 private:
  // In double, since gamma is close to 1.
  const float* powers_of(const Tensor& gamma) {
    const Tensor base = gamma.to(at::kDouble).contiguous();
    // Here and not in retention's own checks, which also see tensors that have no values. NaN
    // passes, to be seen in the output.
    const double *const values = base.const_data_ptr<double>(), *const end = values + args.H;
    const double* const found = std::find_if(values, end, [](double g) { return g <= 0 || g > 1; });
    TORCH_CHECK_VALUE(found == end, "retention: gamma is ", *found, " for head ", found - values,
                      ", expected more than 0 and at most 1.");
    const int64_t chunk = args.chunk;
    const Tensor powers = hold(at::empty({args.H, 3 * chunk}, at::kFloat));
    float* row = powers.data_ptr<float>();
    for (const double* g = values; g != end; ++g, row += 3 * chunk) {
      std::fill(row + chunk + 1, row + 2 * chunk, 0.0F);
      double power = 1;
      for (int64_t i = 0; i <= chunk; ++i, power *= *g) {
        row[chunk - i] = static_cast<float>(power);
        if (i < chunk) row[2 * chunk + i] = static_cast<float>(power);
      }
    }
    return powers.const_data_ptr<float>();
  }

  // No chunk crosses a document's end.
  void cut(const int64_t* id) {
    for (int64_t b = 0; b < args.B; ++b) {
      first_chunk.push_back(static_cast<int64_t>(chunks.size()));
      for (int64_t t = 0; t < args.T;) {
        const bool fresh = t == 0 ? args.state == nullptr : id != nullptr && id[t] != id[t - 1];
        int64_t end = std::min(t + args.chunk, args.T);
        for (int64_t i = t + 1; id != nullptr && i < end; ++i) {
          if (id[i] != id[i - 1]) end = i;
        }
        chunks.push_back({.begin = t, .length = end - t, .fresh = fresh});
        t = end;
      }
      if (id != nullptr) id += args.T;
    }
    first_chunk.push_back(static_cast<int64_t>(chunks.size()));
    args.chunks = chunks.data();
    args.first_chunk = first_chunk.data();
  }
};

const char* unsupported(const Retention::Arguments& a) {
  return a.options.form == "chunkwise" ? nullptr
                                       : "the fused kernels compute the chunkwise form only";
}

std::vector<Tensor> forward(const Retention::Arguments& a, bool training) {
  RetentionCall call(a);
  std::vector<Tensor> outputs = Retention::outputs(a, training);
  call.args.out = outputs[0].data_ptr();
  call.args.final_state = outputs[1].data_ptr<float>();
  call.run(false);
  return outputs;
}

void backward(const Retention::Arguments& a, Backward<Retention>& b) {
  RetentionCall call(a);
  call.args.grad_out = call.head_sequence(b.grads[0]);
  call.args.grad_final_state = call.whole<float>(b.grads[1]);
  Retention::Arguments& to = b.gradients;
  to.q = contiguous_like(a.q);
  to.k = contiguous_like(a.k);
  to.v = contiguous_like(a.v);
  call.args.grad_q = to.q.data_ptr();
  call.args.grad_k = to.k.data_ptr();
  call.args.grad_v = to.v.data_ptr();
  if (b.wants(to.options.state)) {
    to.options.state = contiguous_like(a.options.state);
    call.args.grad_state = to.options.state.data_ptr<float>();
  }
  call.run(true);
}

const Kernels<Retention> retention_cpu({.limits = "the chunkwise form",
                                        .unsupported = unsupported,
                                        .forward = forward,
                                        .backward = backward});

}  // namespace
}  // namespace headloom::ops
