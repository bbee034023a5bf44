// The tensors of a folder of weights: one file, or shards that an index names.
#pragma once

#include <map>
#include <set>
#include <string>
#include <vector>

#include "storage/safetensors.h"

namespace headloom {

class Weights {
 public:
  // Maps the files: model.safetensors, else pytorch_model.bin, each whole or as the shards of its
  // .index.json, else consolidated.pth or consolidated.00.pth. Throws Error naming the file and
  // what is wrong with it: no such file, a shard that is missing or lacks a tensor, a tensor in two
  // shards. Prefixes that all names have are removed: `module.`, which DistributedDataParallel puts
  // there, and `_orig_mod.`, which torch.compile does.
  explicit Weights(const std::string& folder);

  bool has(const std::string& name) const { return tensors_.count(name) > 0; }
  // Without marking it as used. Throws Error naming the folder's file where it is not there.
  const at::Tensor& at(const std::string& name) const;
  // Marks it as used. Throws as at() does.
  at::Tensor take(const std::string& name);
  // Adds a tensor that was made of others, or replaces one.
  void put(const std::string& name, const at::Tensor& tensor) { tensors_[name] = tensor; }
  void drop(const std::string& name) { tensors_.erase(name); }
  std::vector<std::string> unused() const;
  int64_t count() const { return static_cast<int64_t>(tensors_.size()); }
  double numbers() const;  // in all tensors
  // The file or index, for messages.
  const std::string& path() const { return path_; }

 private:
  // Reads the files, their names as they are.
  void read(const std::string& folder);
  void read_shards(const std::string& folder);
  // Whether all names had it.
  bool remove_prefix(const std::string& prefix);

  std::string path_;
  std::map<std::string, at::Tensor> tensors_;
  std::set<std::string> used_;
};

}  // namespace headloom
