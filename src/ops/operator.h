// One mechanism for every operator: an operator says once what it takes, what it computes and when
// kernels of its own run, and this header makes the rest.
//
//   headloom::X            the operator users call: checks, autocast, choice of the backend
//   headloom::X_fused      its fused kernels, with their fake (Meta) kernel and autograd formula
//   headloom::X_backward   the gradients, by fused kernels; the gradient of a gradient is that of
//                          the definition
//
// An operator is a struct `Op` in its folder's declaration.h:
//
//   struct Op {
//     struct Arguments {...};           // everything it is given
//     using Result = at::Tensor;        // or (output, state), or a vector of tensors
//     static constexpr const char *kName, *kDoc, *kSource;      // kDoc, kSource: `headloom list`
//     static constexpr const char* kOtherwise;                  // what runs where no kernel does
//     static auto arguments(Arguments&);                        // a tuple of Argument, below
//     static void check(const Arguments&);                      // throws, naming the argument
//     static Result reference(const Arguments&);                // the definition, in plain ATen
//     static std::vector<Tensor> outputs(const Arguments&, bool training);   // uninitialised
//   };
//
// outputs() has what the kernels return: first the results, then what the backward wants kept,
// which is empty where not `training`. Sizes stay symbolic. Optional members:
//
//     static void autocast(Arguments&, const AutocastCast&);  // under autocast; absent: left alone
//     static void prepare(Arguments&);                        // before kernels: casts, expansions
//     static bool prefers_kernels(const Arguments&);          // absent: always, where they can run
//     static Result otherwise(const Arguments&);              // instead of the reference, unless
//                                                             // that is asked for
//     static Result definition(const Arguments&);             // instead of the reference where
//                                                             // that has no second derivative, or
//                                                             // where result() changes outputs
//     static constexpr const char* kReturns;                  // the schema's, of a pair that is
//                                                             // no (output, state)
//     static constexpr size_t kOutputs;                       // how many outputs are results
//     static constexpr bool kScalesKept;                      // Call::scales_kept(); absent: no
//     static Result result(const Arguments&, std::vector<Tensor>);    // made from these outputs
//
// `const Define<Op> x_operator;` in a source file registers it. Kernels for a device register
// themselves from a source file of their own: `const Kernels<Op> x_cpu({.device = ...})`.
#pragma once

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "ops/case.h"
#include "ops/check.h"

