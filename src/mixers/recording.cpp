#include "mixers/recording.h"

#include "core/error.h"
#include "core/text.h"

namespace headloom {

std::string Recording::full(const std::string& name) const {
  return place_.empty() ? name : place_ + "." + name;
}

bool Recording::wants(const std::string& name) {
  offered_.insert(name);
  bool wanted = false;
  for (const std::string& one : names_) {
    if (one != name && one != full(name)) continue;
    found_.insert(one);
    wanted = true;
  }
  return wanted;
}

bool Recording::wants_family(const std::string& name) {
  offered_.insert(name);
  for (const std::string& one : names_) {
    for (const std::string& own : {name, full(name)}) {
      if (one == own || one.starts_with(own + ".")) return true;
    }
  }
  return false;
}

void Recording::put(const std::string& name, const at::Tensor& value) {
  if (!wants(name)) return;
  const std::string key = full(name);
  for (auto& [present, tensor] : tensors_) {
    if (present != key) continue;
    tensor = value;
    return;
  }
  tensors_.emplace_back(key, value);
}

void Recording::to_cpu() {
  for (auto& [name, tensor] : tensors_) tensor = tensor.cpu();
}

at::Tensor Recording::find(const std::string& full_name) const {
  for (const auto& [name, tensor] : tensors_) {
    if (name == full_name) return tensor;
  }
  return {};
}

void Recording::check_all_found() const {
  for (const std::string& name : names_) {
    if (found_.contains(name)) continue;
    const std::vector<std::string> present(offered_.begin(), offered_.end());
    const std::string near = nearest(name, present);
    usage_error("this model has no '", name, "' to show; ",
                near.empty() ? "" : "did you mean '" + near + "'? ", "it has ", join(present), ".");
  }
}

}  // namespace headloom
