#include "train/safetensors.h"

#include <ATen/ATen.h>
#include <c10/util/ConstexprCrc.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>

#include "core/error.h"
#include "core/files.h"
#include "train/safetensors_header.h"

namespace headloom {
namespace {

struct DtypeName {
  const char* name;
  at::ScalarType type;
};
constexpr DtypeName kDtypes[] = {{"F64", at::kDouble},    {"F32", at::kFloat}, {"F16", at::kHalf},
                                 {"BF16", at::kBFloat16}, {"I64", at::kLong},  {"I32", at::kInt},
                                 {"I16", at::kShort},     {"I8", at::kChar},   {"U8", at::kByte},
                                 {"BOOL", at::kBool}};

constexpr uint64_t kMost = uint64_t{1} << 62;  // bytes of any tensor

// A file mapped copy-on-write; tensors keep it alive.
struct Mapping {
  char* data = nullptr;
  size_t size = 0;
  ~Mapping() {
    if (data != nullptr) ::munmap(data, size);
  }
};

std::shared_ptr<Mapping> map_file(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) fail(path, ": cannot be read: ", std::strerror(errno), ".");
  struct stat info {};
  auto mapping = std::make_shared<Mapping>();
  if (::fstat(fd, &info) == 0 && info.st_size > 0) {
    void* data = ::mmap(nullptr, static_cast<size_t>(info.st_size), PROT_READ | PROT_WRITE,
                        MAP_PRIVATE, fd, 0);
    if (data != MAP_FAILED) {
      mapping->data = static_cast<char*>(data);
      mapping->size = static_cast<size_t>(info.st_size);
    }
  }
  ::close(fd);
  if (info.st_size > 0 && mapping->data == nullptr) fail(path, ": cannot be mapped into memory.");
  return mapping;
}

// The byte count of a tensor of `shape`, or -1 where it does not fit `limit`. An empty dimension
// does not excuse huge others: strides are products of sizes.
int64_t byte_count(const std::vector<int64_t>& shape, int64_t element, uint64_t limit) {
  uint64_t bytes = static_cast<uint64_t>(element);
  bool empty = false;
  for (int64_t size : shape) {
    empty = empty || size == 0;
    if (size == 0) continue;
    if (bytes > limit / static_cast<uint64_t>(size)) return -1;
    bytes *= static_cast<uint64_t>(size);
  }
  return empty ? 0 : static_cast<int64_t>(bytes);
}

uint64_t crc(uint64_t before, const void* data, size_t size) {
  return c10::util::detail::crc64impl(before, static_cast<const char*>(data), size);
}

}  // namespace

FileMark write_safetensors(const std::string& path, const NamedTensors& tensors) {
  std::vector<size_t> order(tensors.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return tensors[a].second.element_size() > tensors[b].second.element_size();
  });
  std::vector<TensorRecord> records;
  std::vector<at::Tensor> data;
  uint64_t offset = 0;
  for (size_t i : order) {
    const auto& [name, tensor] = tensors[i];
    TensorRecord r;
    r.name = name;
    for (const DtypeName& d : kDtypes) {
      if (d.type == tensor.scalar_type()) r.dtype = d.name;
    }
    require(!r.dtype.empty(), path, ": tensor '", name,
            "' has a type that safetensors has no name for.");
    r.shape = tensor.sizes().vec();
    r.begin = offset;
    offset += static_cast<uint64_t>(tensor.numel() * tensor.element_size());
    r.end = offset;
    records.push_back(std::move(r));
    data.push_back(tensor.detach().cpu().contiguous());
  }
  const std::string header = make_safetensors_header(records);
  FileMark mark;
  write_file(path, [&](const Sink& sink) {
    const auto put = [&](const void* bytes, size_t size) {
      sink(bytes, size);
      mark.bytes += static_cast<int64_t>(size);
      mark.crc = crc(mark.crc, bytes, size);
    };
    const uint64_t length = header.size();
    put(&length, sizeof length);
    put(header.data(), header.size());
    for (const at::Tensor& t : data) put(t.const_data_ptr(), static_cast<size_t>(t.nbytes()));
  });
  return mark;
}

NamedTensors read_safetensors(const std::string& path) {
  const auto mapping = map_file(path);
  uint64_t length = 0;
  require(mapping->size >= sizeof length, path, ": has ", mapping->size,
          " bytes, too few for a safetensors file.");
  std::memcpy(&length, mapping->data, sizeof length);
  require(length <= mapping->size - sizeof length, path, ": the header says it has ", length,
          " bytes, but the file has only ", mapping->size, ".");
  const auto records =
      parse_safetensors_header({mapping->data + sizeof length, static_cast<size_t>(length)}, path);
  char* const base = mapping->data + sizeof length + length;
  const uint64_t available = mapping->size - sizeof length - length;

  NamedTensors tensors;
  std::vector<std::pair<uint64_t, uint64_t>> ranges;
  for (const TensorRecord& r : records) {
    const DtypeName* dtype = std::find_if(std::begin(kDtypes), std::end(kDtypes),
                                          [&](const DtypeName& d) { return r.dtype == d.name; });
    require(dtype != std::end(kDtypes), path, ": tensor '", r.name, "' has the unknown type ",
            r.dtype, ".");
    require(r.begin <= r.end && r.end <= available, path, ": tensor '", r.name, "' lies at bytes ",
            r.begin, " to ", r.end, " of ", available, ": the file is truncated or damaged.");
    const auto element = static_cast<int64_t>(c10::elementSize(dtype->type));
    require(byte_count(r.shape, element, kMost) == static_cast<int64_t>(r.end - r.begin), path,
            ": tensor '", r.name, "' has ", r.end - r.begin,
            " bytes, which does not fit its shape and type.");
    if (r.end > r.begin) ranges.emplace_back(r.begin, r.end);
    const auto options = at::TensorOptions().dtype(dtype->type);
    char* const data = base + r.begin;
    at::Tensor tensor = at::from_blob(
        data, r.shape, [mapping](void*) {}, options);
    // A foreign file may leave tensors unaligned; kernels expect natural alignment.
    if (reinterpret_cast<uintptr_t>(data) % static_cast<uintptr_t>(element) != 0) {
      at::Tensor aligned = at::empty(r.shape, options);
      std::memcpy(aligned.mutable_data_ptr(), data, r.end - r.begin);
      tensor = aligned;
    }
    tensors.emplace_back(r.name, tensor);
  }
  std::sort(ranges.begin(), ranges.end());
  for (size_t i = 1; i < ranges.size(); ++i) {
    require(ranges[i].first >= ranges[i - 1].second, path, ": two tensors overlap at byte ",
            ranges[i].first, ".");
  }
  return tensors;
}

FileMark mark_file(const std::string& path) {
  const auto mapping = map_file(path);
  return {.bytes = static_cast<int64_t>(mapping->size),
          .crc = mapping->size == 0 ? 0 : crc(0, mapping->data, mapping->size)};
}

}  // namespace headloom
