#include "train/checkpoint.h"

#include <ATen/ATen.h>
#include <sys/stat.h>

#include <algorithm>
#include <charconv>
#include <filesystem>

#include "core/files.h"
#include "core/text.h"
#include "mixers/nn.h"
#include "ops/product/product.h"
#include "train/device.h"

namespace headloom {
namespace {

namespace fs = std::filesystem;
constexpr const char* kModel = "model.safetensors";
constexpr const char* kOptimizer = "optimizer.safetensors";

// Which folder stands at a path, so that it is known when another one does.
struct FolderMark {
  dev_t device = 0;
  ino_t number = 0;
  int64_t seconds = 0, nanoseconds = 0;  // when its entries last changed

  bool operator==(const FolderMark&) const = default;
};

std::optional<FolderMark> mark_folder(const std::string& path) {
  struct stat info{};
  if (::stat(path.c_str(), &info) != 0) return std::nullopt;
  return FolderMark{info.st_dev, info.st_ino, info.st_mtim.tv_sec, info.st_mtim.tv_nsec};
}

StoredFile stored(const FileMark& mark) { return {.bytes = mark.bytes, .crc = mark.crc}; }

}  // namespace

CheckpointStore::CheckpointStore(std::string run_folder)
    : run_(std::move(run_folder)), root_(run_ + "/checkpoints") {}

std::string CheckpointStore::folder(int64_t step) const { return str(root_, "/step-", step); }

std::vector<int64_t> CheckpointStore::steps() const {
  std::vector<int64_t> found;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(root_, error)) {
    const std::string name = entry.path().filename().string();
    int64_t step = 0;
    if (name.rfind("step-", 0) != 0) continue;
    const char* end = name.data() + name.size();
    const auto result = std::from_chars(name.data() + 5, end, step);
    if (result.ec == std::errc() && result.ptr == end) found.push_back(step);
  }
  std::sort(found.begin(), found.end());
  return found;
}

std::optional<int64_t> CheckpointStore::best() const {
  const auto present = steps();
  if (present.empty()) return std::nullopt;
  try {
    const std::string path = folder(present.back()) + "/state.json";
    const auto step = parse_state(read_file(path), path).best_step;
    if (step && std::find(present.begin(), present.end(), *step) != present.end()) return step;
  } catch (const Error&) {  // loading that checkpoint says what is wrong with it
  }
  return std::nullopt;
}

int64_t CheckpointStore::find(const std::string& which) const {
  const auto present = steps();
  require(!present.empty(), run_, ": has no checkpoint yet.");
  if (which == "last") return present.back();
  if (which == "best") return best().value_or(present.back());
  int64_t step = 0;
  const char* end = which.data() + which.size();
  const auto result = std::from_chars(which.data(), end, step);
  if (result.ec != std::errc() || result.ptr != end ||
      std::find(present.begin(), present.end(), step) == present.end()) {
    std::vector<std::string> names;
    for (int64_t s : present) names.push_back(std::to_string(s));
    usage_error(run_, ": has no checkpoint '", which, "', expected best, last or one of the steps ",
                join(names), ".");
  }
  return step;
}

bool CheckpointStore::has_weights_alone(int64_t step) const {
  const std::string path = folder(step) + "/state.json";
  try {
    return !parse_state(read_file(path), path).files.contains(kOptimizer);
  } catch (const Error&) {  // loading it says what is wrong with it
    return false;
  }
}

void CheckpointStore::remove(int64_t step) const {
  // A reader must not find a folder that lacks some of its files.
  const std::string gone = root_ + "/removing";
  std::error_code ignored;
  fs::remove_all(gone, ignored);  // what a killed process left
  fs::rename(folder(step), gone, ignored);
  fs::remove_all(gone, ignored);
}

void CheckpointStore::publish(const TrainState& state,
                              const std::function<void(const std::string&)>& fill) const {
  const std::string temporary = root_ + "/writing";
  const auto intact = steps();
  try {
    std::error_code ignored;
    fs::remove_all(temporary, ignored);
    make_folders(temporary);
    fill(temporary);
    publish_folder(temporary, folder(state.step));
  } catch (const Error& error) {
    std::error_code ignored;
    fs::remove_all(temporary, ignored);
    fail("the checkpoint of step ", state.step, " could not be saved: ", error.what(),
         intact.empty() ? " There is no earlier checkpoint."
                        : str(" The checkpoint of step ", intact.back(), " is intact."));
  }
}