namespace headloom::ops {

using at::Tensor;
using torch::autograd::variable_list;

// ---------------------------------------------------------------------------------------------
// Arguments
// ---------------------------------------------------------------------------------------------

// The kinds of arguments: the type in the schema, the C++ type that the dispatcher passes, and the
// way between that and the member of Arguments. An absent optional tensor is undefined there.
struct RequiredTensor {
  using Value = Tensor;
  using Passed = const Tensor&;
  static constexpr const char *kType = "Tensor", *kStandard = nullptr;
  static const Tensor& pack(const Tensor& t) { return t; }
  static const Tensor& pack(Tensor&&) = delete;
  static void unpack(const Tensor& from, Tensor& to) { to = from; }
  template <typename F>
  static void each_tensor(Tensor& t, const F& f) {
    f(t);
  }
};

struct OptionalTensor {
  using Value = Tensor;
  using Passed = const std::optional<Tensor>&;
  static constexpr const char *kType = "Tensor?", *kStandard = "None";
  static std::optional<Tensor> pack(const Tensor& t) {
    return t.defined() ? std::optional<Tensor>(t) : std::nullopt;
  }
  static void unpack(const std::optional<Tensor>& from, Tensor& to) {
    if (from) to = *from;
  }
  template <typename F>
  static void each_tensor(Tensor& t, const F& f) {
    f(t);
  }
};

// A tensor of a Tensor?[] as kernels read it. In other arguments the dispatcher makes ordinary
// tensors of those that are negated when they are read, and of zeros without memory.
inline Tensor resolved(const Tensor& t) {
  if (!t.defined()) return t;
  return t._is_zerotensor() ? at::zeros_symint(t.sym_sizes(), t.options()) : t.resolve_neg();
}

// A value that is no tensor. A string is passed as a view.
template <typename T>
struct Setting {
  using Value = T;
  using Passed = std::conditional_t<std::is_same_v<T, std::string>, std::string_view, T>;
  static constexpr const char* kType = std::is_same_v<T, bool>                     ? "bool"
                                       : std::is_same_v<T, int64_t>                ? "int"
                                       : std::is_same_v<T, double>                 ? "float"
                                       : std::is_same_v<T, std::string>            ? "str"
                                       : std::is_same_v<T, std::optional<int64_t>> ? "int?"
                                                                                   : "float?";
  static constexpr const char* kStandard = nullptr;
  static const T& pack(const T& value) { return value; }
  static const T& pack(T&&) = delete;
  static void unpack(Passed from, T& to) { to = T(from); }
  template <typename F>
  static void each_tensor(T&, const F&) {}
};

// One argument of an operator. Kind is one of the above or a struct of the same shape.
template <typename K, bool kHasGradient>
struct Argument {
  using Kind = K;
  static constexpr bool kDifferentiable = kHasGradient;
  const char* name;
  typename K::Value& value;
  const char* standard = K::kStandard;  // in the schema; null: it must be given
};

// The fused kernels compute its gradient, or they do not and the reference runs where it is wanted.
inline Argument<RequiredTensor, true> differentiable(const char* name, Tensor& t) {
  return {name, t};
}
inline Argument<RequiredTensor, false> constant(const char* name, Tensor& t) { return {name, t}; }
inline Argument<OptionalTensor, true> optional_differentiable(const char* name, Tensor& t) {
  return {name, t};
}
inline Argument<OptionalTensor, false> optional_constant(const char* name, Tensor& t) {
  return {name, t};
}
template <typename T>
Argument<Setting<T>, false> setting(const char* name, T& value, const char* standard = nullptr) {
  return {name, value, standard};
}

// Fresh memory of t's sizes and type, contiguous whatever t's strides are.
inline Tensor contiguous_like(const Tensor& t) {
  return at::empty_symint(t.sym_sizes(), t.options().memory_format(at::MemoryFormat::Contiguous));
}

// The same for an intermediate result in float32.
inline Tensor contiguous_float(c10::SymIntArrayRef sizes, const Tensor& like) {
  return at::empty_symint(sizes, like.options().dtype(at::kFloat));
}

// Casts what is given to autocast's type for the device, once a step for a leaf, as at::linear does
// with its weights. Undefined tensors and those that are not floating stay.
class AutocastCast {
 public:
  explicit AutocastCast(c10::DeviceType device)
      : device_(device), type_(at::autocast::get_autocast_dtype(device)) {}

  template <typename... T>
  void operator()(T&... tensors) const {
    const auto one = [&](Tensor& t) {
      if (t.defined()) t = at::autocast::cached_cast(type_, t, device_);
    };
    (one(tensors), ...);
  }

 private:
  c10::DeviceType device_;
  at::ScalarType type_;
};

// ---------------------------------------------------------------------------------------------
// Kernels
// ---------------------------------------------------------------------------------------------

// What the kernels of a backward are given beside the arguments.
template <typename Op>
struct Backward {
  std::vector<Tensor> grads;  // of the results. That of a returned state may be undefined: zero
  std::vector<Tensor> kept;   // what the forward kept
  // Where the gradients go, at the arguments' names. They may be of any floating type, but must not
  // share memory. One that is not wanted may stay undefined.
  typename Op::Arguments gradients;
  int64_t wanted = 0;  // a bit for each differentiable tensor, in the order of the arguments

