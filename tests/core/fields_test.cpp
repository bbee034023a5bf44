// Strict reading into structs, writing them out and listing their options.
#include "core/fields.h"

#include <gtest/gtest.h>

#include "testing/errors.h"

namespace headloom::fields_test {
namespace {

using test::contains;
using test::message_of;

struct Animal {
  virtual ~Animal() = default;
  virtual std::string type() const = 0;
  virtual void fields(Fields& f) = 0;
};
struct Cat : Animal {
  int64_t lives = 9;
  std::string type() const override { return "cat"; }
  void fields(Fields& f) override { f.field("lives", lives, "how many", at_least(1)); }
};
struct Dog : Animal {
  double bark = 0.5;
  std::string type() const override { return "dog"; }
  void fields(Fields& f) override { f.field("bark", bark, "how loud", fraction()); }
};

std::shared_ptr<Animal> make_animal(const std::string& type) {
  if (type == "cat") return std::make_shared<Cat>();
  if (type == "dog") return std::make_shared<Dog>();
  usage_error("there is no animal '", type, "'.");
}

struct Part {
  int64_t size = 1;
  void fields(Fields& f) { f.field("size", size, "of the part"); }
};

struct Options {
  bool flag = false;
  int64_t count = 3;
  double rate = 0.1;
  double scale = 1;
  std::string mode = "slow";
  std::string name = "x";
  std::optional<int64_t> window;
  std::optional<double> limit;
  std::optional<std::string> note;
  std::vector<std::string> words = {"one"};
  std::vector<int64_t> numbers = {1, 2};
  Node rest;
  Part part;
  std::vector<Part> parts{1};
  std::shared_ptr<Animal> animal = std::make_shared<Cat>();

