#include "storage/safetensors.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>

#include "core/error.h"
#include "core/files.h"
#include "storage/crc64.h"
#include "storage/mapped_file.h"
#include "storage/safetensors_header.h"

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
      mark.crc = crc64(mark.crc, bytes, size);
    };
    const uint64_t length = header.size();
    put(&length, sizeof length);
    put(header.data(), header.size());
    for (const at::Tensor& t : data) put(t.const_data_ptr(), static_cast<size_t>(t.nbytes()));
  });
  return mark;
}

NamedTensors read_safetensors(const std::string& path) {
  const auto file = MappedFile::open(path);
  const std::string_view bytes = file->bytes();
  uint64_t length = 0;
  require(bytes.size() >= sizeof length, path, ": has ", bytes.size(),
          " bytes, too few for a safetensors file.");
  std::memcpy(&length, bytes.data(), sizeof length);
  require(length <= bytes.size() - sizeof length, path, ": the header says it has ", length,
          " bytes, but the file has only ", bytes.size(), ".");
  const auto records =
      parse_safetensors_header(bytes.substr(sizeof length, static_cast<size_t>(length)), path);
  const size_t first = sizeof length + static_cast<size_t>(length);
  const uint64_t available = bytes.size() - first;

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
    require(bytes_reached(r.shape, {}, element) == static_cast<int64_t>(r.end - r.begin), path,
            ": tensor '", r.name, "' has ", r.end - r.begin,
            " bytes, which does not fit its shape and type.");
    if (r.end > r.begin) ranges.emplace_back(r.begin, r.end);
    tensors.emplace_back(r.name, mapped_tensor(file, first + static_cast<size_t>(r.begin), r.shape,
                                               {}, dtype->type));
  }
  std::sort(ranges.begin(), ranges.end());
  for (size_t i = 1; i < ranges.size(); ++i) {
    require(ranges[i].first >= ranges[i - 1].second, path, ": two tensors overlap at byte ",
            ranges[i].first, ".");
  }
  const uint64_t end = ranges.empty() ? 0 : ranges.back().second;
  require(end == available, path, ": has ", available - end,
          " bytes after its last tensor, expected none: the file is damaged.");
  return tensors;
}

FileMark mark_file(const std::string& path) {
  const auto file = MappedFile::open(path);
  const std::string_view bytes = file->bytes();
  return {.bytes = static_cast<int64_t>(bytes.size()), .crc = crc64(0, bytes.data(), bytes.size())};
}

StoredTensors as_stored(NamedTensors tensors) {
  StoredTensors out;
  for (auto& [name, tensor] : tensors) out.push_back({name, {.parts = {std::move(tensor)}}});
  return out;
}

}  // namespace headloom
