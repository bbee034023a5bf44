#include "distributed/parameter_shards.h"

#include <ATen/ATen.h>
#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <cstring>

#include "core/error.h"
#include "core/platform.h"

namespace headloom {

using at::Tensor;

static int64_t part_begin(int64_t elements, int64_t rank, int64_t size) {
  return elements * rank / size;
}

ParameterShards::ParameterShards(std::vector<std::vector<Tensor>> units, bool frees,
                                 Communicator& group)
    : frees_(frees), group_(group) {
  const int64_t n = group.size();
  for (std::vector<Tensor>& parameters : units) {
    Unit unit;
    std::vector<int64_t> of_rank(static_cast<size_t>(n), 0);
    for (const Tensor& p : parameters) {
      require(p.scalar_type() == parameters[0].scalar_type(), "parameters of the types ",
              parameters[0].scalar_type(), " and ", p.scalar_type(),
              " cannot be shared out among processes, expected one type.");
      if (!p.is_contiguous() || p.storage().nbytes() != p.nbytes()) {
        const Tensor own = p.detach().clone(at::MemoryFormat::Contiguous);
        p.unsafeGetTensorImpl()->shallow_copy_from(own.getIntrusivePtr());
      }
      for (int64_t r = 0; r < n; ++r) {
        of_rank[static_cast<size_t>(r)] +=
            part_begin(p.numel(), r + 1, n) - part_begin(p.numel(), r, n);
      }
    }
    const int64_t longest = *std::max_element(of_rank.begin(), of_rank.end());
    unit.joined =
        at::empty({longest}, parameters.empty() ? at::kFloat : parameters[0].scalar_type());
    int64_t first = 0;
    for (const Tensor& p : parameters) {
      const int64_t count =
          part_begin(p.numel(), group.rank() + 1, n) - part_begin(p.numel(), group.rank(), n);
      places_[p.unsafeGetTensorImpl()] = {units_.size(), unit.own.size()};
      unit.own.push_back(unit.joined.narrow(0, first, count));
      first += count;
    }
    unit.joined.narrow(0, first, longest - first).zero_();
    unit.parameters = std::move(parameters);
    units_.push_back(std::move(unit));
  }
}

Tensor owned_elements(const Tensor& whole, int64_t rank, int64_t size) {
  const int64_t begin = part_begin(whole.numel(), rank, size);
  const int64_t end = part_begin(whole.numel(), rank + 1, size);
  return whole.detach().reshape(-1).narrow(0, begin, end - begin);
}

Tensor ParameterShards::part_of(const Tensor& whole, int64_t rank) const {
  return owned_elements(whole, rank, group_.size());
}

bool ParameterShards::has(const Tensor& parameter) const {
  return places_.contains(parameter.unsafeGetTensorImpl());
}

Tensor& ParameterShards::own(const Tensor& parameter) {
  const auto [unit, place] = places_.at(parameter.unsafeGetTensorImpl());
  return units_[unit].own[place];
}

Tensor ParameterShards::gradient_memory(const Tensor& parameter) {
  const auto [index, place] = places_.at(parameter.unsafeGetTensorImpl());
  Unit& unit = units_[index];
  if (!unit.gradients.defined()) unit.gradients = at::empty_like(unit.joined);
  const Tensor& own = unit.own[place];
  return unit.gradients.narrow(0, own.storage_offset(), own.numel());
}

int64_t ParameterShards::first_of(const Tensor& parameter) const {
  return part_begin(parameter.numel(), group_.rank(), group_.size());
}

void ParameterShards::take() {
  for (Unit& unit : units_) {
    for (size_t i = 0; i < unit.parameters.size(); ++i) {
      unit.own[i].copy_(part_of(unit.parameters[i], group_.rank()));
    }
    if (!frees_) continue;
    free(unit, /*keep=*/false);
    release_free_memory();
  }
}

void ParameterShards::free(Unit& unit, bool keep) {
  if (unit.released) return;
  unit.released = true;
  for (const Tensor& p : unit.parameters) {
    at::DataPtr memory = p.storage().set_data_ptr(at::DataPtr(nullptr, p.device()));
    p.storage().set_nbytes(0);
    if (keep) spare_[p.nbytes()].push_back(std::move(memory));
  }
}

void ParameterShards::release(size_t unit) { free(units_[unit], /*keep=*/true); }

void ParameterShards::release() {
  for (size_t unit = 0; unit < size(); ++unit) release(unit);
}

void ParameterShards::request(size_t index) {
  Unit& unit = units_[index];
  if (unit.coming) return;
  const int64_t elements = group_.size() * unit.joined.numel();
  std::vector<Tensor>& spare = spare_all_[elements];
  if (spare.empty()) spare.push_back(at::empty({elements}, unit.joined.options()));
  unit.all = std::move(spare.back());
  spare.pop_back();
  unit.coming = group_.start_gather(unit.joined, unit.all);
}

void ParameterShards::gather(size_t index) {
  Unit& unit = units_[index];
  request(index);
  unit.coming();
  unit.coming = nullptr;
  const auto longest = unit.joined.numel();
  const auto element = static_cast<int64_t>(unit.joined.element_size());
  const auto* from = static_cast<const char*>(unit.all.const_data_ptr());
  std::vector<int64_t> read(static_cast<size_t>(group_.size()), 0);  // of each process's row
  for (const Tensor& p : unit.parameters) {
    if (unit.released) {
      std::vector<at::DataPtr>& spare = spare_[p.nbytes()];
      if (spare.empty()) spare.push_back(c10::GetCPUAllocator()->allocate(p.nbytes()));
      p.storage().set_data_ptr_noswap(std::move(spare.back()));
      p.storage().set_nbytes(p.nbytes());
      spare.pop_back();
    }
    // The bytes alone are written: what autograd has kept of the parameter stays valid, because its
    // values are those that it had.
    auto* to = static_cast<char*>(p.storage().mutable_data());
    for (int64_t r = 0; r < group_.size(); ++r) {
      int64_t& at = read[static_cast<size_t>(r)];
      const int64_t begin = part_begin(p.numel(), r, group_.size());
      const int64_t count = part_begin(p.numel(), r + 1, group_.size()) - begin;
      std::memcpy(to + begin * element, from + (r * longest + at) * element,
                  static_cast<size_t>(count * element));
      at += count;
    }
  }
  unit.released = false;
  spare_all_[unit.all.numel()].push_back(std::move(unit.all));
}

void ParameterShards::refresh() {
  for (size_t unit = 0; unit < size(); ++unit) {
    if (released(unit)) continue;
    if (unit + 1 < size() && !released(unit + 1)) request(unit + 1);
    gather(unit);
  }
}

}  // namespace headloom
