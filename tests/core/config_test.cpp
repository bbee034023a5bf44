// Reading TOML into a tree, changing it, and writing it back.
#include "core/config.h"

#include <gtest/gtest.h>

#include <cmath>

#include "core/differences.h"
#include "core/json.h"
#include "testing/errors.h"
#include "testing/temp_folder.h"

namespace headloom::config_test {
namespace {

using test::contains;
using test::message_of;

bool same(const Node& a, const Node& b) {
  if (a.value.index() != b.value.index()) return false;
  if (a.is_table()) {
    if (a.table().size() != b.table().size()) return false;
    for (const auto& [key, child] : a.table()) {
      const Node* other = b.find(key);
      if (other == nullptr || !same(child, *other)) return false;
    }
    return true;
  }
  if (a.is_array()) {
    if (a.array().size() != b.array().size()) return false;
    for (size_t i = 0; i < a.array().size(); ++i) {
      if (!same(a.array()[i], b.array()[i])) return false;
    }
    return true;
  }
  if (const auto* real = std::get_if<double>(&a.value)) {
    const double other = std::get<double>(b.value);
    return std::isnan(*real) ? std::isnan(other) : *real == other;
  }
  if (const auto* text = std::get_if<std::string>(&a.value)) {
    return *text == std::get<std::string>(b.value);
  }
  if (const auto* integer = std::get_if<int64_t>(&a.value)) {
    return *integer == std::get<int64_t>(b.value);
  }
  return std::get<bool>(a.value) == std::get<bool>(b.value);
}

Node round_trip(const Node& node) {
  const std::string text = to_toml(node);
  Node back = parse_toml(text, "written.toml");
  EXPECT_TRUE(same(node, back)) << text;
  EXPECT_EQ(to_toml(back), text) << "writing again gives another text";
  return back;
}

TEST(Toml, KeepsOrderTypesAndLines) {
  const Node root = parse_toml("zebra = 1\nants = true\n[table]\nx = 2.0\ny = 'text'\n", "a.toml");
  ASSERT_EQ(root.table().size(), 3u);
  EXPECT_EQ(root.table()[0].first, "zebra");
  EXPECT_EQ(root.table()[1].first, "ants");
  EXPECT_EQ(std::get<int64_t>(root.find("zebra")->value), 1);
  EXPECT_TRUE(std::get<bool>(root.find("ants")->value));
  const Node* table = root.find("table");
  ASSERT_NE(table, nullptr);
  EXPECT_EQ(std::get<double>(table->find("x")->value), 2.0);
  EXPECT_EQ(table->find("y")->origin, "a.toml:5");
  EXPECT_EQ(root.find("missing"), nullptr);
}

TEST(Toml, ErrorsNameFileAndLine) {
  EXPECT_TRUE(contains(message_of<UsageError>([] { parse_toml("a = 1\nb = = 2\n", "bad.toml"); }),
                       "bad.toml:2"));
  EXPECT_TRUE(contains(message_of<UsageError>([] { parse_toml("a = 1\na = 2\n", "twice.toml"); }),
                       "twice.toml:2"));
  EXPECT_TRUE(
      contains(message_of<UsageError>([] { parse_toml("\nwhen = 2020-01-01\n", "date.toml"); }),
               "date.toml:2"));
  EXPECT_TRUE(
      contains(message_of([] { read_toml("/nowhere/at-all.toml"); }), "/nowhere/at-all.toml"));
  const test::TempFolder folder;
  EXPECT_TRUE(contains(message_of([&] { read_toml(folder.path()); }), folder.path()));
}

TEST(Toml, RoundTripOfEverything) {
  const Node root = parse_toml(R"(
title = "quotes \" and \\ and \t tab and \u00fc and \u0001"
lines = "one\ntwo\n\nfour"
single = "it's 'quoted'"
empty = ""
integer = -9223372036854775808
reals = [0.1, 1e300, 5e-324, -0.0, 3.0, inf, -inf, nan, 1e20]
nothing = []
nested = [[1, 2], [], ["a"]]
mixed = [{ a = 1 }, 2]
"odd key.with = dots" = 1
"" = 2
[empty_table]
[model]
width = 256
[model.position]
type = "rope"
[model."strange key"]
x = 1
[[model.layer]]
mixer = { type = "mha", heads = 8, deep = { er = [1, { x = 2 }] } }
[[model.layer]]
[[model.layer.inner]]
a = 1
[[model.layer.inner]]
b = "2"
)",
                               "all.toml");
  round_trip(root);
}

TEST(Toml, WritesAnyTextThatIsUtf8) {
  for (const std::string text : {"\nfirst", "a'''b\nc", "\"\\\n\t\x01\x7f", "\r\n", "grün\n"}) {
    Node root;
    root.set("text", {.value = text});
    EXPECT_EQ(std::get<std::string>(parse_toml(to_toml(root), "t").find("text")->value), text);
  }
  Node root;
  root.set("paths", {.value = std::string("donn\xe9" "es")});
  EXPECT_TRUE(contains(message_of<UsageError>([&] { to_toml(root); }), "is no UTF-8"));
}

TEST(Toml, RoundTripOfTablesMadeInCode) {
  Node root, inner, text;
  text.value = std::string("line\nbreak");
  inner.set("v", text);
  root.set("a b", inner);
  Array items;
  for (int64_t i = 0; i < 3; ++i) {
    Node item, number;
    number.value = i;
    item.set("number", number);
    items.push_back(item);
  }
  Node list;
  list.value = items;
  root.set("list", list);
  const Node back = round_trip(root);
  EXPECT_EQ(back.find("list")->array().size(), 3u);
}

TEST(Merge, TablesMergeAndTheRestIsReplaced) {
  const Node base = parse_toml("a = 1\nlist = [1, 2]\n[t]\nx = 1\ny = 2\n[t.u]\np = 1\n", "base");
  const Node over = parse_toml("list = [3]\n[t]\ny = 5\nz = 6\nu = 4\n[new]\nk = 1\n", "over");
  const Node expected =
      parse_toml("a = 1\nlist = [3]\n[t]\nx = 1\ny = 5\nz = 6\nu = 4\n[new]\nk = 1\n", "expected");
  const Node result = merged(base, over);
  EXPECT_TRUE(same(result, expected)) << to_toml(result);
  EXPECT_EQ(result.find("t")->find("y")->origin, "over:3");
  EXPECT_TRUE(same(merged(base, Node{}), base));
}

TEST(Toml, SaysWhereItIsBrokenInItsOwnWords) {
  const std::string said = message_of([] { parse_toml("a = 1\nb = = 2\n", "a.toml"); });
  EXPECT_EQ(said.rfind("a.toml:2: not valid TOML: column ", 0), 0u) << said;
  EXPECT_EQ(said.find("Error while parsing"), std::string::npos) << said;
  EXPECT_EQ(said.find(".."), std::string::npos) << said;
}

TEST(Toml, NestsNoDeeperThanAnyoneWants) {
  const auto said = [](const std::string& text) {
    return message_of([&] { parse_toml(text, "a.toml"); });
  };
  std::string key = "a";
  for (int i = 0; i < 100'000; ++i) key += ".a";
  const std::string deep = ": is nested deeper than 64 levels.";
  EXPECT_EQ(said("# a [comment]\nb = 'it'\n" + key + " = 1\n"), "a.toml:3" + deep);
  EXPECT_EQ(said("[" + key + "]\n"), "a.toml:1" + deep);
  EXPECT_EQ(said("b = { " + key + " = 1 }"), "a.toml:1" + deep);
  EXPECT_EQ(said("b = " + std::string(100, '[')), "a.toml:1" + deep);
  Node root;
  EXPECT_NE(message_of([&] { apply_override(root, key + "=1"); }).find("expected at most 64."),
            std::string::npos);
  const std::string quotes = "a = \"\"\"x\"\"\"\"\nb = '''x'''''\n";
  EXPECT_EQ(said(quotes + key + " = 1\n"), "a.toml:3" + deep);
  const Node quoted = parse_toml(quotes + "s = \"" + key + "\"\n", "a.toml");
  EXPECT_EQ(std::get<std::string>(quoted.find("a")->value), "x\"");
  EXPECT_EQ(std::get<std::string>(quoted.find("s")->value), key);
  // Neither strings nor comments nest, nor what stands one after the other.
  std::string flat = "# " + key + "\ns = \"" + key + "\\\"[\"\nt = '" + key + "'\nu = '''\n" + key +
                     "'\n'''\nv = \"\"\"\n[[\"" + key + "\"\"\"\nx = [";
  for (int i = 0; i < 200; ++i) flat += "1.5, [2.5], {a.b = 1},\n";
  const Node node = parse_toml(flat + "]\n[c.d]\ne.f = 1\n[[g.h]]\n", "a.toml");
  EXPECT_EQ(node.find("x")->array().size(), 600u);
  EXPECT_EQ(std::get<std::string>(node.find("t")->value), key);
}

TEST(Json, SaysWhereItIsBroken) {
  const test::TempFolder folder;
  const auto said = [&](const std::string& text) {
    const std::string path = folder.write("a.json", text);
    const std::string message = message_of([&] { read_json(path); });
    EXPECT_EQ(message.rfind(path, 0), 0u) << message;
    return message.substr(std::min(path.size(), message.size()));
  };
  EXPECT_EQ(said("{\n \"a\": 1,\n \"b\" 2\n}"),
            ": is not JSON: line 3 has '2' in column 6, where it does not belong.");
  EXPECT_EQ(said("{\"a\": [1, 2"), ": is not JSON: it ends in the middle (was it cut off?).");
  EXPECT_EQ(said(""), ": is not JSON: it is empty.");
  EXPECT_EQ(said("[1]"), ": is JSON, but not an object ({...}).");
  EXPECT_EQ(said(std::string(100, '[')), ": is nested deeper than 64 levels.");
  EXPECT_EQ(said("{\"a\": 1e999}"), ": has a number that is too large for any type.");
  const Node big = read_json(folder.write("b.json", "{\"a\": 18446744073709551615}"));
  EXPECT_TRUE(std::holds_alternative<double>(big.find("a")->value));
}

TEST(Override, ReadsTomlValuesElseText) {
  Node root = parse_toml("[train]\nsteps = 5\n", "a.toml");
  apply_override(root, "train.steps=10");
  apply_override(root, "train.lr=1e-3");
  apply_override(root, "task.paths=[\"a\", \"b\"]");
  apply_override(root, "task.type=find_block");
  apply_override(root, "task.name=with = sign");
  apply_override(root, "task.empty=");
  apply_override(root, "train.on=true");
  const Node expected = parse_toml(
      "[train]\nsteps = 10\nlr = 1e-3\non = true\n[task]\npaths = ['a', 'b']\n"
      "type = 'find_block'\nname = 'with = sign'\nempty = ''\n",
      "expected");
  EXPECT_TRUE(same(root, expected)) << to_toml(root);
  EXPECT_TRUE(contains(root.find("train")->find("steps")->origin, "--set train.steps"));
}

TEST(Override, ReachesArrayElements) {
  Node root = parse_toml("[[model.layer]]\nx = 1\n[[model.layer]]\nx = 2\n", "a.toml");
  apply_override(root, "model.layer.1.x=7");
  apply_override(root, "model.layer.0.mixer.heads=3");
  const Node expected =
      parse_toml("[[model.layer]]\nx = 1\nmixer = { heads = 3 }\n[[model.layer]]\nx = 7\n", "e");
  EXPECT_TRUE(same(root, expected)) << to_toml(root);
}

TEST(Override, RefusesWhatCannotBe) {
  Node root = parse_toml("steps = 5\nlist = [1, 2]\n", "a.toml");
  const auto message = [&](const char* assignment) {
    return message_of<UsageError>([&] { apply_override(root, assignment); });
  };
  EXPECT_TRUE(contains(message("steps"), "expected key=value"));
  EXPECT_TRUE(contains(message("=3"), "expected key=value"));
  EXPECT_TRUE(contains(message("steps.x=3"), "'steps' is an integer, not a table"));
  EXPECT_TRUE(contains(message("list.2=3"), "expected 0 to 1"));
  EXPECT_TRUE(contains(message("list.-1=3"), "expected 0 to 1"));
  EXPECT_TRUE(contains(message("list.x=3"), "expected 0 to 1"));
  EXPECT_TRUE(contains(message("steps=3\nbatch=1"), "--set steps: other keys follow the value"));
  EXPECT_TRUE(
      contains(message("layer.0.heads=4"),
               "--set layer.0.heads: the configuration has no list 'layer', of which '0' "));
  EXPECT_TRUE(same(root, parse_toml("steps = 5\nlist = [1, 2]\n", "a.toml")));
  apply_override(root, "list=[3,\n4]");
  EXPECT_TRUE(same(root, parse_toml("steps = 5\nlist = [3, 4]\n", "a.toml")));
}

TEST(Differences, AreNamedByTheirKeys) {
  const Node a = parse_toml(
      "x = 1\n[model]\nwidth = 8\nlist = [1, 2]\n[[model.layer]]\nmixer = { type = 'mha', heads = "
      "2 }\n"
      "[[model.layer]]\nmixer = { type = 'mha' }\n",
      "a");
  EXPECT_TRUE(differences(a, a).empty());
  Node b = a;
  apply_override(b, "model.layer.1.mixer.window=3");
  apply_override(b, "model.list=[1]");
  apply_override(b, "y={p=1.5}");
  std::vector<std::string> found;
  for (const Difference& d : differences(a, b)) found.push_back(d.was() + " -> " + d.is());
  EXPECT_EQ(found, (std::vector<std::string>{
                       "'model.list' = [1, 2] -> 'model.list' = [1]",
                       "no 'model.layer.1.mixer.window' -> 'model.layer.1.mixer.window' = 3",
                       "no 'y' -> 'y' = { p = 1.5 }"}));
  // Lists of other lengths differ as a whole.
  b.find("model")->find("layer")->array().pop_back();
  EXPECT_EQ(differences(a, b)[1].key, "model.layer");
}

}  // namespace
}  // namespace headloom::config_test
