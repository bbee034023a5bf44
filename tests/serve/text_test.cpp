#include "train/codec.h"

#include <gtest/gtest.h>

#include <random>

#include "core/utf8.h"
#include "serve/completions.h"
#include "support.h"

namespace headloom::test::text_test {
namespace {

constexpr serve::Limits kLimits{.samples = 4, .texts = 8, .length = 1000};

TEST(TextStream, ShowsWhatCannotBecomeAStopString) {
  TextStream text({"END", "\n\n"});
  EXPECT_EQ(text.add("one E"), "one ");
  EXPECT_EQ(text.add("N"), "");
  EXPECT_EQ(text.add("T\n"), "ENT");
  EXPECT_EQ(text.add("x\nEN"), "\nx\n");
  EXPECT_FALSE(text.ended());
  EXPECT_EQ(text.add("D y\n\n"), "");
  EXPECT_TRUE(text.ended());
  EXPECT_EQ(text.rest(), "");
  TextStream early({"c", "b"});  // the first in the text, not in the list
  EXPECT_EQ(early.add("abc"), "a");
  for (const std::vector<std::string>& stops :
       {{"bc", "abcd"}, std::vector<std::string>{"abcd", "bc"}}) {
    EXPECT_EQ(TextStream(stops).add("xabcd"), "x");
  }
  TextStream open({"END"});
  EXPECT_EQ(open.add("aEN"), "a");
  EXPECT_EQ(open.rest(), "EN");
}

std::string in_pieces(const std::string& bytes, std::mt19937& random) {
  Utf8Stream utf8;
  std::string out;
  for (size_t at = 0; at < bytes.size();) {
    const size_t n = 1 + random() % 4;
    out += utf8.add(std::string_view(bytes).substr(at, n));
    at += n;
  }
  return out + utf8.rest();
}

// Expected texts by Unicode 15, table 3-8 and conformance requirement D93b.
TEST(Utf8Stream, ReplacesWhatIsNoText) {
  std::mt19937 random(1);
  const std::string r = "\xef\xbf\xbd";
  for (const auto& [bytes, text] : std::vector<std::pair<std::string, std::string>>{
           {"plain", "plain"},
           {"gr\xc3\xbc\xc3\x9f \xe2\x82\xac \xf0\x9f\x98\x80",
            "gr\xc3\xbc\xc3\x9f \xe2\x82\xac \xf0\x9f\x98\x80"},
           {"a\xff"
            "b\x80",
            "a" + r + "b" + r},
           {"\xc0\xaf", r + r},  // longer than needed
           {"\xe0\x9f\x80", r + r + r},
           {"\xed\xa0\x80", r + r + r},          // a surrogate
           {"\xf4\x90\x80\x80", r + r + r + r},  // above U+10FFFF
           {"\xe2\x82", r},                      // cut off
           {"\xe2\x82"
            "a",
            r + "a"},
           {"\xf0\x9f\x98\xe2\x82\xac", r + "\xe2\x82\xac"},
           {std::string("a\0b", 3), std::string("a\0b", 3)}}) {
    for (int i = 0; i < 20; ++i) EXPECT_EQ(in_pieces(bytes, random), text);
    EXPECT_EQ(is_utf8(bytes), bytes == text);
  }
  for (int i = 0; i < 2000; ++i) {
    std::string bytes;
    for (int n = 0; n < 12; ++n)
      bytes += static_cast<char>(random() % 3 ? 0x80 + random() % 128 : random());
    const std::string once = in_pieces(bytes, random);
    EXPECT_EQ(once, in_pieces(bytes, random));
    EXPECT_TRUE(is_utf8(once));
  }
}

// "0,0,0".
std::string list_of(int count) {
  std::string out = "0";
  for (int i = 1; i < count; ++i) out += ",0";
  return out;
}

TEST(Completions, BadBodiesAreRefused) {
  RunConfig config = byte_config();
  const Codec codec(config);
  const auto refused = [&](const std::string& body) -> std::string {
    try {
      serve::parse_completion(body, codec, "tiny", kLimits);
    } catch (const serve::Refusal& e) {
      EXPECT_EQ(std::string(e.what()).find('\n'), std::string::npos);
      return str(e.status, " ", e.what());
    }
    return "taken";
  };
  for (const auto& [body, message] : std::vector<std::pair<std::string, std::string>>{
           {"", "400 the body is not JSON: "},
           {"{\"prompt\": ", "400 the body is not JSON: "},
           {"{\"prompt\": \"\xff\"}", "400 the body is not JSON: "},
           {"[1]", "400 the body is [1], expected a JSON object."},
           {std::string(100'000, '['), "400 the body is nested deeper than 8 levels."},
           {R"({})", "400 'prompt' is missing, expected a text, "},
           {R"({"prompt": 3})", "400 'prompt' is 3, expected a text, "},
           {R"({"prompt": []})", "400 'prompt' is [], expected a text, "},
           {R"({"prompt": ["a", 1]})", "400 'prompt' is [\"a\",1], expected a text, "},
           {R"({"prompt": [[1], "a"]})", "400 'prompt' is [[1],\"a\"], expected a text, "},
           {R"({"prompt": [1, "a"]})", "400 'prompt' has the token \"a\", expected an integer."},
           {R"({"prompt": [1.5]})", "400 'prompt' has the token 1.5, expected an integer."},
           {R"({"prompt": [1e30]})", "400 'prompt' has the token 1e+30, expected an integer."},
           {R"({"prompt": [9223372036854775808]})", "400 'prompt' has the token 92233720368547758"},
           {R"({"prompt": "a", "promt": 1})", "400 unknown key \"promt\"; did you mean 'prompt'?"},
           {R"({"prompt": "a", "model": "big"})",
            "404 there is no model \"big\" here, but 'tiny'."},
           {R"({"prompt": "a", "model": 1})", "400 'model' is 1, expected a text."},
           {R"({"prompt": "a", "max_tokens": "ten"})",
            "400 'max_tokens' is \"ten\", expected an integer from 0 to 1073741824."},
           {R"({"prompt": "a", "max_tokens": -1})", "400 'max_tokens' is -1, expected"},
           {R"({"prompt": "a", "max_tokens": 2.0})", "400 'max_tokens' is 2.0, expected"},
           {R"({"prompt": "a", "temperature": -0.1})", "400 'temperature' is -0.1, expected a num"},
           {R"({"prompt": "a", "top_p": 2})", "400 'top_p' is 2, expected a number from 0 to 1."},
           {R"({"prompt": "a", "repetition_penalty": 0})", "400 'repetition_penalty' is 0, expec"},
           {R"({"prompt": "a", "n": 0})",
            "400 'n' is 0, expected an integer from 1 to 4, the texts"},
           {R"({"prompt": "a", "n": 30000000})", "400 'n' is 30000000, expected an integer from 1"},
           {R"({"prompt": "a", "n": 1e99})", "400 'n' is 1e+99, expected an integer from 1 to 4,"},
           {R"({"prompt": ["a", "b", "c"], "n": 4})", "400 'prompt' has 3 prompts and n is 4, exp"},
           {R"({"prompt": [[)" + list_of(1001) + "]]}", "400 'prompt' has a list of 1001 tokens, "},
           {R"({"prompt": "a", "stop": ")" + std::string(1025, 'x') + "\"}", "400 'stop' is "},
           {R"({"prompt": "a", "stop": [)" + list_of(65) + "]}", "400 'stop' is a list of 65, "},
           {R"({"prompt": "a", "best_of": 1000000})", "400 'best_of' is not supported, expected"},
           {R"({"prompt": "a", "max_tokens": 1073741825})", "400 'max_tokens' is 1073741825, exp"},
           {R"({"prompt": "a", "user": 1})", "400 'user' is 1, expected a text."},
           {R"({"prompt": "a", "logprobs": 21})", "400 'logprobs' is 21, expected an integer from"},
           {R"({"prompt": "a", "logprobs": true})", "400 'logprobs' is true, expected an integer"},
           {R"({"prompt": "a", "echo": 1})", "400 'echo' is 1, expected true or false."},
           {R"({"prompt": "a", "stop": ["x", ""]})",
            "400 'stop' is [\"x\",\"\"], expected a text or"},
           {R"({"prompt": "a", "stop": 1})", "400 'stop' is 1, expected a text or a list of at mo"},
           {R"({"prompt": "a", "best_of": 2})",
            "400 'best_of' is not supported, expected it to be "},
           {R"({"prompt": "a", "suffix": "b"})",
            "400 'suffix' is not supported, expected it to be "},
           {R"({"prompt": "a", "stream_options": {}})",
            "400 'stream_options' needs 'stream' to be"},
           {R"({"prompt": "a", "stream": true, "stream_options": {"x": 1}})",
            "400 unknown key \"x\"; expected include_usage."},
           {R"({"prompt": ")" + std::string(3000, 'a') + R"(", "echo": ")" +
                std::string(3000, 'b') + "\"}",
            "400 'echo' is \"bbbb"}}) {
    EXPECT_TRUE(refused(body).starts_with(message)) << refused(body);
    EXPECT_LT(refused(body).size(), 400u);
  }
  // A great many keys and values take no long time.
  std::string many = "{\"prompt\": \"a\"";
  for (int i = 0; i < 100'000; ++i) many += str(", \"k", i, "\": 0");
  EXPECT_EQ(refused(many + "}"),
            "400 the body has more than 32768 texts, keys, lists and objects.");
  // What is echoed is bounded before it is made.
  const std::string echoed = "{\"prompt\": \"" + std::string(30'000, 'a') + "\", \"n\": 4, ";
  EXPECT_EQ(
      refused(echoed + "\"logprobs\": 20, \"echo\": true}"),
      "400 'echo' would give back 30000 tokens, n = 4 times with 20 logprobs each, expected at "
      "most 2097152 tokens and logprobs.");
  EXPECT_EQ(refused(echoed + "\"logprobs\": 1, \"echo\": true}"), "taken");
}

TEST(Completions, BodiesAreRead) {
  RunConfig config = byte_config();
  const Codec codec(config);
  const auto read = [&](const std::string& body) {
    return serve::parse_completion(body, codec, "tiny", kLimits);
  };
  using Prompts = std::vector<std::vector<int64_t>>;
  EXPECT_EQ(read(R"({"prompt": "ab"})").request.prompts, (Prompts{{97, 98}}));
  EXPECT_EQ(read(R"({"prompt": ["ab", ""]})").request.prompts, (Prompts{{97, 98}, {0}}));
  EXPECT_EQ(read(R"({"prompt": [3, 4]})").request.prompts, (Prompts{{3, 4}}));
  EXPECT_EQ(read(R"({"prompt": [[3], [4, 5]]})").request.prompts, (Prompts{{3}, {4, 5}}));
  const auto r = read(R"({"model": "tiny", "prompt": "a", "max_tokens": 7, "temperature": 0,
      "top_p": 0.5, "top_k": 3, "min_p": 0.1, "repetition_penalty": 1.5, "n": 2, "stop": "x",
      "seed": -5, "logprobs": 0, "echo": true, "stream": true, "user": "me", "best_of": 2,
      "stream_options": {"include_usage": true}, "presence_penalty": 0.0, "suffix": null})");
  EXPECT_EQ(r.request.max_tokens, 7);
  EXPECT_EQ(r.request.sampling.temperature, 0);
  EXPECT_EQ(r.request.sampling.top_p, 0.5);
  EXPECT_EQ(r.request.sampling.top_k, 3);
  EXPECT_EQ(r.request.sampling.min_p, 0.1);
  EXPECT_EQ(r.request.sampling.repetition_penalty, 1.5);
  EXPECT_EQ(r.request.samples, 2);
  EXPECT_EQ(r.request.stops, std::vector<std::string>{"x"});
  EXPECT_EQ(r.request.seed, static_cast<uint64_t>(-5));
  EXPECT_FALSE(r.request.drawn_seed);
  EXPECT_EQ(r.request.logprobs, 0);
  EXPECT_TRUE(r.request.echo && r.stream && r.include_usage);
  const auto plain = read(R"({"prompt": "a"})").request;
  EXPECT_EQ(plain.sampling.temperature, 1);
  EXPECT_FALSE(plain.max_tokens || plain.logprobs || plain.echo);
  EXPECT_TRUE(plain.drawn_seed);
  EXPECT_NE(plain.seed, read(R"({"prompt": "a"})").request.seed);
}

}  // namespace
}  // namespace headloom::test::text_test
