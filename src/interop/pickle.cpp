#include "interop/pickle.h"

#include <bit>
#include <cstring>
#include <deque>
#include <set>
#include <unordered_map>
#include <variant>

#include "core/error.h"
#include "core/text.h"

namespace headloom {
namespace {

// Values point at each other, in circles too if a file wants that: the machine below owns them all.
struct PickledValue;
using List = std::vector<PickledValue*>;
struct Tuple {
  List items;
};
struct Dict {
  std::vector<std::pair<const PickledValue*, const PickledValue*>> items;
};
struct Name {
  std::string text;  // "collections.OrderedDict"
};
struct Storage {
  std::string dtype, key;
  int64_t numbers;
};
struct None {};
struct Mark {};
struct PickledValue {  // small, as a damaged program may make many
  std::variant<None, Mark, bool, int64_t, double, std::string, List, Tuple, Dict, Name,
               const Storage*, const PickledTensor*>
      value;
};

constexpr const char* kOrderedDict = "collections.OrderedDict";
constexpr const char* kRebuildTensor = "torch._utils._rebuild_tensor_v2";
constexpr const char* kRebuildParameter = "torch._utils._rebuild_parameter";
constexpr const char* kSize = "torch.Size";
constexpr const char* kStorages[] = {"Double", "Float", "Half", "BFloat16", "Long",
                                     "Int",    "Short", "Char", "Byte",     "Bool"};

// "Float" of "torch.FloatStorage", or "".
std::string storage_dtype(const std::string& name) {
  for (const char* type : kStorages) {
    if (name == str("torch.", type, "Storage")) return type;
  }
  return "";
}

// A program may use one long text or tuple many times, but not have it copied.
constexpr size_t kLongestName = 1000;
constexpr size_t kMostSizes = 64;
constexpr size_t kMostTensors = 100000;

// Types that optimisers and hyperparameters beside the tensors mention; of no use here.
bool is_dtype(const std::string& name) {
  static const std::set<std::string> known = {
      "torch.float64", "torch.float32", "torch.float16", "torch.bfloat16", "torch.int64",
      "torch.int32",   "torch.int16",   "torch.int8",    "torch.uint8",    "torch.bool"};
  return known.count(name) > 0;
}

class Machine {
 public:
  Machine(std::string_view program, const std::string& path) : rest_(program), path_(path) {}

  const PickledValue& run() {
    while (true) {
      const auto op = static_cast<unsigned char>(take(1)[0]);
      if (op == '.') return *pop();
      step(op);
    }
  }

  template <typename... Args>
  [[noreturn]] void bad(const Args&... what) const {
    fail(path_, ": its pickle ", what..., ".");
  }

 private:
  void step(unsigned char op) {
    switch (op) {
      case 0x80:  // PROTO
        if (const uint64_t protocol = number(1); protocol < 2 || protocol > 5) {
          bad("is of protocol ", protocol, ", expected 2 to 5");
        }
        return;
      case 0x95:  // FRAME
        number(8);
        return;
      case '(':
        return push(Mark{});
      case 'N':
        return push(None{});
      case 0x88:  // NEWTRUE
        return push(true);
      case 0x89:  // NEWFALSE
        return push(false);
      case 'J':  // BININT
        return push(int64_t{static_cast<int32_t>(number(4))});
      case 'K':  // BININT1
        return push(static_cast<int64_t>(number(1)));
      case 'M':  // BININT2
        return push(static_cast<int64_t>(number(2)));
      case 0x8a:  // LONG1
        return push(integer(number(1)));
      case 'G':  // BINFLOAT
        return push(std::bit_cast<double>(__builtin_bswap64(number(8))));
      case 'X':  // BINUNICODE
        return push(std::string(take(number(4))));
      case 0x8c:  // SHORT_BINUNICODE
        return push(std::string(take(number(1))));
      case 0x8d:  // BINUNICODE8
        return push(std::string(take(number(8))));
      case ']':
        return push(List{});
      case ')':
        return push(Tuple{});
      case '}':
        return push(Dict{});
      case 'l':  // LIST
        return push(popped_to_mark());
      case 't':  // TUPLE
        return push(Tuple{popped_to_mark()});
      case 0x85:  // TUPLE1
      case 0x86:  // TUPLE2
      case 0x87:  // TUPLE3
        return push(Tuple{popped(op - 0x84u)});
      case 'a': {  // APPEND
        PickledValue* item = pop();
        return top<List>("a list").push_back(item);
      }
      case 'e': {  // APPENDS
        const List items = popped_to_mark();
        List& list = top<List>("a list");
        list.insert(list.end(), items.begin(), items.end());
        return;
      }
      case 's':  // SETITEM
        return set_items(popped(2));
      case 'u':  // SETITEMS
        return set_items(popped_to_mark());
      case 'q':  // BINPUT
        memo_[number(1)] = top();
        return;
      case 'r':  // LONG_BINPUT
        memo_[number(4)] = top();
        return;
      case 0x94: {  // MEMOIZE
        const size_t next = memo_.size();
        memo_[next] = top();
        return;
      }
      case 'h':  // BINGET
        return recall(number(1));
      case 'j':  // LONG_BINGET
        return recall(number(4));
      case '0':  // POP
        pop();
        return;
      case 'c': {  // GLOBAL
        const std::string module(line()), name(line());
        return push_name(module, name);
      }
      case 0x93: {  // STACK_GLOBAL
        const List names = popped(2);
        return push_name(get<std::string>(*names[0], "text"), get<std::string>(*names[1], "text"));
      }
      case 'Q':  // BINPERSID
        storages_.push_back(storage(*pop()));
        return push(&std::as_const(storages_.back()));
      case 'R': {  // REDUCE
        const PickledValue* arguments = pop();
        const PickledValue* function = pop();
        return call(get<Name>(*function, "a known name").text,
                    get<Tuple>(*arguments, "a tuple").items);
      }
      case 'b':  // BUILD: attributes of a dictionary, which say nothing of its tensors
        pop();
        top<Dict>("a dictionary");
        return;
      default:
        bad("has the instruction ", static_cast<int>(op),
            ", which dictionaries of tensors do not use");
    }
  }

