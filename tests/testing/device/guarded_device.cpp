#include "testing/device/guarded_device.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/TensorShape.h>
#include <ATen/native/UnaryOps.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <signal.h>
#include <sys/mman.h>
#include <torch/library.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <bit>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace headloom::test {
namespace {

using at::Tensor;

constexpr c10::DeviceIndex kDevices = 2;
constexpr at::DeviceType kGuarded = at::kPrivateUse1;

std::atomic<int64_t> g_host_reads = 0, g_operators = 0;

// ---------------------------------------------------------------------------------------------
// Memory
// ---------------------------------------------------------------------------------------------

// The memory of the devices is mapped twice: for tensors, where nobody may read or write, and for
// the device's own operators.
class Memory {
 public:
  static Memory& get() {
    static Memory* const memory = new Memory;  // tensors may outlive static objects
    return *memory;
  }

  void* allocate(size_t bytes) {
    const std::lock_guard lock(mutex_);
    const size_t size = std::bit_ceil(std::max<size_t>(bytes, 64));
    auto& free = free_[size];
    size_t offset = used_;
    if (free.empty()) {
      TORCH_CHECK(used_ + size <= kBytes, "guarded: there is no memory for ", bytes, " bytes.");
      used_ += size;
    } else {
      offset = free.back();
      free.pop_back();
    }
    sizes_[offset] = size;
    return guarded_ + offset;
  }

  void release(void* pointer) {
    if (pointer == nullptr) return;
    const std::lock_guard lock(mutex_);
    const auto offset = static_cast<size_t>(static_cast<char*>(pointer) - guarded_);
    const auto found = sizes_.find(offset);
    free_[found->second].push_back(offset);
    sizes_.erase(found);
  }

  // Where the device's operators see what lies at `pointer`.
  void* open(const void* pointer) const {
    if (pointer == nullptr) return nullptr;
    return open_ + (static_cast<const char*>(pointer) - guarded_);
  }

  bool owns(const void* pointer) const {
    return pointer >= guarded_ && pointer < guarded_ + kBytes;
  }

 private:
  static constexpr size_t kBytes = size_t{1} << 33;  // of addresses; memory is taken as it is used

  Memory() {
    const int file = memfd_create("guarded", 0);
    const auto map = [&](int access) {
      void* const at = mmap(nullptr, kBytes, access, MAP_SHARED | MAP_NORESERVE, file, 0);
      TORCH_CHECK(at != MAP_FAILED, "guarded: the device's memory cannot be mapped.");
      return static_cast<char*>(at);
    };
    TORCH_CHECK(file >= 0 && ftruncate(file, static_cast<off_t>(kBytes)) == 0,
                "guarded: there is no memory for the device.");
    guarded_ = map(PROT_NONE);
    open_ = map(PROT_READ | PROT_WRITE);
    close(file);
  }

  std::mutex mutex_;
  char *guarded_ = nullptr, *open_ = nullptr;
  size_t used_ = 0;
  std::map<size_t, std::vector<size_t>> free_;
  std::map<size_t, size_t> sizes_;
};

// Says why before the process ends as it would have without this.
void explain_fault(int, siginfo_t* info, void*) {
  if (Memory::get().owns(info->si_addr)) {
    constexpr char kText[] =
        "guarded: code of the host follows a pointer to the device's memory.\n";
    [[maybe_unused]] const auto written = write(STDERR_FILENO, kText, sizeof kText - 1);
  }
  signal(SIGSEGV, SIG_DFL);
}

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  at::DeviceType type() const override { return kGuarded; }
  at::Device exchangeDevice(at::Device device) const override {
    const at::Device before = getDevice();
    setDevice(device);
    return before;
  }
  at::Device getDevice() const override { return {kGuarded, current_}; }
  void setDevice(at::Device device) const override {
    TORCH_CHECK(device.type() == kGuarded && device.index() < kDevices, "guarded: there is no ",
                device, ".");
    if (device.has_index()) current_ = device.index();
  }
  void uncheckedSetDevice(at::Device device) const noexcept override { current_ = device.index(); }
  c10::Stream getStream(at::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, device.has_index() ? device : getDevice());
  }
  c10::Stream getNewStream(at::Device device, int) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
  // Everything has happened when it was asked for.
  void record(void**, const c10::Stream&, const c10::DeviceIndex,
              const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}

 private:
  static thread_local c10::DeviceIndex current_;
};

