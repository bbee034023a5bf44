#include "mixers/token/attention_maps.h"

#include <limits>

#include "mixers/recording.h"
#include "ops/composed_attention/trace.h"

namespace headloom {
namespace {

std::string map_prefix(const MixerContext& context) {
  return context.memory.defined() ? "cross." : "";
}

// Puts what there is of one stage.
class MapStage {
 public:
  MapStage(Recording& recording, std::string name, const Tensor& visible)
      : recording_(recording), name_(std::move(name)), visible_(visible) {}

  void put(const char* part, const Tensor& map, double invisible) const {
    if (!map.defined()) return;
    const std::string name = part[0] == '\0' ? name_ : name_ + "." + part;
    if (!recording_.wants(name)) return;
    recording_.put(name,
                   visible_.defined() ? map.masked_fill(visible_.logical_not(), invisible) : map);
  }
  // As it is.
  void put_whole(const char* part, const Tensor& value) const {
    if (value.defined()) recording_.put(name_ + "." + part, value);
  }

 private:
  Recording& recording_;
  const std::string name_;
  const Tensor& visible_;
};

}  // namespace

bool wants_maps(const MixerContext& context) {
  if (context.recording == nullptr) return false;
  bool wanted = false;
  for (const char* stage : {"scores", "weights"}) {
    wanted |= context.recording->wants_family(map_prefix(context) + stage);
  }
  return wanted;
}

Tensor attention_with_maps(const Tensor& q, const Tensor& k, const Tensor& v,
                           const ops::ComposedAttentionOptions& o, const MixerContext& context,
                           const Tensor& order) {
  ops::ComposedAttentionTrace trace;
  const Tensor out = ops::composed_attention_traced(q, k, v, o, trace);
  const int64_t heads = q.size(2);
  // Maps of the operator's order become the mixer's. After a matrix that changes the number of
  // maps they have the mixer's order already.
  const auto ordered = [&](Tensor& map, int64_t dim) {
    if (order.defined() && map.defined()) map = map.index_select(dim, order);
  };
  for (Tensor* map : {&trace.scores.before, &trace.scores.convolved, &trace.scores.by_static,
                      &trace.scores.by_query, &trace.scores.by_key, &trace.scores.after,
                      &trace.weights.before, &trace.weights.convolved}) {
    ordered(*map, 1);
  }
  constexpr double kNone = -std::numeric_limits<double>::infinity();
  for (const bool post : {false, true}) {
    const ops::CompositionTrace& t = post ? trace.weights : trace.scores;
    const ops::HeadMix& mix = post ? o.post : o.pre;
    const MapStage stage(*context.recording, map_prefix(context) + (post ? "weights" : "scores"),
                         trace.visible);
    stage.put("", t.before, post ? 0 : kNone);
    stage.put("convolved", t.convolved, post ? 0 : kNone);
    stage.put("static", t.by_static, 0);
    stage.put("query", t.by_query, 0);
    stage.put("key", t.by_key, 0);
    stage.put("composed", t.after, post ? 0 : kNone);
    if (!post) {
      stage.put_whole("unmasked", t.before);
      stage.put_whole("composed_unmasked", t.after);
    }
    if (!mix.defined()) continue;
    ops::CompositionMaps maps = ops::composition_maps(mix, heads, q.options().requires_grad(false));
    ordered(maps.by_static, 0);
    stage.put_whole("map_static", maps.by_static);
    stage.put_whole("map_query", maps.by_query);
    stage.put_whole("map_key", maps.by_key);
  }
  return out;
}

}  // namespace headloom
