// The safetensors format: round trips, and files that are damaged or lie.
#include "storage/safetensors.h"

#include <ATen/ATen.h>
#include <c10/util/ConstexprCrc.h>
#include <gtest/gtest.h>

#include <cstring>
#include <random>

#include "storage/crc64.h"
#include "support.h"

namespace headloom::test::safetensors_test {
namespace {

std::string file_of(const std::string& header, size_t data_bytes, uint64_t length_offset = 0) {
  const uint64_t length = header.size() + length_offset;
  std::string out(sizeof length, '\0');
  std::memcpy(out.data(), &length, sizeof length);
  return out + header + std::string(data_bytes, '\x01');
}

std::string entry(const std::string& name, const std::string& dtype, const std::string& shape,
                  const std::string& offsets) {
  return "\"" + name + "\":{\"dtype\":\"" + dtype + "\",\"shape\":" + shape +
         ",\"data_offsets\":" + offsets + "}";
}

class Safetensors : public ::testing::Test {
 protected:
  std::string path() const { return folder_.path("x.safetensors"); }
  NamedTensors read(const std::string& content) const {
    return read_safetensors(folder_.write("x.safetensors", content));
  }
  // Reading `content` must end in an error that names the file.
  std::string refused(const std::string& content) const {
    const std::string message = message_of([&] { read(content); });
    EXPECT_TRUE(contains(message, path()));
    return message;
  }
  const TempFolder folder_;
};

TEST_F(Safetensors, RoundTripOfEveryType) {
  at::manual_seed(1);
  const NamedTensors tensors = {{"bytes", at::arange(5, at::kByte)},
                                {"real", at::randn({3, 4})},
                                {"transposed", at::randn({3, 4}).t()},
                                {"double", at::randn({2, 0, 3}, at::kDouble)},
                                {"scalar", at::scalar_tensor(2.5)},
                                {"half", at::randn({3}).to(at::kHalf)},
                                {"bfloat", at::randn({1, 7}).to(at::kBFloat16)},
                                {"long", at::tensor({int64_t{1} << 60, int64_t{-1}}, at::kLong)},
                                {"int", at::arange(3, at::kInt)},
                                {"bool", at::tensor({1, 0, 1}, at::kLong).to(at::kBool)},
                                {"name \"quoted\" \xc3\xbc", at::ones({1})}};
  const FileMark mark = write_safetensors(path(), tensors);
  EXPECT_EQ(static_cast<size_t>(mark.bytes), bytes_of(path()).size());
  const FileMark found = mark_file(path());
  EXPECT_EQ(found.bytes, mark.bytes);
  EXPECT_EQ(found.crc, mark.crc);
  std::map<std::string, at::Tensor> back;
  for (const auto& [name, tensor] : read_safetensors(path())) back[name] = tensor;
  EXPECT_EQ(back.size(), tensors.size());
  for (const auto& [name, tensor] : tensors) {
    ASSERT_TRUE(back.count(name)) << name;
    EXPECT_EQ(back[name].scalar_type(), tensor.scalar_type()) << name;
    EXPECT_TRUE(back[name].equal(tensor)) << name;
    EXPECT_EQ(reinterpret_cast<uintptr_t>(back[name].const_data_ptr()) %
                  static_cast<uintptr_t>(tensor.element_size()),
              0u)
        << name;
  }
  // The mapping is private: the file does not follow the tensors.
  back["real"].zero_();
  EXPECT_EQ(mark_file(path()).crc, mark.crc);
  write_safetensors(path(), {});
  EXPECT_TRUE(read_safetensors(path()).empty());
}

TEST_F(Safetensors, TheChecksumIsTheOneOfPyTorch) {
  std::mt19937 random(3);
  std::string content(100003, '\0');
  for (char& byte : content) byte = static_cast<char>(random());
  std::vector<size_t> sizes = {content.size()};
  for (size_t size = 0; size <= 300; ++size) sizes.push_back(size);
  for (const size_t size : sizes) {
    // From an odd address, and after bytes that have a checksum already.
    const char* const bytes = content.data() + (size < content.size() ? 1 : 0);
    for (const uint64_t sum : {uint64_t{0}, ~uint64_t{12345}}) {
      const uint64_t expected = c10::util::detail::crc64impl(sum, bytes, size);
      EXPECT_EQ(crc64(sum, bytes, size), expected) << size;
      EXPECT_EQ(crc64_by_tables(sum, bytes, size), expected) << size;
    }
  }
  const std::string file = folder_.write("x.safetensors", content);
  EXPECT_EQ(mark_file(file).crc, c10::util::detail::crc64impl(0, content.data(), content.size()));
  EXPECT_EQ(mark_file(folder_.write("x.safetensors", "")).crc, 0u);
}

TEST_F(Safetensors, UnalignedTensorsOfOtherWritersAreRead) {
  const NamedTensors tensors =
      read(file_of("{\"__metadata__\":{\"format\":\"pt\"}," + entry("a", "U8", "[1]", "[0,1]") +
                       "," + entry("b", "I32", "[2]", "[1,9]") + "}",
                   9));
  ASSERT_EQ(tensors.size(), 2u);
  EXPECT_EQ(tensors[1].second[1].item<int64_t>(), 0x01010101);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(tensors[1].second.const_data_ptr()) % 4, 0u);
}

TEST_F(Safetensors, EveryTruncationIsRefused) {
  write_safetensors(path(), {{"a", at::randn({5})}, {"b", at::arange(3, at::kLong)}});
  const std::string whole = bytes_of(path());
  for (size_t length = 0; length < whole.size(); ++length) refused(whole.substr(0, length));
  EXPECT_EQ(read(whole).size(), 2u);
}

TEST_F(Safetensors, HeadersThatLieAreRefused) {
  const auto one = [](const char* dtype, const char* shape, const char* offsets) {
    return "{" + entry("t", dtype, shape, offsets) + "}";
  };
  EXPECT_TRUE(contains(refused(file_of("{}", 0, uint64_t{1} << 40)), "header"));
  EXPECT_TRUE(contains(refused(file_of("{}", 0, ~uint64_t{0} - 2)), "header"));
  EXPECT_TRUE(contains(refused(file_of("[]", 0)), "not a JSON object"));
  EXPECT_TRUE(
      contains(refused(file_of("{\"a\":", 0)), "header: is not JSON: it ends in the middle"));
  EXPECT_TRUE(contains(refused(file_of("{\"a\":1}", 0)), "malformed"));
  EXPECT_TRUE(contains(refused(file_of(one("F33", "[1]", "[0,4]"), 4)), "unknown type F33"));
  EXPECT_TRUE(contains(refused(file_of(one("F32", "[2]", "[0,4]"), 8)), "does not fit its shape"));
  EXPECT_TRUE(contains(refused(file_of(one("F32", "[1]", "[4,8]"), 4)), "truncated or damaged"));
  EXPECT_TRUE(contains(refused(file_of(one("F32", "[1]", "[8,4]"), 8)), "truncated or damaged"));
  EXPECT_TRUE(
      contains(refused(file_of(one("F32", "[1]", "[0,4]"), 6)), "2 bytes after its last tensor"));
  EXPECT_TRUE(contains(refused(file_of("{}", 3)), "3 bytes after its last tensor"));
  EXPECT_TRUE(contains(refused(file_of(one("F32", "[-1]", "[0,4]"), 4)), "malformed"));
  EXPECT_TRUE(contains(refused(file_of(one("F32", "[1.5]", "[0,4]"), 4)), "malformed"));
  EXPECT_TRUE(contains(refused(file_of(one("F32", "\"x\"", "[0,4]"), 4)), "malformed"));
  EXPECT_TRUE(contains(refused(file_of(one("F32", "[1]", "[0]"), 4)), "malformed"));
  EXPECT_TRUE(contains(refused(file_of(one("F32", "[1]", "[-4,0]"), 4)), "malformed"));
  // Products that overflow, with and without an empty dimension.
  refused(file_of(one("F32", "[4611686018427387904,4]", "[0,0]"), 0));
  refused(file_of(one("F32", "[4294967296,4294967296]", "[0,0]"), 0));
  refused(file_of(one("F32", "[0,4611686018427387904,4611686018427387904]", "[0,0]"), 0));
  refused(file_of(one("F32", "[18446744073709551615]", "[0,4]"), 4));
  const std::string overlap =
      "{" + entry("a", "F32", "[2]", "[0,8]") + "," + entry("b", "F32", "[2]", "[4,12]") + "}";
  EXPECT_TRUE(contains(refused(file_of(overlap, 12)), "overlap"));
  EXPECT_TRUE(
      contains(message_of([&] { read_safetensors(folder_.path("no")); }), "cannot be read"));
  EXPECT_TRUE(contains(message_of([&] { read_safetensors(folder_.path()); }), folder_.path()));
}

TEST_F(Safetensors, RandomDamageNeverCrashes) {
  write_safetensors(path(), {{"weight", at::randn({3, 2})},
                             {"steps", at::scalar_tensor(1.0)},
                             {"bytes", at::arange(7, at::kByte)}});
  const std::string whole = bytes_of(path());
  const size_t header_end = whole.find("}}") + 2;
  std::mt19937 random(5);
  int refusals = 0;
  for (int i = 0; i < 300; ++i) {
    std::string damaged = whole;
    for (unsigned flips = 1 + random() % 3; flips > 0; --flips) {
      damaged[random() % header_end] = static_cast<char>(random() % 256);
    }
    if (random() % 8 == 0) damaged.resize(random() % damaged.size());
    try {
      for (const auto& [name, tensor] : read(damaged)) tensor.to(at::kFloat).sum().item<float>();
    } catch (const Error& error) {
      EXPECT_TRUE(contains(error.what(), path()));
      ++refusals;
    }
  }
  EXPECT_GT(refusals, 100);
}

}  // namespace
}  // namespace headloom::test::safetensors_test
