// composed_attention on its CPU kernels.
#include <cmath>

#include "ops/composed_attention/declaration.h"
#include "ops/composed_attention/int8.h"
#include "ops/composed_attention/kernel.h"
#include "ops/composed_attention/schedule.h"
#include "ops/cpu.h"

namespace headloom::ops {
namespace {

namespace kernels = composed_attention_kernel;

using kernels::Plan;

struct ComposedAttentionCall : Held {
  kernels::Args args;

  template <typename T>
  kernels::View<const T> view(const Tensor& t, at::IntArrayRef shape) {
    kernels::View<const T> out;
    if (!t.defined()) return out;
    const Tensor kept = hold(t.expand(shape));
    out.data = kept.const_data_ptr<T>();
    for (int64_t i = 0; i < kept.dim(); ++i) out.stride[i] = kept.stride(i);
    return out;
  }
  kernels::AnyView weights(const Tensor& t) {
    kernels::AnyView out;
    if (!t.defined()) return out;
    out.data = t.const_data_ptr();
    for (int64_t i = 0; i < t.dim(); ++i) out.stride[i] = t.stride(i);
    return out;
  }
};

int64_t rank_of(const Tensor& down) { return down.defined() ? fixed_size(down, 2) : 0; }

kernels::Mix convert(ComposedAttentionCall& call, const HeadMix& m, int64_t heads) {
  kernels::Mix out;
  out.in = out.out = heads;
  if (!m.defined()) return out;
  out.present = true;
  out.groups = m.groups;
  if (m.static_matrix.defined()) {
    if (m.static_matrix.dim() == 2) out.out = m.static_matrix.size(1);
    out.matrix = call.floats(m.static_matrix);
  }
  out.q_rank = rank_of(m.q_down);
  out.k_rank = rank_of(m.k_down);
  out.rank = std::max(out.q_rank, out.k_rank);
  out.q_down = call.weights(m.q_down);
  out.q_up = call.weights(m.q_up);
  out.q_gate = call.weights(m.q_gate);
  out.k_down = call.weights(m.k_down);
  out.k_up = call.weights(m.k_up);
  out.k_gate = call.weights(m.k_gate);
  return out;
}

kernels::Conv convert(ComposedAttentionCall& call, const Tensor& kernel,
                      const std::string& padding) {
  kernels::Conv out;
  if (!kernel.defined()) return out;
  out.kernel = call.floats(kernel);
  if (kernel.dim() == 4) out.heads = kernel.size(1);
  out.queries = kernel.size(-2);
  out.keys = kernel.size(-1);
  out.left = padding == "both" ? (out.keys - 1) / 2 : padding == "left" ? out.keys - 1 : 0;
  return out;
}

void strides(const Tensor& t, int64_t* to) {
  for (int64_t i = 0; i < 4; ++i) to[i] = t.stride(i);
}

void convert(ComposedAttentionCall& call, const ComposedAttention::Arguments& arguments) {
  const auto& [q, k, v, o] = arguments;
  kernels::Args& a = call.args;
  a.B = q.size(0);
  a.T = q.size(1);
  a.S = k.size(1);
  a.H = q.size(2);
  a.Gk = k.size(2);
  a.Gv = v.size(2);
  a.D = q.size(3);
  a.E = v.size(3);
  a.type = kernel_type(q);
  a.q = q.const_data_ptr();
  a.k = k.const_data_ptr();
  a.v = v.const_data_ptr();
  strides(q, a.q_stride);
  strides(k, a.k_stride);
  strides(v, a.v_stride);
  a.scale = static_cast<float>(o.scale.value_or(1.0 / std::sqrt(static_cast<double>(a.D))));
  a.pre = convert(call, o.pre, a.H);
  a.H1 = a.pre.out;
  a.post = convert(call, o.post, a.H1);
  a.H2 = a.post.out;
  a.pre_conv = convert(call, o.pre_conv, o.conv_padding);
  a.post_conv = convert(call, o.post_conv, o.conv_padding);
  a.exact_mask = o.conv_mask == "exact";
  a.past_cache = fetches_past_cache();
  if (o.bias.defined()) a.bias = call.view<float>(o.bias.to(at::kFloat), {a.B, a.H, a.T, a.S});
  a.causal = o.causal;
  // A window that reaches over everything is none; the kernels add to it and double it.
  if (o.window && *o.window < a.S + a.T) a.window = *o.window;
  a.lengths = call.whole<int64_t>(o.lengths);
  a.documents = call.whole<int64_t>(o.documents);
  a.mask = call.view<bool>(o.mask, {a.B, 1, a.T, a.S});
}

// Where the processor does not multiply bfloat16 itself, it is widened when packed.
kernels::Products products_of(const kernels::Args& a) {
  using kernels::Products;
  const bool pairs = a.type == Type::kBFloat16 && capability() == Capability::kAvx512Bf16;
  return !pairs ? Products::kFloats : has_amx() ? Products::kAmx : Products::kPairs;
}

// Few queries against few keys: a second thread costs more than it brings. Measured: as much at 256
// KB of keys and values.
Plan forward_plan(const kernels::Args& a) {
  const auto products = a.k_scale ? kernels::Products::kFloats : products_of(a);
  const Plan plan = kernels::make_plan(a, false, products, thread_count());
  const int64_t size = a.k_scale ? 1 : a.type == Type::kBFloat16 ? 2 : 4;
  const bool small = a.B * a.S * (a.Gk * a.D + a.Gv * a.E) * size < int64_t{256} << 10;
  return plan.direct && small ? kernels::make_plan(a, false, products, 1) : plan;
}

void run_all(const kernels::Args& a, const Plan& plan) {
  static kernels::Run* const kernel = HL_CHOOSE(kernels::run);
  thread_local KeptMemory kept(int64_t{64} << 20);  // calls that need more take long anyway
  const Tensor memory =
      kept.bytes(kernels::memory_floats(a, plan) * static_cast<int64_t>(sizeof(float)));
  auto* const floats = static_cast<float*>(memory.data_ptr());
  kernels::run_all(a, plan, kernel, floats, [](int64_t n, const auto& f) {
    at::parallel_for(0, n, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) f(i);
    });
  });
}

