// The tensors of a Hugging Face folder: model.safetensors, or shards named by
// model.safetensors.index.json.
#pragma once

#include <map>
#include <set>
#include <string>
#include <vector>

#include "train/safetensors.h"

namespace headloom {

class Weights {
 public:
  // Maps the files. Throws Error naming the file and what is wrong with it: no such file, a shard
  // that is missing or lacks a tensor, a tensor in two shards.
  explicit Weights(const std::string& folder);

  bool has(const std::string& name) const { return tensors_.count(name) > 0; }
  // Marks it as used. Throws Error naming the folder's file where it is not there.
  at::Tensor take(const std::string& name);
  std::vector<std::string> unused() const;
  int64_t count() const { return static_cast<int64_t>(tensors_.size()); }
  double numbers() const;  // in all tensors
  // The file or index, for messages.
  const std::string& path() const { return path_; }

 private:
  std::string path_;
  std::map<std::string, at::Tensor> tensors_;
  std::set<std::string> used_;
};

}  // namespace headloom
