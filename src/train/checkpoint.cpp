#include "train/checkpoint.h"

#include <ATen/ATen.h>
#include <sys/stat.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <filesystem>
#include <map>
#include <sstream>
#include <thread>

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

// The file of one process's part of the optimiser's state, from 0.
std::string part_name(int64_t part, int64_t parts) {
  if (parts == 1) return kOptimizer;
  const auto number = [](int64_t n) { return formatted("%05.0f", static_cast<double>(n)); };
  return str("optimizer-", number(part + 1), "-of-", number(parts), ".safetensors");
}

// Names of the optimiser's files in a checkpoint, by part.
std::vector<std::string> optimizer_files(const TrainState& state) {
  std::vector<std::string> out;
  for (const auto& [name, mark] : state.files) {
    if (name.starts_with("optimizer")) out.push_back(name);
  }
  return out;
}

// Where several files have parts of a tensor's elements, those are put together in a row.
NamedTensors read_parts(const std::string& where, const std::vector<std::string>& names) {
  if (names.size() == 1) return read_safetensors(where + "/" + names[0]);
  NamedTensors out;
  std::map<std::string, std::vector<Tensor>> parts;
  for (const std::string& name : names) {
    for (auto& [tensor, values] : read_safetensors(where + "/" + name)) {
      std::vector<Tensor>& found = parts[tensor];
      if (found.empty()) out.emplace_back(tensor, Tensor());
      found.push_back(values);
    }
  }
  for (auto& [tensor, values] : out) {
    const std::vector<Tensor>& found = parts[tensor];
    values = found.size() == 1 ? found[0] : at::cat(found);
  }
  return out;
}

}  // namespace

Snapshot Snapshot::take(const torch::nn::Module& model, const AdamW& optimizer, TrainState state,
                        bool copied) {
  Snapshot out;
  out.optimizer = optimizer.state();
  out.state = std::move(state);
  out.state.files.clear();  // of the checkpoint that the run went on from
  out.part = optimizer.part();
  out.parts = optimizer.parts();
  out.state.product_routes = ops::product_routes();
  if (out.part == 0) {
    out.model = named_tensors(model);
    for (auto& random : random_states(device_of(model))) out.optimizer.push_back(random);
  }
  if (!copied) return out;
  for (NamedTensors* tensors : {&out.model, &out.optimizer}) {
    for (auto& [name, tensor] : *tensors) {
      tensor = tensor.detach().to(at::kCPU, tensor.scalar_type(), /*non_blocking=*/false,
                                  /*copy=*/true);
    }
  }
  return out;
}

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
    return optimizer_files(parse_state(read_file(path), path)).empty();
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

void CheckpointStore::guarded(int64_t step, const std::vector<std::string>& own,
                              const std::function<void()>& write) const {
  const auto intact = steps();
  try {
    write();
  } catch (const Error& error) {
    std::error_code ignored;
    for (const std::string& path : own) fs::remove_all(path, ignored);
    fail("the checkpoint of step ", step, " could not be saved: ", error.what(),
         intact.empty() ? " There is no earlier checkpoint."
                        : str(" The checkpoint of step ", intact.back(), " is intact."));
  }
}

void CheckpointStore::prepare() const {
  std::error_code ignored;
  fs::remove_all(unfinished(), ignored);  // what a killed process left
  make_folders(unfinished());
}

void CheckpointStore::save_weights(const torch::nn::Module& model, TrainState state) const {
  guarded(state.step, {unfinished()}, [&] {
    prepare();
    const std::string where = unfinished();
    state.files[kModel] = stored(write_safetensors(where + "/" + kModel, named_tensors(model)));
    write_file(where + "/state.json", state_json(state));
    publish_folder(where, folder(state.step));
  });
}

// The mark of the file is written last: the first process waits for that.
void CheckpointStore::write_part(const Snapshot& snapshot) const {
  const std::string path = unfinished() + "/" + part_name(snapshot.part, snapshot.parts);
  guarded(snapshot.state.step, {path}, [&] {
    const FileMark mark = write_safetensors(path, snapshot.optimizer);
    write_file(path + ".mark", str(mark.bytes, " ", mark.crc));
  });
}

void CheckpointStore::save(const Snapshot& snapshot, const std::atomic<bool>& cancelled) const {
  at::NoGradGuard no_grad;
  if (snapshot.part != 0) return write_part(snapshot);
  TrainState state = snapshot.state;
  const std::string where = unfinished(), own = part_name(0, snapshot.parts);
  const std::string model_path = where + "/" + kModel, own_path = where + "/" + own;
  // Without their folder the other processes would fail as well, and one of them might say so first.
  const std::vector<std::string> failed =
      snapshot.parts == 1 ? std::vector{where} : std::vector{model_path, own_path};
  guarded(state.step, failed, [&] {
    if (snapshot.parts == 1) prepare();
    state.files[kModel] = stored(write_safetensors(model_path, snapshot.model));
    state.files[own] = stored(write_safetensors(own_path, snapshot.optimizer));
    for (int64_t part = 1; part < snapshot.parts; ++part) {
      const std::string name = part_name(part, snapshot.parts);
      const std::string mark = where + "/" + name + ".mark";
      while (!fs::exists(mark)) {
        require(!cancelled, "another process has ended.");
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
      }
      StoredFile& file = state.files[name];
      std::istringstream(read_file(mark)) >> file.bytes >> file.crc;
      fs::remove(mark);
    }
    write_file(where + "/state.json", state_json(state));
    publish_folder(where, folder(state.step));
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
  require(state.files.contains(kModel), where, "/state.json: does not mention ", kModel, ".");
  const std::vector<std::string> optimizer = optimizer_files(state);
  require(!with_optimizer || !optimizer.empty(), where, "/state.json: does not mention ",
          kOptimizer, ".");
  for (const auto& [name, mark] : state.files) {
    const std::string path = where + "/" + name;
    const FileMark found = mark_file(path);
    require(found.bytes == mark.bytes, path, ": is truncated or damaged: it has ", found.bytes,
            " bytes, expected ", mark.bytes, ".");
    require(found.crc == mark.crc, path, ": is damaged: its checksum differs.");
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
    const std::vector<std::string> names = optimizer_files(state);
    NamedTensors rest = read_parts(where, names);
    restore_random(rest, device_of(model), where + "/" + names[0]);
    optimizer.load(rest, where + "/" + names[0]);
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
