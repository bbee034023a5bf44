#include "mixers/decoding_state.h"

#include <ATen/Parallel.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <cstring>
#include <numeric>

#include "core/error.h"
#include "core/parse_number.h"
#include "mixers/check.h"

namespace headloom {
namespace {

// Memory is taken for at least so many positions.
constexpr int64_t kSpare = 16;

[[noreturn]] void refuse_policy(const std::string& text) {
  usage_error("the cache policy is \"", text,
              "\", expected \"full\", or \"window:N\", \"sinks:N\" or \"tova:N\" with a budget of "
              "N positions, as in \"tova:512\".");
}

// Of one position of one sequence.
size_t bytes_of_row(const at::Tensor& data) {
  return static_cast<size_t>(data.stride(1)) * data.element_size();
}

// Whether the values of a row, t[b][i], lie one after the other.
bool is_row(const at::Tensor& t) {
  int64_t expected = 1;
  for (int64_t dim = t.dim() - 1; dim >= 2; --dim) {
    if (t.size(dim) != 1 && t.stride(dim) != expected) return false;
    expected *= t.size(dim);
  }
  return true;
}

// 0, 1, ..., count - 1: sequences that stay where they are.
std::vector<int64_t> first_numbers(int64_t count) {
  std::vector<int64_t> out(static_cast<size_t>(count));
  std::iota(out.begin(), out.end(), 0);
  return out;
}

template <typename T>
bool same_names(const Named<T>& a, const Named<T>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const auto& x, const auto& y) { return x.first == y.first; });
}

// Of the sequences of several states together.
Positions joined_positions(const std::vector<const MixerState*>& all) {
  Positions joined;
  int64_t coming = 0;
  bool even = true;
  for (const MixerState* part : all) {
    const Positions& p = part->position;
    even = even && p.longest == all[0]->position.longest && !p.left_padding.defined();
    joined.longest = std::max(joined.longest, p.longest);
    coming = std::max(coming, p.capacity - p.longest);
  }
  if (coming > 0) joined.capacity = joined.longest + coming;
  if (even || all[0]->batch() == 0) return joined;
  std::vector<at::Tensor> padding;
  for (const MixerState* part : all) {
    const int64_t before = joined.longest - part->position.longest;
    const at::Tensor& own = part->position.left_padding;
    padding.push_back(own.defined() ? own + before : at::full({part->batch()}, before, at::kLong));
  }
  joined.left_padding = at::cat(padding);
  return joined;
}

}  // namespace

int64_t Positions::of(int64_t b) const {
  return left_padding.defined() ? longest - left_padding[b].item<int64_t>() : longest;
}

at::Tensor Positions::position_ids(const c10::SymInt& n, at::Device device) const {
  const auto options = at::TensorOptions(device).dtype(at::kLong);
  const at::Tensor aligned =
      at::arange(c10::Scalar(longest), c10::Scalar(longest + n), options).unsqueeze(0);
  if (!left_padding.defined()) return aligned;
  return (aligned - left_padding.to(device).unsqueeze(1)).clamp_min(0);
}

at::Tensor Positions::padding_mask(int64_t columns, at::Device device) const {
  if (!left_padding.defined()) return {};
  const auto options = at::TensorOptions(device).dtype(at::kLong);
  const at::Tensor place = at::arange(longest - columns, longest, options);
  return place.ge(left_padding.to(device).view({-1, 1, 1, 1}));
}

Positions Positions::newest(int64_t columns) const {
  if (!left_padding.defined()) return {columns, {}};
  return {columns, (left_padding - (longest - columns)).clamp_min(0)};
}

Positions Positions::select(const at::Tensor& which) const {
  if (which.numel() == 0) return {};
  if (!left_padding.defined()) return *this;
  const at::Tensor chosen = left_padding.index_select(0, which.to(left_padding.device()));
  const int64_t least = chosen.min().item<int64_t>();
  const bool even = chosen.max().item<int64_t>() == least;
  return {longest - least, even ? at::Tensor() : chosen - least,
          std::max<int64_t>(capacity - least, 0)};
}

