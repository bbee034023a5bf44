// tests/python/test_chat.py compares what templates give with jinja2.
#include <gtest/gtest.h>

#include <random>

#include "../testing/temp_folder.h"
#include "core/files.h"
#include "serve/chat_template.h"
#include "serve/jinja/template.h"
#include "support.h"

namespace headloom::test::jinja_test {
namespace {

using jinja::Dict;
using jinja::Template;

std::string rendered(const std::string& source, const Dict& names = {}) {
  return Template(source).render(names);
}

TEST(Jinja, TagsTakeTheirLineBreaksAndMargins) {
  EXPECT_EQ(rendered("  {% if true %}\n  a\n  {% endif %}\nb\n"), "  a\nb");
  EXPECT_EQ(rendered("x  {% if true %} a{% endif %}\n\nb\n\n"), "x   a\nb\n");
  EXPECT_EQ(rendered(" {{ 1 }} \n {{- 2 -}} \n {{ 3 }}"), " 123");
  EXPECT_EQ(rendered("  {%+ if true +%}\na{% endif %}"), "  \na");
  EXPECT_EQ(rendered("{# a #}\n  {#- b -#}  c"), "c");
}

TEST(Jinja, ErrorsNameTheLineAndWhatStandsThere) {
  for (const auto& [source, message] : std::vector<std::pair<std::string, std::string>>{
           {"\n{{ 1 + }}", "line 2: expected a value, found the end of the tag"},
           {"{{ a b }}", "line 1: expected the end of the tag, found 'b'"},
           {"{% if x %}\n", "line 1: there is no 'endif'"},
           {"a\n{% endfor %}", "line 2: 'endfor' ends no block"},
           {"{% if x %}{% endfor %}", "'endfor' stands where 'endif' is expected"},
           {"{{ 'abc }}", "line 1: a text in quotes has no end"},
           {"{% for x of y %}{% endfor %}", "expected 'in', found 'of'"},
           {"{{ ? }}", "the character '?' is not expected in a tag"},
           {"{{ (1] }}", "the bracket ']' closes none"},
           {"{{ 1", "a tag has no end, expected '}}'"},
           {"{# x", "a comment that begins with '{#' has no end"},
           {"{% break %}", "'break' stands in no loop"},
           {"{% import 'x' as y %}", "the block 'import' is not supported; there are if, for"},
           {"{{ 99999999999999999999 }}", "the integer 99999999999999999999 is too large"},
           {"\n\n{{ x.y }}", "line 3: 'x' is undefined"},
           {"{{ {}.a.b }}", "the attribute 'a' of a dict is undefined"},
           {"{{ 1 | nothing }}", "the filter 'nothing' is not supported"},
           {"{{ 1 is nothing }}", "the test 'nothing' is not supported"},
           {"{{ 9223372036854775807 + 1 }}", "an integer is too large"},
           {"{% set x.y = 1 %}", "'x' is a undefined, expected a namespace()"},
           {"{{ [] | join('1', '2', '3') }}",
            "the filter 'join' takes at most 2 arguments, found 3"},
           {std::string("{{ \0 }}", 7), "the byte 0x00 is not expected in a tag"}}) {
    const std::string found = message_of<jinja::TemplateError>([&] { rendered(source); });
    EXPECT_TRUE(contains(found, message)) << source << ": " << found;
  }
}

// What a loop is to its body may be kept, and may hold what was kept before, or itself.
TEST(Jinja, LoopsThatHoldEachOtherGoAway) {
  const std::string chain =
      "{% set ns = namespace(p=1) %}{% for i in range(COUNT) %}{% for x in [ns.p, 1] %}"
      "{% set ns.p = loop %}{% endfor %}{% endfor %}{{ ns.p.index }}";
  const auto of = [&](const std::string& count) {
    return std::string(chain).replace(chain.find("COUNT"), 5, count);
  };
  EXPECT_EQ(rendered(of("1000")), "2");
  EXPECT_TRUE(contains(message_of<jinja::TemplateError>([&] { rendered(of("100000")); }),
                       "67108864 bytes"));
  EXPECT_EQ(rendered("{% for x in [1, 2] %}{{ loop.changed(loop) }}{% endfor %}"), "TrueTrue");
  EXPECT_EQ(rendered("{{ 1e-400 }}"), "0.0");
}

// Whatever bytes a template has: it is rendered or refused.
TEST(Jinja, NoTemplateBreaksIt) {
  std::mt19937 random(5);
  const std::vector<std::string> words = {
      "{{",       "}}",      "{%",   "%}",     "{#",  "#}", "-",     "+",         "if",
      "endif",    "for",     "in",   "endfor", "set", "x",  "=",     "(",         ")",
      "[",        "]",       "{",    "}",      ".",   ",",  ":",     "|",         "is",
      "not",      "defined", "'a'",  "1",      "\n",  " ",  "macro", "endmacro",  "loop",
      "raw",      "endraw",  "\xff", "~",      "**",  "//", "\\",    "namespace", "join",
      "range(9)", "else",    "and",  "%",      "'"};
  int fine = 0;
  for (int i = 0; i < 30'000; ++i) {
    std::string source = random() % 2 ? "{{ " : "{% ";
    for (size_t n = random() % 20; n > 0; --n) source += words[random() % words.size()] + " ";
    source += random() % 2 ? "}}" : "%}";
    try {
      rendered(source, {{{"x", jinja::Value("text")}}});
      ++fine;
    } catch (const jinja::TemplateError& error) {
      EXPECT_TRUE(std::string(error.what()).starts_with("line ")) << source << error.what();
    }
  }
  EXPECT_GT(fine, 50);
}

TEST(ChatTemplate, KnowsTheTimeAndItsTokens) {
  const TempFolder folder;
  RunConfig config = byte_config();
  const Codec codec(config);
  const std::string root = folder.path();
  const auto spelled = [&](const std::string& source) {
    write_file(root + "/chat_template.jinja", source);
    setenv("TZ", "UTC", 1);
    tzset();
    return serve::ChatTemplate(root, codec)
        .spelled({{{"role", "user"}, {"content", "a"}}}, std::time_t{86'400 * 365});
  };
  EXPECT_EQ(spelled("{{ strftime_now('%d %B %Y, %H:%M') }}"), "01 January 1971, 00:00");
  EXPECT_EQ(spelled("{{ messages[0].content ~ add_generation_prompt }}"), "aTrue");
  try {
    spelled("{{ raise_exception('no\\nway') }}");
    ADD_FAILURE() << "taken";
  } catch (const serve::Refusal& refusal) {
    EXPECT_EQ(refusal.status, 400);
    EXPECT_TRUE(
        contains(refusal.what(), "'messages' are refused by the model's chat template: no way."));
  }
}

}  // namespace
}  // namespace headloom::test::jinja_test
