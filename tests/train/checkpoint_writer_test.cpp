// Checkpoints that are written while training goes on.
#include "train/checkpoint_writer.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "support.h"
#include "train/checkpoint.h"
#include "train/load.h"
#include "train/state.h"

namespace headloom::test::checkpoint_writer_test {
namespace {

using Cancelled = CheckpointWriter::Cancelled;

TEST(CheckpointWriter, WritesBesideItsCaller) {
  std::promise<void> go;
  std::atomic<int> written = 0;
  CheckpointWriter writer;
  writer.start([&](const Cancelled&) {
    go.get_future().wait();
    ++written;
  });
  writer.check();
  EXPECT_EQ(written, 0);
  go.set_value();
  writer.start([&](const Cancelled&) { ++written; });
  EXPECT_GE(written, 1) << "one after the other";
  writer.wait();
  EXPECT_EQ(written, 2);
}

TEST(CheckpointWriter, ThrowsInItsCaller) {
  CheckpointWriter writer;
  writer.start([](const Cancelled&) { fail("the disk is full"); });
  EXPECT_EQ(message_of([&] { writer.wait(); }), "the disk is full");
  writer.wait();
  writer.start([](const Cancelled&) { fail("again"); });
  std::string said;
  while (said.empty()) {
    try {
      writer.check();
    } catch (const Error& error) {
      said = error.what();
    }
  }
  EXPECT_EQ(said, "again");
  writer.check();
}

TEST(CheckpointWriter, ItsEndCancels) {
  bool told = false;
  {
    CheckpointWriter writer;
    writer.start([&](const Cancelled& cancelled) {
      while (!cancelled) std::this_thread::yield();
      told = true;
    });
  }
  EXPECT_TRUE(told);
}

// A copied snapshot has the values of its moment, whatever training does before it is written.
TEST(Snapshot, ACopyStands) {
  const TempFolder folder;
  const std::string run = folder.path("run");
  train_quietly(tiny_run("steps = 2"), {.folder = run});
  const CheckpointStore store(run);
  const LoadedRun loaded = load_run(run);
  const AdamW optimizer(*loaded.model, loaded.config.train);
  const at::NoGradGuard no_grad;
  std::vector<Tensor> before;
  TrainState state;
  state.step = 3;
  for (const Tensor& p : loaded.model->parameters()) before.push_back(p.clone());
  Snapshot snapshot = Snapshot::take(*loaded.model, optimizer, state);
  snapshot.copy();
  for (Tensor& p : loaded.model->parameters()) p.add_(1);
  store.save(snapshot);
  store.load_weights("3", *loaded.model);
  const auto after = loaded.model->parameters();
  for (size_t i = 0; i < after.size(); ++i) EXPECT_TRUE(after[i].equal(before[i]));
}

// The first process waits for the others' parts; where one never comes, nothing is published.
TEST(Snapshot, PartsAreOneCheckpoint) {
  const TempFolder folder;
  const std::string run = folder.path("run");
  train_quietly(tiny_run("steps = 2"), {.folder = run});
  const CheckpointStore store(run);
  const LoadedRun loaded = load_run(run);
  AdamW optimizer(*loaded.model, loaded.config.train);
  store.load(2, *loaded.model, optimizer);
  TrainState state;
  state.step = 3;
  Snapshot first = Snapshot::take(*loaded.model, optimizer, state);
  first.copy();
  Snapshot second = first;
  first.parts = second.parts = 2;
  second.part = 1;
  // The second has the last element of the first tensor, and nothing else.
  auto& [name, tensor] = first.optimizer.front();
  second.optimizer = {{name, tensor.flatten().slice(0, -1)}};
  tensor = tensor.flatten().slice(0, 0, -1);

  store.prepare();
  Cancelled cancelled = false;
  std::thread saving([&] { store.save(first, cancelled); });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_EQ(store.steps(), std::vector<int64_t>{2});
  store.save(second);
  saving.join();
  EXPECT_EQ(store.steps(), (std::vector<int64_t>{2, 3}));
  AdamW again(*loaded.model, loaded.config.train);
  store.load(3, *loaded.model, again);
  const NamedTensors expected = optimizer.state(), found = again.state();
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_TRUE(found[i].second.equal(expected[i].second)) << found[i].first;
  }

  first.state.step = second.state.step = 4;
  store.prepare();
  cancelled = true;
  EXPECT_EQ(message_of([&] { store.save(first, cancelled); }),
            "the checkpoint of step 4 could not be saved: another process has ended. The "
            "checkpoint of step 3 is intact.");
  EXPECT_EQ(store.steps(), (std::vector<int64_t>{2, 3}));
}

}  // namespace
}  // namespace headloom::test::checkpoint_writer_test
