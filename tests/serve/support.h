// A tiny decoder on bytes and an engine that runs it.
#pragma once

#include <gtest/gtest.h>

#include "../model/support.h"
#include "serve/engine.h"
#include "train/config.h"

namespace headloom::test {

using namespace std::chrono_literals;

inline RunConfig byte_config() {
  return read_run_config(parse_toml("[task]\ntype = 'text'\npaths = ['none.txt']\n", "run.toml"));
}

// How likely byte 0, the end, is beside the others: as its score is raised.
inline void set_end(Decoder& model, float score) {
  at::NoGradGuard no_grad;
  model.named_parameters()["output_bias"][0].fill_(score);
}

// Weights far from their start, so that texts vary; they do not end by themselves.
inline std::shared_ptr<Decoder> byte_decoder(const std::string& toml, int64_t length = 400) {
  at::manual_seed(3);
  auto model = std::make_shared<Decoder>(
      model_of(str("width = 48\ndepth = 2\nvocabulary = 256\nmax_length = ", length,
                   "\noutput_bias = true\n", toml)));
  model->eval();
  at::NoGradGuard no_grad;
  for (Tensor p : model->parameters()) p.add_(at::randn_like(p) * 0.05);
  set_end(*model, -100);
  return model;
}

inline const char* kAttention = "[[layer]]\nmixer = { type = 'dcmha', heads = 4 }\n";
inline const char* kRecurrence =
    "position = { type = 'none' }\n[[layer]]\nmixer = { type = 'rwkv' }\nchannel = { type = "
    "'rwkv_channel' }\n";

// What came of one text.
struct Written {
  std::string text, finish;
  std::vector<serve::Token> prompt, tokens;

  std::vector<int64_t> ids() const {
    std::vector<int64_t> out;
    for (const serve::Token& t : tokens) out.push_back(t.id);
    return out;
  }
};

inline std::vector<Written> collect(serve::Answer& answer, size_t texts = 1) {
  std::vector<Written> out(texts);
  while (!answer.done()) {
    for (const serve::Event& e : answer.wait(10ms)) {
      Written& w = out.at(static_cast<size_t>(e.choice));
      w.text += e.text;
      auto& list = e.prompt ? w.prompt : w.tokens;
      list.insert(list.end(), e.tokens.begin(), e.tokens.end());
      EXPECT_EQ(w.finish, "") << "news after the end";
      w.finish = e.finish;
    }
  }
  return out;
}

// Until `holds`, or long enough for a test to fail.
template <typename Condition>
bool soon(const Condition& holds) {
  for (int i = 0; i < 12000 && !holds(); ++i) std::this_thread::sleep_for(5ms);
  return holds();
}

}  // namespace headloom::test
