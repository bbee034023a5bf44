#include <cstdio>
#include <iostream>
#include <nlohmann/json.hpp>

#include "cli/command.h"
#include "core/error.h"
#include "core/text.h"
#include "data/tokenizer.h"

namespace headloom::cli {
namespace {

using Json = nlohmann::ordered_json;

struct TokenizeArguments {
  std::string tokenizer;
  bool json = false;
};

// Valid UTF-8, as JSON has to be, though a token may be a part of a character.
std::string shown(const Json& value) {
  return value.dump(-1, ' ', false, Json::error_handler_t::replace);
}

int run_tokenize(const TokenizeArguments& a) {
  const auto tokenizer = data::make_tokenizer(a.tokenizer);
  if (a.json) {
    std::string line;
    for (int64_t number = 1; std::getline(std::cin, line); ++number) {
      const Json text = Json::parse(line, nullptr, false);
      require(text.is_string(), "standard input: line ", number,
              " is no JSON string, expected one on each line.");
      const auto tokens = data::tokens_of(*tokenizer, text.get<std::string>());
      std::printf("%s\n", shown({{"tokens", tokens}, {"text", tokenizer->decode(tokens)}}).c_str());
    }
    return 0;
  }
  const std::string text = read_standard_input();
  const auto tokens = data::tokens_of(*tokenizer, text);
  for (const int64_t token : tokens) {
    std::printf("%lld\t%s\n", static_cast<long long>(token),
                shown(tokenizer->piece(token)).c_str());
  }
  std::fflush(stdout);  // where both go to one place, this comes last
  std::fprintf(
      stderr, "%s for %s; vocabulary of %lld\n", counted(std::ssize(tokens), "token").c_str(),
      counted(std::ssize(text), "byte").c_str(), static_cast<long long>(tokenizer->vocabulary()));
  return 0;
}

}  // namespace

Command tokenize_command() {
  return {"tokenize", "the tokens of the text on standard input",
          "headloom tokenize tokenizer.json < book.txt", [](CLI::App& app) -> std::function<int()> {
            auto a = std::make_shared<TokenizeArguments>();
            app.add_option("tokenizer", a->tokenizer,
                           "bytes, a tokenizer.json or a SentencePiece *.model")
                ->required();
            app.add_flag("--json", a->json,
                         "read a JSON string a line, print its tokens and them decoded");
            return [a] { return run_tokenize(*a); };
          }};
}

}  // namespace headloom::cli
