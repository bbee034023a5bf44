// train.dtype = "float64": everything that a run holds is float64, and it computes what float32
// does.
#include <gtest/gtest.h>

#include "support.h"
#include "train/load.h"

namespace headloom::test::float64_test {
namespace {

TEST(Float64, HoldsEverythingAndLosesWhatFloat32Loses) {
  const TempFolder folder;
  const std::string steps = "steps = 6\neval_every = 3\n";
  train_quietly(tiny_run(steps), {.folder = folder.path("narrow")});
  train_quietly(tiny_run(steps + "dtype = 'float64'\n"), {.folder = folder.path("wide")});
  const std::vector<double> narrow = losses_of(folder.path("narrow"));
  const std::vector<double> wide = losses_of(folder.path("wide"));
  ASSERT_EQ(wide.size(), 6U);
  ASSERT_EQ(narrow.size(), 6U);
  for (size_t i = 0; i < 6; ++i) EXPECT_NEAR(wide[i], narrow[i], 1e-4) << i;
  // Not what float32 computed.
  EXPECT_NE(wide[0], static_cast<double>(static_cast<float>(wide[0])));

  for (const char* file : {"model", "optimizer"}) {
    const std::string path = folder.path(str("wide/checkpoints/step-6/", file, ".safetensors"));
    for (const auto& [name, tensor] : read_safetensors(path)) {
      if (!tensor.is_floating_point() || name.starts_with("steps.")) continue;
      EXPECT_EQ(tensor.scalar_type(), at::kDouble) << file << " " << name;
    }
  }
  EXPECT_EQ(load_run(folder.path("wide")).model->parameters()[0].scalar_type(), at::kDouble);
}

TEST(Float64, ResumesBitForBit) {
  const TempFolder folder;
  const std::string more = "eval_every = 3\ndtype = 'float64'\n";
  train_quietly(tiny_run("steps = 6\n" + more), {.folder = folder.path("whole")});
  train_quietly(tiny_run("steps = 3\n" + more), {.folder = folder.path("parts")});
  train_quietly(tiny_run("steps = 6\n" + more), {.folder = folder.path("parts"), .resume = true});
  EXPECT_EQ(bytes_of(folder.path("whole/checkpoints/step-6/model.safetensors")),
            bytes_of(folder.path("parts/checkpoints/step-6/model.safetensors")));
}

TEST(Float64, ARunIsConvertedToOtherTypesAndBack) {
  const TempFolder folder;
  train_quietly(tiny_run("steps = 2\ndtype = 'float64'\n"), {.folder = folder.path("run")});
  for (const char* type : {"float32", "bfloat16", "float64"}) {
    LoadedRun run = load_run(folder.path("run"));
    hold_weights(run, {.dtype = type});
    EXPECT_EQ(run.config.train.dtype, type);
    EXPECT_EQ(run.model->parameters()[0].scalar_type(),
              std::string(type) == "float64" ? at::kDouble : at::kFloat);
  }
  LoadedRun run = load_run(folder.path("run"));
  EXPECT_EQ(message_of<UsageError>([&] { hold_weights(run, {.quantize = "int8"}); }),
            "weights in int8 cannot be computed with in float64, expected --dtype float32 or "
            "bfloat16.");
}

}  // namespace
}  // namespace headloom::test::float64_test
