#include "saved_state.h"

#include <type_traits>

namespace headloom::python {
namespace {

// The order of the values. One that is changed needs another number here.
constexpr int64_t kFormat = 2;

// `each` below gives the order to both archives. A tensor that is not there is saved as one of no
// values in one dimension, which no state has.
class Saving {
 public:
  void value(std::string& text) { texts_.push_back(text); }
  void value(int64_t& number) { numbers_.push_back(number); }
  void value(at::Tensor& tensor) {
    tensors_.push_back(tensor.defined() ? tensor.clone(at::MemoryFormat::Contiguous)
                                        : at::empty({0}));
  }
  void value(CacheTensor& tensor) {
    at::Tensor kept = tensor.batch() > 0 ? tensor.kept() : at::Tensor();
    value(kept);
  }
  template <typename T>
  void named(Named<T>& all) {
    auto count = static_cast<int64_t>(all.size());
    value(count);
    for (auto& [name, one] : all) {
      texts_.push_back(name);
      value(one);
    }
  }
  int64_t count(size_t present) {
    numbers_.push_back(static_cast<int64_t>(present));
    return numbers_.back();
  }
  SavedState take() { return {std::move(texts_), std::move(numbers_), std::move(tensors_)}; }

 private:
  std::vector<std::string> texts_;
  std::vector<int64_t> numbers_;
  std::vector<at::Tensor> tensors_;
};

class Restoring {
  static constexpr const char* kDamaged = "state: what was saved is damaged or of another version.";

  static bool is_there(const at::Tensor& tensor) { return tensor.dim() != 1 || tensor.numel() > 0; }
  template <size_t I>
  const std::tuple_element_t<I, SavedState>::value_type& next() {
    const auto& list = std::get<I>(from_);
    TORCH_CHECK_VALUE(places_[I] < list.size(), kDamaged);
    return list[places_[I]++];
  }

 public:
  explicit Restoring(const SavedState& from) : from_(from) {}
  void value(std::string& text) { text = next<0>(); }
  void value(int64_t& number) { number = next<1>(); }
  void value(at::Tensor& tensor) {
    const at::Tensor& read = next<2>();
    tensor = is_there(read) ? read.detach().clone() : at::Tensor();
  }
  void value(CacheTensor& tensor) {
    const at::Tensor& read = next<2>();
    if (!is_there(read)) return;
    TORCH_CHECK_VALUE(read.dim() >= 2 && read.size(0) > 0, kDamaged);
    tensor.append(read.detach());
  }
  template <typename T>
  void named(Named<T>& all) {
    const int64_t names = count(0);
    for (int64_t i = 0; i < names; ++i) {
      std::string name;
      value(name);
      value(all[name]);
    }
  }
  int64_t count(size_t) { return next<1>(); }
  void finish() const {
    TORCH_CHECK_VALUE(places_[0] == std::get<0>(from_).size() &&
                          places_[1] == std::get<1>(from_).size() &&
                          places_[2] == std::get<2>(from_).size(),
                      kDamaged);
  }

 private:
  const SavedState& from_;
  size_t places_[3] = {};
};

template <typename A>
void each(A& archive, CachePolicy& policy) {
  archive.value(policy.type);
  archive.value(policy.budget);
  archive.value(policy.dtype);
}

template <typename A>
void each(A& archive, Positions& position) {
  archive.value(position.longest);
  archive.value(position.left_padding);
  archive.value(position.capacity);
}

template <typename A>
void each(A& archive, MixerState& state) {
  each(archive, state.position);
  archive.named(state.cache);
  archive.named(state.recurrent);
  each(archive, state.policy);
}

template <typename A>
void each(A& archive, HeldState& held) {
  int64_t format = kFormat;
  archive.value(format);
  TORCH_CHECK_VALUE(format == kFormat, "state: it was saved in format ", format,
                    " by another version, expected format ", kFormat, ".");
  each(archive, held.policy);
  archive.value(held.spec);
  archive.value(held.types);
  archive.value(held.state.model);
  each(archive, held.state.position);
  const int64_t layers = archive.count(held.state.layers.size());
  for (int64_t i = 0; i < layers; ++i) {
    if constexpr (std::is_same_v<A, Restoring>) held.state.layers.emplace_back();
    LayerState& layer = held.state.layers.at(static_cast<size_t>(i));
    for (MixerState* part : {&layer.mixer, &layer.channel, &layer.cross}) each(archive, *part);
  }
}

}  // namespace

SavedState saved(const HeldState& held) {
  Saving archive;
  each(archive, const_cast<HeldState&>(held));  // it only reads
  return archive.take();
}

HeldState restored(const SavedState& from) {
  Restoring archive(from);
  HeldState out;
  each(archive, out);
  archive.finish();
  return out;
}

}  // namespace headloom::python
