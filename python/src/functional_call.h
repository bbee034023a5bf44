// Functional calls: C++ modules that run with the parameters and buffers of a Python module, as
// torch.func.functional_call does for Python modules. mixer_op.cpp and model_op.cpp call them.
//
// A spec is TOML text that says what is built. The modules built from it wait in a pool. A call
// takes one, sets its tensors to the caller's (named_tensors() in mixers/nn.h: parameters, then
// buffers), runs it and clears them again. The operators that do so are composite: autograd, fake
// tensors, functional transforms and export see only the ATen and Headloom operators inside.
#pragma once

#include <ATen/ATen.h>

#include <initializer_list>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "core/config.h"
#include "core/error.h"
#include "mixers/auxiliary.h"
#include "mixers/nn.h"

namespace headloom::python {

// What a call was given beside the parameters, named as its caller names it.
struct Input {
  const char* name;
  const Tensor& tensor;  // undefined where it is absent
};
using Inputs = std::initializer_list<Input>;

// Throws UsageError where the spec does not fit.
using Builder = std::shared_ptr<Module> (*)(const std::string& spec);

// The spec's tree; lines of a text that Python wrote mean nothing to its caller, so the nodes have
// no origin.
Node parse_spec(const std::string& spec);

// Calls build, on the calling thread, as if no mode (fake tensors, tracing, autocast, inference)
// were on. UsageErrors become ValueErrors.
std::shared_ptr<Module> build_plainly(Builder build, const std::string& spec);

// Names, values and kinds of a module's tensors, in the order of a call's. A kind is "decayed" (a
// parameter that weight decay shrinks), "undecayed" or "buffer".
using ModuleTensors =
    std::tuple<std::vector<std::string>, std::vector<Tensor>, std::vector<std::string>>;
ModuleTensors tensors_of(const Module& module);
// Of a new module: values are drawn from torch's default generator; without `values` they are as
// the allocator gives them, and nothing is drawn.
ModuleTensors new_tensors(Builder build, std::string_view spec, bool values);

// A module without tensors of its own: each call brings them.
struct FunctionalModule {
  struct Parameter {  // or buffer
    std::string name;
    std::vector<int64_t> sizes;
    std::vector<Tensor*> slots;  // where the module keeps it
  };
  std::shared_ptr<Module> module;
  std::vector<Parameter> parameters;

  // ValueError, naming the parameter, where there are others than the module has, they are not
  // where `inputs` are, or an input has a type that none of them has.
  void set_tensors(at::TensorList params, Inputs inputs);
  void clear_tensors();
};

// Whether autocast is on for the device; the meta device has none.
bool under_autocast(at::DeviceType device);

// Whether it is of a Python class of its own, as a DTensor: C++ does not see its numbers.
bool is_of_python(const Tensor& t);

// A ValueError that names them where inputs and parameters are of several types, or parameters that
// FSDP shards meet plain inputs. No operator inside can say so in the caller's words.
void explain_types(const FunctionalModule& functional, at::TensorList params, Inputs inputs);

// Its initial weights are thrown away and leave no trace in the caller's random numbers.
FunctionalModule make_functional_module(Builder build, const std::string& spec);

// Idle modules by spec. Calls from several threads each take their own.
// Modules between calls, of a bounded number of specs: each keeps tables of positions.
class Pool {
 public:
  explicit Pool(Builder build) : build_(build) {}
  FunctionalModule take(const std::string& spec);
  void put(const std::string& spec, FunctionalModule functional);
  Builder builder() const { return build_; }

 private:
  const Builder build_;
  std::mutex mutex_;
  std::unordered_map<std::string, std::vector<FunctionalModule>> idle_;
};

// Whether a call with these tensors is traced or transformed: what a module then keeps between
// calls (tables of positions) would be tensors of that mode.
bool is_traced(Inputs inputs, at::TensorList params);

// What layers want added to the loss: a scalar like x, 0 where none wants anything.
Tensor auxiliary_loss(const AuxiliaryOutputs& auxiliary, const Tensor& x);

// Whether a backward pass is under way on this thread: it computes again what activation
// checkpointing left out, so the load of experts was counted before.
bool computes_again();

// Before a training call that counts the load of experts. Throws UsageError inside a transform of
// torch.func, which lets nothing outside of it be changed.
void expect_countable(const Module& module);

// Throws the ValueError that a UsageError is in Python.
[[noreturn]] void throw_value_error(const UsageError& error);

// What `run` returns of a module of `pool` whose tensors are `params`. On an error the module is
// dropped together with the tensors that it was given.
template <typename Built, typename Run>
auto with_parameters(Pool& pool, std::string_view spec_text, at::TensorList params, Inputs inputs,
                     bool training, const Run& run) {
  const std::string spec(spec_text);
  const bool traced = is_traced(inputs, params);
  FunctionalModule functional =
      traced ? make_functional_module(pool.builder(), spec) : pool.take(spec);
  functional.set_tensors(params, inputs);
  functional.module->train(training);
  try {
    auto result = run(dynamic_cast<Built&>(*functional.module));
    functional.clear_tensors();
    if (!traced) pool.put(spec, std::move(functional));
    return result;
  } catch (const UsageError& error) {
    throw_value_error(error);
  } catch (const std::exception&) {
    explain_types(functional, params, inputs);
    throw;
  }
}

}  // namespace headloom::python
