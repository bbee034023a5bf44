// The JSON of a checkpoint's state.json. Free of torch.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "train/metrics.h"

namespace headloom {

// How a tensor is cut of which each file in parts has one part (mixers/tensor_parallel.h).
struct StoredCut {
  int64_t dim = 0;
  std::vector<int64_t> segments;
};

struct StoredFile {
  int64_t bytes = 0;
  uint64_t crc = 0;
};

// The data that a run is trained on, to tell whether they have changed.
struct StoredData {
  int64_t count = 0;  // data::DataSize
  std::string fingerprint;

  bool operator==(const StoredData&) const = default;
};

// Where a run stands after `step` optimiser steps. The data cursor is the step itself: a task's
// batches are a pure function of (seed, index).
struct TrainState {
  int64_t step = 0;
  int64_t tokens = 0;
  double seconds = 0;  // of training, evaluations left out
  std::optional<int64_t> best_step;
  double best_loss = 0;
  std::string model = {};  // the [model] table that the weights belong to; "" before it was kept
  std::string config = {};  // the run's configuration, as config.toml had it; "" as above
  std::map<std::string, StoredFile> files;
  std::map<std::string, StoredCut> cuts = {};              // by the parameter's name
  std::map<std::string, std::string> product_routes = {};  // ops/product/product.h
  // Those of the other processes that the run was shared by, from rank 1 on.
  std::vector<std::map<std::string, std::string>> other_routes = {};
  // Absent in checkpoints that were written before it was kept, and of generated data.
  std::optional<StoredData> data = {};
  SummedLoad load = {};  // of experts since the last evaluation
};

// The text carries its own checksum, so that damage is found on reading.
std::string state_json(const TrainState& state);
TrainState parse_state(const std::string& json, const std::string& path);

}  // namespace headloom