const char* mix_reason(const HeadMix& m) {
  if (rank_of(m.q_down) > kernels::kMaxRank || rank_of(m.k_down) > kernels::kMaxRank) {
    return "a low-rank branch has a rank above 4";
  }
  if ((m.q_down.defined() && fixed_size(m.q_down, 2) == 0) ||
      (m.k_down.defined() && fixed_size(m.k_down, 2) == 0)) {
    return "a low-rank branch has rank 0";
  }
  return nullptr;
}

// Contiguous memory for a gradient. Where there is no query or no key nothing runs that would write
// it: then it is the sum of nothing.
Tensor fresh_grad(const kernels::Args& a, const Tensor& like, at::ScalarType type) {
  const auto options = like.options().dtype(type).memory_format(at::MemoryFormat::Contiguous);
  return a.B * a.T * a.S > 0 ? at::empty(like.sizes(), options) : at::zeros(like.sizes(), options);
}

// Allocates the gradients of a mix and points the kernel to them.
HeadMix allocate_grads(ComposedAttentionCall& call, const HeadMix& m, kernels::Mix& mix,
                       int64_t workers) {
  HeadMix out;
  out.groups = m.groups;
  const auto like = [&](const Tensor& t, float** data) {
    if (!t.defined()) return Tensor();
    Tensor grad = fresh_grad(call.args, t, at::kFloat);
    *data = grad.data_ptr<float>();
    return grad;
  };
  if (m.static_matrix.defined()) {
    Tensor sums =
        at::zeros({workers, m.static_matrix.numel()}, m.static_matrix.options().dtype(at::kFloat));
    mix.grad.matrix = call.hold(sums).data_ptr<float>();
    out.static_matrix = sums;
  }
  out.q_down = like(m.q_down, &mix.grad.q_down);
  out.q_up = like(m.q_up, &mix.grad.q_up);
  out.q_gate = like(m.q_gate, &mix.grad.q_gate);
  out.k_down = like(m.k_down, &mix.grad.k_down);
  out.k_up = like(m.k_up, &mix.grad.k_up);
  out.k_gate = like(m.k_gate, &mix.grad.k_gate);
  return out;
}