  // Whether the gradient that belongs to this place in `gradients` is wanted.
  bool wants(const Tensor& place);
};

// Kernels of Op for one device. They see tensors of that device whose first has one of `types`.
template <typename Op>
struct Kernel {
  using Arguments = typename Op::Arguments;
  c10::DeviceType device = at::kCPU;
  std::vector<at::ScalarType> types = {at::kFloat, at::kBFloat16};
  std::string limits = {};  // for `headloom list`: "up to 4 mixes"; empty: none
  // Why they cannot run a case, as the end of a sentence, or null. Absent: they run every case.
  const char* (*unsupported)(const Arguments&) = nullptr;
  // Returns what Op::outputs() describes.
  std::vector<Tensor> (*forward)(const Arguments&, bool training) = nullptr;
  // Absent beside `forward`: the kernel does not run where a gradient is wanted.
  void (*backward)(const Arguments&, Backward<Op>&) = nullptr;
};

// "float32 and bfloat16".
std::string type_names(const std::vector<at::ScalarType>& types);

// Whether a call runs inside a transform of torch.func (grad, vmap), which refuses autograd
// functions written in C++: such calls go to an operator's reference. A backward of a batch of
// gradients (is_grads_batched) runs inside one too.
bool in_transform();

// While one lives, operators compute what they compute where a gradient is wanted, also without
// GradMode: of a forward pass that is computed again when the gradient comes.
class GradientComes {
 public:
  GradientComes();
  ~GradientComes();
  GradientComes(const GradientComes&) = delete;
  GradientComes& operator=(const GradientComes&) = delete;
  static bool is_announced();

 private:
  const bool before_;
};

namespace detail {

template <typename Op, typename List>
struct Bound;  // below

template <typename Op>
using ArgumentList = decltype(Op::arguments(std::declval<typename Op::Arguments&>()));
template <typename Op>
using BoundTo = Bound<Op, ArgumentList<Op>>;

template <typename Op>
std::vector<Kernel<Op>>& kernels() {
  static std::vector<Kernel<Op>> registered;
  return registered;
}

template <typename Op>
const Kernel<Op>* kernels_for(c10::DeviceType device) {
  for (const Kernel<Op>& k : kernels<Op>()) {
    if (k.device == device) return &k;
  }
  return nullptr;
}

// A tensor among the arguments: `name` is its argument's.
struct Slot {
  const char* name;
  Tensor* tensor;
  bool differentiable;
};

using Slots = c10::SmallVector<Slot, 24>;

template <typename Op>
Slots slots(typename Op::Arguments& a) {
  Slots out;
  std::apply(
      [&](const auto&... argument) {
        const auto add = [&](const auto& one) {
          using A = std::decay_t<decltype(one)>;
          A::Kind::each_tensor(
              one.value, [&](Tensor& t) { out.push_back({one.name, &t, A::kDifferentiable}); });
        };
        (add(argument), ...);
      },
      Op::arguments(a));
  return out;
}

// Whether the kernels of Op have a gradient at all.
template <typename... A>
constexpr bool any_differentiable(const std::tuple<A...>*) {
  return (A::kDifferentiable || ...);
}
template <typename Op>
constexpr bool kHasGradient = any_differentiable(static_cast<const ArgumentList<Op>*>(nullptr));

inline std::vector<Tensor> listed(Tensor t) { return {std::move(t)}; }
inline std::vector<Tensor> listed(std::tuple<Tensor, Tensor> t) {
  return {std::move(std::get<0>(t)), std::move(std::get<1>(t))};
}
inline std::vector<Tensor> listed(std::vector<Tensor> t) { return t; }

template <typename Op>
constexpr bool kReturnsList = std::is_same_v<typename Op::Result, std::vector<Tensor>>;
template <typename Op>
constexpr const char* return_type() {
  if constexpr (requires { Op::kReturns; }) {
    return Op::kReturns;
  } else if constexpr (kReturnsList<Op>) {
    return "Tensor[]";
  } else {
    return std::is_same_v<typename Op::Result, Tensor> ? "Tensor" : "(Tensor output, Tensor state)";
  }
}

// How many of `available` outputs are results; the others are kept for the backward.
template <typename Op>
size_t result_count(size_t available) {
  if constexpr (requires { Op::kOutputs; }) {
    return Op::kOutputs;
  } else if constexpr (kReturnsList<Op>) {
    return available;
  } else {
    return std::is_same_v<typename Op::Result, Tensor> ? 1 : 2;
  }
}

template <typename Op>
typename Op::Result result_of(const typename Op::Arguments& a, std::vector<Tensor> outputs) {
  outputs.resize(result_count<Op>(outputs.size()));
  if constexpr (requires { Op::result(a, outputs); }) {
    return Op::result(a, std::move(outputs));
  } else if constexpr (kReturnsList<Op>) {
    return outputs;
  } else if constexpr (std::is_same_v<typename Op::Result, Tensor>) {
    return std::move(outputs[0]);
  } else {
    return {std::move(outputs[0]), std::move(outputs[1])};
  }
}

template <typename Op>
typename Op::Result definition(const typename Op::Arguments& a) {
  if constexpr (requires { Op::definition(a); }) {
    return Op::definition(a);
  } else {
    return Op::reference(a);
  }
}

// A call of an operator as autograd sees it: what it does with fused kernels is the same for all.
class Call : public torch::CustomClassHolder {
 public:
  using Grads = c10::List<std::optional<Tensor>>;

