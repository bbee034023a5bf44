// The JSON header of a safetensors file, apart so that no file includes both torch and the JSON
// library.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace headloom {

struct TensorRecord {
  std::string name;
  std::string dtype;  // "F32", "I64", ...
  std::vector<int64_t> shape;
  uint64_t begin = 0, end = 0;  // bytes, from the end of the header
};

std::string make_safetensors_header(const std::vector<TensorRecord>& records);
// `path` is for messages only. Checks types of all JSON values, not the offsets.
std::vector<TensorRecord> parse_safetensors_header(std::string_view json, const std::string& path);

}  // namespace headloom