thread_local c10::DeviceIndex Guard::current_ = 0;

class Allocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    void* const data = bytes == 0 ? nullptr : Memory::get().allocate(bytes);
    return {data, data, &release, Guard().getDevice()};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(Memory::get().open(to), Memory::get().open(from), bytes);
  }

 private:
  static void release(void* data) { Memory::get().release(data); }
};

Allocator g_allocator;
REGISTER_ALLOCATOR(kGuarded, &g_allocator)

// ---------------------------------------------------------------------------------------------
// Random numbers
// ---------------------------------------------------------------------------------------------

// Draws what a generator of the CPU would. Its own is apart from the CPU's default one.
class Generator final : public c10::GeneratorImpl {
 public:
  explicit Generator(c10::DeviceIndex index)
      : GeneratorImpl({kGuarded, index}, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        numbers(at::make_generator<at::CPUGeneratorImpl>()) {}

  void set_current_seed(uint64_t seed) override { numbers.set_current_seed(seed); }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "guarded: has no offset."); }
  uint64_t get_offset() const override { TORCH_CHECK(false, "guarded: has no offset."); }
  uint64_t current_seed() const override { return numbers.current_seed(); }
  uint64_t seed() override { return numbers.seed(); }
  void set_state(const c10::TensorImpl& state) override {
    numbers.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return numbers.unsafeGetGeneratorImpl()->get_state();
  }

  mutable at::Generator numbers;

 private:
  GeneratorImpl* clone_impl() const override {
    auto* const copy = new Generator(device().index());
    copy->numbers = numbers.clone();
    return copy;
  }
};

const at::Generator& default_generator(c10::DeviceIndex index) {
  static const auto* const all =
      new std::array<at::Generator, kDevices>{at::make_generator<Generator>(c10::DeviceIndex{0}),
                                              at::make_generator<Generator>(c10::DeviceIndex{1})};
  return all->at(static_cast<size_t>(index < 0 ? Guard().getDevice().index() : index));
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  c10::DeviceIndex getCurrentDevice() const override { return Guard().getDevice().index(); }
  void setCurrentDevice(c10::DeviceIndex index) const override {
    Guard().setDevice({kGuarded, index});
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    return Guard().exchangeDevice({kGuarded, index}).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return exchangeDevice(index);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    return default_generator(index);
  }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return at::make_generator<Generator>(index < 0 ? Guard().getDevice().index() : index);
  }
  at::Device getDeviceFromPtr(void*) const override { return Guard().getDevice(); }
};

// ---------------------------------------------------------------------------------------------
// Operators
// ---------------------------------------------------------------------------------------------

bool is_guarded(const Tensor& t) { return t.defined() && t.device().type() == kGuarded; }

// The tensor as the device's operators see it: of the CPU, in the same memory.
Tensor opened(const Tensor& t) {
  void* const data = Memory::get().open(t.unsafeGetTensorImpl()->data());
  return at::from_blob(data, t.sizes(), t.strides(), t.options().device(at::kCPU));
}

Tensor closed(const Tensor& result, at::Device device) {
  const c10::DeviceGuard guard(device);
  const auto options = result.options().device(device);
  const Tensor out = result.is_non_overlapping_and_dense()
                         ? at::empty_strided(result.sizes(), result.strides(), options)
                         : at::empty(result.sizes(), options);
  opened(out).copy_(result);
  return out;
}

