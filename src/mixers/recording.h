// What a forward pass shows of its inside: attention maps, hidden states, decays, hidden units.
//
// Whoever wants to see something puts a Recording into the MixerContext (ModelInput::recording).
// Layers and mixers offer what they have under names; only what is wanted is computed and kept.
// docs/analyses.md lists the names.
#pragma once

#include <ATen/core/Tensor.h>

#include <set>
#include <string>
#include <utility>
#include <vector>

namespace headloom {

class Recording {
 public:
  // `names` are wanted: "weights" of every layer, or "layer3.weights" of one.
  explicit Recording(std::vector<std::string> names) : names_(std::move(names)) {}

  // What is offered from now on belongs to `place`: "layer3", or "decoder.layer3".
  void enter(const std::string& place) { place_ = place; }
  // Whether the present place's `name` is wanted. The name counts as offered.
  bool wants(const std::string& name);
  // Whether the present place's `name`, or anything below it ("name.part"), is wanted. Offers
  // `name`; its parts are offered by wants() and put().
  bool wants_family(const std::string& name);
  // Keeps `value` where it is wanted. A layer that runs twice keeps the last.
  void put(const std::string& name, const at::Tensor& value);

  // Takes what was kept to the CPU.
  void to_cpu();

  // Full names, in the order in which they came.
  const std::vector<std::pair<std::string, at::Tensor>>& tensors() const { return tensors_; }
  // Of a full name; undefined where it was not kept.
  at::Tensor find(const std::string& full_name) const;
  // Throws UsageError for the first wanted name that nothing has offered. It says what there is.
  void check_all_found() const;

 private:
  std::string full(const std::string& name) const;

  const std::vector<std::string> names_;
  std::string place_;
  std::set<std::string> found_;    // those of names_ that were offered
  std::set<std::string> offered_;  // without their places
  std::vector<std::pair<std::string, at::Tensor>> tensors_;
};

}  // namespace headloom
