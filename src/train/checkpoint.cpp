#include "train/checkpoint.h"

#include <ATen/ATen.h>
#include <sys/stat.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <map>
#include <set>
#include <sstream>
#include <thread>

#include "core/fields.h"
#include "core/files.h"
#include "core/parse_number.h"
#include "core/text.h"
#include "mixers/nn.h"
#include "model/describe.h"
#include "ops/product/product.h"
#include "train/device.h"

namespace headloom {
namespace {

namespace fs = std::filesystem;

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

// What a checkpoint has a file of, or one for each part: "model" and "optimizer".
std::string file_name(const std::string& what, int64_t part, int64_t parts) {
  if (parts == 1) return what + ".safetensors";
  const auto number = [](int64_t n) { return formatted("%05.0f", static_cast<double>(n)); };
  return str(what, "-", number(part + 1), "-of-", number(parts), ".safetensors");
}

// Their names, by part.
std::vector<std::string> files_of(const TrainState& state, const std::string& what) {
  std::vector<std::string> out;
  for (const auto& [name, mark] : state.files) {
    if (name.starts_with(what)) out.push_back(name);
  }
  return out;
}

// What the files `names` of the checkpoint `state` have together; the tensors share their mappings.
StoredTensors read_files(const TrainState& state, const std::string& where,
                         const std::vector<std::string>& names) {
  StoredTensors out;
  std::map<std::string, size_t> place;
  for (const std::string& name : names) {
    for (auto& [tensor, values] : read_safetensors(where + "/" + name)) {
      const auto [found, fresh] = place.try_emplace(tensor, out.size());
      if (fresh) out.emplace_back(tensor, StoredTensor());
      StoredTensor& stored = out[found->second].second;
      stored.parts.push_back(std::move(values));
      const auto cut = state.cuts.find(parameter_of(tensor));
      if (cut == state.cuts.end()) continue;
      stored.dim = cut->second.dim;
      stored.segments = cut->second.segments;
    }
  }
  return out;
}

// The weights are of another model than is to have them.
class OtherModel : public Error {
 public:
  using Error::Error;
};

std::string config_text(const Model& model) {
  ModelConfig config = model.config();
  return to_toml(write_fields(config));
}

// Shapes alone would not tell: a model with another window has the same, for example. Gives the
// tensors of `model` that the checkpoint has, which are all unless the model is adapted().
NamedTensors tensors_in(const TrainState& state, const std::string& where, const Model& model,
                        WeightsOf weights) {
  NamedTensors out = named_tensors(model);
  if (state.model.empty()) return out;
  ModelConfig theirs, ours = model.config();
  // Read and written anew: an option that came after the checkpoint is at its default.
  read_fields(parse_toml(state.model, where + "/state.json"), theirs);
  auto other = difference_of_weights(theirs, ours);
  if (!other) return out;
  if (weights == WeightsOf::kAdapted) {
    ModelConfig same = adapted(theirs, ours);
    other = difference_of_weights(same, ours);
  }
  if (other) {
    throw OtherModel(str(where, ": its weights are of a model with ", other->was(),
                         ", but the configuration (config.toml of a run) has ", other->is(), "."));
  }
  std::set<std::string> present;
  for (const auto& [name, tensor] : named_tensors(*build_without_memory(theirs))) {
    present.insert(name);
  }
  std::erase_if(out, [&](const auto& named) { return !present.contains(named.first); });
  return out;
}

void read_model(const TrainState& state, const std::string& where, const Model& model,
                const CutModel* cut, WeightsOf weights = WeightsOf::kSame) {
  const NamedTensors tensors = tensors_in(state, where, model, weights);
  const std::vector<std::string> names = files_of(state, "model");
  const StoredTensors stored = read_files(state, where, names);
  try {
    copy_tensors(stored, tensors, where + "/" + names[0], cut);
  } catch (const Error& error) {
    throw OtherModel(str(error.what(),
                         " The file is not damaged: [model] in the configuration (config.toml of "
                         "a run) does not fit its weights."));
  }
}

// The model's tensors that this process writes: all, or its parts of those that have no memory, and
// buffers with the first ones.
NamedTensors own_tensors(const torch::nn::Module& model, ParameterShards& shards) {
  NamedTensors out;
  for (const auto& [name, tensor] : named_tensors(model)) {
    if (shards.has(tensor)) {
      const Tensor own = shards.own(tensor).detach();
      if (own.numel() > 0) out.emplace_back(name, own);
    } else if (shards.group().rank() == 0) {
      out.emplace_back(name, tensor);
    }
  }
  return out;
}

}  // namespace

Snapshot Snapshot::take(const Model& model, const AdamW& optimizer, TrainState state,
                        ParameterShards* released) {
  Snapshot out;
  out.optimizer = optimizer.state();
  out.state = std::move(state);
  out.state.files.clear();  // of the checkpoint that the run went on from
  out.state.model = config_text(model);
  out.part = optimizer.part();
  out.parts = optimizer.parts();
  out.state.product_routes = ops::product_routes();
  const CutModel* const cut = optimizer.cut();
  out.model_in_parts = released != nullptr || cut != nullptr;
  out.state.cuts.clear();
  if (cut != nullptr) {
    out.model = cut->to_store(named_tensors(model));
    out.optimizer = cut->to_store(out.optimizer);
    for (const auto& [name, how] : cut->cuts()) out.state.cuts[name] = {how.dim, how.segments};
  } else if (out.model_in_parts) {
    out.model = own_tensors(model, *released);
  } else if (out.part == 0) {
    out.model = named_tensors(model);
  }
  if (out.part == 0) {
    for (auto& random : random_states(model.device())) out.optimizer.push_back(random);
  }
  return out;
}

void Snapshot::copy() {
  for (NamedTensors* tensors : {&model, &optimizer}) {
    for (auto& [name, tensor] : *tensors) {
      tensor = tensor.detach().to(at::kCPU, tensor.scalar_type(), /*non_blocking=*/false,
                                  /*copy=*/true);
    }
  }
}

double Snapshot::bytes() const {
  double sum = 0;
  for (const NamedTensors* tensors : {&model, &optimizer}) {
    for (const auto& [name, tensor] : *tensors) sum += static_cast<double>(tensor.nbytes());
  }
  return sum;
}

std::vector<std::string> Snapshot::files(int64_t of_part) const {
  std::vector<std::string> out = {file_name("optimizer", of_part, parts)};
  if (model_in_parts) {
    out.push_back(file_name("model", of_part, parts));
  } else if (of_part == 0) {
    out.push_back(file_name("model", 0, 1));
  }
  return out;
}

// What a checkpoint's folder is called, before the step's number.
constexpr std::string_view kStepFolder = "step-";

CheckpointStore::CheckpointStore(std::string run_folder)
    : run_(std::move(run_folder)), root_(run_ + "/checkpoints") {}

std::string CheckpointStore::folder(int64_t step) const {
  return str(root_, "/", kStepFolder, step);
}

std::vector<int64_t> CheckpointStore::steps() const {
  std::vector<int64_t> found;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(root_, error)) {
    const std::string name = entry.path().filename().string();
    if (!name.starts_with(kStepFolder)) continue;
    const auto step = parse_number<int64_t>(std::string_view(name).substr(kStepFolder.size()));
    if (!step) continue;
    // Neither a file is a checkpoint nor an empty folder, which a copy that was broken off leaves.
    std::error_code unreadable;
    if (!entry.is_directory(unreadable) || fs::is_empty(entry.path(), unreadable)) continue;
    found.push_back(*step);
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

std::optional<StoredData> CheckpointStore::data() const {
  const auto present = steps();
  if (present.empty()) return std::nullopt;
  try {
    const std::string path = folder(present.back()) + "/state.json";
    return parse_state(read_file(path), path).data;
  } catch (const Error&) {  // loading that checkpoint says what is wrong with it
    return std::nullopt;
  }
}

std::string CheckpointStore::config(int64_t step) const {
  const std::string path = folder(step) + "/state.json";
  try {
    return parse_state(read_file(path), path).config;
  } catch (const Error&) {  // loading that checkpoint says what is wrong with it
    return "";
  }
}

int64_t CheckpointStore::find(const std::string& which) const {
  const auto present = steps();
  require(!present.empty(), run_, ": has no checkpoint yet.");
  if (which == "last") return present.back();
  if (which == "best") return best().value_or(present.back());
  const auto step = parse_number<int64_t>(which);
  if (!step || std::find(present.begin(), present.end(), *step) == present.end()) {
    std::vector<std::string> names;
    for (int64_t s : present) names.push_back(std::to_string(s));
    usage_error(run_, ": has no checkpoint '", which, "', expected best, last or one of the steps ",
                join(names), ".");
  }
  return *step;
}

bool CheckpointStore::has_weights_alone(int64_t step) const {
  const std::string path = folder(step) + "/state.json";
  try {
    return files_of(parse_state(read_file(path), path), "optimizer").empty();
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
    throw CannotWrite(str("the checkpoint of step ", step, " could not be saved: ", error.what(),
                          intact.empty()
                              ? " There is no earlier checkpoint."
                              : str(" The checkpoint of step ", intact.back(), " is intact.")));
  }
}

void CheckpointStore::prepare() const {
  std::error_code ignored;
  fs::remove_all(unfinished(), ignored);  // what a killed process left
  // A run's folder that was moved away is not made again: a new one would have no configuration.
  if (!fs::is_directory(run_)) throw CannotWrite(run_ + ": the folder is not there.");
  make_folders(unfinished());
}

void CheckpointStore::save_weights(const Model& model, TrainState state) const {
  guarded(state.step, {unfinished()}, [&] {
    prepare();
    const std::string where = unfinished();
    const std::string name = file_name("model", 0, 1);
    state.model = config_text(model);
    state.files[name] = stored(write_safetensors(where + "/" + name, named_tensors(model)));
    write_file(where + "/state.json", state_json(state));
    publish_folder(where, folder(state.step));
  });
}

std::vector<std::pair<std::string, FileMark>> CheckpointStore::write_files(
    const Snapshot& snapshot) const {
  std::vector<std::pair<std::string, FileMark>> out;
  for (const std::string& name : snapshot.files(snapshot.part)) {
    const NamedTensors& tensors = name.starts_with("model") ? snapshot.model : snapshot.optimizer;
    out.emplace_back(name, write_safetensors(unfinished() + "/" + name, tensors));
  }
  return out;
}

void CheckpointStore::save(const Snapshot& snapshot, const std::atomic<bool>& cancelled) const {
  at::NoGradGuard no_grad;
  TrainState state = snapshot.state;
  const std::string where = unfinished();
  // Without their folder the other processes would fail as well, and one of them might say so
  // first.
  std::vector<std::string> own;
  for (const std::string& name : snapshot.files(snapshot.part)) own.push_back(where + "/" + name);
  if (snapshot.parts == 1) own = {where};
  if (snapshot.part != 0) {
    guarded(state.step, own, [&] {
      // The first process waits for the marks, so they are written last.
      for (const auto& [name, mark] : write_files(snapshot)) {
        write_file(where + "/" + name + ".mark", str(mark.bytes, " ", mark.crc));
      }
    });
    return;
  }
  guarded(state.step, own, [&] {
    if (snapshot.parts == 1) prepare();
    for (const auto& [name, mark] : write_files(snapshot)) state.files[name] = stored(mark);
    for (int64_t part = 1; part < snapshot.parts; ++part) {
      for (const std::string& name : snapshot.files(part)) {
        const std::string mark = where + "/" + name + ".mark";
        while (!fs::exists(mark)) {
          require(!cancelled, "another process has ended.");
          std::this_thread::sleep_for(std::chrono::milliseconds(5));
        }
        StoredFile& file = state.files[name];
        std::istringstream(read_file(mark)) >> file.bytes >> file.crc;
        fs::remove(mark);
      }
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

void CheckpointStore::check_finite(int64_t step, const torch::nn::Module& model) const {
  const at::NoGradGuard no_grad;
  for (const auto& [name, tensor] : named_tensors(model)) {
    if (!tensor.defined() || !tensor.is_floating_point()) continue;
    require(tensor.isfinite().all().item<bool>(), run_, ": the weights of step ", step,
            " have values that are not finite, first in '", name,
            "': they are damaged, or the training diverged.");
  }
}

TrainState CheckpointStore::checked_state(int64_t step, bool with_optimizer) const {
  const std::string where = folder(step);
  const TrainState state = parse_state(read_file(where + "/state.json"), where + "/state.json");
  require(state.step == step, where, "/state.json: says step ", state.step, ", expected ", step,
          ".");
  for (const std::string what : {"model", "optimizer"}) {
    if (what == "optimizer" && !with_optimizer) continue;
    require(!files_of(state, what).empty(), where, "/state.json: does not mention ",
            file_name(what, 0, 1), ".");
  }
  for (const auto& [name, mark] : state.files) {
    if (name.starts_with("optimizer") && !with_optimizer) continue;
    const std::string path = where + "/" + name;
    const FileMark found = mark_file(path);
    require(found.bytes == mark.bytes, path, ": is truncated or damaged: it has ", found.bytes,
            " bytes, expected ", mark.bytes, ".");
    require(found.crc == mark.crc, path, ": is damaged: its checksum differs.");
  }
  return state;
}

std::string CheckpointStore::other_intact(int64_t step, bool with_optimizer) const {
  const auto present = steps();
  for (auto other = present.rbegin(); other != present.rend(); ++other) {
    if (*other == step) continue;
    try {
      checked_state(*other, with_optimizer);
      return str(" The checkpoint of step ", *other, " is intact (--checkpoint ", *other, ").");
    } catch (const Error&) {
    }
  }
  return " No other checkpoint is intact.";
}

TrainState CheckpointStore::load(int64_t step, Model& model, AdamW& optimizer) const {
  try {
    const TrainState state = checked_state(step, /*with_optimizer=*/true);
    const std::string where = folder(step);
    at::NoGradGuard no_grad;
    read_model(state, where, model, optimizer.cut());
    ParameterShards* const shards = optimizer.shards();
    if (shards != nullptr && shards->frees()) shards->take();  // before the optimiser needs memory
    const std::vector<std::string> names = files_of(state, "optimizer");
    StoredTensors rest = read_files(state, where, names);
    restore_random(rest, model.device(), where + "/" + names[0]);
    optimizer.load(rest, where + "/" + names[0]);
    ops::use_product_routes(state.product_routes);
    return state;
  } catch (const OtherModel&) {
    throw;
  } catch (const Error& error) {
    fail(error.what(), other_intact(step, /*with_optimizer=*/true));
  }
}

TrainState CheckpointStore::load_weights(const std::string& which, Model& model,
                                         const CutModel* cut, WeightsOf weights) const {
  constexpr int kAttempts = 20;
  for (int attempt = 1;; ++attempt) {
    const int64_t step = find(which);
    const auto before = mark_folder(folder(step));
    try {
      const TrainState state = checked_state(step, /*with_optimizer=*/false);
      at::NoGradGuard no_grad;
      read_model(state, folder(step), model, cut, weights);
      return state;
    } catch (const Error& error) {
      const bool stands = before && before == mark_folder(folder(step));
      if (!stands && attempt < kAttempts) continue;
      if (dynamic_cast<const OtherModel*>(&error) != nullptr) throw;
      fail(error.what(), other_intact(step, /*with_optimizer=*/false));
    }
  }
}

}  // namespace headloom
