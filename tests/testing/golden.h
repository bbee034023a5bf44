// Tensors recorded from the original authors' code (tests/golden/README.md): NAME.safetensors holds
// inputs, parameters, outputs, cotangents and gradients ("grad.X"). CMake defines HEADLOOM_GOLDEN
// as the folder; a file that is missing fails the test that reads it.
#pragma once

#include <ATen/ATen.h>

#include <cstring>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>

namespace headloom::test {

using Tensors = std::map<std::string, at::Tensor>;

inline at::ScalarType safetensors_type(const std::string& name) {
  if (name == "F32") return at::kFloat;
  if (name == "F64") return at::kDouble;
  if (name == "I64") return at::kLong;
  if (name == "U8") return at::kByte;
  throw std::runtime_error("golden tensor of type " + name);
}

// Eight bytes of header length, a JSON header, raw values.
inline Tensors read_golden(const std::string& name) {
  const std::string path = std::string(HEADLOOM_GOLDEN) + "/" + name + ".safetensors";
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error("cannot read " + path);
  uint64_t size = 0;
  file.read(reinterpret_cast<char*>(&size), sizeof(size));
  std::string header(size, ' ');
  file.read(header.data(), static_cast<std::streamsize>(size));
  const std::string values((std::istreambuf_iterator<char>(file)), {});
  Tensors out;
  const auto entries = nlohmann::json::parse(header);
  for (const auto& [key, entry] : entries.items()) {
    if (key == "__metadata__") continue;
    const auto shape = entry.at("shape").get<std::vector<int64_t>>();
    const auto from = entry.at("data_offsets").at(0).get<size_t>();
    at::Tensor t = at::empty(shape, safetensors_type(entry.at("dtype").get<std::string>()));
    if (from + t.nbytes() > values.size()) throw std::runtime_error(path + " is truncated");
    std::memcpy(t.data_ptr(), values.data() + from, t.nbytes());
    out[key] = t;
  }
  return out;
}

}  // namespace headloom::test
