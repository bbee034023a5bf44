// The safetensors format: 8 bytes of header length, a JSON header, the tensors' bytes.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace headloom {

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

// What a file or several have of a tensor, in order: the whole, rows of its elements, or with
// `segments` parts along dimension `dim`, of which each has so much of every segment.
struct StoredTensor {
  std::vector<at::Tensor> parts;
  int64_t dim = 0;
  std::vector<int64_t> segments = {};
};
using StoredTensors = std::vector<std::pair<std::string, StoredTensor>>;
StoredTensors as_stored(NamedTensors tensors);

// What identifies a file's content: its size and a CRC-64 of all its bytes.
struct FileMark {
  int64_t bytes = 0;
  uint64_t crc = 0;
};

// Writes tensors atomically, larger element types first so that every tensor is aligned.
FileMark write_safetensors(const std::string& path, const NamedTensors& tensors);

// Maps the file and returns tensors that share the mapping (copy on write). Throws Error naming the
// file and the tensor where the file is malformed: truncated, offsets that overlap or leave the
// file, unknown types, sizes that do not fit.
NamedTensors read_safetensors(const std::string& path);

// The mark of a file as it is on disk.
FileMark mark_file(const std::string& path);

}  // namespace headloom
