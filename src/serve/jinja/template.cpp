#include "serve/jinja/template.h"

#include "serve/jinja/builtins.h"
#include "serve/jinja/syntax.h"

namespace headloom::jinja {
namespace {

constexpr int kDeepestCall = 1000;  // of evaluation: a macro may call itself
constexpr size_t kLoopBytes = 1024;  // about what the attributes of a loop take
constexpr size_t kMostSource = size_t{1} << 20;

struct Scope {
  explicit Scope(std::shared_ptr<Scope> parent) : parent(std::move(parent)) {}
  const std::shared_ptr<Scope> parent;
  Dict names = {};
};

class Renderer {
 public:
  explicit Renderer(const Dict& names) : scope_(std::make_shared<Scope>(nullptr)) {
    scope_->names = global_functions(spaces_, budget_);
    for (const auto& [name, value] : names.items) scope_->names.set(name, value);
    push();
  }
  ~Renderer() {
    // Namespaces may hold each other.
    for (const auto& space : spaces_) space->attributes.items.clear();
  }
  Renderer(const Renderer&) = delete;
  Renderer& operator=(const Renderer&) = delete;

  std::string run(const Block& block) {
    execute(block);
    return std::move(out_);
  }

 private:
  enum class Flow { on, leave, next };

  struct Deeper {
    explicit Deeper(int& depth) : depth(depth) {
      if (++depth > kDeepestCall) template_error("it calls itself too deep");
    }
    ~Deeper() { --depth; }
    Deeper(const Deeper&) = delete;
    Deeper& operator=(const Deeper&) = delete;
    int& depth;
  };
  // A scope in the current one, until the end of a block.
  struct Inner {
    Inner(Renderer& renderer, std::shared_ptr<Scope> parent)
        : renderer(renderer), before(renderer.scope_) {
      renderer.scope_ = std::make_shared<Scope>(std::move(parent));
    }
    explicit Inner(Renderer& renderer) : Inner(renderer, renderer.scope_) {}
    ~Inner() { renderer.scope_ = before; }
    Inner(const Inner&) = delete;
    Inner& operator=(const Inner&) = delete;
    Renderer& renderer;
    const std::shared_ptr<Scope> before;
  };

  void push() { scope_ = std::make_shared<Scope>(scope_); }

  void write(const std::string& text) {
    budget_.make(text.size());
    out_ += text;
  }

  // What `block` writes, in a scope of its own.
  std::string captured(const Block& block) {
    std::string before = std::exchange(out_, {});
    {
      const Inner inner(*this);
      execute(block);
    }
    return std::exchange(out_, std::move(before));
  }

  Flow execute(const Block& block) {
    const Deeper deeper(depth_);
    for (const auto& statement : block) {
      budget_.step();
      line_ = statement->line;
      const Flow flow = execute(*statement);
      if (flow != Flow::on) return flow;
    }
    return Flow::on;
  }

  Flow execute(const Statement& s) {
    switch (s.kind) {
      case Statement::Kind::text:
        write(s.text);
        break;
      case Statement::Kind::output:
        write(shown(evaluate(*s.expression)));
        break;
      case Statement::Kind::condition:
        for (const auto& [condition, block] : s.branches) {
          if (!condition || evaluate(*condition).truth()) return execute(block);
        }
        break;
      case Statement::Kind::loop:
        return loop(s);
      case Statement::Kind::set:
        set(s);
        break;
      case Statement::Kind::set_block: {
        Value value = captured(s.body);
        if (s.expression) value = filtered_body(*s.expression, std::move(value));
        scope_->names.set(s.names[0], std::move(value));
        break;
      }
      case Statement::Kind::macro:
        scope_->names.set(s.names[0], macro(s));
        break;
      case Statement::Kind::filter:
        write(shown(filtered_body(*s.expression, captured(s.body))));
        break;
      case Statement::Kind::scope: {
        const Inner inner(*this);
        return execute(s.body);
      }
      case Statement::Kind::leave:
        return Flow::leave;
      case Statement::Kind::next:
        return Flow::next;
    }
    return Flow::on;
  }

  void assign(const std::vector<std::string>& names, const Value& value) {
    if (names.size() == 1) {
      scope_->names.set(names[0], value);
      return;
    }
    const std::vector<Value> parts = items_of(value);
    if (parts.size() != names.size()) {
      template_error("a value of ", parts.size(), " parts is given to ", names.size(), " names");
    }
    for (size_t i = 0; i < names.size(); ++i) scope_->names.set(names[i], parts[i]);
  }

  void set(const Statement& s) {
    const Value value = evaluate(*s.expression);
    if (s.attribute.empty()) {
      assign(s.names, value);
      return;
    }
    const Value space = lookup(s.names[0]);
    if (!space.is_namespace() || s.names[0] == "loop") {
      template_error("'", s.names[0], "' is a ", space.type(),
                     ", expected a namespace() to set an attribute of");
    }
    space.space().attributes.set(s.attribute, value);
  }