  virtual c10::intrusive_ptr<Call> without_tensors() const = 0;  // a copy that has the settings
  virtual Slots tensors() = 0;
  virtual bool returns_list() const = 0;
  virtual size_t results(size_t outputs) const = 0;  // how many of the kernels' outputs are results
  virtual std::vector<Tensor> outputs() const = 0;   // what Op::outputs() describes, uninitialised
  virtual std::vector<Tensor> definition() const = 0;
  virtual std::vector<Tensor> fused() const = 0;  // headloom::X_fused
  virtual std::vector<Tensor> backward(const Grads& grads, const variable_list& kept,
                                       int64_t wanted) const = 0;  // headloom::X_backward
  // Whether finite gradients are what is kept, one tensor for each differentiable one that is
  // there, times the first result's gradient.
  virtual bool scales_kept() const = 0;
};

// What call.fused() gives, recorded so that it has a gradient.
variable_list record(const c10::intrusive_ptr<Call>& call);

// The operators as the dispatcher sees them: functions with one parameter an argument.
template <typename Op, typename... A>
struct Bound<Op, std::tuple<A...>> {
  using Arguments = typename Op::Arguments;
  using Result = typename Op::Result;
  using OptionalTensors = Call::Grads;
  using Backend = std::optional<std::string_view>;
  static constexpr const char* kOp = Op::kName;

  static Arguments unpack(typename A::Kind::Passed... passed) {
    Arguments a;
    std::apply([&](const A&... argument) { (A::Kind::unpack(passed, argument.value), ...); },
               Op::arguments(a));
    return a;
  }

  // Calls f with what the dispatcher passes for `a`.
  template <typename F>
  static auto with_passed(const Arguments& a, const F& f) {
    // arguments() only says where the members are.
    return std::apply([&](const A&... argument) { return f(A::Kind::pack(argument.value)...); },
                      Op::arguments(const_cast<Arguments&>(a)));
  }

  static std::string schema(const char* suffix, const char* before, const char* after,
                            const char* returns, bool with_standards) {
    std::string out = std::string(kOp) + suffix + "(" + before;
    const auto add = [&](const auto& argument) {
      if (out.back() != '(' && out.back() != ' ') out += ", ";
      out += std::string(std::decay_t<decltype(argument)>::Kind::kType) + " " + argument.name;
      if (with_standards && argument.standard) out += std::string("=") + argument.standard;
    };
    Arguments a;
    std::apply([&](const A&... argument) { (add(argument), ...); }, Op::arguments(a));
    return out + after + ") -> " + returns;
  }

  // A graph that is traced for any size takes the kernels of the CPU: what is preferred there
  // depends on the sizes, and asking would bind the graph to those of the trace.
  static bool is_for_any_size(Arguments& a) {
    const Tensor& first = std::get<0>(Op::arguments(a)).value;
    return first.unsafeGetTensorImpl()->has_symbolic_sizes_strides() && first.is_cpu();
  }

  // --- headloom::X ---

  static Result composite(typename A::Kind::Passed... passed, Backend backend) {
    Arguments a = unpack(passed...);
    check_backend(kOp, backend);
    for (const Slot& slot : slots<Op>(a)) {
      if (slot.tensor->defined()) check_dense(kOp, *slot.tensor, slot.name);
    }
    Op::check(a);
    const bool asked = backend.has_value();
    if (asked && *backend == "reference") return Op::reference(a);
    const std::string reason = unsupported(a);
    TORCH_CHECK_NOT_IMPLEMENTED(reason.empty() || !asked, kOp,
                                ": backend \"fused\" cannot run this case because ", reason,
                                "; use None or \"reference\".");
    bool fused = reason.empty();
    if constexpr (requires { Op::prefers_kernels(a); }) {
      fused = fused && (asked || is_for_any_size(a) || Op::prefers_kernels(a));
    }
    if (!fused) {
      if constexpr (requires { Op::otherwise(a); }) {
        return Op::otherwise(a);
      } else {
        return Op::reference(a);
      }
    }
    if constexpr (requires { Op::prepare(a); }) Op::prepare(a);
    return result_of<Op>(a, call_fused(a, wants_gradient(a)));
  }

