// Sequences decoded side by side, against each by itself.
#pragma once

#include <algorithm>
#include <functional>
#include <random>

#include "testing/compare.h"

namespace headloom::test {

// Reads the beginnings of sequences alone, joins what was read, extends it together, selects, sets
// aside and joins again, in place and in states of their own, all at random, until every sequence
// is read; each output must equal its rows of `wholes`. `inputs` [1, L, ...] and `wholes` [1, L, C]
// a sequence; `extend` reads a batch's next inputs, `add` puts others after a batch or nothing.
template <typename State>
void joined_as_alone(const std::vector<Tensor>& inputs, const std::vector<Tensor>& wholes,
                     const std::function<Tensor(const Tensor& input, State& state)>& extend,
                     const std::function<void(State&, const std::vector<State>&)>& add,
                     const State& initial, double tolerance, uint32_t seed) {
  struct Batch {
    std::vector<size_t> ids;
    State state;
  };
  std::mt19937 random(seed);
  const auto below = [&](int64_t n) {
    return static_cast<int64_t>(random() % static_cast<uint64_t>(n));
  };
  const int64_t length = wholes[0].size(1);
  std::vector<int64_t> read(inputs.size(), 0);
  const auto advance = [&](Batch& batch, int64_t most) {
    for (const size_t id : batch.ids) most = std::min(most, length - read[id]);
    if (most == 0) return;
    const int64_t n = 1 + below(most);
    std::vector<Tensor> pieces, expected;
    for (const size_t id : batch.ids) {
      pieces.push_back(inputs[id].narrow(1, read[id], n));
      expected.push_back(wholes[id].narrow(1, read[id], n));
    }
    const Tensor y = extend(at::cat(pieces), batch.state);
    for (size_t b = 0; b < batch.ids.size(); ++b) {
      const auto row = static_cast<int64_t>(b);
      EXPECT_TRUE(close(y.narrow(0, row, 1), expected[b], tolerance))
          << "sequence " << batch.ids[b] << " of " << batch.ids.size() << " at "
          << read[batch.ids[b]] << ", " << n << " positions";
      read[batch.ids[b]] += n;
      EXPECT_EQ(batch.state.position.of(row), read[batch.ids[b]]);
    }
  };
  const auto take = [&](Batch& batch, const std::vector<size_t>& places) {
    Batch out;
    std::vector<int64_t> rows;
    for (const size_t place : places) {
      rows.push_back(static_cast<int64_t>(place));
      out.ids.push_back(batch.ids[place]);
    }
    out.state = batch.state.select(at::tensor(at::IntArrayRef(rows), at::kLong));
    return out;
  };
  std::vector<Batch> batches;
  for (size_t id = 0; id < inputs.size(); ++id) {
    batches.push_back({{id}, initial.alias()});
    advance(batches.back(), 15);
  }
  const auto unread = [&] {
    for (const int64_t n : read) {
      if (n < length) return true;
    }
    return false;
  };
  while (unread()) {
    std::shuffle(batches.begin(), batches.end(), random);
    // Several as one.
    std::vector<State> states;
    Batch joined;
    for (int64_t n = 1 + below(static_cast<int64_t>(batches.size())); n > 0; --n) {
      states.push_back(std::move(batches.back().state));
      joined.ids.insert(joined.ids.end(), batches.back().ids.begin(), batches.back().ids.end());
      batches.pop_back();
    }
    if (states.size() == 1 || below(2) == 0) {
      joined.state = std::move(states[0]);
      states.erase(states.begin());
    }
    if (!states.empty()) add(joined.state, states);
    for (int64_t n = below(4); n >= 0; --n) advance(joined, 5);
    // Some are set aside; those that are done leave.
    std::vector<size_t> places, stay, aside;
    for (size_t i = 0; i < joined.ids.size(); ++i) places.push_back(i);
    std::shuffle(places.begin(), places.end(), random);
    for (const size_t place : places) {
      if (read[joined.ids[place]] < length) (below(3) > 0 ? stay : aside).push_back(place);
    }
    const auto go_on = [&](Batch batch) {
      batches.push_back(std::move(batch));
      advance(batches.back(), 5);
      if (read[batches.back().ids[0]] == length && batches.back().ids.size() == 1) {
        batches.pop_back();
      }
    };
    if (!aside.empty()) go_on(take(joined, aside));
    if (stay.empty()) continue;
    if (below(2) == 0) {
      go_on(take(joined, stay));
      continue;
    }
    // In place: a sequence that leaves gives its row to one of the last.
    const size_t count = stay.size();
    std::vector<int64_t> which;
    std::vector<size_t> last;
    std::sort(stay.begin(), stay.end());
    for (const size_t place : stay) {
      if (place >= count) last.push_back(place);
    }
    Batch kept;
    for (size_t b = 0; b < count; ++b) {
      size_t from = b;
      if (!std::binary_search(stay.begin(), stay.end(), b)) {
        from = last.back();
        last.pop_back();
      }
      which.push_back(static_cast<int64_t>(from));
      kept.ids.push_back(joined.ids[from]);
    }
    kept.state = std::move(joined.state);
    kept.state.keep(which);
    go_on(std::move(kept));
  }
}

}  // namespace headloom::test