  Flow loop(const Statement& s) {
    std::vector<Value> items = items_of(evaluate(*s.expression));
    budget_.make(items.size() * sizeof(Value));
    if (s.condition) {
      std::vector<Value> kept;
      for (const Value& item : items) {
        budget_.step();
        const Inner inner(*this);
        assign(s.names, item);
        if (evaluate(*s.condition).truth()) kept.push_back(item);
      }
      items = std::move(kept);
    }
    const auto asked = std::make_shared<Value>(Undefined{});
    for (size_t i = 0; i < items.size(); ++i) {
      budget_.step();
      const auto space = loop_space(items, i, asked);
      Flow flow = Flow::on;
      try {
        const Inner inner(*this);
        scope_->names.set("loop", space);
        assign(s.names, items[i]);
        flow = execute(s.body);
      } catch (...) {
        spaces_.push_back(space);  // it may hold itself
        throw;
      }
      if (space.use_count() > 1) {  // something holds it, which it may hold itself
        spaces_.push_back(space);
        budget_.make(kLoopBytes);
      }
      if (flow == Flow::leave) break;
    }
    if (items.empty()) {
      const Inner inner(*this);
      return execute(s.otherwise);
    }
    return Flow::on;
  }

  // `before` is what loop.changed() was last asked about.
  std::shared_ptr<Namespace> loop_space(const std::vector<Value>& items, size_t i,
                                        const std::shared_ptr<Value>& before) {
    const auto at = static_cast<int64_t>(i), count = static_cast<int64_t>(items.size());
    auto space = std::make_shared<Namespace>();  // its attributes hide no method
    auto& names = space->attributes.items;
    const auto add = [&](const char* name, Value value) {
      names.emplace_back(name, std::move(value));
    };
    add("index", at + 1);
    add("index0", at);
    add("first", i == 0);
    add("last", at + 1 == count);
    add("length", count);
    add("revindex", count - at);
    add("revindex0", count - at - 1);
    add("depth", 1);  // of 'recursive' loops, which are refused
    add("depth0", 0);
    if (i > 0) add("previtem", items[i - 1]);
    if (at + 1 < count) add("nextitem", items[i + 1]);
    add("cycle", std::make_shared<const Function>(
                     Function{"cycle", [i](Call& call) -> Value {
                                if (call.positional.empty())
                                  template_error("cycle() has no arguments");
                                return call.positional[i % call.positional.size()];
                              }}));
    add("changed",
        std::make_shared<const Function>(Function{"changed", [this, before](Call& call) -> Value {
                                                    Value now = List{.items = call.positional};
                                                    const bool same = equal(now, *before, budget_);
                                                    *before = std::move(now);
                                                    return !same;
                                                  }}));
    return space;
  }

  Value macro(const Statement& s) {
    // The scope would else hold itself.
    auto body = [this, &s, home = std::weak_ptr<Scope>(scope_)](Call& call) -> Value {
      const std::shared_ptr<Scope> parent = home.lock();
      const std::string callee = "the macro '" + s.names[0] + "'";
      if (!parent) template_error(callee, " is called outside of the block that it stands in");
      const Deeper deeper(depth_);
      const int line = line_;
      Taken taken(call, callee);
      std::string before = std::exchange(out_, {});
      {
        const Inner inner(*this, parent);
        for (const auto& [name, otherwise] : s.parameters) {
          const Value* given = taken.next(name.c_str());
          scope_->names.set(name, given != nullptr ? *given
                                  : otherwise      ? evaluate(*otherwise)
                                              : Value(Undefined{"the parameter '" + name + "'"}));
        }
        taken.end();
        execute(s.body);
      }
      line_ = line;
      return std::exchange(out_, std::move(before));
    };
    return std::make_shared<const Function>(Function{s.names[0], std::move(body)});
  }

  Value lookup(const std::string& name) const {
    for (const Scope* scope = scope_.get(); scope != nullptr; scope = scope->parent.get()) {
      if (const Value* found = scope->names.find(name)) return *found;
    }
    return Undefined{"'" + name + "'"};
  }

  Call arguments(const Arguments& given) {
    Call out;
    for (const ExpressionPtr& e : given.positional) out.positional.push_back(evaluate(*e));
    for (const auto& [name, e] : given.named) out.named.emplace_back(name, evaluate(*e));
    return out;
  }

  // A chain of filters whose innermost value is a block's text.
  Value filtered_body(const Expression& e, Value body) {
    Value value = e.parts[0] ? filtered_body(*e.parts[0], std::move(body)) : std::move(body);
    Call call = arguments(e.arguments);
    return filtered(e.name, value, call, budget_);
  }