  static Result call(const Arguments& a, Backend backend) {
    static const auto op =
        find<Result(typename A::Kind::Passed..., Backend)>(std::string("headloom::") + kOp);
    return with_passed(a, [&](const auto&... passed) { return op.call(passed..., backend); });
  }

  static Result autocast(typename A::Kind::Passed... passed, Backend backend) {
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    Arguments a = unpack(passed...);
    Op::autocast(a, AutocastCast(slots<Op>(a)[0].tensor->device().type()));
    return call(a, backend);
  }

  // Why no kernel takes the case, as the end of a sentence; empty where one does.
  static std::string unsupported(const Arguments& given) {
    if (in_transform()) return "it runs inside a transform of torch.func";
    Arguments& a = const_cast<Arguments&>(given);
    const Slots tensors = slots<Op>(a);
    for (const Slot& slot : tensors) {
      if (slot.tensor->defined() && slot.tensor->_fw_grad(/*level=*/0).defined()) {
        return std::string(slot.name) + " has a tangent of forward-mode differentiation";
      }
    }
    const Tensor& first = *tensors[0].tensor;
    const Kernel<Op>* kernel = kernels_for<Op>(first.device().type());
    if (kernel == nullptr) return "there is no fused kernel for this device";
    const bool has_gradient = kernel->forward == nullptr || kernel->backward != nullptr;
    if (!has_gradient && (GradientComes::is_announced() || wants_gradient(given))) {
      return "a gradient is wanted";
    }
    const char* reason = kernel->unsupported ? kernel->unsupported(given) : nullptr;
    if (reason != nullptr) return reason;
    const auto& types = kernel->types;
    if (std::find(types.begin(), types.end(), first.scalar_type()) == types.end()) {
      return "the fused kernels take " + type_names(types) + " only";
    }
    if (at::GradMode::is_enabled()) {
      for (const Slot& slot : tensors) {
        if (slot.differentiable || !slot.tensor->defined() || !slot.tensor->requires_grad()) {
          continue;
        }
        return kHasGradient<Op> ? std::string(slot.name) + " wants a gradient"
                                : "a gradient is wanted";
      }
    }
    return "";
  }

  static bool wants_gradient(const Arguments& a) {
    if (!kHasGradient<Op> || !at::GradMode::is_enabled()) return false;
    for (const Slot& slot : slots<Op>(const_cast<Arguments&>(a))) {
      if (slot.differentiable && slot.tensor->defined() && slot.tensor->requires_grad()) {
        return true;
      }
    }
    return false;
  }

  // --- headloom::X_fused ---

  static const auto& fused_op() {
    static const auto op = find<std::vector<Tensor>(typename A::Kind::Passed..., bool)>(
        std::string("headloom::") + kOp + "_fused");
    return op;
  }

  static std::vector<Tensor> call_fused(const Arguments& a, bool training) {
    return with_passed(a,
                       [&](const auto&... passed) { return fused_op().call(passed..., training); });
  }

  static std::vector<Tensor> fused(typename A::Kind::Passed... passed, bool training) {
    const Arguments a = unpack(passed...);
    const Tensor& first = *slots<Op>(const_cast<Arguments&>(a))[0].tensor;
    return kernels_for<Op>(first.device().type())->forward(a, training);
  }

  static std::vector<Tensor> fused_meta(typename A::Kind::Passed... passed, bool training) {
    return Op::outputs(unpack(passed...), training);
  }

  static std::vector<Tensor> fused_autograd(typename A::Kind::Passed... passed, bool training) {
    if constexpr (kHasGradient<Op>) {
      if (training) {
        return record(c10::make_intrusive<Recorded>(unpack(passed...)));
      }
    }
    const at::AutoDispatchBelowADInplaceOrView below;
    return fused_op().call(passed..., training);
  }

