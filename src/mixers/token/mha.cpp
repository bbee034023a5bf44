// Multi-head attention (Vaswani et al. 2017), with grouped or multi queries (Ainslie et al. 2023,
// Shazeer 2019) and a head size free of C / H (Bhojanapalli et al. 2020).
#include "mixers/token/attention.h"

namespace headloom {
namespace {

struct MhaSpec final : TokenMixerSpec {
  AttentionOptions attention;

  std::string type() const override { return "mha"; }
  void fields(Fields& f) override { attention.fields(f); }
  std::shared_ptr<TokenMixer> make(const LayerShape& shape) const override {
    return std::make_shared<Attention>(attention, AttentionSizes::plain(attention, shape), shape);
  }
};

}  // namespace

TokenMixerEntry mha_mixer() {
  return {"mha", "multi-head attention; grouped-query, multi-query and free head sizes by options",
          "Vaswani et al. 2017; Bhojanapalli et al. 2020",
          [] { return std::shared_ptr<TokenMixerSpec>(std::make_shared<MhaSpec>()); }};
}

}  // namespace headloom
