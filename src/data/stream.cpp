#include "data/stream.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "core/error.h"
#include "data/corpus.h"
#include "data/random.h"

namespace headloom::data {
namespace {

// Takes pieces of documents' tokens, in ascending order.
class Packer {
 public:
  explicit Packer(const at::Tensor& tokens) : tokens_(tokens) {}
  void add(int64_t begin, int64_t end) {
    if (end == begin) return;
    if (!ends_.empty() && begin == ends_.back() + shifts_.back()) {
      ends_.back() += end - begin;
    } else {
      shifts_.push_back(begin - size_);
      ends_.push_back(size_ + end - begin);
    }
    size_ += end - begin;
  }
  void end_document() { document_ends_.push_back(size_); }
  PackedStream take() const {
    return {tokens_, at::tensor(document_ends_, at::kLong),
            PackedStream::Pieces{at::tensor(ends_, at::kLong), at::tensor(shifts_, at::kLong)}};
  }

 private:
  const at::Tensor& tokens_;
  std::vector<int64_t> document_ends_, ends_, shifts_;
  int64_t size_ = 0;
};

// Which documents to hold out, or none where whole documents come to less than half of `wanted`.
std::vector<bool> choose_documents(const std::vector<int64_t>& sizes,
                                   const std::vector<uint64_t>& lots, int64_t wanted,
                                   int64_t at_least) {
  if (sizes.size() < kManyDocuments) return {};
  std::vector<size_t> order(sizes.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return lots[a] < lots[b]; });
  std::vector<bool> chosen(sizes.size(), false);
  int64_t held = 0;
  for (size_t i : order) {
    if (held + sizes[i] > wanted) continue;
    chosen[i] = true;
    held += sizes[i];
  }
  return held >= at_least && 2 * held >= wanted ? chosen : std::vector<bool>();
}

}  // namespace

int64_t PackedStream::size() const {
  if (!pieces) return tokens.size(0);
  const at::Tensor& ends = pieces->ends;
  return ends.size(0) == 0 ? 0 : ends.const_data_ptr<int64_t>()[ends.size(0) - 1];
}

Batch PackedStream::windows(const at::Tensor& starts, int64_t length, bool documents) const {
  const at::Tensor places = starts.unsqueeze(1) + at::arange(length + 1, at::kLong);  // [B,T+1]
  const at::Tensor wrapped = places.remainder(size());
  at::Tensor stored = wrapped;
  if (pieces) {
    stored = wrapped + pieces->shifts.take(at::searchsorted(pieces->ends, wrapped,
                                                            /*out_int32=*/false, /*right=*/true));
  }
  const at::Tensor window = tokens.take(stored).to(at::kLong);
  Batch batch{window.slice(1, 0, length).contiguous(), window.slice(1, 1).contiguous(), {}};
  if (documents) {
    const at::Tensor ids =
        at::searchsorted(document_ends, wrapped, /*out_int32=*/false, /*right=*/true);
    // A document met again after the end of the circle is another one.
    const at::Tensor round = places.div(size(), "floor");
    batch.documents = (ids + round * document_ends.size(0)).slice(1, 0, length).contiguous();
  }
  return batch;
}

Batch PackedStream::full_windows(const std::vector<int64_t>& starts, int64_t length,
                                 bool documents) const {
  std::vector<int64_t> full = starts;
  for (int64_t& start : full) start = std::min(start, size() - 1 - length);
  Batch batch = windows(at::tensor(full, at::kLong), length, documents);
  if (full == starts) return batch;
  batch.targets = batch.targets.clone();  // of a single window they share memory with the inputs
  for (size_t i = 0; i < starts.size(); ++i) {
    batch.targets[static_cast<int64_t>(i)].narrow(0, 0, starts[i] - full[i]).fill_(kIgnore);
  }
  return batch;
}

Split split_documents(const EncodedDocuments& documents, const std::vector<uint64_t>& lots,
                      double held_out, int64_t length) {
  std::vector<int64_t> sizes;
  for (size_t i = 0; i < lots.size(); ++i) sizes.push_back(documents.end(i) - documents.begin(i));
  const int64_t total = std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
  // A sequence is length + 1 tokens: the last input's target is one further on.
  const int64_t needed = length + 1;
  if (held_out == 1.0) {
    require(total >= needed, "the text is too short: ", total,
            " tokens with a mark after every document, but length = ", length, " needs at least ",
            needed, ".");
    Packer all(documents.tokens);
    for (size_t i = 0; i < sizes.size(); ++i) {
      all.add(documents.begin(i), documents.end(i));
      all.end_document();
    }
    return {.train = Packer(documents.tokens).take(),
            .held_out = all.take(),
            .by_document = true,
            .held_out_documents = std::ssize(sizes)};
  }
  require(total >= 2 * needed, "the text is too short: ", total,
          " tokens with a mark after every document, but length = ", length, " needs at least ",
          2 * needed, ", one sequence to train on and one held out.");
  const int64_t wanted =
      std::clamp(static_cast<int64_t>(std::llround(held_out * static_cast<double>(total))), needed,
                 total - needed);

  Split split;
  Packer train(documents.tokens), held(documents.tokens);
  const std::vector<bool> chosen = choose_documents(sizes, lots, wanted, needed);
  split.by_document = !chosen.empty();
  int64_t before_cut = total - wanted;
  for (size_t i = 0; i < sizes.size(); ++i) {
    const int64_t begin = documents.begin(i), end = documents.end(i);
    const bool whole = split.by_document || sizes[i] <= before_cut || before_cut == 0;
    if (whole) {
      const bool to_held = split.by_document ? chosen[i] : before_cut == 0;
      Packer& packer = to_held ? held : train;
      packer.add(begin, end);
      packer.end_document();
      split.held_out_documents += to_held;
      if (!split.by_document && !to_held) before_cut -= sizes[i];
      continue;
    }
    // The document with the cut: its first part ends like a document, and may be all of its text.
    const int64_t spare_end = documents.tokens.size(0) - 1;
    train.add(begin, begin + before_cut);
    train.add(spare_end, spare_end + 1);
    train.end_document();
    held.add(begin + before_cut, end);
    held.end_document();
    before_cut = 0;
    ++split.held_out_documents;
  }
  split.train = train.take();
  split.held_out = held.take();
  return split;
}

WindowOrder::WindowOrder(uint64_t seed, int64_t size, int64_t length)
    : seed_(seed), size_(size), length_(length), windows_(size / length) {}

std::shared_ptr<const WindowOrder::Epoch> WindowOrder::epoch(int64_t index) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!latest_ || latest_->index != index) {
    Random random({seed_, static_cast<uint64_t>(index)});
    Epoch epoch{index, random.below(size_), std::vector<int64_t>(static_cast<size_t>(windows_))};
    std::iota(epoch.order.begin(), epoch.order.end(), int64_t{0});
    random.shuffle(epoch.order);
    latest_ = std::make_shared<const Epoch>(std::move(epoch));
  }
  return latest_;
}

std::vector<int64_t> WindowOrder::starts(int64_t first, int64_t count) const {
  std::vector<int64_t> starts;
  for (int64_t number = first; number < first + count; ++number) {
    const auto current = epoch(number / windows_);
    const int64_t window = current->order[static_cast<size_t>(number % windows_)];
    starts.push_back((current->offset + window * length_) % size_);
  }
  return starts;
}

}  // namespace headloom::data