Tensor empty(c10::IntArrayRef sizes, std::optional<at::ScalarType> type, std::optional<at::Layout>,
             std::optional<at::Device> device, std::optional<bool>,
             std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(device.value_or(at::Device(kGuarded)));
  const auto scalar = type.value_or(at::typeMetaToScalarType(at::get_default_dtype()));
  return at::detail::empty_generic(
      sizes, &g_allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), scalar, format);
}

Tensor empty_strided(c10::IntArrayRef sizes, c10::IntArrayRef strides,
                     std::optional<at::ScalarType> type, std::optional<at::Layout>,
                     std::optional<at::Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(device.value_or(at::Device(kGuarded)));
  const auto scalar = type.value_or(at::typeMetaToScalarType(at::get_default_dtype()));
  return at::detail::empty_strided_generic(
      sizes, strides, &g_allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), scalar);
}

// Between two devices of any kind: the only operator that takes two.
Tensor copy_from(const Tensor& from, const Tensor& to, bool) {
  if (is_guarded(from) && !is_guarded(to)) ++g_host_reads;
  Tensor target = is_guarded(to) ? opened(to) : to;
  target.copy_(is_guarded(from) ? opened(from) : from);
  return to;
}

at::Scalar local_scalar_dense(const Tensor& t) {
  ++g_host_reads;
  return at::_local_scalar_dense(opened(t));
}

const Tensor& resize_memory(const Tensor& t, c10::IntArrayRef sizes,
                            std::optional<at::MemoryFormat>) {
  const c10::DeviceGuard guard(t.device());
  auto* const impl = t.unsafeGetTensorImpl();
  const size_t bytes = static_cast<size_t>(c10::multiply_integers(sizes)) * t.element_size() +
                       static_cast<size_t>(t.storage_offset()) * t.element_size();
  const c10::Storage& storage = impl->unsafe_storage();
  if (bytes > storage.nbytes()) {
    c10::DataPtr data = g_allocator.allocate(bytes);
    if (storage.nbytes() > 0) g_allocator.copy_data(data.get(), storage.data(), storage.nbytes());
    storage.set_data_ptr_noswap(std::move(data));
    storage.set_nbytes(bytes);
  }
  impl->set_sizes_contiguous(sizes);
  return t;
}

Tensor& set_storage(Tensor& t, c10::Storage storage, int64_t offset, c10::IntArrayRef sizes,
                    c10::IntArrayRef strides) {
  auto* const impl = t.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_sizes_and_strides(
      sizes, strides.data() == nullptr ? c10::IntArrayRef(c10::contiguous_strides(sizes)) : strides,
      offset);
  return t;
}

// Operators whose result's size depends on values: CUDA's wait for the device.
bool waits(const c10::OperatorHandle& op, const torch::jit::Stack& arguments) {
  const std::string& name = op.schema().name();
  if (name == "aten::index" || name == "aten::index_put_" || name == "aten::_index_put_impl_") {
    for (const auto& mask : arguments.at(1).toListRef()) {
      if (!mask.isTensor() || !mask.toTensor().defined()) continue;
      const auto type = mask.toTensor().scalar_type();
      if (type == at::kBool || type == at::kByte) return true;
    }
    return false;
  }
  return op.hasTag(at::Tag::dynamic_output_shape) || op.hasTag(at::Tag::data_dependent_output);
}

// While one lives, the CPU's default generator is the device's.
class Numbers {
 public:
  explicit Numbers(const at::Generator& device)
      : own_(device.get<Generator>()->numbers),
        cpu_(at::detail::getDefaultCPUGenerator()),
        lock_(cpu_.mutex()),
        before_(cpu_.get_state()) {
    cpu_.set_state(own_.get_state());
    lock_.unlock();
  }
  ~Numbers() {
    lock_.lock();
    own_.set_state(cpu_.get_state());
    cpu_.set_state(before_);
  }

 private:
  at::Generator own_, cpu_;
  std::unique_lock<std::mutex> lock_;
  Tensor before_;
};

