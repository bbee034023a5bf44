// Decoding: a token's time beside the memory's bound, in narrower types, of mechanisms beside plain
// attention, and along the context.
#include <ATen/ATen.h>

#include <memory>

#include "bench/decode_step.h"
#include "bench/rates.h"
#include "bench/requirements.h"
#include "core/text.h"
#include "ops/machine_rates/machine_rates.h"

namespace headloom::bench {
namespace {

// Reads `bytes`, which are more than any cache holds, once with all threads, in the way that is the
// fastest here.
class StreamingRead {
 public:
  explicit StreamingRead(int64_t bytes)
      : data_(at::ones({bytes / kPiece * (kPiece / int64_t{sizeof(float)})})),
        fastest_(fastest_reading(data_).how) {}
  void operator()() { ops::read_all(data_, fastest_); }

 private:
  static constexpr int64_t kPiece = 1 << 20;  // bytes, as read_all() wants them
  const Tensor data_;
  const ops::Reading fastest_;
};

std::shared_ptr<Decoder> decoder_of(const std::string& toml) {
  ModelConfig config;
  read_fields(parse_toml(toml, "bench"), config, "model");
  seed_all();
  return std::dynamic_pointer_cast<Decoder>(build_model(config));
}

// 124M parameters; `mixer` in place of plain attention.
std::shared_ptr<Decoder> model_124m(int64_t max_length, const std::string& mixer = "mha") {
  return decoder_of(str("preset = \"transformer++-124m\"\nvocabulary = 50257\nmax_length = ",
                        max_length, "\n[[layer]]\nmixer = { type = \"", mixer,
                        "\", heads = 12 }\nchannel = { type = \"swiglu\" }\n"));
}

int64_t parameter_bytes(const Decoder& model) {
  int64_t bytes = 0;
  for (const Tensor& p : model.parameters()) bytes += static_cast<int64_t>(p.nbytes());
  return bytes;
}

}  // namespace

void bench_decode(const BenchOptions& a, Requirements& rows) {
  const double seconds = 2 * a.seconds;
  const auto ratio = [](DecodeStep& step, DecodeStep& other, double time) {
    return time_tokens(step, other, time).ratio.median;
  };
  rows.at_least("memory's bound over a token's time, 124M float32, context 512", 0.8, [&] {
    const auto model = model_124m(1024);
    DecodeStep step(model, 512);
    StreamingRead read(parameter_bytes(*model));
    return time_tokens(read, step, seconds).ratio.median;
  });
  const CachePolicy in_int8{.dtype = "int8"};
  const auto converted = [&](at::ScalarType type, const std::string& dtype,
                             const CachePolicy& cache = {}) {
    const auto model = model_124m(1024);
    model->convert_weights(type);
    DecodeStep step(model_124m(1024), 512), other(model, 512, dtype, cache);
    return ratio(step, other, seconds);
  };
  rows.at_least("bfloat16 over float32 speed, 124M, context 512", 1.8,
                [&] { return converted(at::kBFloat16, "bfloat16"); });
  rows.at_least("int8 and bfloat16 over float32 speed, 124M, context 512", 3,
                [&] { return converted(at::kChar, "bfloat16"); });
  rows.at_least("int8 weights alone over float32 speed, 124M, context 512", 3,
                [&] { return converted(at::kChar, ""); });
  constexpr auto kInt4 = at::ScalarType::Int4;
  rows.at_least("int4 and bfloat16 over float32 speed, 124M, context 512", 4,
                [&] { return converted(kInt4, "bfloat16"); });
  rows.at_least("int4 weights alone over float32 speed, 124M, context 512", 4,
                [&] { return converted(kInt4, ""); });
  rows.at_least("int4, cache in int8, over float32 speed, 124M, context 512", 4,
                [&] { return converted(kInt4, "", in_int8); });
  rows.at_least("cache in int8 over float32 speed, 124M, context 8192", 1.2, [&] {
    const auto model = model_124m(8200);
    DecodeStep wide(model, 8192), narrow(model, 8192, "", in_int8);
    return ratio(wide, narrow, seconds);
  });
  rows.at_least("float32 cache over int8, bytes of the state, 124M, context 1024", 3.7, [&] {
    const auto model = model_124m(1024);
    return DecodeStep(model, 1024).state_bytes() /
           DecodeStep(model, 1024, "", in_int8).state_bytes();
  });
  rows.at_most("dcmha over mha, time a token, 124M, context 2048", 1.15, [&] {
    DecodeStep dcmha(model_124m(4096, "dcmha"), 2048), mha(model_124m(4096), 2048);
    return ratio(dcmha, mha, seconds);
  });
  for (const char* preset : {"retnet", "rwkv", "mamba"}) {
    rows.at_most(str(preset, "-tiny, time a token, context 32768 over 512"), 1.1, [&] {
      const auto model =
          decoder_of(str("preset = \"", preset, "-tiny\"\nvocabulary = 256\nmax_length = 512\n"));
      DecodeStep late(model, 32768), early(model, 512);
      return ratio(late, early, a.seconds);
    });
  }
  const CachePolicy tova = CachePolicy::parse("tova:512");
  rows.at_most("tova:512 over the full cache, time a token, 124M, context 4096", 1.0, [&] {
    const auto model = model_124m(4096);
    DecodeStep forgetful(model, 4096, "", tova), whole(model, 4096);
    return ratio(forgetful, whole, seconds);
  });
  rows.at_most("tova:512, bytes of the state at context 4096 over 1024, 124M", 1.0, [&] {
    const auto model = model_124m(4096);
    return DecodeStep(model, 4096, "", tova).state_bytes() /
           DecodeStep(model, 1024, "", tova).state_bytes();
  });
  rows.at_least("tokens a second, 8 texts side by side over one, 124M, context 512", 3, [&] {
    const auto model = model_124m(1024);
    DecodeStep one(model, 512), eight(model, 512, "", {}, 8);
    return 8 * ratio(one, eight, seconds);
  });
  rows.at_most("a text leaves 16 and another joins, over a step's time, 124M, context 512", 2, [&] {
    const auto model = model_124m(1024);
    DecodeStep step(model, 512, "", {}, 16);
    return time_pairs([&] { step.change(); }, [&] { step(); }, seconds, 15).ratio.median;
  });
  rows.at_most("prefill over training's forward pass, 124M, 2048 tokens", 1.1, [&] {
    const auto model = model_124m(2048);
    const Tensor tokens = at::randint(0, 50257, {1, 2048}, at::kLong);
    const auto read = [&] {
      DecoderState state;
      model->extend(tokens, state, 1);
    };
    const auto forward = [&] { model->hidden({.tokens = tokens}); };
    return time_pairs(read, forward, seconds).ratio.median;
  });
}

}  // namespace headloom::bench
