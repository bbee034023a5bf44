// Files of torch.save: what they hold, and archives and pickles that are damaged or do more than
// describe tensors. tests/python/test_interop.py reads files that PyTorch itself wrote.
#include "interop/torch_file.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstring>
#include <random>

#include "interop/zip.h"
#include "testing/errors.h"
#include "testing/temp_folder.h"

namespace headloom::test::torch_file_test {
namespace {

template <typename T>
std::string raw(T value) {
  std::string out(sizeof value, '\0');
  std::memcpy(out.data(), &value, sizeof value);
  return out;
}

struct Entry {
  std::string name, bytes;
  uint16_t method = 0, flags = 0;
};

// A zip archive; `wide` writes sizes and places as zip64 does.
std::string zip(const std::vector<Entry>& entries, bool wide = false) {
  std::string out, directory;
  const uint32_t none = 0xffffffff;
  for (const Entry& e : entries) {
    const uint64_t place = out.size(), size = e.bytes.size();
    const std::string pad(7, 'p');
    const std::string fixed = raw<uint16_t>(20) + raw(e.flags) + raw(e.method) + raw<uint32_t>(0) +
                              raw<uint32_t>(0) + raw(wide ? none : static_cast<uint32_t>(size)) +
                              raw(wide ? none : static_cast<uint32_t>(size)) +
                              raw(static_cast<uint16_t>(e.name.size()));
    out += raw<uint32_t>(0x04034b50) + fixed + raw(static_cast<uint16_t>(pad.size())) + e.name +
           pad + e.bytes;
    const std::string extra =
        wide ? raw<uint16_t>(1) + raw<uint16_t>(24) + raw(size) + raw(size) + raw(place) : "";
    directory += raw<uint32_t>(0x02014b50) + raw<uint16_t>(20) + fixed +
                 raw(static_cast<uint16_t>(extra.size())) + raw<uint16_t>(0) + raw<uint16_t>(0) +
                 raw<uint16_t>(0) + raw<uint32_t>(0) +
                 raw(wide ? none : static_cast<uint32_t>(place)) + e.name + extra;
  }
  const uint64_t begin = out.size(), count = entries.size();
  out += directory;
  if (wide) {
    const uint64_t end = out.size();
    out += raw<uint32_t>(0x06064b50) + raw<uint64_t>(44) + raw<uint16_t>(45) + raw<uint16_t>(45) +
           raw<uint64_t>(0) + raw(count) + raw(count) + raw<uint64_t>(directory.size()) +
           raw(begin);
    out += raw<uint32_t>(0x07064b50) + raw<uint32_t>(0) + raw(end) + raw<uint32_t>(1);
  }
  const auto narrow = [&](uint64_t value) { return wide ? none : static_cast<uint32_t>(value); };
  return out + raw<uint32_t>(0x06054b50) + raw<uint32_t>(0) + raw(static_cast<uint16_t>(count)) +
         raw(static_cast<uint16_t>(count)) + raw(narrow(directory.size())) + raw(narrow(begin)) +
         raw<uint16_t>(0);
}

std::string text(const std::string& value) {
  return "X" + raw(static_cast<uint32_t>(value.size())) + value;
}
std::string integer(int64_t value) { return "\x8a\x08" + raw(value); }
std::string tuple(const std::vector<std::string>& items) {
  std::string out = "(";
  for (const std::string& item : items) out += item;
  return out + "t";
}
std::string integers(const std::vector<int64_t>& values) {
  std::vector<std::string> items;
  for (const int64_t v : values) items.push_back(integer(v));
  return tuple(items);
}

struct TensorText {
  std::string type = "FloatStorage", key = "0";
  int64_t numbers = 6, offset = 0;
  std::vector<int64_t> sizes = {2, 3}, strides = {3, 1};