// Runs an operator by the CPU's kernel on the same memory.
void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const std::string name = schema.operator_name().name;
  TORCH_CHECK(!name.starts_with("headloom::"), "guarded: ", name,
              " has no kernel for this device, and its definition did not run instead.");
  const size_t count = schema.arguments().size();
  torch::jit::Stack given(stack->end() - static_cast<std::ptrdiff_t>(count), stack->end());
  torch::jit::drop(*stack, count);

  std::optional<at::Device> device;
  const auto check = [&](const Tensor& t, const std::string& argument) {
    if (!t.defined()) return;
    if (!is_guarded(t)) {
      TORCH_CHECK(t.unsafeGetTensorImpl()->is_wrapped_number(), "guarded: ", name, " got ",
                  argument, " of shape ", t.sizes(), " on ", t.device(),
                  " together with a tensor of the device.");
      return;
    }
    TORCH_CHECK(!device || *device == t.device(), "guarded: ", name, " got tensors on ", *device,
                " and on ", t.device(), ".");
    device = t.device();
  };
  for (size_t i = 0; i < count; ++i) {
    const std::string& argument = schema.arguments()[i].name();
    const at::IValue& value = given[i];
    if (value.isTensor()) check(value.toTensor(), argument);
    if (value.isDevice() && value.toDevice().type() == kGuarded) {
      device = value.toDevice().has_index() ? value.toDevice() : Guard().getDevice();
    }
    if (!value.isList()) continue;
    for (const at::IValue& item : value.toListRef()) {
      if (item.isTensor()) check(item.toTensor(), argument);
    }
  }
  if (!device) device = Guard().getDevice();
  ++g_operators;
  if (waits(op, given)) ++g_host_reads;

  // Results that an operator writes into an empty tensor may give it a size.
  std::vector<std::pair<Tensor, Tensor>> resized;
  std::map<const at::TensorImpl*, Tensor> originals;
  const auto open = [&](const Tensor& t, bool written) {
    if (!is_guarded(t)) return t;
    if (written && t.numel() == 0) {
      resized.emplace_back(t, at::empty(t.sizes(), t.options().device(at::kCPU)));
      originals[resized.back().second.unsafeGetTensorImpl()] = t;
      return resized.back().second;
    }
    const Tensor out = opened(t);
    originals[out.unsafeGetTensorImpl()] = t;
    return out;
  };
  const at::Generator& numbers = default_generator(device->index());
  bool has_generator = false;
  torch::jit::Stack passed;
  std::vector<Tensor> alive;
  for (size_t i = 0; i < count; ++i) {
    const auto& argument = schema.arguments()[i];
    const bool written = argument.alias_info() != nullptr && argument.alias_info()->isWrite();
    const at::IValue& value = given[i];
    const bool generator =
        argument.type()->kind() == c10::TypeKind::GeneratorType ||
        (argument.type()->kind() == c10::TypeKind::OptionalType &&
         argument.type()->expect<c10::OptionalType>()->getElementType()->kind() ==
             c10::TypeKind::GeneratorType);
    if (value.isTensor()) {
      passed.emplace_back(open(value.toTensor(), written));
    } else if (value.isTensorList()) {
      std::vector<Tensor> list;
      for (const Tensor& t : value.toTensorVector()) list.push_back(open(t, written));
      passed.emplace_back(list);
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (const std::optional<Tensor>& t : value.toOptionalTensorList().vec()) {
        list.push_back(t ? std::optional<Tensor>(open(*t, written)) : std::nullopt);
      }
      passed.emplace_back(list);
    } else if (generator) {
      has_generator = true;
      const at::Generator own = value.isNone() ? numbers : value.toGenerator();
      TORCH_CHECK(own.device().type() == kGuarded, "guarded: ", name, " got a generator on ",
                  own.device(), ", expected one of the device.");
      passed.emplace_back(own.get<Generator>()->numbers);
    } else if (value.isDevice() && value.toDevice().type() == kGuarded) {
      passed.emplace_back(at::Device(at::kCPU));
    } else {
      passed.push_back(value);
    }
  }
  {
    std::optional<Numbers> draws;
    if (!has_generator && op.hasTag(at::Tag::nondeterministic_seeded)) draws.emplace(numbers);
    op.callBoxed(&passed);
  }
  for (auto& [original, result] : resized) {
    if (result.sizes() != original.sizes()) resize_memory(original, result.sizes(), {});
    opened(original).copy_(result);
  }
  const auto close_result = [&](const Tensor& t) {
    if (!t.defined()) return t;
    const auto found = originals.find(t.unsafeGetTensorImpl());
    return found != originals.end() ? found->second : closed(t, *device);
  };
  for (size_t i = 0; i < schema.returns().size(); ++i) {
    const auto* const alias = schema.returns()[i].alias_info();
    TORCH_CHECK(alias == nullptr || alias->isWrite(), "guarded: ", name,
                " returns a view, which this device does not know.");
    const at::IValue& value = passed.at(passed.size() - schema.returns().size() + i);
    if (value.isTensor()) {
      stack->emplace_back(close_result(value.toTensor()));
    } else if (value.isTensorList()) {
      std::vector<Tensor> list;
      for (const Tensor& t : value.toTensorVector()) list.push_back(close_result(t));
      stack->emplace_back(list);
    } else {
      stack->push_back(value);
    }
  }
}

