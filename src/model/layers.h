// A run of layers, built from a configuration's list: what all models consist of.
#pragma once

#include "model/config.h"

namespace headloom {

struct LayersPlan {
  std::string part = {};      // "encoder" and "decoder" where a model has both
  std::string key = "layer";  // of the list in [model], for messages
  std::vector<LayerConfig> list = {};
  int64_t depth = 0;
  int64_t first = 0;  // layers of the model that come before
  int64_t max_length = 0;
  bool causal = true;
  std::optional<int64_t> memory_length = {};  // cross-attention reads at most as much
};

// Is told which layer computes next, where a layer's parameters are not always there.
class LayerWatcher {
 public:
  virtual ~LayerWatcher() = default;
  // `layer` (MixerContext::layer) begins its forward or its backward; another one has ended.
  virtual void begin(int64_t layer, bool backward) = 0;
};

class Layers {
 public:
  struct Layer {
    std::shared_ptr<TokenMixer> mixer, cross;  // cross may be null
    std::shared_ptr<ChannelMixer> channel;     // may be null
    std::shared_ptr<Block> block;
  };

  // Registers layer0, layer1, ... and the final norm in `owner`. Throws UsageError naming the layer
  // whose options do not fit.
  Layers(Module& owner, const ModelConfig& config, const LayersPlan& plan);
  // x [B, T, C] -> [B, T, C], normed at the end. With `states`, one a layer, x continues what they
  // have seen, and the result has the newest positions that the context wants.
  Tensor forward(Tensor x, const MixerContext& context,
                 std::vector<LayerState>* states = nullptr) const;

  // `watcher` must outlive this and every graph that forward() leaves; nullptr for none.
  void watch(LayerWatcher* watcher) { watcher_ = watcher; }

  const std::string& part() const { return plan_.part; }
  bool causal() const { return plan_.causal; }
  // Whether every token mixer has a decoding state.
  bool stateful() const;
  const std::vector<Layer>& all() const { return layers_; }
  // "layer3", or "decoder.layer3": the layer's name among the parameters and in a Recording.
  std::string place(size_t layer) const;
  // The place of the first layer among all of the model's: MixerContext::layer.
  int64_t first() const { return plan_.first; }

 private:
  const LayersPlan plan_;
  std::vector<Layer> layers_;
  std::shared_ptr<Norm> norm_;  // null where the model has no final norm
  LayerWatcher* watcher_ = nullptr;
};

}  // namespace headloom
