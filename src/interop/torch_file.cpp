#include "interop/torch_file.h"

#include <ATen/ATen.h>

#include <unordered_map>

#include "core/error.h"
#include "interop/pickle.h"
#include "interop/zip.h"
#include "storage/mapped_file.h"

namespace headloom {
namespace {

struct Dtype {
  const char* name;
  at::ScalarType type;
};
constexpr Dtype kDtypes[] = {{"Double", at::kDouble}, {"Float", at::kFloat},
                             {"Half", at::kHalf},     {"BFloat16", at::kBFloat16},
                             {"Long", at::kLong},     {"Int", at::kInt},
                             {"Short", at::kShort},   {"Char", at::kChar},
                             {"Byte", at::kByte},     {"Bool", at::kBool}};

at::ScalarType type_of(const std::string& name) {
  for (const Dtype& dtype : kDtypes) {
    if (name == dtype.name) return dtype.type;
  }
  fail("there is no type of tensors '", name, "'.");
}

at::Tensor tensor_of(const PickledTensor& t, std::string_view storage,
                     const std::shared_ptr<MappedFile>& file, const std::string& path) {
  const at::ScalarType type = type_of(t.dtype);
  const auto element = static_cast<int64_t>(c10::elementSize(type));
  const auto there = static_cast<int64_t>(storage.size()) / element;  // numbers
  require(t.numbers <= there, path, ": tensor '", t.name, "' has a storage of ", t.numbers,
          " numbers, but the entry data/", t.storage, " has ", storage.size(), " bytes.");
  const int64_t bytes = bytes_reached(t.sizes, t.strides, element);
  require(bytes >= 0 && t.offset <= t.numbers && bytes / element <= t.numbers - t.offset, path,
          ": tensor '", t.name, "' of sizes ", at::IntArrayRef(t.sizes), " and strides ",
          at::IntArrayRef(t.strides), " does not fit its storage of ", t.numbers, " numbers.");
  // Numbers that are shown several times would need more memory than the file has.
  int64_t count = 1;
  for (const int64_t size : t.sizes) count *= size;
  require(count <= t.numbers, path, ": tensor '", t.name, "' of sizes ", at::IntArrayRef(t.sizes),
          " repeats the ", t.numbers, " numbers of its storage.");
  const auto begin = static_cast<size_t>(storage.data() - file->bytes().data());
  return mapped_tensor(file, begin + static_cast<size_t>(t.offset * element), t.sizes, t.strides,
                       type);
}

}  // namespace

NamedTensors read_torch_file(const std::string& path) {
  const auto file = MappedFile::open(path);
  const std::string_view bytes = file->bytes();
  require(bytes.starts_with("PK"), path,
          ": is no zip archive, expected a file that torch.save wrote, of PyTorch 1.6 or newer.");
  std::unordered_map<std::string, std::string_view> entries;
  std::string root;
  for (const ZipEntry& entry : read_zip(bytes, path)) {
    require(entries.emplace(entry.name, entry.bytes).second, path, ": has two entries '",
            entry.name, "'.");
    constexpr std::string_view kPickle = "/data.pkl";
    if (root.empty() && entry.name.ends_with(kPickle)) {
      root = entry.name.substr(0, entry.name.size() - kPickle.size());
    }
  }
  const auto find = [&](const std::string& name) {
    const auto found = entries.find(root + "/" + name);
    require(found != entries.end(), path, ": has no entry '", name,
            "', expected a file that torch.save wrote.");
    return found->second;
  };
  const std::string_view pickle = find("data.pkl");
  if (const auto order = entries.find(root + "/byteorder"); order != entries.end()) {
    require(order->second == "little", path, ": its byte order is '", order->second,
            "', expected 'little'.");
  }
  NamedTensors tensors;
  for (const PickledTensor& t : read_pickled_tensors(pickle, path)) {
    tensors.emplace_back(t.name, tensor_of(t, find("data/" + t.storage), file, path));
  }
  return tensors;
}

}  // namespace headloom