  Value evaluate(const Expression& e) {
    const Deeper deeper(depth_);
    budget_.step();
    line_ = e.line;
    switch (e.kind) {
      case Expression::Kind::constant:
        return e.value;
      case Expression::Kind::name:
        return lookup(e.name);
      case Expression::Kind::list: {
        List list{.items = {}, .tuple = e.flag};
        for (const ExpressionPtr& part : e.parts) list.items.push_back(evaluate(*part));
        budget_.make(list.items.size() * sizeof(Value));
        return list;
      }
      case Expression::Kind::dict: {
        Dict dict;
        for (size_t i = 0; i < e.parts.size(); i += 2) {
          const Value key = evaluate(*e.parts[i]);
          if (!key.is_text()) {
            template_error("a dictionary has a key of type ", key.type(), ", expected a text");
          }
          budget_.make(key.text().size() + sizeof(Value));
          dict.set(key.text(), evaluate(*e.parts[i + 1]));
        }
        return dict;
      }
      case Expression::Kind::attribute:
        return attribute_of(evaluate(*e.parts[0]), e.name, budget_);
      case Expression::Kind::item: {
        const Value holder = evaluate(*e.parts[0]);
        return item_of(holder, evaluate(*e.parts[1]), budget_);
      }
      case Expression::Kind::slice: {
        const Value holder = evaluate(*e.parts[0]);
        const auto bound = [&](size_t i) {
          return e.parts[i] ? evaluate(*e.parts[i]) : Value(None{});
        };
        const Value begin = bound(1), end = bound(2), step = bound(3);
        return slice_of(holder, begin, end, step, budget_);
      }
      case Expression::Kind::call:
        return call(e);
      case Expression::Kind::filter: {
        const Value value = evaluate(*e.parts[0]);
        Call call = arguments(e.arguments);
        line_ = e.line;
        return filtered(e.name, value, call, budget_);
      }
      case Expression::Kind::test: {
        const Value value = evaluate(*e.parts[0]);
        Call call = arguments(e.arguments);
        return tested(e.name, value, call, budget_) != e.flag;
      }
      case Expression::Kind::unary: {
        const Value value = evaluate(*e.parts[0]);
        if (e.name == "not") return !value.truth();
        if (e.name == "-") return negated(value);
        if (!value.is_number()) value.integer();  // throws
        return value;
      }
      case Expression::Kind::binary: {
        Value left = evaluate(*e.parts[0]);
        if (e.name == "and") return left.truth() ? evaluate(*e.parts[1]) : left;
        if (e.name == "or") return left.truth() ? left : evaluate(*e.parts[1]);
        return operated(e.name, left, evaluate(*e.parts[1]), budget_);
      }
      case Expression::Kind::compare:
        return compared(e);
      case Expression::Kind::conditional:
        if (evaluate(*e.parts[1]).truth()) return evaluate(*e.parts[0]);
        return e.parts[2] ? evaluate(*e.parts[2]) : Value(Undefined{"an 'if' without 'else'"});
    }
    return {};
  }

  Value call(const Expression& e) {
    const Value callee = evaluate(*e.parts[0]);
    if (callee.is_undefined()) callee.refuse_undefined();
    if (!callee.is_function()) {
      template_error("a value of type ", callee.type(), " is called as a function");
    }
    Call call = arguments(e.arguments);
    line_ = e.line;
    return callee.function().body(call);
  }

  Value compared(const Expression& e) {
    Value left = evaluate(*e.parts[0]);
    for (size_t i = 0; i < e.names.size(); ++i) {
      Value right = evaluate(*e.parts[i + 1]);
      const std::string& name = e.names[i];
      bool holds = false;
      if (name == "==" || name == "!=") {
        holds = equal(left, right, budget_) == (name == "==");
      } else if (name == "in" || name == "not in") {
        holds = contains(right, left, budget_) == (name == "in");
      } else {
        const int order = compare(left, right, name, budget_);
        holds = name == "<"    ? order < 0
                : name == "<=" ? order <= 0
                : name == ">"  ? order > 0
                               : order >= 0;
      }
      if (!holds) return false;
      left = std::move(right);
    }
    return true;
  }

 public:
  int line() const { return line_; }

 private:
  Budget budget_;
  std::vector<std::shared_ptr<Namespace>> spaces_;
  std::shared_ptr<Scope> scope_;
  std::string out_;
  int depth_ = 0, line_ = 1;
};

}  // namespace

struct Template::Tree {
  Block block;
};

Template::Template(const std::string& source) {
  if (source.size() > kMostSource) {
    template_error("the template has ", source.size(), " bytes, expected at most ", kMostSource);
  }
  tree_ = std::make_unique<const Tree>(Tree{parse_template(source)});
}

Template::~Template() = default;
Template::Template(Template&&) noexcept = default;

std::string Template::render(const Dict& names) const {
  Renderer renderer(names);
  try {
    return renderer.run(tree_->block);
  } catch (const Raised&) {
    throw;
  } catch (const TemplateError& error) {
    template_error("line ", renderer.line(), ": ", error.what());
  }
}

}  // namespace headloom::jinja
