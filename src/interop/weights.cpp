#include "interop/weights.h"

#include <algorithm>
#include <filesystem>

#include "core/error.h"
#include "core/files.h"
#include "core/json.h"
#include "core/text.h"
#include "interop/torch_file.h"

namespace headloom {

namespace fs = std::filesystem;

namespace {

NamedTensors read_weights(const std::string& path) {
  return path.ends_with(".safetensors") ? read_safetensors(path) : read_torch_file(path);
}

}  // namespace

Weights::Weights(const std::string& folder) {
  read(folder);
  // Each around the other, in any order.
  while (remove_prefix("module.") || remove_prefix("_orig_mod.")) {
  }
}

bool Weights::remove_prefix(const std::string& prefix) {
  if (!std::all_of(tensors_.begin(), tensors_.end(),
                   [&](const auto& one) { return one.first.starts_with(prefix); })) {
    return false;
  }
  std::map<std::string, at::Tensor> bare;
  for (const auto& [name, tensor] : tensors_) bare.emplace(name.substr(prefix.size()), tensor);
  tensors_ = std::move(bare);
  return !tensors_.empty();
}

void Weights::read(const std::string& folder) {
  // Safetensors first: a folder that has both has the same in both.
  constexpr const char* kFiles[] = {"model.safetensors", "pytorch_model.bin", "consolidated.pth",
                                    "consolidated.00.pth"};
  std::vector<std::string> looked_for;
  for (const std::string file : kFiles) {
    for (const char* ending : {"", ".index.json"}) {
      const bool index = *ending != '\0';
      if (index && file.starts_with("consolidated")) continue;
      path_ = folder + "/" + file + ending;
      looked_for.push_back(file + ending);
      if (!is_there(path_)) continue;
      if (index) {
        read_shards(folder);
        return;
      }
      for (auto& [name, tensor] : read_weights(path_)) tensors_.emplace(name, tensor);
      require(file != "consolidated.00.pth" || !is_there(folder + "/consolidated.01.pth"), folder,
              ": its weights are cut into several files for model parallelism, expected one.");
      return;
    }
  }
  fail(folder, ": has no weights, expected one of ", join(looked_for), ".");
}

void Weights::read_shards(const std::string& folder) {
  const Node root = read_json(path_);
  const Node* map = root.find("weight_map");
  require(map != nullptr && map->is_table(), path_, ": has no table 'weight_map'.");
  std::map<std::string, std::string> shard_of;
  std::set<std::string> shards;
  for (const auto& [name, file] : map->table()) {
    const auto* shard = std::get_if<std::string>(&file.value);
    require(shard != nullptr && !shard->empty() && fs::path(*shard).filename() == *shard, path_,
            ": tensor '", name, "' is not assigned to a file of the same folder.");
    shard_of[name] = *shard;
    shards.insert(*shard);
  }
  for (const std::string& shard : shards) {
    const std::string path = folder + "/" + shard;
    require(fs::exists(path), path, ": is missing, but ", path_, " names it.");
    for (auto& [name, tensor] : read_weights(path)) {
      require(tensors_.emplace(name, tensor).second, path, ": tensor '", name,
              "' is in another shard too.");
    }
  }
  for (const auto& [name, shard] : shard_of) {
    require(has(name), folder, "/", shard, ": has no tensor '", name, "', which ", path_,
            " puts there.");
  }
}

const at::Tensor& Weights::at(const std::string& name) const {
  const auto found = tensors_.find(name);
  if (found == tensors_.end()) {
    std::vector<std::string> names;
    for (const auto& [other, tensor] : tensors_) names.push_back(other);
    const std::string near = nearest(name, names);
    fail(path_, ": has no tensor '", name, "'",
         near.empty() ? "." : str("; the nearest name is '", near, "'."));
  }
  return found->second;
}

at::Tensor Weights::take(const std::string& name) {
  const at::Tensor& found = at(name);
  used_.insert(name);
  return found;
}

double Weights::numbers() const {
  double sum = 0;
  for (const auto& [name, tensor] : tensors_) sum += static_cast<double>(tensor.numel());
  return sum;
}

std::vector<std::string> Weights::unused() const {
  std::vector<std::string> names;
  for (const auto& [name, tensor] : tensors_) {
    if (!used_.count(name)) names.push_back(name);
  }
  return names;
}

}  // namespace headloom
