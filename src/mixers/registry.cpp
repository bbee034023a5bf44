// The tables of mixers, explicit so that nothing depends on static initialisation. One line a
// mixer.
#include "mixers/mixer.h"

namespace headloom {

#define HEADLOOM_TOKEN_MIXERS(X) \
  X(mha)                         \
  X(talking_heads)               \
  X(dcmha)                       \
  X(differential)                \
  X(multi_token)                 \
  X(retention)                   \
  X(rwkv)                        \
  X(fnet)                        \
  X(linformer)                   \
  X(shaped)                      \
  X(aft)                         \
  X(mamba)                       \
  X(gla)                         \
  X(performer)                   \
  X(synthesizer)

#define HEADLOOM_CHANNEL_MIXERS(X) \
  X(mlp)                           \
  X(swiglu)                        \
  X(rwkv_channel)                  \
  X(moe)                           \
  X(none)

#define DECLARE(name) TokenMixerEntry name##_mixer();
HEADLOOM_TOKEN_MIXERS(DECLARE)
#undef DECLARE
#define DECLARE(name) ChannelMixerEntry name##_channel();
HEADLOOM_CHANNEL_MIXERS(DECLARE)
#undef DECLARE

const std::vector<TokenMixerEntry>& token_mixers() {
#define ENTRY(name) name##_mixer(),
  static const std::vector<TokenMixerEntry> entries = {HEADLOOM_TOKEN_MIXERS(ENTRY)};
#undef ENTRY
  return entries;
}

const std::vector<ChannelMixerEntry>& channel_mixers() {
#define ENTRY(name) name##_channel(),
  static const std::vector<ChannelMixerEntry> entries = {HEADLOOM_CHANNEL_MIXERS(ENTRY)};
#undef ENTRY
  return entries;
}

}  // namespace headloom