c10::OperatorHandle operator_named(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
}

// What ATen asks a device for whose convolutions it does not know.
void convolve(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  static const auto op = operator_named("aten::convolution");
  run_on_cpu(op, stack);
}
void convolve_backward(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  static const auto op = operator_named("aten::convolution_backward");
  const Tensor weight = torch::jit::peek(*stack, 2, 10).toTensor();
  stack->insert(stack->end() - 7, at::IValue(std::vector<int64_t>{weight.size(0)}));
  run_on_cpu(op, stack);
}

Tensor view(const Tensor& t, c10::IntArrayRef sizes) { return at::native::view(t, sizes); }

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_local_scalar_dense", &local_scalar_dense);
  m.impl("resize_", &resize_memory);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolve>());
  m.impl("convolution_backward_overrideable",
         torch::CppFunction::makeFromBoxedFunction<&convolve_backward>());
  m.impl("view_as_real", &at::native::view_as_real);
  m.impl("view_as_complex", &at::native::view_as_complex);
}

// Casts what autocast of CUDA casts. The list names types without their namespace.
using namespace at;

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define HEADLOOM_LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define HEADLOOM_WIDE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define HEADLOOM_WIDE_RESULT(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define HEADLOOM_WIDEST(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
#define HEADLOOM_OTHER(...) KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE(__VA_ARGS__)
  AT_FORALL_LOWER_PRECISION_FP(HEADLOOM_LOWER)
  AT_FORALL_FP32(HEADLOOM_WIDE)
  AT_FORALL_FP32_SET_OPT_DTYPE(HEADLOOM_WIDE_RESULT)
  AT_FORALL_PROMOTE(HEADLOOM_WIDEST)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(HEADLOOM_OTHER)
}

const bool g_registered = [] {
  if (!on_guarded_device()) return false;
  static const c10::impl::DeviceGuardImplRegistrar guard(kGuarded, new Guard);
  c10::register_privateuse1_backend("guarded");
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  struct sigaction action = {};
  action.sa_sigaction = &explain_fault;
  action.sa_flags = SA_SIGINFO;
  sigaction(SIGSEGV, &action, nullptr);
  return true;
}();

}  // namespace

std::string test_device() {
  const char* const name = std::getenv("HEADLOOM_TEST_DEVICE");
  return name != nullptr && *name != '\0' ? name : "guarded:1";
}
bool on_guarded_device() { return test_device().starts_with("guarded"); }

int64_t host_reads() { return g_host_reads; }
int64_t device_operators() { return g_operators; }

}  // namespace headloom::test