  std::string pickle() const {
    return "ctorch._utils\n_rebuild_tensor_v2\n" +
           tuple({tuple({text("storage"), "ctorch\n" + type + "\n", text(key), text("cpu"),
                         integer(numbers)}) +
                      "Q",
                  integer(offset), integers(sizes), integers(strides), "\x89",
                  "ccollections\nOrderedDict\n)R"}) +
           "R";
  }
};

std::string program(const std::string& body) { return "\x80\x02" + body + "."; }
std::string dict(const std::vector<std::pair<std::string, std::string>>& items) {
  std::string out = "}(";
  for (const auto& [key, value] : items) out += text(key) + value;
  return out + "u";
}

class TorchFile : public ::testing::Test {
 protected:
  std::string path() const { return folder_.path("x.bin"); }
  NamedTensors read(const std::string& content) const {
    return read_torch_file(folder_.write("x.bin", content));
  }
  std::string refused(const std::string& content) const {
    const std::string message = message_of([&] { read(content); });
    EXPECT_TRUE(contains(message, path()));
    return message;
  }
  static std::string archive(const std::string& pickle, const std::string& storage,
                             bool wide = false) {
    return zip({{.name = "m/data.pkl", .bytes = pickle},
                {.name = "m/byteorder", .bytes = "little"},
                {.name = "m/data/0", .bytes = storage}},
               wide);
  }
  static std::string six() {
    std::string out;
    for (int i = 0; i < 6; ++i) out += raw(static_cast<float>(i));
    return out;
  }
  std::string refused_tensor(const TensorText& tensor) const {
    return refused(archive(program(dict({{"t", tensor.pickle()}})), six()));
  }
  const TempFolder folder_;
};

TEST_F(TorchFile, TensorsShareTheFile) {
  const TensorText turned{.sizes = {3, 2}, .strides = {1, 3}};
  const TensorText part{.offset = 4, .sizes = {2}, .strides = {1}};
  const std::string pickle = program(dict({{"a", TensorText{}.pickle()},
                                           {"turned", turned.pickle()},
                                           {"part", part.pickle()},
                                           {"epoch", integer(-3)},
                                           {"rate", "G" + std::string(8, '\0')},
                                           {"none", "N"}}));
  const at::Tensor whole = at::arange(6, at::kFloat).view({2, 3});
  for (const bool wide : {false, true}) {
    const NamedTensors tensors = read(archive(pickle, six(), wide));
    ASSERT_EQ(tensors.size(), 3u);
    EXPECT_TRUE(tensors[0].second.equal(whole));
    EXPECT_TRUE(tensors[1].second.equal(whole.t()));
    EXPECT_TRUE(tensors[2].second.equal(at::tensor({4.0F, 5.0F})));
    EXPECT_EQ(reinterpret_cast<uintptr_t>(tensors[0].second.const_data_ptr()) % 4, 0u);
  }
}

TEST_F(TorchFile, DictionariesInsideAreFound) {
  const std::string inner = dict({{"w", TensorText{}.pickle()}});
  for (const char* key : {"model", "state_dict", "module"}) {
    const NamedTensors tensors =
        read(archive(program(dict({{"step", integer(3)}, {key, inner}})), six()));
    ASSERT_EQ(tensors.size(), 1u);
    EXPECT_EQ(tensors[0].first, "w");
  }
  EXPECT_TRUE(contains(refused(archive(program(dict({{"x", inner}})), six())), "has no tensors"));
}

TEST_F(TorchFile, ArchivesThatLieAreRefused) {
  const std::string pickle = program(dict({{"t", TensorText{}.pickle()}}));
  const std::string whole = archive(pickle, six());
  EXPECT_EQ(read(whole).size(), 1u);
  for (size_t length = 0; length < whole.size(); ++length) refused(whole.substr(0, length));
  EXPECT_TRUE(contains(refused("not a zip"), "no zip archive"));
  const auto with = [&](const Entry& entry) {
    return refused(zip({{.name = "m/data.pkl", .bytes = pickle}, entry}));
  };
  EXPECT_TRUE(contains(with({.name = "m/data/0", .bytes = six(), .method = 8}), "is compressed"));
  EXPECT_TRUE(contains(with({.name = "m/data/0", .bytes = six(), .flags = 1}), "is encrypted"));
  EXPECT_TRUE(contains(with({.name = "m/data/1", .bytes = six()}), "has no entry 'data/0'"));
  EXPECT_TRUE(contains(with({.name = "m/byteorder", .bytes = "big"}), "byte order is 'big'"));
  EXPECT_TRUE(contains(with({.name = "m/data.pkl", .bytes = "x"}), "two entries"));
  EXPECT_TRUE(contains(refused(zip({{.name = "m/other", .bytes = "x"}})), "no entry 'data.pkl'"));

  // Two directory entries that point at the same bytes.
  std::string overlapping =
      zip({{.name = "m/data.pkl", .bytes = pickle}, {.name = "m/data/0", .bytes = pickle}});
  const size_t second = overlapping.rfind("PK\x01\x02");
  std::memset(overlapping.data() + second + 42, 0, 4);
  EXPECT_TRUE(contains(refused(overlapping), "overlap"));
}

TEST_F(TorchFile, TensorsThatLeaveTheirStorageAreRefused) {
  EXPECT_TRUE(contains(refused_tensor({.numbers = 7}), "storage of 7 numbers"));
  EXPECT_TRUE(contains(refused_tensor({.numbers = int64_t{1} << 62}), "numbers"));
  EXPECT_TRUE(contains(refused_tensor({.offset = 1}), "does not fit its storage"));
  EXPECT_TRUE(contains(refused_tensor({.offset = int64_t{1} << 62}), "does not fit its storage"));
  EXPECT_TRUE(contains(refused_tensor({.strides = {4, 1}}), "does not fit its storage"));
  EXPECT_TRUE(contains(refused_tensor({.sizes = {int64_t{1} << 40, int64_t{1} << 40}}),
                       "does not fit its storage"));
  EXPECT_TRUE(contains(refused_tensor({.sizes = {0, int64_t{1} << 62, 8}, .strides = {1, 1, 1}}),
                       "does not fit its storage"));
  EXPECT_TRUE(contains(refused_tensor({.sizes = {1 << 20, 6}, .strides = {0, 1}}), "repeats"));
  EXPECT_TRUE(contains(refused_tensor({.sizes = {-2, 3}}), "-2"));
  EXPECT_TRUE(contains(refused_tensor({.strides = {-3, 1}}), "-3"));
  EXPECT_TRUE(contains(refused_tensor({.strides = {1}}), "2 sizes and 1 strides"));
  EXPECT_TRUE(contains(refused_tensor({.type = "ComplexFloatStorage"}), "ComplexFloatStorage"));
  EXPECT_TRUE(contains(refused_tensor({.sizes = std::vector<int64_t>(65, 1)}), "65 dimensions"));
}

TEST_F(TorchFile, TheSameTensorAgainAndAgainIsRefused) {
  const std::string one = TensorText{}.pickle();
  const size_t begin = one.find('(');  // of the arguments
  std::string body = one.substr(0, begin) + "q" + '\0' + one.substr(begin, one.size() - begin - 1) +
                     "q\x01" + "R0";
  for (int i = 0; i < 100'000; ++i) body += std::string("h\0h\x01R0", 6);
  EXPECT_TRUE(contains(refused(archive(program(body + "}"), six())), "more than 100000 tensors"));
}

TEST_F(TorchFile, PicklesThatDoMoreAreRefused) {
  const auto message = [&](const std::string& body) {
    return refused(archive(program(body), six()));
  };
  EXPECT_TRUE(contains(message("cos\nsystem\n(" + text("true") + "tR"), "'os.system'"));
  EXPECT_TRUE(contains(message(text("builtins") + text("eval") + "\x93"), "'builtins.eval'"));
  EXPECT_TRUE(contains(message("c\x1b[2J\nx\n"), "'?[2J.x'"));
  EXPECT_TRUE(contains(message("ctorch\nFloatStorage\n)R"), "calls 'torch.FloatStorage'"));
  EXPECT_TRUE(contains(message("ctorch\nFloatStorage\n)\x81"), "instruction 129"));
  EXPECT_TRUE(contains(message("N"), "no dictionary"));
  EXPECT_TRUE(contains(message("h\x05"), "never stored"));
  EXPECT_TRUE(contains(message("}s"), "not there"));
  EXPECT_TRUE(contains(message("}(Nu"), "without a value"));
  EXPECT_TRUE(contains(message("}Na"), "a list belongs"));
  EXPECT_TRUE(contains(message("Nb"), "not there"));
  EXPECT_TRUE(contains(message(std::string("\x80\x09", 2)), "protocol 9"));
  EXPECT_TRUE(contains(message("\x8a\x09" + std::string(9, 'x')), "9 bytes"));
  EXPECT_TRUE(contains(refused(archive("\x80\x02X\xff\xff\xff\xff", six())), "ends too early"));
  EXPECT_TRUE(contains(refused(archive("\x80\x02}", six())), "ends too early"));
  const std::string same = dict({{"t", TensorText{}.pickle()}, {"t", TensorText{}.pickle()}});
  EXPECT_TRUE(contains(message(same), "two tensors 't'"));
  EXPECT_TRUE(contains(message(dict({{std::string(2000, 'n'), TensorText{}.pickle()}})), "2000"));

  // Values inside each other without end, and in a circle, are freed without recursion.
  std::string deep(1000000, ']');
  deep += std::string(999999, 'a');
  EXPECT_TRUE(contains(message(deep), "no dictionary"));
  EXPECT_TRUE(contains(message("]q" + std::string(1, '\0') + "h" + std::string(1, '\0') + "a"),
                       "no dictionary"));
  // One long tuple as the sizes of many tensors would be copied as often.
  std::string many = "}(" + std::string(100000, 'N') + "tq" + std::string(1, '\1') + "0";
  EXPECT_TRUE(contains(message(many + dict({})), "no tensors"));
  refused(archive(program(std::string((size_t{1} << 23) + 1, 'N')), six()));
}

TEST_F(TorchFile, RandomDamageNeverCrashes) {
  const TensorText half{.type = "HalfStorage", .numbers = 12, .sizes = {12}, .strides = {1}};
  const std::string whole = archive(
      program(dict({{"weight", TensorText{}.pickle()}, {"half", half.pickle()}})), six(), true);
  std::mt19937 random(5);
  int refusals = 0;
  for (int i = 0; i < 500; ++i) {
    std::string damaged = whole;
    for (unsigned flips = 1 + random() % 3; flips > 0; --flips) {
      damaged[random() % damaged.size()] = static_cast<char>(random() % 256);
    }
    if (random() % 8 == 0) damaged.resize(random() % damaged.size());
    try {
      for (const auto& [name, tensor] : read(damaged)) tensor.to(at::kFloat).sum().item<float>();
    } catch (const Error& error) {
      EXPECT_TRUE(contains(error.what(), path()));
      EXPECT_EQ(std::string(error.what()).find('\n'), std::string::npos);
      ++refusals;
    }
  }
  EXPECT_GT(refusals, 100);
}

}  // namespace
}  // namespace headloom::test::torch_file_test
