#include "mixers/state.h"

#include <algorithm>

namespace headloom {

at::Tensor Rows::append(const at::Tensor& t) {
  if (!t.defined()) return {};
  const int64_t added = t.size(1), kept = size();
  const int64_t capacity = data_.defined() ? data_.size(1) : 0;
  if (end_ + added > capacity) {
    at::Tensor room = data_;
    // Rows that are forgotten leave room in front; it is used where nothing would overlap.
    if (begin_ < kept || kept + added > capacity) {
      std::vector<int64_t> sizes = t.sizes().vec();
      sizes[1] = std::max({2 * kept + added, reserved_, int64_t{16}});
      room = at::empty(sizes, t.options().requires_grad(false));
    }
    if (kept > 0) room.narrow(1, 0, kept).copy_(data_.narrow(1, begin_, kept));
    data_ = room;
    begin_ = 0;
    end_ = kept;
  }
  data_.narrow(1, end_, added).copy_(t);
  end_ += added;
  return data_.narrow(1, begin_, size());
}

void Rows::keep_last(int64_t n) { begin_ = std::max(begin_, end_ - n); }

int64_t Rows::bytes() const {
  if (!data_.defined() || data_.size(1) == 0) return 0;
  return static_cast<int64_t>(data_.nbytes()) / data_.size(1) * size();
}

Rows Rows::select(const at::Tensor& which) const {
  Rows out;
  out.reserved_ = reserved_;
  if (data_.defined()) out.append(data_.narrow(1, begin_, size()).index_select(0, which));
  return out;
}

MixerState MixerState::select(const at::Tensor& which) const {
  MixerState out{.position = position, .rows = {}, .tensors = {}};
  for (const Rows& r : rows) out.rows.push_back(r.select(which));
  for (const at::Tensor& t : tensors) {
    out.tensors.push_back(t.defined() ? t.index_select(0, which) : t);
  }
  return out;
}

int64_t MixerState::bytes() const {
  int64_t sum = 0;
  for (const Rows& r : rows) sum += r.bytes();
  for (const at::Tensor& t : tensors) sum += t.defined() ? static_cast<int64_t>(t.nbytes()) : 0;
  return sum;
}

}  // namespace headloom
