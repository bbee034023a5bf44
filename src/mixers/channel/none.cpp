// No channel mixer: the block is its token mixer alone, as in the two-layer recall models of
// Arora et al. 2023.
#include "mixers/mixer.h"

namespace headloom {
namespace {

struct NoneSpec final : ChannelMixerSpec {
  void fields(Fields&) override {}
  // Blocks leave out a channel mixer that is null.
  std::shared_ptr<ChannelMixer> make(const LayerShape&) const override { return nullptr; }
};

}  // namespace

ChannelMixerEntry none_channel() {
  return {"none",
          "no channel mixer",
          "Arora et al. 2023",
          {},
          []() -> std::shared_ptr<ChannelMixerSpec> { return std::make_shared<NoneSpec>(); }};
}

}  // namespace headloom