  // --- headloom::X_backward ---

  // A gradient for each differentiable tensor that is there, in their order; empty where not
  // wanted.
  static std::vector<Tensor> call_backward(const Arguments& a, const OptionalTensors& grads,
                                           const variable_list& kept, int64_t wanted) {
    static const auto op = find<std::vector<Tensor>(
        const OptionalTensors&, typename A::Kind::Passed..., at::TensorList, int64_t)>(
        std::string("headloom::") + kOp + "_backward");
    return with_passed(
        a, [&](const auto&... passed) { return op.call(grads, passed..., kept, wanted); });
  }

  static std::vector<Tensor> backward(const OptionalTensors& grads,
                                      typename A::Kind::Passed... passed, at::TensorList kept,
                                      int64_t wanted) {
    Arguments a = unpack(passed...);
    Backward<Op> b;
    b.kept = kept.vec();
    b.wanted = wanted;
    for (const std::optional<Tensor>& grad : grads) b.grads.push_back(grad.value_or(Tensor()));
    const Slots tensors = slots<Op>(a), gradients = slots<Op>(b.gradients);
    kernels_for<Op>(tensors[0].tensor->device().type())->backward(a, b);
    return present(a, wanted, [&](size_t i, const Tensor& t) {
      TORCH_INTERNAL_ASSERT(gradients[i].tensor->defined(), kOp, ": no gradient of ",
                            gradients[i].name);
      return gradients[i].tensor->to(t.scalar_type()).contiguous();
    });
  }

  static std::vector<Tensor> backward_meta(const OptionalTensors&,
                                           typename A::Kind::Passed... passed, at::TensorList,
                                           int64_t wanted) {
    Arguments a = unpack(passed...);
    return present(a, wanted, [](size_t, const Tensor& t) { return contiguous_like(t); });
  }

  // make(its place among all tensors, it) for each differentiable tensor that is there.
  template <typename Make>
  static std::vector<Tensor> present(Arguments& a, int64_t wanted, const Make& make) {
    std::vector<Tensor> out;
    const Slots tensors = slots<Op>(a);
    int64_t bit = 0;
    for (size_t i = 0; i < tensors.size(); ++i) {
      if (!tensors[i].differentiable) continue;
      const bool wants = wanted >> bit++ & 1;
      const Tensor& t = *tensors[i].tensor;
      if (t.defined()) out.push_back(wants ? make(i, t) : at::empty({0}, t.options()));
    }
    return out;
  }

  struct Recorded final : Call {
    explicit Recorded(Arguments given) : a(std::move(given)) {}

    c10::intrusive_ptr<Call> without_tensors() const override {
      Arguments copy = a;
      for (const Slot& slot : slots<Op>(copy)) *slot.tensor = Tensor();
      return c10::make_intrusive<Recorded>(std::move(copy));
    }
    Slots tensors() override { return slots<Op>(a); }
    bool returns_list() const override { return kReturnsList<Op>; }
    size_t results(size_t outputs) const override { return result_count<Op>(outputs); }
    std::vector<Tensor> outputs() const override { return Op::outputs(a, false); }
    std::vector<Tensor> definition() const override { return listed(detail::definition<Op>(a)); }
    std::vector<Tensor> fused() const override { return call_fused(a, true); }
    std::vector<Tensor> backward(const Grads& grads, const variable_list& kept,
                                 int64_t wanted) const override {
      return call_backward(a, grads, kept, wanted);
    }
    bool scales_kept() const override {
      return requires { Op::kScalesKept; };
    }

    Arguments a;
  };

  template <typename F>
  static auto find(const std::string& name) {
    return c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), "").template typed<F>();
  }

  static OpInfo info() {
    std::string backends;
    for (const Kernel<Op>& k : kernels<Op>()) {
      backends += std::string("fused ") + c10::DeviceTypeName(k.device) + " kernels for " +
                  type_names(k.types) + (k.limits.empty() ? "" : ", " + k.limits) + "; ";
    }
    return {Op::kName, Op::kDoc, Op::kSource, backends + Op::kOtherwise};
  }
};

}  // namespace detail