CachePolicy CachePolicy::parse(const std::string& text, const std::string& dtype) {
  CachePolicy out{.type = text, .budget = 0, .dtype = dtype};
  if (text == "full") return out.checked();
  const size_t colon = text.find(':');
  if (colon == std::string::npos) refuse_policy(text);
  out.type.resize(colon);
  const auto budget = parse_number<int64_t>(std::string_view(text).substr(colon + 1));
  if (!out.evicts() || !budget) refuse_policy(text);
  out.budget = *budget;
  return out.checked();
}

const CachePolicy& CachePolicy::checked() const {
  if (!dtype.empty() && dtype != "int8") {
    usage_error("keys and values cannot be held in \"", dtype, "\", expected int8.");
  }
  if (!evicts()) return *this;
  if ((type != "window" && type != "sinks" && type != "tova") || budget < 1) refuse_policy(text());
  if (type == "sinks" && budget <= kSinks) {
    usage_error("the cache policy is \"", text(), "\", expected a budget of more than the ", kSinks,
                " first positions that it keeps.");
  }
  return *this;
}

std::string CachePolicy::text() const { return evicts() ? str(type, ":", budget) : type; }

void CacheTensor::swap(CacheTensor& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(batch_, other.batch_);
  std::swap(begin_, other.begin_);
  std::swap(end_, other.end_);
  std::swap(reserved_, other.reserved_);
}

// In one operator, as a step makes many of them.
at::Tensor CacheTensor::view(int64_t begin, int64_t count) const {
  c10::DimVector sizes(data_.sizes());
  sizes[0] = batch_;
  sizes[1] = count;
  return data_.as_strided(sizes, data_.strides(), data_.storage_offset() + begin * data_.stride(1));
}

at::Tensor CacheTensor::kept() const { return view(begin_, size()); }

void CacheTensor::reserve(int64_t positions, std::optional<int64_t> most) {
  // Within twice what is kept, positions move once in as many steps.
  reserved_ = most && *most < positions ? std::min(positions, 2 * *most + kSpare) : positions;
}

// Memory of a state that began in PyTorch's inference mode is written to outside of it, too.
static at::Tensor fresh(at::IntArrayRef sizes, const at::TensorOptions& options) {
  const c10::InferenceMode normal(false);
  return at::empty(sizes, options);
}

at::Tensor CacheTensor::append(const at::Tensor& t) {
  const int64_t added = t.size(1), after = size() + added;
  if (!data_.defined()) {
    batch_ = t.size(0);
    std::vector<int64_t> sizes = t.sizes().vec();
    sizes[1] = std::max({after, reserved_, kSpare});
    data_ = fresh(sizes, t.options().requires_grad(false));
  } else {
    grow(batch_, 0, added, after <= reserved_ ? reserved_ : std::max(size() + after, kSpare));
  }
  put(t);
  end_ += added;
  return kept();
}

void CacheTensor::put(const at::Tensor& t) {
  // The few rows of a decoding step are copied here, because copy_ takes longer to begin than to
  // copy them. `whole`: they have the cache's type and lie as a projection leaves them.
  const int64_t values = data_.stride(1), added = t.size(1);
  const bool whole = t.scalar_type() == data_.scalar_type() && has_numbers(t) &&
                     has_numbers(data_) && t.numel() == batch_ * added * values && is_row(t);
  if (added > kSpare || !whole) {
    view(end_, added).copy_(t);
    return;
  }
  const size_t row = bytes_of_row(data_);
  const auto size = static_cast<int64_t>(t.element_size());
  const char* const from = static_cast<const char*>(t.const_data_ptr());
  char* const to = static_cast<char*>(data_.data_ptr());
  for (int64_t b = 0; b < batch_; ++b) {
    for (int64_t i = 0; i < added; ++i) {
      std::memcpy(to + static_cast<size_t>(b * data_.size(1) + end_ + i) * row,
                  from + (b * t.stride(0) + i * t.stride(1)) * size, row);
    }
  }
}

