// composed_attention on NVIDIA GPUs: which cases its kernels take. The kernels are in Triton and in
// CUDA, and the Python package registers them with the dispatcher (python/headloom/gpu).
#include <algorithm>

#include "ops/composed_attention/declaration.h"
#include "ops/cuda.h"

namespace headloom::ops {
namespace {

constexpr int64_t kMaxTritonHeads = 64, kMaxTritonRank = 4;
constexpr int64_t kMinTritonQueries = 16;  // of a tile
constexpr int64_t kMaxTritonJobs = 4;      // for a sequence, in one launch

const char* triton_mix_reason(const HeadMix& m) {
  for (const Tensor* down : {&m.q_down, &m.k_down}) {
    if (down->defined() && fixed_size(*down, 2) > kMaxTritonRank) return "a mix has a rank above 4";
  }
  if (m.static_matrix.defined() &&
      fixed_size(m.static_matrix, -1) != fixed_size(m.static_matrix, -2)) {
    return "a static mix changes the number of maps";
  }
  return nullptr;
}

const char* triton_reason(const ComposedAttention::Arguments& a) {
  const ComposedAttentionOptions& o = a.options;
  if (const char* reason = triton_missing<ComposedAttention>(a)) return reason;
  if (is_plain(o)) return "nothing is composed, which scaled_dot_product_attention computes faster";
  if (fixed_size(a.q, 2) > kMaxTritonHeads) return "there are more than 64 heads";
  if (fixed_size(a.v, 3) == 0) return "a head has no values";
  // The number of queries and of sequences may be any in a graph.
  if (TORCH_GUARD_OR_FALSE(a.q.sym_size(1).sym_lt(kMinTritonQueries))) {
    return "there are fewer than 16 queries, of which the definition's maps are small";
  }
  for (const HeadMix* m : {&o.pre, &o.post}) {
    if (const char* reason = triton_mix_reason(*m)) return reason;
  }
  const int64_t groups = std::max(o.pre.groups, o.post.groups);
  const int64_t most = kMaxCudaBlocks / std::max(kMaxTritonJobs, groups);
  if (TORCH_GUARD_OR_FALSE(a.q.sym_size(0).sym_gt(most))) {
    return "the batch has more sequences than a launch has blocks";
  }
  if (o.pre.defined() && o.post.defined() && o.pre.groups != o.post.groups) {
    return "the mixes before and after softmax have different groups";
  }
  return nullptr;
}

const CudaKernels<ComposedAttention> composed_attention_cuda(
    {.limits = c10::str("from ", kMinTritonQueries, " queries on, up to ", kMaxTritonHeads,
                        " maps, rank up to ", kMaxTritonRank, ", with Triton"),
     .unsupported = triton_reason});

}  // namespace
}  // namespace headloom::ops
