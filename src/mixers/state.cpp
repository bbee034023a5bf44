#include "mixers/state.h"

#include <algorithm>
#include <charconv>
#include <cstring>

#include "core/error.h"

namespace headloom {

int64_t Positions::of(int64_t b) const {
  return late.defined() ? longest - late[b].item<int64_t>() : longest;
}

at::Tensor Positions::next(int64_t n) const {
  const auto options = late.defined() ? late.options() : at::TensorOptions().dtype(at::kLong);
  const at::Tensor aligned = at::arange(longest, longest + n, options).unsqueeze(0);
  return late.defined() ? (aligned - late.unsqueeze(1)).clamp_min(0) : aligned;
}

at::Tensor Positions::present(int64_t columns) const {
  if (!late.defined()) return {};
  const at::Tensor place = at::arange(longest - columns, longest, late.options());
  return place.ge(late.view({-1, 1, 1, 1}));
}

Positions Positions::newest(int64_t columns) const {
  if (!late.defined()) return {columns, {}};
  return {columns, (late - (longest - columns)).clamp_min(0)};
}

Positions Positions::select(const at::Tensor& which) const {
  if (!late.defined()) return *this;
  const at::Tensor chosen = late.index_select(0, which.to(late.device()));
  const int64_t least = chosen.min().item<int64_t>();
  const bool even = chosen.max().item<int64_t>() == least;
  return {longest - least, even ? at::Tensor() : chosen - least};
}

CachePolicy CachePolicy::parse(const std::string& text) {
  if (text == "full") return {};
  const size_t colon = text.find(':');
  CachePolicy out{.type = text.substr(0, colon), .budget = 0};
  const char* const end = text.data() + text.size();
  const bool known = out.type == "window" || out.type == "sinks" || out.type == "tova";
  const bool number = known && colon != std::string::npos && [&] {
    const auto [stop, error] = std::from_chars(text.data() + colon + 1, end, out.budget);
    return error == std::errc() && stop == end && out.budget >= 1;
  }();
  if (!number) {
    usage_error(
        "the cache policy is \"", text,
        "\", expected \"full\", or \"window:N\", \"sinks:N\" or \"tova:N\" with a budget of "
        "N positions, as in \"tova:512\".");
  }
  if (out.type == "sinks" && out.budget <= kSinks) {
    usage_error("the cache policy is \"", text, "\", expected a budget of more than the ", kSinks,
                " first positions that it keeps.");
  }
  return out;
}

std::string CachePolicy::text() const { return evicts() ? str(type, ":", budget) : type; }

at::Tensor Rows::append(const at::Tensor& t) {
  if (!t.defined()) return {};
  const int64_t added = t.size(1), before = size();
  const int64_t capacity = data_.defined() ? data_.size(1) : 0;
  if (end_ + added > capacity) {
    at::Tensor room = data_;
    // Rows that are forgotten leave room in front; it is used where nothing would overlap.
    if (begin_ < before || before + added > capacity) {
      std::vector<int64_t> sizes = t.sizes().vec();
      sizes[1] = std::max({2 * before + added, reserved_, int64_t{16}});
      room = at::empty(sizes, t.options().requires_grad(false));
    }
    if (before > 0) room.narrow(1, 0, before).copy_(kept());
    data_ = room;
    begin_ = 0;
    end_ = before;
  }
  data_.narrow(1, end_, added).copy_(t);
  end_ += added;
  return kept();
}

void Rows::keep_last(int64_t n) { begin_ = std::max(begin_, end_ - n); }

void Rows::keep(const at::Tensor& which) {
  if (!data_.defined()) return;
  const int64_t count = which.size(-1), batch = data_.size(0), capacity = data_.size(1);
  const at::Tensor index = which.contiguous();
  const size_t row = data_.nbytes() / static_cast<size_t>(batch * capacity);
  const auto bytes = [&](int64_t rows) { return static_cast<size_t>(rows) * row; };
  // Within each sequence rows move towards the newest, run by run, and leave room in front.
  for (int64_t b = 0; b < batch; ++b) {
    char* const base = static_cast<char*>(data_.data_ptr()) + bytes(b * capacity + begin_);
    const int64_t* const from =
        index.const_data_ptr<int64_t>() + (index.dim() == 2 ? b * count : 0);
    for (int64_t end = count, to = size(); end > 0;) {
      int64_t first = end - 1;
      while (first > 0 && from[first - 1] == from[first] - 1) --first;
      to -= end - first;
      if (from[first] != to) {
        std::memmove(base + bytes(to), base + bytes(from[first]), bytes(end - first));
      }
      end = first;
    }
  }
  begin_ = end_ - count;
  // What a long prompt took is given back.
  if (capacity <= 4 * count + 64) return;
  std::vector<int64_t> sizes = data_.sizes().vec();
  sizes[1] = 2 * count + 16;
  at::Tensor room = at::empty(sizes, data_.options());
  room.narrow(1, 0, count).copy_(kept());
  data_ = room;
  begin_ = 0;
  end_ = count;
}

int64_t Rows::bytes() const {
  if (!data_.defined() || data_.size(1) == 0) return 0;
  return static_cast<int64_t>(data_.nbytes()) / data_.size(1) * size();
}

Rows Rows::select(const at::Tensor& which, int64_t n) const {
  Rows out;
  out.reserved_ = reserved_;
  if (data_.defined()) {
    const int64_t count = std::min(n, size());
    out.append(data_.narrow(1, end_ - count, count).index_select(0, which));
  }
  return out;
}

Rows Rows::join(const std::vector<const Rows*>& parts) {
  int64_t batch = 0, longest = 0;
  Rows out;
  for (const Rows* part : parts) {
    if (!part->data_.defined()) return {};
    batch += part->data_.size(0);
    longest = std::max(longest, part->size());
    out.reserved_ = std::max(out.reserved_, part->reserved_);
  }
  const at::Tensor& like = parts[0]->data_;
  std::vector<int64_t> sizes = like.sizes().vec();
  sizes[0] = batch;
  // Joined sequences go on: room for some of it.
  sizes[1] = std::max(longest + longest / 4 + 16, out.reserved_);
  out.data_ = at::empty(sizes, like.options());
  out.end_ = longest;
  int64_t first = 0;
  for (const Rows* part : parts) {
    const int64_t count = part->data_.size(0);
    const at::Tensor to = out.data_.narrow(0, first, count);
    to.narrow(1, 0, longest - part->size()).zero_();
    to.narrow(1, longest - part->size(), part->size()).copy_(part->kept());
    first += count;
  }
  return out;
}

int64_t MixerState::bytes() const {
  int64_t sum = 0;
  for (const Rows& r : rows) sum += r.bytes();
  for (const at::Tensor& t : tensors) sum += t.defined() ? static_cast<int64_t>(t.nbytes()) : 0;
  return sum;
}

int64_t MixerState::batch() const {
  for (const Rows& r : rows) {
    if (r.batch() > 0) return r.batch();
  }
  for (const at::Tensor& t : tensors) {
    if (t.defined()) return t.size(0);
  }
  return 0;
}

MixerState MixerState::select(const at::Tensor& which) const {
  MixerState out{.position = position.select(which), .policy = policy};
  for (const Rows& r : rows) out.rows.push_back(r.select(which, out.position.longest));
  for (const at::Tensor& t : tensors) {
    out.tensors.push_back(t.defined() ? t.index_select(0, which) : t);
  }
  return out;
}

MixerState MixerState::join(const std::vector<const MixerState*>& parts) {
  const MixerState& first = *parts.at(0);
  MixerState out{.policy = first.policy};
  int64_t shortest = first.position.longest;
  for (const MixerState* part : parts) {
    require(part->rows.size() == first.rows.size() && part->tensors.size() == first.tensors.size(),
            "decoding states cannot be joined: some have seen nothing, or another model's text.");
    require(part->policy == first.policy,
            "decoding states cannot be joined: their cache policies are ", first.policy.text(),
            " and ", part->policy.text(), ", expected one.");
    out.position.longest = std::max(out.position.longest, part->position.longest);
    shortest = std::min(shortest, part->position.longest);
  }
  if (first.batch() == 0) return out;
  const bool even = shortest == out.position.longest &&
                    std::all_of(parts.begin(), parts.end(), [](const MixerState* part) {
                      return !part->position.late.defined();
                    });
  if (!even) {
    std::vector<at::Tensor> late;
    for (const MixerState* part : parts) {
      const int64_t before = out.position.longest - part->position.longest;
      const at::Tensor& own = part->position.late;
      late.push_back(own.defined() ? own + before : at::full({part->batch()}, before, at::kLong));
    }
    out.position.late = at::cat(late);
  }
  for (size_t i = 0; i < first.rows.size(); ++i) {
    std::vector<const Rows*> rows;
    for (const MixerState* part : parts) rows.push_back(&part->rows[i]);
    out.rows.push_back(Rows::join(rows));
  }
  for (size_t i = 0; i < first.tensors.size(); ++i) {
    std::vector<at::Tensor> tensors;
    for (const MixerState* part : parts) tensors.push_back(part->tensors[i]);
    out.tensors.push_back(at::cat(tensors));
  }
  return out;
}

LayerState LayerState::select(const at::Tensor& which) const {
  return {.mixer = mixer.select(which), .channel = channel.select(which)};
}

LayerState LayerState::join(const std::vector<const LayerState*>& parts) {
  std::vector<const MixerState*> mixers, channels;
  for (const LayerState* part : parts) {
    mixers.push_back(&part->mixer);
    channels.push_back(&part->channel);
  }
  return {.mixer = MixerState::join(mixers), .channel = MixerState::join(channels)};
}

}  // namespace headloom
