// Multi-head attention (Vaswani et al. 2017), with grouped or multi queries (Ainslie et al. 2023,
// Shazeer 2019) and a head size free of C / H (Bhojanapalli et al. 2020).
#include "mixers/token/attention.h"

namespace headloom {
namespace {

class Mha final : public Attention {
 public:
  Mha(const AttentionOptions& options, const LayerShape& shape)
      : Attention(options, AttentionSizes::plain(options, shape), shape) {}
};

}  // namespace

TokenMixerEntry mha_mixer() {
  return token_mixer<Mha, AttentionOptions>(
      "mha", "multi-head attention; grouped-query, multi-query and free head sizes by options",
      "Vaswani et al. 2017; Bhojanapalli et al. 2020",
      {.cross_attention = true, .tensor_parallel = true, .context_parallel = true});
}

}  // namespace headloom