  // --- The program's bytes.

  std::string_view take(uint64_t count) {
    if (count > rest_.size()) bad("ends too early");
    const std::string_view out = rest_.substr(0, static_cast<size_t>(count));
    rest_.remove_prefix(static_cast<size_t>(count));
    return out;
  }
  std::string_view line() {
    const size_t end = rest_.find('\n');
    if (end == std::string_view::npos) bad("ends too early");
    const std::string_view out = take(end);
    take(1);
    return out;
  }
  uint64_t number(uint64_t width) {
    uint64_t out = 0;
    std::memcpy(&out, take(width).data(), static_cast<size_t>(width));
    return out;
  }
  // Two's complement of so many bytes.
  int64_t integer(uint64_t width) {
    if (width > 8) bad("has an integer of ", width, " bytes, expected at most 8");
    if (width == 0) return 0;
    const int unused = 64 - 8 * static_cast<int>(width);
    return static_cast<int64_t>(number(width) << unused) >> unused;
  }

  // --- The stack.

  template <typename T>
  void push(T value) {
    values_.push_back({std::move(value)});
    stack_.push_back(&values_.back());
  }
  PickledValue* top() {
    if (stack_.empty()) bad("takes a value that is not there");
    return stack_.back();
  }
  PickledValue* pop() {
    PickledValue* out = top();
    stack_.pop_back();
    return out;
  }
  List popped(size_t count) {
    if (stack_.size() < count) bad("takes a value that is not there");
    const List out(stack_.end() - static_cast<std::ptrdiff_t>(count), stack_.end());
    stack_.resize(stack_.size() - count);
    return out;
  }
  List popped_to_mark() {
    size_t count = 0;
    while (count < stack_.size() &&
           !std::holds_alternative<Mark>(stack_[stack_.size() - 1 - count]->value)) {
      ++count;
    }
    const List out = popped(count);
    pop();  // the mark
    return out;
  }
  void recall(uint64_t place) {
    const auto found = memo_.find(place);
    if (found == memo_.end()) bad("recalls a value that it never stored");
    stack_.push_back(found->second);
  }
  template <typename T>
  const T& get(const PickledValue& value, const char* expected) const {
    const T* out = std::get_if<T>(&value.value);
    if (out == nullptr) bad("has something else where ", expected, " belongs");
    return *out;
  }
  template <typename T>
  T& top(const char* expected) {
    return const_cast<T&>(get<T>(*top(), expected));
  }
  void set_items(const List& items) {
    if (items.size() % 2 != 0) bad("has a key without a value");
    Dict& dict = top<Dict>("a dictionary");
    for (size_t i = 0; i < items.size(); i += 2) dict.items.emplace_back(items[i], items[i + 1]);
  }

  // --- The names it may use.

  void push_name(std::string_view module, std::string_view name) {
    const std::string whole = str(module, '.', name);
    static const std::set<std::string> known = {kOrderedDict, kRebuildTensor, kRebuildParameter,
                                                kSize};
    if (known.count(whole) == 0 && storage_dtype(whole).empty() && !is_dtype(whole)) {
      fail(path_, ": holds ", shown(whole), ", expected only tensors and plain values.");
    }
    push(Name{whole});
  }
  static std::string shown(const std::string& name) {
    std::string out = "'";
    for (const char c : name.substr(0, 100)) out += c >= ' ' && c < 0x7f ? c : '?';
    return out + "'";
  }

  const std::string& short_text(const PickledValue& value, const char* expected) const {
    const std::string& out = get<std::string>(value, expected);
    if (out.size() > kLongestName) bad("has a name of ", out.size(), " bytes");
    return out;
  }
  int64_t at_least_zero(const PickledValue& value) const {
    const int64_t out = get<int64_t>(value, "an integer");
    if (out < 0) bad("has ", out, " where a size belongs");
    return out;
  }
  std::vector<int64_t> sizes(const PickledValue& value) const {
    const List& items = get<Tuple>(value, "a tuple").items;
    if (items.size() > kMostSizes) bad("has a tensor of ", items.size(), " dimensions");
    std::vector<int64_t> out;
    for (const PickledValue* item : items) out.push_back(at_least_zero(*item));
    return out;
  }

