#include "data/examples.h"

#include <algorithm>
#include <limits>
#include <map>
#include <set>
#include <sstream>
#include <unordered_set>

#include "core/error.h"
#include "core/files.h"
#include "core/text.h"
#include "data/floors.h"
#include "data/labelled.h"
#include "data/tasks/tasks.h"

namespace headloom::data {

void FileOptions::fields(Fields& f, const std::string& what, bool generates) {
  const char* const with = generates ? "with path: " : "";
  f.field("path", path, str(what, generates ? "; absent: generated" : ""));
  f.field("held_out_path", held_out_path,
          str(with, "a file alike to evaluate on; absent: a share"));
  f.field("held_out", held_out,
          str(with, "share kept for evaluation where no file is named; 1: all, to evaluate only"),
          Range<double>{.low = 0.0, .high = 1.0, .open_low = true});
  f.field("tokenizer", tokenizer, str(with, kTokenizerHelp));
}

void FileOptions::hold_out_all() {
  held_out = 1.0;
  held_out_path.reset();
}

std::vector<DataPath> FileOptions::data_paths() {
  std::vector<DataPath> out;
  if (path && !path->empty()) out.push_back({"path", &*path});
  if (held_out_path) out.push_back({"held_out_path", &*held_out_path});
  return out;
}

std::vector<std::string> lines_of(const std::string& path) {
  std::string text = read_file(path);
  require(text.find('\0') == std::string::npos, path, ": is not text, as it has a byte 0.");
  constexpr std::string_view kByteOrderMark = "\xEF\xBB\xBF";  // as some editors write it
  if (text.starts_with(kByteOrderMark)) text.erase(0, kByteOrderMark.size());
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) {
    if (line.ends_with('\r')) line.pop_back();
    lines.push_back(std::move(line));
  }
  return lines;
}

int64_t Labels::number(const std::string& name, const std::string& place) {
  const auto [found, is_new] = numbers_.emplace(name, static_cast<int64_t>(found_.size()));
  if (is_new) {
    found_.push_back(name);
    places_.push_back(place);
  }
  return found->second;
}

void Labels::order(const std::vector<std::string>& given, const std::vector<int64_t>& trained) {
  names_ = given;
  if (given.empty()) {
    const std::set<int64_t> numbers(trained.begin(), trained.end());
    for (const int64_t number : numbers) names_.push_back(found_[static_cast<size_t>(number)]);
    std::sort(names_.begin(), names_.end());
  }
  classes_.clear();
  for (size_t i = 0; i < found_.size(); ++i) {
    const auto place = std::find(names_.begin(), names_.end(), found_[i]);
    classes_.push_back(place - names_.begin());
    if (place != names_.end()) continue;
    if (!given.empty()) {
      usage_error(places_[i], ": has the label '", found_[i],
                  "', expected one of labels = ", join(given), ".");
    }
    fail(places_[i], ": has the label '", found_[i],
         "', which is in the held-out part alone; name all there are in 'labels'.");
  }
  require(names_.size() >= 2, "there is one label alone, '", names_.empty() ? "" : names_[0],
          "', expected at least two.");
}

ExampleTask::ExampleTask(const std::string& type, const std::string& tokenizer, int64_t length,
                         int64_t texts)
    : tokenizer_(make_tokenizer(tokenizer)), length_(length) {
  if (length < frame(texts) + texts) {
    usage_error(type, " has length = ", length, ", but ", tokenizer, " puts ",
                counted(frame(texts), "token"), " around ", texts == 1 ? "each text" : "two texts",
                "; expected at least ", frame(texts) + texts, ".");
  }
}

void ExampleTask::split(std::vector<size_t> train, std::vector<size_t> held_out,
                        int64_t eval_sequences, uint64_t seed, const std::vector<uint64_t>& lots) {
  train_ = std::move(train);
  held_out_ = std::move(held_out);
  // Whatever part of it is evaluated should be a fair sample.
  Random random({0});
  random.shuffle(held_out_);
  if (!lots.empty()) keep_lots_in_halves(lots);
  eval_sequences_ = std::min(eval_sequences, static_cast<int64_t>(held_out_.size()));
  if (!train_.empty()) order_.emplace(seed, static_cast<int64_t>(train_.size()), 1);
}

// Test data that are also validation data would be what a setting was chosen by. So each lot goes
// to one half, the largest first, and the halves go to the numbers that are theirs. Where every lot
// has one example, the order stays as it is.
void ExampleTask::keep_lots_in_halves(const std::vector<uint64_t>& lots) {
  struct Lot {
    int64_t first, size = 0;
    bool test = false;
  };
  std::unordered_map<uint64_t, size_t> places;
  std::vector<Lot> found;
  for (int64_t i = 0; i < std::ssize(held_out_); ++i) {
    const auto place = places.emplace(lots[held_out_[static_cast<size_t>(i)]], found.size()).first;
    if (place->second == found.size()) found.push_back({.first = i});
    ++found[place->second].size;
  }
  std::vector<Lot*> by_size;
  for (Lot& lot : found) by_size.push_back(&lot);
  std::stable_sort(by_size.begin(), by_size.end(),
                   [](const Lot* a, const Lot* b) { return a->size > b->size; });
  int64_t more = 0;  // validation data than test data
  for (Lot* const lot : by_size) {
    lot->test = more == 0 ? is_test(lot->first) : more > 0;
    more += lot->test ? -lot->size : lot->size;
  }
  std::array<std::vector<size_t>, 2> halves;  // validation, test
  for (const size_t example : held_out_) {
    halves[found[places.at(lots[example])].test ? 1 : 0].push_back(example);
  }
  // What one half has more than the other comes last.
  std::array<size_t, 2> next = {0, 0};
  for (size_t i = 0; i < held_out_.size(); ++i) {
    size_t half = is_test(static_cast<int64_t>(i)) ? 1 : 0;
    if (next[half] == halves[half].size()) half = 1 - half;
    held_out_[i] = halves[half][next[half]++];
  }
}

