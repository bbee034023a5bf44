#include "interop/weights.h"

#include <filesystem>

#include "core/error.h"
#include "core/text.h"
#include "interop/json.h"

namespace headloom {

namespace fs = std::filesystem;

Weights::Weights(const std::string& folder) {
  const std::string single = folder + "/model.safetensors", index = single + ".index.json";
  if (fs::exists(single)) {
    path_ = single;
    for (auto& [name, tensor] : read_safetensors(single)) tensors_.emplace(name, tensor);
    return;
  }
  path_ = index;
  require(fs::exists(index), folder,
          ": has neither model.safetensors nor model.safetensors.index.json (weights of another "
          "format have to be saved as safetensors first).");
  const Node root = read_json(index);
  const Node* map = root.find("weight_map");
  require(map != nullptr && map->is_table(), index, ": has no table 'weight_map'.");
  std::map<std::string, std::string> shard_of;
  std::set<std::string> shards;
  for (const auto& [name, file] : map->table()) {
    const auto* shard = std::get_if<std::string>(&file.value);
    require(shard != nullptr && !shard->empty() && fs::path(*shard).filename() == *shard, index,
            ": tensor '", name, "' is not assigned to a file beside it.");
    shard_of[name] = *shard;
    shards.insert(*shard);
  }
  for (const std::string& shard : shards) {
    const std::string path = folder + "/" + shard;
    require(fs::exists(path), path, ": is missing, but ", index, " names it.");
    for (auto& [name, tensor] : read_safetensors(path)) {
      require(tensors_.emplace(name, tensor).second, path, ": tensor '", name,
              "' is in another shard too.");
    }
  }
  for (const auto& [name, shard] : shard_of) {
    require(has(name), folder, "/", shard, ": has no tensor '", name, "', which ", index,
            " puts there.");
  }
}

at::Tensor Weights::take(const std::string& name) {
  const auto found = tensors_.find(name);
  if (found == tensors_.end()) {
    std::vector<std::string> names;
    for (const auto& [other, tensor] : tensors_) names.push_back(other);
    const std::string near = nearest(name, names);
    fail(path_, ": has no tensor '", name, "'",
         near.empty() ? "." : str("; the nearest name is '", near, "'."));
  }
  used_.insert(name);
  return found->second;
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
