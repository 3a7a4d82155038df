// Runs a template's syntax tree. One Interpreter renders once.
#pragma once

#include <ctime>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "text/jinja/ast.h"
#include "text/jinja/value.h"

namespace fourfold::text::jinja {

struct Limits {
  uint64_t max_steps = 50'000'000;     // nodes evaluated, and 1 for every 16 bytes moved
  uint64_t max_memory = 512ull << 20;  // bytes of all values made, together
  size_t max_output = 64ull << 20;     // bytes
  int max_depth = 400;                 // of nested evaluation, so of macro calls too
};

// A call of raise_exception; the message is the template's own.
struct RaisedByTemplate {
  std::string message;
};

struct Scope {
  explicit Scope(std::shared_ptr<Scope> outer) : parent(std::move(outer)) {}
  Value* find(int name) {
    for (Scope* scope = this; scope != nullptr; scope = scope->parent.get()) {
      for (auto& [id, value] : scope->variables) {
        if (id == name) return &value;
      }
    }
    return nullptr;
  }
  void set(int name, Value value) {
    for (auto& [id, old] : variables) {
      if (id == name) {
        old = std::move(value);
        return;
      }
    }
    variables.emplace_back(name, std::move(value));
  }
  std::shared_ptr<Scope> parent;
  std::vector<std::pair<int, Value>> variables;
};
using ScopePtr = std::shared_ptr<Scope>;

class Interpreter {
 public:
  Interpreter(const Tree& tree, const Limits& limits, std::optional<std::time_t> now);
  ~Interpreter();

  // The variables hide the global functions of the same name.
  std::string render(const std::vector<std::pair<std::string, Value>>& variables);

  // The line that was being run, for errors.
  int line() const { return line_; }

  // ---- for the built-in functions, filters, tests and methods

  void step(uint64_t n = 1) { Fuel::spend(n); }
  // Charges for memory; call before making something large.
  void charge(uint64_t bytes);
  Value text(std::string value, bool markup = false);
  Value list(std::vector<Value> items, Kind kind = Kind::kList, const char* name = "");
  Value strings(std::vector<std::string> items);

  // The elements of whatever can be looped over; takes all that is left of a generator.
  std::vector<Value> iterate(const Value& value);
  Value call(const Value& callee, const Arguments& arguments);
  Value filter(const std::string& name, const Value& value, const Arguments& arguments);
  bool test(const std::string& name, const Value& value, const Arguments& arguments);
  Value method(const Value& self, const std::string& name, const Arguments& arguments);
  Value attribute(const Value& object, const std::string& name);
  Value item(const Value& object, const Value& key);
  bool contains(const Value& container, const Value& value);
  Value binary(const std::string& op, const Value& left, const Value& right);
  std::time_t now() const { return now_ ? *now_ : std::time(nullptr); }
  void remember(const std::shared_ptr<NamespaceObject>& space) { namespaces_.push_back(space); }

 private:
  enum class Flow { kNormal, kBreak, kContinue };
  struct MacroObject;

  Value eval(const Node& node, const ScopePtr& scope);
  Value eval_call(const Node& node, const ScopePtr& scope);
  Value eval_compare(const Node& node, const ScopePtr& scope);
  Value eval_slice(const Node& node, const ScopePtr& scope);
  Arguments arguments(const CallArguments& call, const ScopePtr& scope);
  Flow run(const Node& node, const ScopePtr& scope);
  Flow run_for(const Node& node, const ScopePtr& scope);
  Flow loop(const Node& node, const ScopePtr& scope, const Value& iterable, int depth);
  void assign(const Node& target, const Value& value, const ScopePtr& scope);
  Value make_macro(const Node& node, const ScopePtr& scope, const Node& body, std::string name);
  Value call_macro(const MacroObject& macro, const Arguments& arguments);
  // Runs a body and returns what it writes.
  std::string capture(const Node& body, const ScopePtr& scope);
  void write(const std::string& text);
  int name_id(const char* name) const;
  void add_globals();

  struct DepthGuard {
    explicit DepthGuard(Interpreter& owner);
    ~DepthGuard() { --interpreter.depth_; }
    Interpreter& interpreter;
  };

  const Tree& tree_;
  Limits limits_;
  std::optional<std::time_t> now_;
  std::map<std::string, Value> globals_;
  std::string* out_ = nullptr;
  size_t written_ = 0;
  uint64_t memory_ = 0;
  int depth_ = 0;
  int line_ = 0;
  int loop_name_, caller_name_, varargs_name_, kwargs_name_;
  Value hole_;
  // What may hold itself; emptied at the end so that nothing leaks.
  std::vector<std::shared_ptr<NamespaceObject>> namespaces_;
  std::vector<std::shared_ptr<MacroObject>> macros_;
};

// Arguments by position or name, as Python binds them. Throws for unknown, missing or repeated ones.
class Bound {
 public:
  // Names after "|" are optional: {"old", "new", "|", "count"}.
  Bound(const Arguments& arguments, std::string_view function, std::initializer_list<const char*> names);
  bool has(size_t i) const { return i < values_.size() && values_[i].has_value(); }
  const Value& operator[](size_t i) const { return *values_[i]; }
  Value get(size_t i, const Value& fallback) const { return has(i) ? *values_[i] : fallback; }
  // With a type check that names the argument.
  int64_t integer(size_t i, int64_t fallback) const;
  bool flag(size_t i, bool fallback) const { return has(i) ? truthy(*values_[i]) : fallback; }
  std::string string(size_t i, std::string fallback) const;

 private:
  std::string function_;
  std::vector<std::string> names_;
  std::vector<std::optional<Value>> values_;
};

// "%s and %d" % values, and "{} {name}".format(...), for the conversions that templates use.
std::string format_percent(Interpreter& interpreter, const std::string& format, const Value& values);
std::string format_braces(Interpreter& interpreter, const std::string& format, const Arguments& arguments);

}  // namespace fourfold::text::jinja