void CacheTensor::grow(int64_t sequences, int64_t before, int64_t after, int64_t capacity) {
  const int64_t present = data_.size(0), has = data_.size(1), kept = size();
  if (sequences <= present) {
    if (begin_ >= before && end_ + after <= has) return;
    // Positions that were forgotten have left memory free. Unless a quarter of those kept can be
    // appended before they have to move again, it is too little.
    const int64_t spare = has - (before + kept + after);
    if (spare >= 0 && 4 * spare >= kept) return move_to(present, has, before);
  }
  move_to(sequences <= present ? present : std::max(sequences, 2 * present), capacity, before);
}

void CacheTensor::move_to(int64_t sequences, int64_t capacity, int64_t begin) {
  at::Tensor data = data_;
  if (sequences != data_.size(0) || capacity != data_.size(1)) {
    std::vector<int64_t> sizes = data_.sizes().vec();
    sizes[0] = sequences;
    sizes[1] = capacity;
    data = fresh(sizes, data_.options());
  }
  if (has_numbers(data_)) {
    const size_t row = bytes_of_row(data_);
    const int64_t has = data_.size(1);
    const char* const from = static_cast<const char*>(data_.const_data_ptr());
    char* const to = static_cast<char*>(data.data_ptr());
    // Within the same memory a sequence moves in its own part.
    at::parallel_for(0, batch_, 1, [&](int64_t first, int64_t last) {
      for (int64_t b = first; b < last; ++b) {
        std::memmove(to + static_cast<size_t>(b * capacity + begin) * row,
                     from + static_cast<size_t>(b * has + begin_) * row,
                     static_cast<size_t>(size()) * row);
      }
    });
  } else {  // within the same memory the two may overlap
    const at::Tensor from = data.is_same(data_) ? kept().clone() : kept();
    data.narrow(0, 0, batch_).narrow(1, begin, size()).copy_(from);
  }
  end_ = begin + size();
  begin_ = begin;
  data_ = data;
}

void CacheTensor::keep_last(int64_t n) {
  if (!data_.defined()) return;
  n = std::min(n, data_.size(1));  // a window may be as large as int64 allows
  begin_ = std::max(begin_, end_ - n);
  // What a long prompt took is given back.
  if (data_.size(1) > 4 * n + 4 * kSpare) move_to(data_.size(0), 2 * n + kSpare, 0);
}

void CacheTensor::keep(const at::Tensor& which) {
  if (!data_.defined()) return;
  const int64_t count = which.size(-1), capacity = data_.size(1), all = size();
  if (!has_numbers(data_) || !has_numbers(which)) {
    const at::Tensor index = which.to(data_.device()).expand({batch_, count});
    const at::Tensor row = at::arange(batch_, index.options()).unsqueeze(1);
    view(end_ - count, count).copy_(at::index(kept(), {row, index}));
    return keep_last(count);
  }
  const at::Tensor index = which.contiguous();
  const size_t row = bytes_of_row(data_);
  const auto bytes = [&](int64_t rows) { return static_cast<size_t>(rows) * row; };
  const auto chosen = [&](int64_t b) {
    return index.const_data_ptr<int64_t>() + (index.dim() == 2 ? b * count : 0);
  };
  // The positions kept close up towards the newest or towards the oldest, whichever moves fewer.
  int64_t moves = 0;
  for (int64_t b = 0; b < batch_; ++b) {
    const int64_t* const from = chosen(b);
    for (int64_t i = 0; i < count; ++i) {
      require(from[i] >= 0 && from[i] < all, "position ", from[i], " of a cache of ", all,
              " cannot be kept, expected one from 0 to ", all - 1, ".");
      moves += (from[i] != i) - (from[i] != all - count + i);
    }
  }
  const bool back = moves < 0;
  for (int64_t b = 0; b < batch_; ++b) {
    char* const base = static_cast<char*>(data_.data_ptr()) + bytes(b * capacity + begin_);
    const int64_t* const from = chosen(b);
    // Run by run, so that none is overwritten before it has moved.
    const auto move = [&](int64_t first, int64_t end, int64_t to) {
      if (from[first] == to) return;
      std::memmove(base + bytes(to), base + bytes(from[first]), bytes(end - first));
    };
    if (back) {
      for (int64_t first = 0, end; first < count; first = end) {
        for (end = first + 1; end < count && from[end] == from[end - 1] + 1;) ++end;
        move(first, end, first);
      }
      continue;
    }
    for (int64_t end = count, first; end > 0; end = first) {
      for (first = end - 1; first > 0 && from[first - 1] == from[first] - 1;) --first;
      move(first, end, all - count + first);
    }
  }
  if (back) end_ = begin_ + count;
  keep_last(count);
}