void finish_grads(HeadMix& grads, const HeadMix& m) {
  if (grads.static_matrix.defined()) {
    grads.static_matrix = grads.static_matrix.sum(0).view(m.static_matrix.sizes());
  }
}

// The sums [n, bias]: one where no two workers add to the same elements, else one for each worker.
Tensor allocate_bias_grad(ComposedAttentionCall& call, const Tensor& bias, int64_t workers) {
  kernels::Args& a = call.args;
  const auto full = [&](int64_t dim, int64_t size) {
    return bias.dim() + dim >= 4 && bias.size(bias.dim() + dim - 4) == size;
  };
  const bool apart = full(2, a.T) && a.pre_conv.halo() + a.post_conv.halo() == 0 &&
                     (full(0, a.B) || kernels::whole_elements(a, workers) == 0);
  const Tensor sums =
      at::zeros({apart ? 1 : workers, bias.numel()}, bias.options().dtype(at::kFloat));
  const Tensor first = sums.select(0, 0).view(bias.sizes()).expand({a.B, a.H, a.T, a.S});
  a.grad_bias.data = sums.data_ptr<float>();
  a.grad_bias_size = apart ? 0 : bias.numel();
  strides(first, a.grad_bias.stride);
  return call.hold(sums);
}

const char* unsupported(const ComposedAttention::Arguments& a) {
  const auto& [q, k, v, o] = a;
  if (fixed_size(q, 2) > kernels::kMaxHeads) return "there are more than 64 heads";
  for (const HeadMix* m : {&o.pre, &o.post}) {
    if (const char* reason = mix_reason(*m)) return reason;
    if (m->static_matrix.defined() && fixed_size(m->static_matrix, -1) > kernels::kMaxHeads) {
      return "a static mix makes more than 64 maps";
    }
  }
  if (fixed_size(q, 3) > 256 || fixed_size(v, 3) > 256) return "a head is larger than 256";
  if (fixed_size(v, 3) < 1) return "the value heads are empty";
  for (const Tensor* c : {&o.pre_conv, &o.post_conv}) {
    if (!c->defined()) continue;
    if (fixed_size(*c, -2) > kernels::kMaxConvQueries) {
      return "a convolution reaches over more than 8 queries";
    }
    if (fixed_size(*c, -1) > kernels::kMaxConvKeys) {
      return "a convolution reaches over more than 33 keys";
    }
  }
  return nullptr;
}

std::vector<Tensor> forward(const ComposedAttention::Arguments& arguments, bool training) {
  ComposedAttentionCall call;
  convert(call, arguments);
  kernels::Args& a = call.args;
  std::vector<Tensor> out = ComposedAttention::outputs(arguments, training);
  a.out = out[0].data_ptr();
  a.lse = out[1].data_ptr<float>();
  if (out[0].numel() > 0) run_all(a, forward_plan(a));
  return out;
}

