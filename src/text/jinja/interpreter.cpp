#include "text/jinja/interpreter.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "text/jinja/python_text.h"
#include "text/unicode.h"

namespace fourfold::text::jinja {

struct Interpreter::MacroObject : FunctionObject {
  const Node* node;  // the parameters
  const Node* body;
  ScopePtr scope;
};

Interpreter::DepthGuard::DepthGuard(Interpreter& owner) : interpreter(owner) {
  if (++interpreter.depth_ > interpreter.limits_.max_depth) {
    --interpreter.depth_;
    fail("the template recurses deeper than {} levels", interpreter.limits_.max_depth);
  }
}

Interpreter::Interpreter(const Tree& tree, const Limits& limits, std::optional<std::time_t> now)
    : tree_(tree), limits_(limits), now_(now) {
  loop_name_ = name_id("loop");
  caller_name_ = name_id("caller");
  varargs_name_ = name_id("varargs");
  kwargs_name_ = name_id("kwargs");
  add_globals();
}

Interpreter::~Interpreter() {
  for (const auto& macro : macros_) macro->scope = nullptr;
  for (const auto& space : namespaces_) space->members = {};
}

int Interpreter::name_id(const char* name) const {
  const auto found = std::find(tree_.names.begin(), tree_.names.end(), name);
  return found == tree_.names.end() ? -2 : static_cast<int>(found - tree_.names.begin());
}

std::string Interpreter::render(const std::vector<std::pair<std::string, Value>>& variables) {
  const Fuel fuel(limits_.max_steps);
  for (const auto& [name, value] : variables) globals_[name] = value;
  std::string out;
  out_ = &out;
  // Global variables lie outside of the template's own top scope.
  auto top = std::make_shared<Scope>(nullptr);
  for (size_t i = 0; i < tree_.names.size(); ++i) {
    const auto found = globals_.find(tree_.names[i]);
    if (found != globals_.end()) top->variables.emplace_back(static_cast<int>(i), found->second);
  }
  run(*tree_.root, std::make_shared<Scope>(top));
  return out;
}

void Interpreter::charge(uint64_t bytes) {
  if (bytes > limits_.max_memory || (memory_ += bytes) > limits_.max_memory) {
    fail("the template's values take more than {} bytes", limits_.max_memory);
  }
  step(bytes / 16);
}

Value Interpreter::text(std::string value, bool markup) {
  charge(value.size() + 64);
  return Value::string(std::move(value), markup);
}

Value Interpreter::list(std::vector<Value> items, Kind kind, const char* name) {
  charge(items.size() * sizeof(Value) + 64);
  return Value::list(std::move(items), kind, name);
}

Value Interpreter::strings(std::vector<std::string> items) {
  std::vector<Value> out;
  out.reserve(items.size());
  for (std::string& item : items) out.push_back(text(std::move(item)));
  return list(std::move(out));
}

void Interpreter::write(const std::string& text) {
  written_ += text.size();
  if (written_ > limits_.max_output) fail("the template writes more than {} bytes", limits_.max_output);
  step(text.size() / 16);
  *out_ += text;
}

std::string Interpreter::capture(const Node& body, const ScopePtr& scope) {
  std::string text;
  std::string* const outer = std::exchange(out_, &text);
  try {
    run(body, scope);
  } catch (...) {
    out_ = outer;
    throw;
  }
  out_ = outer;
  return text;
}

std::vector<Value> Interpreter::iterate(const Value& value) {
  switch (value.kind()) {
    case Kind::kUndefined:
      return {};
    case Kind::kList:
    case Kind::kTuple:
    case Kind::kView:
    case Kind::kRange:
      charge(value.items().size() * sizeof(Value));
      return value.items();
    case Kind::kGenerator: {
      ListObject& object = value.list_object();
      std::vector<Value> out(object.items.begin() + static_cast<ptrdiff_t>(object.consumed), object.items.end());
      charge(out.size() * sizeof(Value));
      object.consumed = object.items.size();
      return out;
    }
    case Kind::kDict: {
      std::vector<Value> out;
      charge(value.dict_object().members.size() * sizeof(Value));
      for (const auto& [key, member] : value.dict_object().members) out.push_back(key);
      return out;
    }
    case Kind::kString: {
      std::vector<Value> out;
      const std::string& all = value.text();
      charge(all.size() * (sizeof(Value) + 64));
      for (size_t i = 0; i < all.size();) {
        const size_t n = utf8_length(static_cast<unsigned char>(all[i]));
        out.push_back(Value::string(all.substr(i, n)));
        i += n;
      }
      return out;
    }
    default:
      fail("'{}' object is not iterable", type_name(value));
  }
}

bool Interpreter::contains(const Value& container, const Value& value) {
  switch (container.kind()) {
    case Kind::kString:
      if (!value.is_string()) {
        if (value.is_undefined()) fail("{}", value.undefined_message());
        fail("'in <string>' requires string as left operand, not {}", type_name(value));
      }
      step(container.text().size() / 16);
      return container.text().find(value.text()) != std::string::npos;
    case Kind::kDict:
      return container.dict_object().find(value) != std::string::npos;
    case Kind::kUndefined:
      return false;
    case Kind::kList:
    case Kind::kTuple:
    case Kind::kView:
    case Kind::kRange: {
      for (const Value& element : container.items()) {
        if (equal(element, value)) return true;
      }
      return false;
    }
    case Kind::kGenerator: {
      ListObject& object = container.list_object();
      while (object.consumed < object.items.size()) {
        if (equal(object.items[object.consumed++], value)) return true;
      }
      return false;
    }
    default:
      fail("argument of type '{}' is not iterable", type_name(container));
  }
}

namespace {

int64_t floor_div(int64_t a, int64_t b) {
  const int64_t quotient = a / b;
  return a % b != 0 && (a < 0) != (b < 0) ? quotient - 1 : quotient;
}

double float_mod(double a, double b) {
  double rest = std::fmod(a, b);
  if (rest != 0 && (rest < 0) != (b < 0)) rest += b;
  return rest;
}

// An addition, subtraction or multiplication that must stay within 64 bits.
template <typename Operation>
Value checked(Operation operation) {
  int64_t result = 0;
  if (operation(&result)) fail("an integer beyond 64 bits");
  return Value::integer(result);
}

Value power(const Value& left, const Value& right) {
  if (left.is_integer() && right.is_integer() && right.as_integer() >= 0) {
    int64_t result = 1, base = left.as_integer();
    for (int64_t exponent = right.as_integer(); exponent > 0; exponent >>= 1) {
      if ((exponent & 1) != 0 && __builtin_mul_overflow(result, base, &result)) fail("an integer beyond 64 bits");
      if (exponent > 1 && __builtin_mul_overflow(base, base, &base)) fail("an integer beyond 64 bits");
    }
    return Value::integer(result);
  }
  const double base = left.as_real(), exponent = right.as_real();
  if (base == 0 && exponent < 0) fail("0.0 cannot be raised to a negative power");
  if (base < 0 && exponent != std::floor(exponent)) fail("a negative number to a fractional power");
  return Value::real(std::pow(base, exponent));
}

Value arithmetic(const std::string& op, const Value& left, const Value& right) {
  const bool whole = left.is_integer() && right.is_integer();
  const int64_t a = whole ? left.as_integer() : 0, b = whole ? right.as_integer() : 0;
  const double x = left.as_real(), y = right.as_real();
  if (whole && op == "+") return checked([&](int64_t* out) { return __builtin_add_overflow(a, b, out); });
  if (whole && op == "-") return checked([&](int64_t* out) { return __builtin_sub_overflow(a, b, out); });
  if (whole && op == "*") return checked([&](int64_t* out) { return __builtin_mul_overflow(a, b, out); });
  if (op == "+") return Value::real(x + y);
  if (op == "-") return Value::real(x - y);
  if (op == "*") return Value::real(x * y);
  if (op == "**") return power(left, right);
  if (y == 0) fail("division by zero");
  if (whole && a == INT64_MIN && b == -1 && op != "/") {
    if (op == "%") return Value::integer(0);
    fail("an integer beyond 64 bits");
  }
  if (op == "/") return Value::real(x / y);
  if (op == "//") return whole ? Value::integer(floor_div(a, b)) : Value::real(std::floor(x / y));
  return whole ? Value::integer(a - floor_div(a, b) * b) : Value::real(float_mod(x, y));
}

}  // namespace

Value Interpreter::binary(const std::string& op, const Value& left, const Value& right) {
  if (left.is_number() && right.is_number()) return arithmetic(op, left, right);
  if (left.is_undefined()) fail("{}", left.undefined_message());
  if (op == "%" && left.is_string()) return text(format_percent(*this, left.text(), right));
  if (right.is_undefined()) fail("{}", right.undefined_message());
  if (op == "+") {
    if (left.is_string() && right.is_string()) {
      charge(left.text().size() + right.text().size());
      if (left.is_markup() != right.is_markup()) {
        // A safe string escapes what is added to it.
        const std::string a = left.is_markup() ? left.text() : str(filter("escape", left, {}));
        const std::string b = right.is_markup() ? right.text() : str(filter("escape", right, {}));
        return text(a + b, true);
      }
      return text(left.text() + right.text(), left.is_markup());
    }
    if (left.kind() == right.kind() && left.is_sequence()) {
      charge((left.items().size() + right.items().size()) * sizeof(Value));
      std::vector<Value> items = left.items();
      items.insert(items.end(), right.items().begin(), right.items().end());
      return list(std::move(items), left.kind());
    }
    if (left.is_string()) fail("can only concatenate str (not \"{}\") to str", type_name(right));
  }
  if (op == "*" && (left.is_integer() || right.is_integer())) {
    const Value& sequence = left.is_integer() ? right : left;
    const auto times = static_cast<uint64_t>(std::max<int64_t>(0, (left.is_integer() ? left : right).as_integer()));
    if (sequence.is_string() || sequence.is_sequence()) {
      const uint64_t size = sequence.is_string() ? sequence.text().size() : sequence.items().size() * sizeof(Value);
      uint64_t bytes = 0;
      if (__builtin_mul_overflow(size, times, &bytes)) bytes = UINT64_MAX;
      charge(bytes);
      if (sequence.is_string()) {
        std::string out;
        if (size > 0) {
          out.reserve(bytes);
          for (uint64_t i = 0; i < times; ++i) out += sequence.text();
        }
        return text(std::move(out), sequence.is_markup());
      }
      std::vector<Value> items;
      if (size > 0) {
        for (uint64_t i = 0; i < times; ++i) {
          items.insert(items.end(), sequence.items().begin(), sequence.items().end());
        }
      }
      return list(std::move(items), sequence.kind());
    }
  }
  fail("unsupported operand type(s) for {}: '{}' and '{}'", op, type_name(left), type_name(right));
}

Value Interpreter::item(const Value& object, const Value& key) {
  switch (object.kind()) {
    case Kind::kUndefined:
      fail("{}", object.undefined_message());
    case Kind::kDict: {
      if (key.is(Kind::kList) || key.is(Kind::kDict)) break;
      const DictObject& dict = object.dict_object();
      const size_t place = dict.find(key);
      if (place != std::string::npos) return dict.members[place].second;
      break;
    }
    case Kind::kList:
    case Kind::kTuple:
    case Kind::kRange:
      if (key.is_integer()) {
        const auto size = static_cast<int64_t>(object.items().size());
        const int64_t index = key.as_integer() < 0 ? key.as_integer() + size : key.as_integer();
        if (index >= 0 && index < size) return object.items()[static_cast<size_t>(index)];
      }
      break;
    case Kind::kString:
      if (key.is_integer()) {
        const std::string& all = object.text();
        step(all.size() / 16);
        const auto size = static_cast<int64_t>(count_code_points(all));
        const int64_t index = key.as_integer() < 0 ? key.as_integer() + size : key.as_integer();
        if (index >= 0 && index < size) {
          const size_t byte = byte_of_char(all, static_cast<size_t>(index));
          return text(all.substr(byte, utf8_length(static_cast<unsigned char>(all[byte]))));
        }
      }
      break;
    default:
      break;
  }
  if (key.is_string()) return attribute(object, key.text());
  return Value::undefined(fmt::format("'{} object' has no element {}", type_name(object), printable(repr(key))));
}

Arguments Interpreter::arguments(const CallArguments& call, const ScopePtr& scope) {
  Arguments out;
  out.positional.reserve(call.positional.size());
  for (const NodePtr& node : call.positional) out.positional.push_back(eval(*node, scope));
  if (call.star) {
    for (Value& value : iterate(eval(*call.star, scope))) out.positional.push_back(std::move(value));
  }
  for (const auto& [name, node] : call.named) out.named.emplace_back(name, eval(*node, scope));
  if (call.star_star) {
    const Value more = eval(*call.star_star, scope);
    if (!more.is(Kind::kDict)) fail("the argument after ** is {}, a dict is wanted", type_name(more));
    for (const auto& [key, value] : more.dict_object().members) {
      if (!key.is_string()) fail("keywords must be strings");
      for (const auto& [name, other] : out.named) {
        if (name == key.text()) fail("multiple values for the keyword argument '{}'", printable(name));
      }
      out.named.emplace_back(key.text(), value);
    }
  }
  return out;
}

Value Interpreter::call(const Value& callee, const Arguments& arguments) {
  switch (callee.kind()) {
    case Kind::kUndefined:
      fail("{}", callee.undefined_message());
    case Kind::kFunction: {
      const auto function = std::static_pointer_cast<FunctionObject>(callee.pointer());
      return function->call(*this, arguments);
    }
    case Kind::kMethod: {
      const auto bound = std::static_pointer_cast<MethodObject>(callee.pointer());
      return method(bound->self, bound->name, arguments);
    }
    case Kind::kLoop: {
      const auto object = std::static_pointer_cast<LoopObject>(callee.pointer());
      if (!object->recurse) fail("the loop is called, but it has no 'recursive' marker");
      if (arguments.positional.size() != 1 || !arguments.named.empty()) fail("loop(...) takes one argument");
      return object->recurse(arguments.positional[0]);
    }
    case Kind::kJoiner: {
      auto& joiner = static_cast<JoinerObject&>(*callee.pointer());
      if (std::exchange(joiner.used, true)) return text(joiner.separator);
      return text("");
    }
    default:
      fail("'{}' object is not callable", type_name(callee));
  }
}

Value Interpreter::eval_compare(const Node& node, const ScopePtr& scope) {
  Value left = eval(*node.children[0], scope);
  for (size_t i = 0; i < node.texts.size(); ++i) {
    const std::string& op = node.texts[i];
    Value right = eval(*node.children[i + 1], scope);
    line_ = node.line;
    bool holds = false;
    if (op == "==") {
      holds = equal(left, right);
    } else if (op == "!=") {
      holds = !equal(left, right);
    } else if (op == "in") {
      holds = contains(right, left);
    } else if (op == "not in") {
      holds = !contains(right, left);
    } else {
      const int order = compare(left, right, op.c_str());
      holds = op == "<"    ? order == -1
              : op == ">"  ? order == 1
              : op == "<=" ? order == -1 || order == 0
                           : order == 0 || order == 1;
    }
    if (!holds) return Value::boolean(false);
    left = std::move(right);
  }
  return Value::boolean(true);
}

Value Interpreter::eval_slice(const Node& node, const ScopePtr& scope) {
  const Value object = eval(*node.children[0], scope);
  std::optional<int64_t> parts[3];
  for (size_t i = 0; i < 3; ++i) {
    if (!node.children[i + 1]) continue;
    const Value part = eval(*node.children[i + 1], scope);
    if (part.is_none()) continue;
    if (!part.is_integer()) {
      if (part.is_undefined()) fail("{}", part.undefined_message());
      fail("slice indices must be integers or None, not {}", type_name(part));
    }
    parts[i] = part.as_integer();
  }
  line_ = node.line;
  if (object.is_undefined()) fail("{}", object.undefined_message());
  if (!object.is_string() && !object.is_sequence() && !object.is(Kind::kRange)) {
    return Value::undefined(fmt::format("'{} object' cannot be sliced", type_name(object)));
  }
  const int64_t step_size = parts[2].value_or(1);
  if (step_size == 0) fail("slice step cannot be zero");
  std::vector<Value> characters;
  const std::vector<Value>* items = nullptr;
  const bool is_text = object.is_string();
  int64_t size = 0;
  if (is_text) {
    step(object.text().size() / 16);
    size = static_cast<int64_t>(count_code_points(object.text()));
  } else {
    items = &object.items();
    size = static_cast<int64_t>(items->size());
  }
  const auto clamp = [&](std::optional<int64_t> value, int64_t fallback) {
    if (!value) return fallback;
    int64_t at = *value;
    if (at < 0) at = at < -size ? -1 : at + size;
    const int64_t low = step_size < 0 ? -1 : 0, high = step_size < 0 ? size - 1 : size;
    return *value < -size ? low : std::clamp(at, low, high);
  };
  const int64_t start = clamp(parts[0], step_size < 0 ? size - 1 : 0);
  const int64_t stop = clamp(parts[1], step_size < 0 ? -1 : size);
  if (is_text && step_size == 1) {
    const std::string& all = object.text();
    if (start >= stop) return text("");
    const size_t begin = byte_of_char(all, static_cast<size_t>(start));
    const size_t length = byte_of_char(std::string_view(all).substr(begin), static_cast<size_t>(stop - start));
    return text(all.substr(begin, length));
  }
  if (is_text) {
    characters = iterate(object);
    items = &characters;
  }
  std::vector<Value> out;
  for (int64_t i = start; step_size > 0 ? i < stop : i > stop;) {
    out.push_back((*items)[static_cast<size_t>(i)]);
    if (__builtin_add_overflow(i, step_size, &i)) break;
  }
  if (!is_text) return list(std::move(out), object.is(Kind::kTuple) ? Kind::kTuple : object.kind());
  std::string joined;
  for (const Value& character : out) joined += character.text();
  return text(std::move(joined));
}

Value Interpreter::eval_call(const Node& node, const ScopePtr& scope) {
  const Value callee = eval(*node.children[0], scope);
  const Arguments bound = arguments(node.arguments, scope);
  line_ = node.line;
  return call(callee, bound);
}

Value Interpreter::eval(const Node& node, const ScopePtr& scope) {
  step();
  const DepthGuard guard(*this);
  line_ = node.line;
  switch (node.op) {
    case Op::kConst:
      return node.value;
    case Op::kHole:
      return hole_;
    case Op::kName: {
      const Value* found = scope->find(node.name);
      if (found != nullptr) return *found;
      return Value::undefined(fmt::format("'{}' is undefined", node.text));
    }
    case Op::kList:
    case Op::kTuple: {
      std::vector<Value> items;
      items.reserve(node.children.size());
      for (const NodePtr& child : node.children) items.push_back(eval(*child, scope));
      return list(std::move(items), node.op == Op::kList ? Kind::kList : Kind::kTuple);
    }
    case Op::kDict: {
      auto dict = std::make_shared<DictObject>();
      for (size_t i = 0; i + 1 < node.children.size(); i += 2) {
        const Value key = eval(*node.children[i], scope);
        dict->set(key, eval(*node.children[i + 1], scope));
      }
      charge(dict->members.size() * 2 * sizeof(Value) + 64);
      return Value::dict(std::move(dict));
    }
    case Op::kAttribute: {
      const Value object = eval(*node.children[0], scope);
      line_ = node.line;
      return attribute(object, node.text);
    }
    case Op::kItem: {
      const Value object = eval(*node.children[0], scope);
      const Value key = eval(*node.children[1], scope);
      line_ = node.line;
      return item(object, key);
    }
    case Op::kSlice:
      return eval_slice(node, scope);
    case Op::kCall:
      return eval_call(node, scope);
    case Op::kFilter: {
      const Value value = eval(*node.children[0], scope);
      const Arguments bound = arguments(node.arguments, scope);
      line_ = node.line;
      return filter(node.text, value, bound);
    }
    case Op::kTest: {
      const Value value = eval(*node.children[0], scope);
      const Arguments bound = arguments(node.arguments, scope);
      line_ = node.line;
      return Value::boolean(test(node.text, value, bound));
    }
    case Op::kNot:
      return Value::boolean(!truthy(eval(*node.children[0], scope)));
    case Op::kNegate:
    case Op::kPlus: {
      const Value value = eval(*node.children[0], scope);
      if (value.is_undefined()) fail("{}", value.undefined_message());
      if (!value.is_number())
        fail("bad operand type for unary {}: '{}'", node.op == Op::kPlus ? '+' : '-', type_name(value));
      if (node.op == Op::kPlus) return value.is(Kind::kBool) ? Value::integer(value.as_integer()) : value;
      if (value.is(Kind::kFloat)) return Value::real(-value.as_real());
      return arithmetic("-", Value::integer(0), value);
    }
    case Op::kAnd: {
      Value left = eval(*node.children[0], scope);
      return truthy(left) ? eval(*node.children[1], scope) : left;
    }
    case Op::kOr: {
      Value left = eval(*node.children[0], scope);
      return truthy(left) ? left : eval(*node.children[1], scope);
    }
    case Op::kCondition:
      if (truthy(eval(*node.children[1], scope))) return eval(*node.children[0], scope);
      if (node.children[2]) return eval(*node.children[2], scope);
      return Value::undefined("an inline if was false and has no else");
    case Op::kCompare:
      return eval_compare(node, scope);
    case Op::kBinary: {
      const Value left = eval(*node.children[0], scope);
      const Value right = eval(*node.children[1], scope);
      line_ = node.line;
      return binary(node.text, left, right);
    }
    case Op::kConcat: {
      std::string out;
      for (const NodePtr& child : node.children) out += str(eval(*child, scope));
      return text(std::move(out));
    }
    default:
      break;
  }
  fail("a statement where an expression is wanted");
}

void Interpreter::assign(const Node& target, const Value& value, const ScopePtr& scope) {
  if (target.op == Op::kName) {
    scope->set(target.name, value);
    return;
  }
  if (target.op == Op::kAttribute) {
    const Value object = eval(*target.children[0], scope);
    if (!object.is(Kind::kNamespace)) fail("cannot assign attribute on non-namespace object");
    if (target.text.starts_with('_')) fail("a namespace cannot have the attribute '{}'", printable(target.text));
    charge(64);
    static_cast<NamespaceObject&>(*object.pointer()).members.set(Value::string(target.text), value);
    return;
  }
  const std::vector<Value> items = iterate(value);
  if (value.is_undefined()) fail("{}", value.undefined_message());
  if (items.size() != target.children.size()) {
    fail("{} values to unpack, {} are wanted", items.size(), target.children.size());
  }
  for (size_t i = 0; i < items.size(); ++i) assign(*target.children[i], items[i], scope);
}

Interpreter::Flow Interpreter::run(const Node& node, const ScopePtr& scope) {
  step();
  const DepthGuard guard(*this);
  line_ = node.line;
  switch (node.op) {
    case Op::kBody:
      for (const NodePtr& child : node.children) {
        if (const Flow flow = run(*child, scope); flow != Flow::kNormal) return flow;
      }
      return Flow::kNormal;
    case Op::kText:
      write(node.text);
      return Flow::kNormal;
    case Op::kOutput: {
      const Value value = eval(*node.children[0], scope);
      line_ = node.line;
      if (value.is_string()) {
        write(value.text());
      } else {
        write(str(value));
      }
      return Flow::kNormal;
    }
    case Op::kIf: {
      size_t i = 0;
      for (; i + 1 < node.children.size(); i += 2) {
        if (truthy(eval(*node.children[i], scope))) return run(*node.children[i + 1], scope);
      }
      return i < node.children.size() ? run(*node.children[i], scope) : Flow::kNormal;
    }
    case Op::kFor:
      return run_for(node, scope);
    case Op::kSet: {
      const Value value = eval(*node.children[1], scope);
      line_ = node.line;
      assign(*node.children[0], value, scope);
      return Flow::kNormal;
    }
    case Op::kSetBlock: {
      Value value = text(capture(*node.children[2], std::make_shared<Scope>(scope)));
      if (node.children[1]) {
        const Value outer = std::exchange(hole_, value);
        value = eval(*node.children[1], scope);
        hole_ = outer;
      }
      assign(*node.children[0], value, scope);
      return Flow::kNormal;
    }
    case Op::kFilterBlock: {
      Value value = text(capture(*node.children[1], std::make_shared<Scope>(scope)));
      const Value outer = std::exchange(hole_, value);
      value = eval(*node.children[0], scope);
      hole_ = outer;
      write(str(value));
      return Flow::kNormal;
    }
    case Op::kMacro:
      scope->set(node.name, make_macro(node, scope, *node.children[0], node.text));
      return Flow::kNormal;
    case Op::kCallBlock: {
      const Node& call_node = *node.children[0];
      const Value callee = eval(*call_node.children[0], scope);
      Arguments bound = arguments(call_node.arguments, scope);
      bound.named.emplace_back("caller", make_macro(node, scope, *node.children[1], "caller"));
      line_ = node.line;
      write(str(call(callee, bound)));
      return Flow::kNormal;
    }
    case Op::kWith: {
      auto inner = std::make_shared<Scope>(scope);
      for (size_t i = 0; i + 2 < node.children.size(); i += 2) {
        assign(*node.children[i], eval(*node.children[i + 1], scope), inner);
      }
      return run(*node.children.back(), inner);
    }
    case Op::kBreak:
      return Flow::kBreak;
    case Op::kContinue:
      return Flow::kContinue;
    default:
      break;
  }
  fail("an expression where a statement is wanted");
}

Interpreter::Flow Interpreter::run_for(const Node& node, const ScopePtr& scope) {
  const Value iterable = eval(*node.children[1], scope);
  line_ = node.line;
  return loop(node, scope, iterable, 0);
}

Interpreter::Flow Interpreter::loop(const Node& node, const ScopePtr& scope, const Value& iterable, int depth) {
  std::vector<Value> all = iterate(iterable);
  const auto passes = [&](const Value& value) {
    auto inner = std::make_shared<Scope>(scope);
    assign(*node.children[0], value, inner);
    return truthy(eval(*node.children[2], inner));
  };
  // Without the variable "loop" nothing looks ahead, and the condition may depend on what the body does.
  const bool filter_first = node.children[2] && loop_name_ >= 0;
  if (filter_first) {
    std::vector<Value> kept;
    for (Value& value : all) {
      if (passes(value)) kept.push_back(std::move(value));
    }
    all = std::move(kept);
  }
  const auto items = std::make_shared<const std::vector<Value>>(std::move(all));
  auto object = std::make_shared<LoopObject>();
  object->items = items;
  object->depth0 = depth;
  if (node.flag) {
    object->recurse = [this, &node, scope, depth](const Value& more) {
      std::string text_out;
      std::string* const outer = std::exchange(out_, &text_out);
      try {
        const DepthGuard guard(*this);
        loop(node, scope, more, depth + 1);
      } catch (...) {
        out_ = outer;
        throw;
      }
      out_ = outer;
      return text(std::move(text_out));
    };
  }
  bool ran = false;
  for (size_t i = 0; i < items->size(); ++i) {
    step();
    if (node.children[2] && !filter_first && !passes((*items)[i])) continue;
    ran = true;
    auto inner = std::make_shared<Scope>(scope);
    if (loop_name_ >= 0) {
      object->index0 = i;
      inner->set(loop_name_, Value::object(Kind::kLoop, object));
    }
    assign(*node.children[0], (*items)[i], inner);
    if (run(*node.children[3], inner) == Flow::kBreak) break;
  }
  if (!ran && node.children[4]) return run(*node.children[4], std::make_shared<Scope>(scope));
  return Flow::kNormal;
}

Value Interpreter::make_macro(const Node& node, const ScopePtr& scope, const Node& body, std::string name) {
  charge(256);
  auto macro = std::make_shared<MacroObject>();
  macro->name = std::move(name);
  macro->node = &node;
  macro->body = &body;
  macro->scope = scope;
  MacroObject* const raw = macro.get();
  macro->call = [raw](Interpreter& interpreter, const Arguments& arguments) {
    return interpreter.call_macro(*raw, arguments);
  };
  macros_.push_back(macro);
  return Value::object(Kind::kFunction, std::move(macro));
}

Value Interpreter::call_macro(const MacroObject& macro, const Arguments& arguments) {
  const std::vector<Parameter>& parameters = macro.node->parameters;
  auto scope = std::make_shared<Scope>(macro.scope);
  std::vector<bool> given(parameters.size());
  for (size_t i = 0; i < parameters.size() && i < arguments.positional.size(); ++i) {
    scope->set(parameters[i].name, arguments.positional[i]);
    given[i] = true;
  }
  auto more = std::make_shared<DictObject>();
  for (const auto& [name, value] : arguments.named) {
    size_t i = 0;
    while (i < parameters.size() && tree_.names[static_cast<size_t>(parameters[i].name)] != name) ++i;
    if (i < parameters.size()) {
      if (given[i]) fail("macro '{}' got multiple values for the argument '{}'", macro.name, printable(name));
      scope->set(parameters[i].name, value);
      given[i] = true;
    } else if (name == "caller") {
      if (caller_name_ >= 0) scope->set(caller_name_, value);
    } else {
      if (kwargs_name_ < 0) fail("macro '{}' takes no keyword argument '{}'", macro.name, printable(name));
      more->set(Value::string(name), value);
    }
  }
  if (arguments.positional.size() > parameters.size() && varargs_name_ < 0) {
    fail("macro '{}' takes not more than {} argument(s)", macro.name, parameters.size());
  }
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (given[i]) continue;
    if (parameters[i].fallback) {
      scope->set(parameters[i].name, eval(*parameters[i].fallback, scope));
    } else {
      scope->set(parameters[i].name,
                 Value::undefined(fmt::format("parameter '{}' was not provided",
                                              tree_.names[static_cast<size_t>(parameters[i].name)])));
    }
  }
  if (varargs_name_ >= 0) {
    std::vector<Value> rest;
    for (size_t i = parameters.size(); i < arguments.positional.size(); ++i) rest.push_back(arguments.positional[i]);
    scope->set(varargs_name_, list(std::move(rest), Kind::kTuple));
  }
  if (kwargs_name_ >= 0) scope->set(kwargs_name_, Value::dict(std::move(more)));
  return text(capture(*macro.body, scope));
}

}  // namespace fourfold::text::jinja