  Storage storage(const PickledValue& id) const {
    const List& parts = get<Tuple>(id, "a tuple").items;  // "storage", type, key, device, numbers
    if (parts.size() != 5 || get<std::string>(*parts[0], "text") != "storage") {
      bad("refers to something that is no storage");
    }
    const std::string dtype = storage_dtype(get<Name>(*parts[1], "a storage's type").text);
    if (dtype.empty()) bad("has a storage without a type");
    return {dtype, short_text(*parts[2], "a storage's name"), at_least_zero(*parts[4])};
  }

  void call(const std::string& function, const List& arguments) {
    if (function == kOrderedDict) {
      if (!arguments.empty()) bad("makes an OrderedDict of values, expected an empty one");
      return push(Dict{});
    }
    if (function == kSize) {
      if (arguments.size() != 1) bad("makes a torch.Size of ", arguments.size(), " values");
      get<Tuple>(*arguments[0], "a tuple");
      return stack_.push_back(arguments[0]);
    }
    if (function == kRebuildParameter) {  // the tensor, requires_grad, hooks
      if (arguments.empty()) bad("makes a parameter of nothing");
      get<const PickledTensor*>(*arguments[0], "a tensor");
      return stack_.push_back(arguments[0]);
    }
    if (function == kRebuildTensor) {  // storage, offset, sizes, strides, requires_grad, hooks, ...
      if (arguments.size() < 4) bad("makes a tensor of ", arguments.size(), " values");
      const Storage& from = *get<const Storage*>(*arguments[0], "a storage");
      PickledTensor tensor{.name = {},
                           .dtype = from.dtype,
                           .storage = from.key,
                           .numbers = from.numbers,
                           .offset = at_least_zero(*arguments[1]),
                           .sizes = sizes(*arguments[2]),
                           .strides = sizes(*arguments[3])};
      if (tensor.sizes.size() != tensor.strides.size()) {
        bad("has a tensor of ", tensor.sizes.size(), " sizes and ", tensor.strides.size(),
            " strides");
      }
      const auto* flags = arguments.size() > 6 ? std::get_if<Dict>(&arguments[6]->value) : nullptr;
      if (flags != nullptr && !flags->items.empty()) {
        bad("has a tensor that is negated or conjugated when it is read, expected one that was "
            "saved after resolve_neg() and resolve_conj()");
      }
      if (tensors_.size() == kMostTensors) bad("has more than ", kMostTensors, " tensors");
      tensors_.push_back(std::move(tensor));
      return push(&std::as_const(tensors_.back()));
    }
    fail(path_, ": its pickle calls '", function, "', expected only tensors and plain values.");
  }

  std::string_view rest_;
  const std::string& path_;
  std::deque<PickledValue> values_;
  std::deque<Storage> storages_;
  std::deque<PickledTensor> tensors_;
  std::vector<PickledValue*> stack_;
  std::unordered_map<uint64_t, PickledValue*> memo_;
};

// Far more than the names and sizes of any model's tensors take.
constexpr size_t kLongest = size_t{1} << 23;

std::vector<PickledTensor> tensors_of(const Dict& dict, const Machine& machine) {
  std::vector<PickledTensor> out;
  std::set<std::string> names;
  for (const auto& [key, value] : dict.items) {
    const auto* name = std::get_if<std::string>(&key->value);
    const auto* tensor = std::get_if<const PickledTensor*>(&value->value);
    if (name == nullptr || tensor == nullptr) continue;
    if (name->size() > kLongestName) machine.bad("has a name of ", name->size(), " bytes");
    if (!names.insert(*name).second) machine.bad("has two tensors '", *name, "'");
    out.push_back(**tensor);
    out.back().name = *name;
  }
  return out;
}

}  // namespace

std::vector<PickledTensor> read_pickled_tensors(std::string_view pickle, const std::string& path) {
  require(pickle.size() <= kLongest, path, ": its pickle has ", pickle.size(),
          " bytes, expected at most ", kLongest, ".");
  Machine machine(pickle, path);
  const auto* dict = std::get_if<Dict>(&machine.run().value);
  if (dict == nullptr) machine.bad("is no dictionary of tensors");
  // Beside the weights a training checkpoint may have tensors of its own, as a loss.
  std::vector<PickledTensor> out;
  for (const auto& [key, value] : dict->items) {
    const auto* name = std::get_if<std::string>(&key->value);
    const auto* inner = std::get_if<Dict>(&value->value);
    if (!out.empty() || name == nullptr || inner == nullptr) continue;
    if (*name == "model" || *name == "state_dict" || *name == "module")
      out = tensors_of(*inner, machine);
  }
  if (out.empty()) out = tensors_of(*dict, machine);
  if (out.empty()) machine.bad("has no tensors, neither itself nor below 'model'");
  return out;
}

}  // namespace headloom