namespace {

// Lots that have about `wanted` examples together: the first ones in their order, but for those by
// which they would be more than twice as many. Where that comes to less than half, the smallest of
// those too. The last of all is trained on.
std::unordered_set<uint64_t> chosen_lots(const std::map<uint64_t, int64_t>& sizes, int64_t wanted) {
  std::unordered_set<uint64_t> chosen;
  std::pair<int64_t, uint64_t> smallest_left = {std::numeric_limits<int64_t>::max(), 0};
  int64_t held = 0;
  for (const auto& [lot, size] : sizes) {
    if (held >= wanted || lot == sizes.rbegin()->first) break;
    if (held + size > 2 * wanted) {
      smallest_left = std::min(smallest_left, {size, lot});
      continue;
    }
    chosen.insert(lot);
    held += size;
  }
  const bool any_left = smallest_left.first < std::numeric_limits<int64_t>::max();
  if (2 * held < wanted && any_left) {
    chosen.insert(smallest_left.second);
  }
  return chosen;
}

}  // namespace

void ExampleTask::split_by_lot(const std::vector<uint64_t>& lots, size_t first_apart, double share,
                               const std::string& path, int64_t eval_sequences, uint64_t seed,
                               const std::vector<uint64_t>& trained) {
  std::unordered_set<uint64_t> chosen;
  if (first_apart < lots.size()) {
    chosen.insert(lots.begin() + static_cast<int64_t>(first_apart), lots.end());
  } else if (share == 1.0) {
    chosen.insert(lots.begin(), lots.end());
  } else {
    std::map<uint64_t, int64_t> sizes;  // by lot
    for (const uint64_t lot : trained) ++sizes[lot];
    require(
        sizes.size() > 1, path, ": has ", counted(std::ssize(trained), "example"),
        trained.size() > 1 ? str(", alike in what is read of them (length = ", length_, ")") : "",
        ", expected at least two that differ, to train on and to hold out.");
    chosen = chosen_lots(sizes, held_out_count(std::ssize(trained), share));
  }
  std::vector<size_t> train, held_out;
  for (size_t i = 0; i < lots.size(); ++i) {
    const bool out = first_apart < lots.size() ? i >= first_apart : chosen.contains(lots[i]);
    if (out) {
      held_out.push_back(i);
    } else if (!chosen.contains(lots[i])) {
      train.push_back(i);
    }
  }
  aside_ = lots.size() - train.size() - held_out.size();
  require(!train.empty() || share == 1.0, path, ": has nothing to train on that is not held out.");
  split(std::move(train), std::move(held_out), eval_sequences, seed, lots);
}

Batch ExampleTask::train_batch(int64_t index, int64_t batch_size) const {
  if (!order_) usage_error("the task has held_out = 1: there is nothing to train on.");
  std::vector<Sample> samples;
  for (const int64_t i : order_->starts(index * batch_size, batch_size)) {
    samples.push_back(sample(train_[static_cast<size_t>(i)]));
  }
  return batch_of(*this, samples, length());
}

Batch ExampleTask::eval_batch(int64_t first, int64_t count) const {
  check_held_out(first, count, eval_sequences_);
  std::vector<Sample> samples;
  for (int64_t i = first; i < first + count; ++i) {
    samples.push_back(sample(held_out_[static_cast<size_t>(i)]));
  }
  return batch_of(*this, samples, length());
}

std::vector<size_t> ExampleTask::held_out(const std::vector<int64_t>& numbers) const {
  std::vector<size_t> examples;
  for (const int64_t number : numbers) {
    examples.push_back(held_out_[static_cast<size_t>(number)]);
  }
  return examples;
}

std::vector<Floor> ExampleTask::floors_of(const std::vector<int64_t>& judged) const {
  std::vector<Floor> floors = Task::floors_of(judged);
  if (goal() != Goal::label) return floors;
  const auto labels = [&](const std::vector<size_t>& examples) {
    std::vector<int64_t> out;
    for (const size_t i : examples) out.push_back(label_of(i));
    return out;
  };
  add_floor(floors, "the most frequent class",
            usual_share(labels(train_), labels(held_out(judged))));
  return floors;
}

Sample ExampleTask::framed(const std::vector<int32_t>& first,
                           const std::vector<int32_t>* second) const {
  Sample out;
  const auto start = tokenizer_->start_token();
  if (start) out.inputs.push_back(*start);
  out.inputs.insert(out.inputs.end(), first.begin(), first.end());
  if (start || second != nullptr) out.inputs.push_back(tokenizer_->end_token());
  if (second == nullptr) return out;
  out.second = static_cast<int64_t>(out.inputs.size());
  out.inputs.insert(out.inputs.end(), second->begin(), second->end());
  if (start) out.inputs.push_back(tokenizer_->end_token());
  return out;
}

std::string ExampleTask::counts() const {
  return str(train_.size(), " to train on and ", eval_sequences_, " of ", held_out_.size(),
             " held out",
             aside_ > 0 ? str(", ", aside_, " left aside as they are held out too") : "");
}

std::string ExampleTask::cut_text(int64_t cut) const {
  return cut > 0 ? str("; ", cut, " of them longer than ", length_, " tokens and cut") : "";
}

}  // namespace headloom::data