  void fields(Fields& f) {
    f.field("flag", flag, "on or off");
    f.field("count", count, "how many", between(int64_t{1}, int64_t{10}));
    f.field("rate", rate, "a share", fraction());
    f.field("scale", scale, "a factor", positive());
    f.field("mode", mode, "which way", {"slow", "fast"});
    f.field("name", name, "any text");
    f.field("window", window, "may be absent", at_least(1));
    f.field("limit", limit, "may be absent");
    f.field("note", note, "may be absent");
    f.field("words", words, "a list");
    f.field("numbers", numbers, "a list", at_least(0));
    f.raw("rest", rest, "kept as it is");
    f.table("part", part, "a table");
    f.list("parts", parts, "tables");
    f.variant<Animal>("animal", animal, "one of several", {"cat", "dog"}, make_animal);
  }
};

Options read(const std::string& text) {
  Options options;
  read_fields(parse_toml(text, "o.toml"), options);
  return options;
}

std::string refused(const std::string& text) {
  return message_of<UsageError>([&] { read(text); });
}

TEST(Fields, ReadsEveryKind) {
  const Options o = read(R"(
flag = true
count = 10
rate = 0
scale = 2
mode = "fast"
window = 4
limit = 1.5
note = "n"
words = "single"
numbers = [5, 6, 7]
rest = { any = [1, "thing"] }
part = { size = 7 }
parts = [{ size = 1 }, {}, { size = 3 }]
animal = { type = "dog", bark = 0.25 }
)");
  EXPECT_TRUE(o.flag);
  EXPECT_EQ(o.count, 10);
  EXPECT_EQ(o.rate, 0.0);
  EXPECT_EQ(o.scale, 2.0);
  EXPECT_EQ(o.mode, "fast");
  EXPECT_EQ(o.name, "x");
  EXPECT_EQ(o.window, 4);
  EXPECT_EQ(o.limit, 1.5);
  EXPECT_EQ(o.note, "n");
  EXPECT_EQ(o.words, std::vector<std::string>{"single"});
  EXPECT_EQ(o.numbers, (std::vector<int64_t>{5, 6, 7}));
  EXPECT_EQ(o.rest.find("any")->array().size(), 2u);
  EXPECT_EQ(o.part.size, 7);
  ASSERT_EQ(o.parts.size(), 3u);
  EXPECT_EQ(o.parts[1].size, 1);
  EXPECT_EQ(o.parts[2].size, 3);
  ASSERT_EQ(o.animal->type(), "dog");
  EXPECT_EQ(static_cast<const Dog&>(*o.animal).bark, 0.25);
}

struct Renamed {
  int64_t d_state = 16;
  void fields(Fields& f) {
    f.renamed("states", "d_state");
    f.field("d_state", d_state, "numbers of state");
  }
};

TEST(Fields, FormerNamesAreReadWithAHint) {
  const auto read_renamed = [](const char* text) {
    Renamed out;
    read_fields(parse_toml(text, "t.toml"), out, "mixer");
    return out;
  };
  testing::internal::CaptureStderr();
  EXPECT_EQ(read_renamed("states = 5").d_state, 5);
  EXPECT_EQ(read_renamed("states = 6").d_state, 6);
  EXPECT_EQ(testing::internal::GetCapturedStderr(),
            "headloom: t.toml:1: 'mixer.states' is called 'd_state' now; the next version will not "
            "know it.\n")
      << "said once";
  EXPECT_EQ(
      message_of<UsageError>([&] { read_renamed("states = 5\nd_state = 6"); }),
      "t.toml:1: 'mixer.states' is the former name of 'mixer.d_state', which is there as well; "
      "expected one of them.");
  Renamed options;
  EXPECT_EQ(to_toml(write_fields(options)), "d_state = 16\n");
}

TEST(Fields, AbsentKeysKeepWhatIsThere) {
  const Options o = read("animal = { lives = 3 }");
  EXPECT_EQ(o.count, 3);
  EXPECT_FALSE(o.window.has_value());
  EXPECT_EQ(o.parts.size(), 1u);
  EXPECT_EQ(static_cast<const Cat&>(*o.animal).lives, 3) << "the default's type may stay unsaid";
}

TEST(Fields, UnknownKeysNameTheNearestAndTheLine) {
  EXPECT_EQ(refused("\ncuont = 3\n"), "o.toml:2: unknown key 'cuont'; did you mean 'count'?");
  EXPECT_EQ(refused("[part]\nsiez = 3\n"),
            "o.toml:2: unknown key 'part.siez'; did you mean 'part.size'?");
  EXPECT_TRUE(contains(refused("parts = [{}, { sizes = 1 }]"), "'parts[1].sizes'"));
  EXPECT_TRUE(contains(refused("animal = { type = 'dog', lives = 3 }"), "'animal.lives'"));
  const std::string far = refused("zzzzzzzzzzzz = 3");
  EXPECT_TRUE(contains(far, "known keys are flag, count"));
}

TEST(Fields, WrongTypesNameLineKeyValueAndExpectation) {
  EXPECT_EQ(refused("flag = 1"), "o.toml:1: 'flag' is 1, expected true or false.");
  EXPECT_EQ(refused("\ncount = 2.5"), "o.toml:2: 'count' is 2.5, expected an integer.");
  const std::string large = ", which an integer of 64 bits cannot hold, expected ";
  EXPECT_TRUE(contains(refused("count = 1e30"), "'count' is 1e+30" + large));
  for (const char* digits : {"99999999999999999999", "-9223372036854775809"}) {
    EXPECT_TRUE(contains(refused(str("count = '", digits, "'")), str("is ", digits, large)));
  }
  EXPECT_TRUE(contains(refused("count = '010'"), "'count' is '010', expected an integer"));
  EXPECT_EQ(refused("count = true"), "o.toml:1: 'count' is true, expected an integer.");
  EXPECT_EQ(refused("rate = 'x'"), "o.toml:1: 'rate' is 'x', expected a number.");
  EXPECT_EQ(refused("name = 3"), "o.toml:1: 'name' is 3, expected text in quotes.");
  EXPECT_TRUE(contains(refused("count = { a = 1 }"), "'count' is a table, expected an integer"));
  EXPECT_TRUE(contains(refused("count = [1]"), "'count' is [1], expected an integer"));
  EXPECT_TRUE(contains(refused("part = 3"), "'part' is an integer, expected a table"));
  EXPECT_TRUE(contains(refused("parts = 3"), "[[parts]]"));
  EXPECT_TRUE(contains(refused("parts = [3]"), "'parts[0]' is an integer, expected a table"));
  EXPECT_TRUE(contains(refused("rest = 3"), "'rest' is an integer, expected a table"));
  EXPECT_TRUE(contains(refused("words = [1]"), "'words' is 1, expected text in quotes"));
  EXPECT_EQ(refused("animal = 'dog'"),
            "o.toml:1: 'animal' is a string, expected a table such as { type = \"dog\" }.");
  EXPECT_EQ(refused("animal = 'dgo'"), "o.toml:1: 'animal' is a string, expected a table.");
  EXPECT_EQ(refused("part = 'dog'"), "o.toml:1: 'part' is a string, expected a table.");
}

TEST(Fields, RangesAreKept) {
  EXPECT_EQ(refused("count = 0"), "o.toml:1: 'count' is 0, expected at least 1 and at most 10.");
  EXPECT_TRUE(contains(refused("count = 11"), "at most 10"));
  EXPECT_TRUE(contains(refused("rate = 1"), "expected at least 0 and below 1"));
  EXPECT_TRUE(contains(refused("rate = -0.1"), "expected at least 0"));
  EXPECT_TRUE(contains(refused("rate = nan"), "'rate' is nan"));
  EXPECT_TRUE(contains(refused("scale = 0.0"), "expected above 0"));
  EXPECT_TRUE(contains(refused("limit = inf"), "expected a finite number"));
  EXPECT_TRUE(contains(refused("limit = nan"), "expected a finite number"));
  EXPECT_TRUE(contains(refused("window = 0"), "'window' is 0, expected at least 1"));
  EXPECT_TRUE(contains(refused("numbers = [1, -1]"), "'numbers' is -1"));
  EXPECT_EQ(refused("mode = 'fats'"),
            "o.toml:1: 'mode' is \"fats\", expected one of slow, fast; did you mean \"fast\"?");
  EXPECT_TRUE(contains(refused("animal = { type = 'dig' }"), "did you mean \"dog\""));
}

TEST(Fields, WhatIsWrittenReadsBackTheSame) {
  Options o = read(
      "count = 7\nwindow = 5\nrest = { deep = { a = 1 } }\nparts = [{ size = 4 }]\n"
      "animal = { type = 'dog' }\nlimit = 0.1");
  const std::string text = to_toml(write_fields(o));
  Options back = read(text);
  EXPECT_EQ(to_toml(write_fields(back)), text);
  EXPECT_TRUE(contains(text, "count = 7"));
  EXPECT_TRUE(contains(text, "rate = 0.1")) << "defaults are written out";
  EXPECT_TRUE(contains(text, "bark = 0.5"));
  EXPECT_EQ(text.find("note"), std::string::npos) << "an absent value stays absent";
  EXPECT_EQ(back.limit, 0.1);
}

TEST(Fields, ListsKeysTypesDefaultsAndMeaning) {
  Options o;
  Lister lister;
  o.fields(lister);
  std::vector<std::string> keys;
  for (const OptionInfo& option : lister.options()) {
    keys.push_back(option.key);
    EXPECT_FALSE(option.doc.empty()) << option.key;
    EXPECT_FALSE(option.type.empty()) << option.key;
    if (option.key == "count") {
      EXPECT_EQ(option.default_value, "3");
      EXPECT_EQ(option.type, "integer, at least 1 and at most 10");
    }
    if (option.key == "limit") {
      EXPECT_EQ(option.type, "real");
      EXPECT_EQ(option.default_value, "");
    }
    if (option.key == "mode") {
      EXPECT_EQ(option.type, "one of slow | fast");
    }
  }
  for (const char* key : {"flag", "part.size", "animal.type", "animal.lives", "words"}) {
    EXPECT_NE(std::find(keys.begin(), keys.end(), key), keys.end()) << key;
  }
}

}  // namespace
}  // namespace headloom::fields_test
