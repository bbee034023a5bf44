// Files mapped into memory, and tensors that share the mapping.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <string_view>

namespace headloom {

// A file mapped copy-on-write: what is written into it stays in this process.
class MappedFile {
 public:
  // Throws Error naming the file and the system's reason.
  static std::shared_ptr<MappedFile> open(const std::string& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  std::string_view bytes() const { return {data_, size_}; }

 private:
  MappedFile() = default;

  char* data_ = nullptr;
  size_t size_ = 0;
};

// Bytes that a tensor of these sizes and strides reaches from its first element on; strides empty:
// contiguous. -1 where a size or stride is negative or they reach beyond 2^62 bytes: an empty
// dimension does not excuse huge others.
int64_t bytes_reached(at::IntArrayRef sizes, at::IntArrayRef strides, int64_t element);

// The tensor that starts at byte `begin` of `file` and keeps it mapped. What it reaches must lie in
// the file. Unaligned ones are copied: kernels expect natural alignment.
at::Tensor mapped_tensor(const std::shared_ptr<MappedFile>& file, size_t begin,
                         at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType type);

}  // namespace headloom
