#include "interop/zip.h"

#include <algorithm>
#include <cstdint>

#include "core/error.h"

namespace headloom {
namespace {

constexpr uint32_t kLocalHeader = 0x04034b50, kDirectoryEntry = 0x02014b50;
constexpr uint32_t kDirectoryEnd = 0x06054b50, kDirectoryEnd64 = 0x06064b50;
constexpr uint32_t kDirectoryLocator64 = 0x07064b50;
constexpr size_t kLocalSize = 30, kEntrySize = 46, kEndSize = 22, kEnd64Size = 56;
constexpr size_t kLocatorSize = 20, kLongestComment = 0xffff;

// Little-endian numbers at places that the archive's author chose.
class Bytes {
 public:
  Bytes(std::string_view archive, const std::string& path) : all_(archive), path_(path) {}

  size_t size() const { return all_.size(); }
  // `count` bytes from `at` on, wherever that is. Throws Error where they are not all there.
  std::string_view at(uint64_t at, uint64_t count) const {
    require(at <= all_.size() && count <= all_.size() - at, path_, ": has ", all_.size(),
            " bytes, but its directory speaks of bytes ", at, " to ", at + count,
            ": the file is truncated or damaged.");
    return all_.substr(static_cast<size_t>(at), static_cast<size_t>(count));
  }
  uint64_t number(uint64_t place, int width) const {
    uint64_t out = 0;
    const std::string_view bytes = at(place, static_cast<uint64_t>(width));
    for (size_t i = bytes.size(); i-- > 0;) {
      out = out << 8 | static_cast<unsigned char>(bytes[i]);
    }
    return out;
  }

 private:
  std::string_view all_;
  const std::string& path_;
};

struct Directory {
  uint64_t begin = 0, size = 0, entries = 0;
};

Directory directory_of(const Bytes& file, const std::string& path) {
  const auto missing = [&] {
    fail(path, ": has no zip directory at its end: the file is truncated or no zip archive.");
  };
  if (file.size() < kEndSize) missing();
  // The end record ends with a comment, whose length it gives.
  size_t end = file.size() - kEndSize;
  const size_t first = end > kLongestComment ? end - kLongestComment : 0;
  while (file.number(end, 4) != kDirectoryEnd ||
         file.number(end + 20, 2) != file.size() - end - kEndSize) {
    if (end-- == first) missing();
  }
  Directory out = {.begin = file.number(end + 16, 4),
                   .size = file.number(end + 12, 4),
                   .entries = file.number(end + 10, 2)};
  if (end >= kLocatorSize && file.number(end - kLocatorSize, 4) == kDirectoryLocator64) {
    const uint64_t end64 = file.number(end - kLocatorSize + 8, 8);
    file.at(end64, kEnd64Size);
    require(file.number(end64, 4) == kDirectoryEnd64, path, ": its zip64 directory is damaged.");
    out = {.begin = file.number(end64 + 48, 8),
           .size = file.number(end64 + 40, 8),
           .entries = file.number(end64 + 32, 8)};
  }
  file.at(out.begin, out.size);
  require(out.entries <= out.size / kEntrySize, path, ": its directory has ", out.size,
          " bytes, too few for ", out.entries, " entries.");
  return out;
}

}  // namespace

std::vector<ZipEntry> read_zip(std::string_view archive, const std::string& path) {
  const Bytes file(archive, path);
  const Directory directory = directory_of(file, path);
  std::vector<ZipEntry> entries;
  std::vector<std::pair<uint64_t, uint64_t>> ranges;
  uint64_t at = directory.begin;
  for (uint64_t i = 0; i < directory.entries; ++i) {
    require(file.number(at, 4) == kDirectoryEntry, path, ": entry ", i,
            " of its directory is damaged.");
    const uint64_t flags = file.number(at + 8, 2), method = file.number(at + 10, 2);
    uint64_t packed = file.number(at + 20, 4), size = file.number(at + 24, 4);
    const uint64_t name_size = file.number(at + 28, 2), extra_size = file.number(at + 30, 2);
    const uint64_t comment_size = file.number(at + 32, 2);
    uint64_t header = file.number(at + 42, 4);
    const std::string name(file.at(at + kEntrySize, name_size));

    // Sizes that do not fit 32 bits are in the extra field of zip64, in this order.
    const uint64_t extra_end = at + kEntrySize + name_size + extra_size;
    for (uint64_t field = at + kEntrySize + name_size; field + 4 <= extra_end;) {
      const uint64_t kind = file.number(field, 2), bytes = file.number(field + 2, 2);
      uint64_t value = field + 4;
      field = value + bytes;
      if (kind != 1) continue;
      for (uint64_t* number : {&size, &packed, &header}) {
        if (*number != 0xffffffff || value + 8 > field) continue;
        *number = file.number(value, 8);
        value += 8;
      }
    }
    at = extra_end + comment_size;

    require((flags & 1) == 0, path, ": entry '", name, "' is encrypted.");
    require(method == 0 && packed == size, path, ": entry '", name,
            "' is compressed, expected stored entries, as PyTorch writes them.");
    require(
        file.at(header, kLocalSize).size() == kLocalSize && file.number(header, 4) == kLocalHeader,
        path, ": entry '", name, "' is damaged: there is no header at byte ", header, ".");
    const uint64_t begin =
        header + kLocalSize + file.number(header + 26, 2) + file.number(header + 28, 2);
    entries.push_back({name, file.at(begin, size)});
    if (size > 0) ranges.emplace_back(begin, begin + size);
  }
  std::sort(ranges.begin(), ranges.end());
  for (size_t i = 1; i < ranges.size(); ++i) {
    require(ranges[i].first >= ranges[i - 1].second, path, ": two entries overlap at byte ",
            ranges[i].first, ".");
  }
  return entries;
}

}  // namespace headloom