void CheckpointStore::save_weights(const torch::nn::Module& model, TrainState state) const {
  publish(state, [&](const std::string& where) {
    state.files[kModel] = stored(write_safetensors(where + "/" + kModel, named_tensors(model)));
    write_file(where + "/state.json", state_json(state));
  });
}

void CheckpointStore::save(const torch::nn::Module& model, NamedTensors optimizer,
                           TrainState state) const {
  state.product_routes = ops::product_routes();
  publish(state, [&](const std::string& where) {
    state.files[kModel] = stored(write_safetensors(where + "/" + kModel, named_tensors(model)));
    for (auto& random : random_states(device_of(model))) optimizer.push_back(std::move(random));
    state.files[kOptimizer] = stored(write_safetensors(where + "/" + kOptimizer, optimizer));
    write_file(where + "/state.json", state_json(state));
  });
  std::vector<int64_t> present = steps();
  for (size_t i = 0; i + 2 < present.size(); ++i) {
    if (present[i] == state.best_step) continue;
    remove(present[i]);
  }
}

void CheckpointStore::drop_after(int64_t step) const {
  for (int64_t present : steps()) {
    if (present > step) remove(present);
  }
}

TrainState CheckpointStore::checked_state(int64_t step, bool with_optimizer) const {
  const std::string where = folder(step);
  const TrainState state = parse_state(read_file(where + "/state.json"), where + "/state.json");
  require(state.step == step, where, "/state.json: says step ", state.step, ", expected ", step,
          ".");
  for (const char* name : {kModel, kOptimizer}) {
    const auto mark = state.files.find(name);
    if (mark == state.files.end() && name == kOptimizer && !with_optimizer) continue;
    require(mark != state.files.end(), where, "/state.json: does not mention ", name, ".");
    const std::string path = where + "/" + name;
    const FileMark found = mark_file(path);
    require(found.bytes == mark->second.bytes, path, ": is truncated or damaged: it has ",
            found.bytes, " bytes, expected ", mark->second.bytes, ".");
    require(found.crc == mark->second.crc, path, ": is damaged: its checksum differs.");
  }
  return state;
}

std::string CheckpointStore::other_intact(int64_t step) const {
  const auto present = steps();
  for (auto other = present.rbegin(); other != present.rend(); ++other) {
    if (*other == step) continue;
    try {
      checked_state(*other);
      return str(" The checkpoint of step ", *other, " is intact (--checkpoint ", *other, ").");
    } catch (const Error&) {
    }
  }
  return " No other checkpoint is intact.";
}

TrainState CheckpointStore::load(int64_t step, torch::nn::Module& model, AdamW& optimizer) const {
  try {
    const TrainState state = checked_state(step, /*with_optimizer=*/true);
    const std::string where = folder(step);
    at::NoGradGuard no_grad;
    copy_tensors(read_safetensors(where + "/" + kModel), named_tensors(model),
                 where + "/" + kModel);
    NamedTensors rest = read_safetensors(where + "/" + kOptimizer);
    restore_random(rest, device_of(model), where + "/" + kOptimizer);
    optimizer.load(rest, where + "/" + kOptimizer);
    ops::use_product_routes(state.product_routes);
    return state;
  } catch (const Error& error) {
    fail(error.what(), other_intact(step));
  }
}

TrainState CheckpointStore::load_weights(const std::string& which, torch::nn::Module& model) const {
  constexpr int kAttempts = 20;
  for (int attempt = 1;; ++attempt) {
    const int64_t step = find(which);
    const auto before = mark_folder(folder(step));
    try {
      const TrainState state = checked_state(step);
      const std::string path = folder(step) + "/" + kModel;
      at::NoGradGuard no_grad;
      copy_tensors(read_safetensors(path), named_tensors(model), path);
      return state;
    } catch (const Error& error) {
      const bool stands = before && before == mark_folder(folder(step));
      if (stands || attempt == kAttempts) fail(error.what(), other_intact(step));
    }
  }
}

}  // namespace headloom