int64_t CacheTensor::bytes() const {
  if (!data_.defined()) return 0;
  return static_cast<int64_t>(bytes_of_row(data_)) * batch_ * size();
}

CacheTensor CacheTensor::select(const at::Tensor& which, int64_t n) const {
  CacheTensor out;
  if (data_.defined()) {
    const int64_t count = std::min(n, size());
    out.reserved_ = std::max<int64_t>(reserved_ - (size() - count), 0);
    out.append(data_.narrow(1, end_ - count, count).index_select(0, which.to(data_.device())));
  }
  return out;
}

void CacheTensor::keep_sequences(const std::vector<int64_t>& which, int64_t n) {
  if (!data_.defined()) return;
  const int64_t before = size();
  batch_ = static_cast<int64_t>(which.size());
  begin_ = std::max(begin_, end_ - n);
  reserved_ = std::max<int64_t>(reserved_ - (before - size()), 0);
  const at::Tensor kept = data_.narrow(1, begin_, size());
  for (int64_t b = 0; b < batch_; ++b) {
    const int64_t from = which[static_cast<size_t>(b)];
    if (from != b) kept[b].copy_(kept[from]);
  }
  if (4 * batch_ > data_.size(0)) return;
  try {  // to give back the memory of many that have left
    move_to(2 * batch_, data_.size(1), begin_);
  } catch (const std::exception&) {  // there is none for the smaller copy: all stays as it is
  }
}

void CacheTensor::add(const std::vector<const CacheTensor*>& others) {
  int64_t sequences = batch_, longest = size(), coming = reserved_ - size();
  for (const CacheTensor* other : others) {
    if (!other->data_.defined()) return;
    sequences += other->batch_;
    longest = std::max(longest, other->size());
    coming = std::max(coming, other->reserved_ - other->size());
  }
  // Where it is not known how many positions come, memory for some.
  const int64_t spare = longest / 4 + kSpare, after = coming > 0 ? coming : spare;
  const int64_t own = size();
  if (data_.defined()) {
    grow(sequences, longest - own, after, longest + after + spare);
  } else {
    std::vector<int64_t> sizes = others[0]->data_.sizes().vec();
    sizes[0] = sequences;
    sizes[1] = longest + after;
    data_ = fresh(sizes, others[0]->data_.options());
    end_ = longest;
    begin_ = longest;
  }
  begin_ = end_ - longest;
  reserved_ = coming > 0 ? longest + coming : 0;
  const auto put = [&](int64_t first, int64_t count, int64_t n) {
    const at::Tensor to = data_.narrow(0, first, count).narrow(1, begin_, longest);
    if (n < longest) to.narrow(1, 0, longest - n).zero_();
    return to.narrow(1, longest - n, n);
  };
  if (batch_ > 0) put(0, batch_, own);
  for (const CacheTensor* other : others) {
    put(batch_, other->batch_, other->size()).copy_(other->kept());
    batch_ += other->batch_;
  }
}

int64_t MixerState::bytes() const {
  int64_t sum = 0;
  for (const auto& [name, tensor] : cache) sum += tensor.bytes();
  for (const auto& [name, tensor] : recurrent) {
    if (tensor.defined()) sum += static_cast<int64_t>(tensor.nbytes());
  }
  return sum;
}

int64_t MixerState::batch() const {
  for (const auto& [name, tensor] : cache) {
    if (tensor.batch() > 0) return tensor.batch();
  }
  for (const auto& [name, tensor] : recurrent) {
    if (tensor.defined()) return tensor.size(0);
  }
  return 0;
}

