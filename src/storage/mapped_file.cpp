#include "storage/mapped_file.h"

#include <ATen/ATen.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "core/error.h"

namespace headloom {

std::shared_ptr<MappedFile> MappedFile::open(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) fail(path, ": cannot be read: ", std::strerror(errno), ".");
  struct stat info{};
  const std::shared_ptr<MappedFile> file(new MappedFile);
  if (::fstat(fd, &info) == 0 && info.st_size > 0) {
    void* data = ::mmap(nullptr, static_cast<size_t>(info.st_size), PROT_READ | PROT_WRITE,
                        MAP_PRIVATE, fd, 0);
    if (data != MAP_FAILED) {
      file->data_ = static_cast<char*>(data);
      file->size_ = static_cast<size_t>(info.st_size);
    }
  }
  ::close(fd);
  if (info.st_size > 0 && file->data_ == nullptr) fail(path, ": cannot be mapped into memory.");
  return file;
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) ::munmap(data_, size_);
}

int64_t bytes_reached(at::IntArrayRef sizes, at::IntArrayRef strides, int64_t element) {
  constexpr uint64_t kMost = uint64_t{1} << 62;
  uint64_t numbers = 1, last = 0;  // the product of the sizes, and the last element's place
  bool empty = false;
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] < 0 || (!strides.empty() && strides[i] < 0)) return -1;
    empty = empty || sizes[i] == 0;
    const auto size = static_cast<uint64_t>(std::max<int64_t>(sizes[i], 1));
    if (numbers > kMost / size) return -1;
    numbers *= size;
    if (strides.empty()) continue;
    const auto stride = static_cast<uint64_t>(strides[i]);
    if (stride > 0 && size - 1 > (kMost - last) / stride) return -1;
    last += (size - 1) * stride;
  }
  const uint64_t reached = strides.empty() ? numbers : last + 1;
  if (std::max(reached, numbers) > kMost / static_cast<uint64_t>(element)) return -1;
  return empty ? 0 : static_cast<int64_t>(reached) * element;
}

at::Tensor mapped_tensor(const std::shared_ptr<MappedFile>& file, size_t begin,
                         at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType type) {
  const auto options = at::TensorOptions().dtype(type);
  char* const data = const_cast<char*>(file->bytes().data()) + begin;
  const auto keep = [file](void*) {};
  const auto element = static_cast<uintptr_t>(c10::elementSize(type));
  if (reinterpret_cast<uintptr_t>(data) % element == 0) {
    return strides.empty() ? at::from_blob(data, sizes, keep, options)
                           : at::from_blob(data, sizes, strides, keep, options);
  }
  const int64_t bytes = bytes_reached(sizes, strides, static_cast<int64_t>(element));
  const at::Tensor aligned = at::empty({bytes / static_cast<int64_t>(element)}, options);
  if (bytes > 0) std::memcpy(aligned.mutable_data_ptr(), data, static_cast<size_t>(bytes));
  return strides.empty() ? aligned.view(sizes) : aligned.as_strided(sizes, strides);
}

}  // namespace headloom