void backward(const ComposedAttention::Arguments& arguments, Backward<ComposedAttention>& b) {
  ComposedAttentionCall call;
  convert(call, arguments);
  const auto& [q, k, v, o] = arguments;
  kernels::Args& a = call.args;
  const int64_t workers = thread_count();
  auto& [grad_q, grad_k, grad_v, grads] = b.gradients;
  grad_q = fresh_grad(a, q, q.scalar_type());
  grad_k = fresh_grad(a, k, k.scalar_type());
  grad_v = fresh_grad(a, v, v.scalar_type());
  a.grad_q = grad_q.data_ptr();
  a.grad_k = grad_k.data_ptr();
  a.grad_v = grad_v.data_ptr();
  grads.pre = allocate_grads(call, o.pre, a.pre, workers);
  grads.post = allocate_grads(call, o.post, a.post, workers);
  const auto taps = [&](const Tensor& kernel, kernels::Conv& conv) {
    if (!kernel.defined()) return Tensor();
    Tensor sums = at::zeros({workers, kernel.numel()}, kernel.options().dtype(at::kFloat));
    conv.grad = call.hold(sums).data_ptr<float>();
    return sums;
  };
  grads.pre_conv = taps(o.pre_conv, a.pre_conv);
  grads.post_conv = taps(o.post_conv, a.post_conv);
  if (b.wants(grads.bias)) grads.bias = allocate_bias_grad(call, o.bias, workers);
  a.grad_out = b.grads[0].const_data_ptr();
  strides(b.grads[0], a.grad_out_stride);
  a.lse = const_cast<float*>(b.kept[0].const_data_ptr<float>());
  if (a.B * a.S * a.T > 0) run_all(a, kernels::make_plan(a, true, products_of(a), workers));
  finish_grads(grads.pre, o.pre);
  finish_grads(grads.post, o.post);
  const auto finish = [](Tensor& sums, const Tensor& like) {
    if (sums.defined()) sums = sums.sum(0).view(like.sizes());
  };
  finish(grads.pre_conv, o.pre_conv);
  finish(grads.post_conv, o.post_conv);
  finish(grads.bias, o.bias);
}

const Kernels<ComposedAttention> composed_attention_cpu(
    {.limits = c10::str("up to ", kernels::kMaxHeads, " maps, heads up to 256, rank up to ",
                        kernels::kMaxRank, ", convolutions up to ", kernels::kMaxConvQueries, " x ",
                        kernels::kMaxConvKeys),
     .unsupported = unsupported,
     .forward = forward,
     .backward = backward});

}  // namespace

Tensor composed_attention_int8(const Tensor& q, const Tensor& k, const Tensor& v,
                               const Tensor& k_scale, const Tensor& v_scale,
                               const ComposedAttentionOptions& options) {
  ComposedAttention::Arguments arguments{q, k, v, options};
  if (at::autocast::is_autocast_enabled(q.device().type())) {
    ComposedAttention::autocast(arguments, AutocastCast(q.device().type()));
  }
  const auto computed = arguments.q.scalar_type();
  const bool kernel_type = computed == at::kFloat || computed == at::kBFloat16;
  if (q.is_cpu() && kernel_type && q.numel() > 0 && unsupported(arguments) == nullptr) {
    ComposedAttentionCall call;
    convert(call, arguments);
    kernels::Args& a = call.args;
    a.k_scale = k_scale.const_data_ptr<float>();
    a.v_scale = v_scale.const_data_ptr<float>();
    for (const auto& [scale, to] :
         {std::pair(&k_scale, a.k_scale_stride), std::pair(&v_scale, a.v_scale_stride)}) {
      to[0] = scale->stride(0);
      to[1] = scale->stride(1);
      to[2] = 0;
      to[3] = 1;
    }
    if (const Plan plan = forward_plan(a); plan.direct) {
      std::vector<Tensor> out = ComposedAttention::outputs(arguments, false);
      a.out = out[0].data_ptr();
      a.lse = out[1].data_ptr<float>();
      run_all(a, plan);
      return out[0];
    }
  }
  const auto type = q.scalar_type();
  return composed_attention(q, dequantized_heads(k, k_scale, type),
                            dequantized_heads(v, v_scale, type), options);
}

}  // namespace headloom::ops