template <typename Op>
bool Backward<Op>::wants(const Tensor& place) {
  int64_t bit = 0;
  for (const detail::Slot& slot : detail::slots<Op>(gradients)) {
    if (slot.tensor == &place) return slot.differentiable && (wanted >> bit & 1) != 0;
    bit += slot.differentiable;
  }
  return false;
}

// Registers Op with the dispatcher and with `headloom list`.
template <typename Op>
class Define {
  using Bound = detail::BoundTo<Op>;

 public:
  Define() {
    const std::string name = Op::kName, fused = name + "_fused", backward = name + "_backward";
    const auto define = [&](const std::string& schema) {
      schemas_.def(schema.c_str(), {at::Tag::pt2_compliant_tag});
    };
    define(Bound::schema("", "", ", str? backend=None", detail::return_type<Op>(), true));
    composite_.impl(name.c_str(), &Bound::composite);
    batched_.impl(name.c_str(), &Bound::composite);
    if constexpr (requires(typename Op::Arguments& a) {
                    Op::autocast(a, AutocastCast(at::kCPU));
                  }) {
      for (const c10::DeviceType device :
           {at::kCPU, at::kCUDA, at::kXPU, at::kMPS, at::kPrivateUse1}) {
        autocasts_.push_back(
            library(at::autocast::get_autocast_dispatch_key_from_device_type(device)));
        autocasts_.back().impl(Op::kName, &Bound::autocast);
      }
    }
    define(Bound::schema("_fused", "", ", bool training", "Tensor[]", false));
    meta_.impl(fused.c_str(), &Bound::fused_meta);
    if constexpr (detail::kHasGradient<Op>) {
      define(Bound::schema("_backward", "Tensor?[] grads, ", ", Tensor[] kept, int wanted",
                           "Tensor[]", false));
      autograd_.impl(fused.c_str(), &Bound::fused_autograd);
      meta_.impl(backward.c_str(), &Bound::backward_meta);
      autograd_.impl(backward.c_str(), torch::autograd::autogradNotImplementedFallback());
    } else {
      autograd_.impl(fused.c_str(), torch::autograd::autogradNotImplementedFallback());
    }
    list_operator(&Bound::info);
  }

 private:
  static torch::Library library(std::optional<c10::DispatchKey> key) {
    return {key ? torch::Library::IMPL : torch::Library::FRAGMENT, "headloom", key, __FILE__,
            __LINE__};
  }

  torch::Library schemas_ = library(std::nullopt);
  torch::Library composite_ = library(c10::DispatchKey::CompositeImplicitAutograd);
  // Under vmap too: its fallback is a loop over slices, which knows no lists of tensors.
  torch::Library batched_ = library(c10::DispatchKey::FuncTorchBatched);
  torch::Library meta_ = library(c10::DispatchKey::Meta);
  torch::Library autograd_ = library(c10::DispatchKey::Autograd);
  std::vector<torch::Library> autocasts_;
};

// Registers kernels of Op for a device.
template <typename Op>
class Kernels {
 public:
  explicit Kernels(Kernel<Op> kernel)
      : library_(torch::Library::IMPL, "headloom",
                 at::TensorOptions(kernel.device).computeDispatchKey(), __FILE__, __LINE__) {
    using Bound = detail::BoundTo<Op>;
    const std::string name = Op::kName;
    library_.impl((name + "_fused").c_str(), &Bound::fused);
    if constexpr (detail::kHasGradient<Op>) {
      if (kernel.backward != nullptr) {
        library_.impl((name + "_backward").c_str(), &Bound::backward);
      }
    }
    detail::kernels<Op>().push_back(std::move(kernel));
  }

 private:
  torch::Library library_;
};

// Why its kernels would not take the case, as the end of a sentence; empty where they would.
template <typename Op>
std::string unsupported_by_kernels(const typename Op::Arguments& a) {
  return detail::BoundTo<Op>::unsupported(a);
}

// Calls the operator through the dispatcher.
template <typename Op>
typename Op::Result call(const typename Op::Arguments& a,
                         const std::optional<std::string>& backend) {
  return detail::BoundTo<Op>::call(
      a, backend ? std::optional<std::string_view>(*backend) : std::nullopt);
}

}  // namespace headloom::ops