MixerState MixerState::select(const at::Tensor& which) const {
  MixerState out{.position = position.select(which), .policy = policy};
  for (const auto& [name, tensor] : cache) {
    out.cache.emplace(name, tensor.select(which, out.position.longest));
  }
  for (const auto& [name, tensor] : recurrent) {
    out.recurrent[name] =
        tensor.defined() ? tensor.index_select(0, which.to(tensor.device())) : tensor;
  }
  return out;
}

void MixerState::keep(const std::vector<int64_t>& which) {
  const at::Tensor index = at::tensor(at::IntArrayRef(which), at::kLong);
  position = position.select(index);
  for (auto& [name, tensor] : cache) tensor.keep_sequences(which, position.longest);
  for (auto& [name, tensor] : recurrent) {
    if (tensor.defined()) tensor = tensor.index_select(0, index.to(tensor.device()));
  }
}

void MixerState::add(const std::vector<const MixerState*>& others) {
  require(!others.empty(), "there are no decoding states to join.");
  std::vector<const MixerState*> all = others;
  const bool empty = batch() == 0 && position.longest == 0;
  if (!empty) all.insert(all.begin(), this);
  const MixerState& first = *all.at(0);
  for (const MixerState* part : all) {
    require(same_names(part->cache, first.cache) && same_names(part->recurrent, first.recurrent),
            "decoding states cannot be joined: some have seen nothing, or another model's text.");
    require(part->policy == first.policy,
            "decoding states cannot be joined: their cache policies are ", first.policy.text(),
            " and ", part->policy.text(), ", expected one.");
  }
  const Positions joined = joined_positions(all);
  if (empty) policy = first.policy;
  Named<at::Tensor> joined_recurrent;
  for (const auto& [name, tensor] : first.recurrent) {
    std::vector<at::Tensor> parts;
    for (const MixerState* part : all) parts.push_back(part->recurrent.at(name));
    for (const at::Tensor& part : parts) {
      require(part.defined() == tensor.defined() &&
                  (!part.defined() || part.sizes().slice(1) == tensor.sizes().slice(1)),
              "decoding states cannot be joined: '", name,
              "' differs in its shape; sources are padded to one length, and all of them have "
              "lengths or none.");
    }
    joined_recurrent[name] = tensor.defined() ? at::cat(parts) : tensor;
  }
  const std::vector<int64_t> own = first_numbers(empty ? 0 : first.batch());
  std::vector<std::pair<CacheTensor*, int64_t>> added;  // and the positions that it had
  try {
    for (const auto& [name, tensor] : others[0]->cache) {
      std::vector<const CacheTensor*> parts;
      for (const MixerState* other : others) parts.push_back(&other->cache.at(name));
      CacheTensor& mine = cache[name];
      const int64_t size = mine.size();
      mine.add(parts);
      added.emplace_back(&mine, size);
    }
  } catch (...) {  // there is no memory for this one: those before it become what they were
    for (const auto& [tensor, size] : added) tensor->keep_sequences(own, size);
    throw;
  }
  recurrent = std::move(joined_recurrent);
  position = joined;
}

MixerState MixerState::alias() const {
  MixerState out{.position = position, .recurrent = recurrent, .policy = policy};
  for (const auto& [name, tensor] : cache) out.cache.emplace(name, tensor.alias());
  return out;
}

LayerState LayerState::select(const at::Tensor& which) const {
  return {
      .mixer = mixer.select(which), .channel = channel.select(which), .cross = cross.select(which)};
}

void LayerState::keep(const std::vector<int64_t>& which) {
  for (MixerState* part : {&mixer, &channel, &cross}) part->keep(which);
}

void LayerState::add(const std::vector<const LayerState*>& others) {
  std::vector<MixerState*> added;
  const std::vector<int64_t> own = first_numbers(mixer.batch());
  try {
    for (MixerState LayerState::* part :
         {&LayerState::mixer, &LayerState::channel, &LayerState::cross}) {
      std::vector<const MixerState*> parts;
      for (const LayerState* other : others) parts.push_back(&(other->*part));
      (this->*part).add(parts);
      added.push_back(&(this->*part));
    }
  } catch (...) {
    for (MixerState* part : added) part->keep(own);
    throw;
  }
}

}  // namespace headloom
