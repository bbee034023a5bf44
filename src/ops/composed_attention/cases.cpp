// What composed attention is timed on: the mechanisms at the sizes people train, beside plain
// attention.
#include <ATen/ATen.h>

#include "ops/case.h"
#include "ops/composed_attention/declaration.h"

namespace headloom::ops {
namespace {

using at::Tensor;

struct Sizes {
  int64_t length = 2048;
  int64_t heads = 8, keys = 8, values = 8;
  int64_t dim = 64, value_dim = 64;
};

// Names the tensors of `o` that a case fills, in the order they follow q, k and v.
struct Slot {
  Tensor* place;
  std::vector<int64_t> shape;
  double mean, std;
};
using Fill = std::function<std::vector<Slot>(ComposedAttentionOptions& o, const Sizes& s)>;

Tensor drawn(const std::vector<int64_t>& shape, double mean, double std, at::ScalarType type) {
  return at::randn(shape).mul_(std).add_(mean).to(type);
}

OpCase composed_attention_case(const std::string& name, const Sizes& s,
                               const ComposedAttentionOptions& base, const Fill& fill,
                               double forward_target, double training_target,
                               at::ScalarType type = at::kFloat) {
  OpCase c;
  c.op = "composed_attention";
  c.name = name + " T=" + std::to_string(s.length) + (type == at::kBFloat16 ? " bfloat16" : "");
  c.dtype = type;
  c.inputs = [=] {
    std::vector<Tensor> inputs = {drawn({1, s.length, s.heads, s.dim}, 0, 1, type),
                                  drawn({1, s.length, s.keys, s.dim}, 0, 1, type),
                                  drawn({1, s.length, s.values, s.value_dim}, 0, 1, type)};
    ComposedAttentionOptions o = base;
    for (const Slot& slot : fill(o, s)) {
      inputs.push_back(drawn(slot.shape, slot.mean, slot.std, type));
    }
    return inputs;
  };
  c.run = [=](const std::vector<Tensor>& inputs, const std::optional<std::string>& backend) {
    ComposedAttentionOptions o = base;
    o.backend = backend;
    const auto slots = fill(o, s);
    for (size_t i = 0; i < slots.size(); ++i) *slots[i].place = inputs[3 + i];
    return composed_attention(inputs[0], inputs[1], inputs[2], o);
  };
  ComposedAttentionOptions shapes = base;
  c.differentiable = 3 + fill(shapes, s).size();
  // Plain attention with as many heads of the same size, in the layout it likes best.
  c.baseline_name = base.window ? "plain attention, same window" : "plain attention";
  const auto window = base.window;
  c.baseline_inputs = [=] {
    std::vector<Tensor> inputs;
    for (int i = 0; i < 3; ++i) {
      inputs.push_back(drawn({1, s.heads, s.length, s.dim}, 0, 1, type));
    }
    return inputs;
  };
  c.baseline = [=](const std::vector<Tensor>& x) {
    if (!window) return at::scaled_dot_product_attention(x[0], x[1], x[2], {}, 0.0, true);
    // The better way to a window with plain attention: blocks of W queries against their 2W keys.
    const int64_t w = *window, blocks = s.length / w;
    const auto with_previous = [&](const Tensor& t) {
      const Tensor cut = t.unflatten(2, {blocks, w});
      const Tensor before = at::constant_pad_nd(cut, {0, 0, 0, 0, 1, 0}).narrow(2, 0, blocks);
      return at::cat({before, cut}, 3).transpose(1, 2).flatten(0, 1);
    };
    const Tensor q = x[0].unflatten(2, {blocks, w}).transpose(1, 2).flatten(0, 1);
    const Tensor key = at::arange(2 * w).unsqueeze(0), query = at::arange(w, 2 * w).unsqueeze(1);
    const Tensor visible = key.le(query).logical_and((query - key).lt(w));
    const Tensor o = at::scaled_dot_product_attention(q, with_previous(x[1]), with_previous(x[2]),
                                                      visible.unsqueeze(0).unsqueeze(0));
    return o.unflatten(0, {1, blocks}).transpose(1, 2).flatten(2, 3);
  };
  const double keys =
      base.window ? static_cast<double>(*base.window) : static_cast<double>(s.length + 1) / 2;
  c.forward_work.flops = 2 * static_cast<double>(s.length) * keys *
                         static_cast<double>(s.heads * s.dim + s.heads * s.dim);
  c.forward_target = forward_target;
  c.training_target = training_target;
  {
    Sizes tiny = s;
    tiny.length = 4;
    ComposedAttentionOptions o = base;
    for (const Slot& slot : fill(o, tiny)) *slot.place = at::empty(slot.shape, type);
    c.unsupported = unsupported_by_kernels<ComposedAttention>(
        {at::empty({1, 4, s.heads, s.dim}, type), at::empty({1, 4, s.keys, s.dim}, type),
         at::empty({1, 4, s.values, s.value_dim}, type), o});
  }
  return c;
}

void add_dynamic(std::vector<Slot>& slots, HeadMix& mix, const Sizes& s, bool query, bool key) {
  const int64_t rank = 2;
  const double std = 0.3;
  if (query) {
    slots.push_back({&mix.q_down, {1, s.length, rank, s.heads}, 0, std});
    slots.push_back({&mix.q_up, {1, s.length, rank, s.heads}, 0, std});
    slots.push_back({&mix.q_gate, {1, s.length, s.heads}, 0, std});
  }
  if (key) {
    slots.push_back({&mix.k_down, {1, s.length, rank, s.heads}, 0, std});
    slots.push_back({&mix.k_up, {1, s.length, rank, s.heads}, 0, std});
    slots.push_back({&mix.k_gate, {1, s.length, s.heads}, 0, std});
  }
}

Fill dynamic(bool query, bool key) {
  return [=](ComposedAttentionOptions& o, const Sizes& s) {
    std::vector<Slot> slots;
    add_dynamic(slots, o.pre, s, query, key);
    add_dynamic(slots, o.post, s, query, key);
    return slots;
  };
}

std::vector<Slot> talking(ComposedAttentionOptions& o, const Sizes& s) {
  return {{&o.pre.static_matrix, {s.heads, s.heads}, 0, 0.3},
          {&o.post.static_matrix, {s.heads, s.heads}, 0, 0.3}};
}

std::vector<Slot> difference(ComposedAttentionOptions& o, const Sizes& s) {
  return {{&o.post.static_matrix, {s.heads, s.heads / 2}, 0, 0.3}};
}

std::vector<Slot> multi_token(ComposedAttentionOptions& o, const Sizes& s) {
  o.post.groups = s.heads / 2;
  return {{&o.pre_conv, {s.heads, 6, 11}, 0, 0.1},
          {&o.post.static_matrix, {s.heads / 2, 2, 2}, 0, 0.5}};
}

std::vector<Slot> nothing(ComposedAttentionOptions&, const Sizes&) { return {}; }

}  // namespace

static std::vector<OpCase> composed_attention_cases() {
  const ComposedAttentionOptions causal;
  ComposedAttentionOptions windowed;
  windowed.window = 256;
  std::vector<OpCase> cases;
  for (int64_t length : {512, 1024, 2048}) {
    cases.push_back(composed_attention_case("dcmha", {.length = length}, causal,
                                            dynamic(true, true), 1.3, 1.6));
  }
  for (int64_t length : {4096, 8192}) {
    cases.push_back(composed_attention_case("dcmha", {.length = length}, causal,
                                            dynamic(true, true), 1.5, 1.8));
  }
  cases.push_back(composed_attention_case("dcmha window 256", {.length = 4096}, windowed,
                                          dynamic(true, true), 1.3, 1.6));
  cases.push_back(
      composed_attention_case("query-wise only", {}, causal, dynamic(true, false), 1.15, 1.4));
  cases.push_back(composed_attention_case("talking heads", {}, causal, talking, 1.3, 1.6));
  cases.push_back(composed_attention_case("differential", {.values = 4, .value_dim = 128}, causal,
                                          difference, 1.15, 1.25));
  cases.push_back(composed_attention_case("multi_token 6x11", {}, causal, multi_token, 2.0, 2.5));
  cases.push_back(composed_attention_case(
      "dcmha H=32 D=128", {.heads = 32, .keys = 32, .values = 32, .dim = 128, .value_dim = 128},
      causal, dynamic(true, true), 1.3, 1.6));
  cases.push_back(composed_attention_case("nothing composed", {}, causal, nothing, 1.0, 1.0));
  cases.push_back(
      composed_attention_case("dcmha", {}, causal, dynamic(true, true), 0, 0, at::kBFloat16));
  return cases;
}

static const CaseFamily composed_attention_registered(composed_attention_cases);

}  // namespace headloom::ops
