#include "model/sampling.h"

namespace headloom {

int64_t sample(const Tensor& logits, const SamplingOptions& o, at::Generator& generator) {
  const Tensor scores = logits.to(at::kFloat);
  if (o.temperature == 0) return scores.argmax().item<int64_t>();
  const auto [sorted, order] = (scores / o.temperature).sort(/*dim=*/-1, /*descending=*/true);
  Tensor p = at::softmax(sorted, -1);
  // A token is kept while the likelier ones before it have not yet reached top_p.
  p = p.masked_fill((p.cumsum(-1) - p).ge(o.top_p), 0);
  p.select(0, 0).clamp_min_(1e-30);
  if (o.top_k > 0 && o.top_k < p.size(0)) p.narrow(0, o.top_k, p.size(0) - o.top_k).zero_();
  return order.index_select(0, at::multinomial(p, 1, false, generator)).item<int64_t>();
}

}  // namespace headloom
