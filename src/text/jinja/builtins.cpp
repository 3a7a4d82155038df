// Attributes, global functions, tests, and the binding of arguments.
#include <algorithm>
#include <unordered_map>
#include <unordered_set>

#include "base/check.h"
#include "text/jinja/interpreter.h"
#include "text/jinja/python_text.h"
#include "text/unicode.h"

namespace fourfold::text::jinja {

Bound::Bound(const Arguments& arguments, std::string_view function, std::initializer_list<const char*> names)
    : function_(function) {
  size_t required = names.size();
  for (const char* name : names) {
    if (name == std::string_view("|")) {
      required = names_.size();
    } else {
      names_.emplace_back(name);
    }
  }
  required = std::min(required, names_.size());
  values_.resize(names_.size());
  if (arguments.positional.size() > names_.size()) {
    fail("{}() takes at most {} argument(s), {} are given", function, names_.size(), arguments.positional.size());
  }
  for (size_t i = 0; i < arguments.positional.size(); ++i) values_[i] = arguments.positional[i];
  for (const auto& [name, value] : arguments.named) {
    const auto found = std::find(names_.begin(), names_.end(), name);
    if (found == names_.end()) fail("{}() got an unexpected keyword argument '{}'", function, printable(name));
    auto& place = values_[static_cast<size_t>(found - names_.begin())];
    if (place) fail("{}() got multiple values for argument '{}'", function, name);
    place = value;
  }
  for (size_t i = 0; i < required; ++i) {
    if (!values_[i]) fail("{}() misses the argument '{}'", function, names_[i]);
  }
}

int64_t Bound::integer(size_t i, int64_t fallback) const {
  if (!has(i)) return fallback;
  if (!values_[i]->is_integer()) {
    fail("{}(): the argument '{}' is {}, an integer is wanted", function_, names_[i], type_name(*values_[i]));
  }
  return values_[i]->as_integer();
}

std::string Bound::string(size_t i, std::string fallback) const {
  if (!has(i)) return fallback;
  if (!values_[i]->is_string()) {
    fail("{}(): the argument '{}' is {}, a string is wanted", function_, names_[i], type_name(*values_[i]));
  }
  return values_[i]->text();
}

namespace {

const std::unordered_set<std::string>& methods_of(Kind kind) {
  static const std::unordered_set<std::string> kNothing;
  static const std::unordered_set<std::string> kText = {
      "capitalize", "casefold",     "center",       "count",   "encode",     "endswith",    "expandtabs",
      "find",       "format",       "format_map",   "index",   "isalnum",    "isalpha",     "isascii",
      "isdecimal",  "isdigit",      "isidentifier", "islower", "isnumeric",  "isprintable", "isspace",
      "istitle",    "isupper",      "join",         "ljust",   "lower",      "lstrip",      "maketrans",
      "partition",  "removeprefix", "removesuffix", "replace", "rfind",      "rindex",      "rjust",
      "rpartition", "rsplit",       "rstrip",       "split",   "splitlines", "startswith",  "strip",
      "swapcase",   "title",        "translate",    "upper",   "zfill"};
  static const std::unordered_set<std::string> kList = {"copy", "count", "index"};
  static const std::unordered_set<std::string> kTuple = {"count", "index"};
  static const std::unordered_set<std::string> kDict = {"copy", "fromkeys", "get", "items", "keys", "values"};
  switch (kind) {
    case Kind::kString:
      return kText;
    case Kind::kList:
      return kList;
    case Kind::kTuple:
    case Kind::kRange:
      return kTuple;
    case Kind::kDict:
      return kDict;
    default:
      return kNothing;
  }
}

// What would change a list or dict; jinja2's immutable sandbox refuses it too.
bool would_modify(Kind kind, const std::string& name) {
  static const std::unordered_set<std::string> kList = {"append", "clear",  "extend",  "insert",
                                                        "pop",    "remove", "reverse", "sort"};
  static const std::unordered_set<std::string> kDict = {"clear", "pop", "popitem", "setdefault", "update"};
  return (kind == Kind::kList && kList.contains(name)) || (kind == Kind::kDict && kDict.contains(name));
}

Value loop_attribute(const LoopObject& loop, const std::string& name, const Value& self) {
  const auto size = static_cast<int64_t>(loop.items->size());
  const auto index = static_cast<int64_t>(loop.index0);
  if (name == "index") return Value::integer(index + 1);
  if (name == "index0") return Value::integer(index);
  if (name == "revindex") return Value::integer(size - index);
  if (name == "revindex0") return Value::integer(size - index - 1);
  if (name == "first") return Value::boolean(index == 0);
  if (name == "last") return Value::boolean(index + 1 == size);
  if (name == "length") return Value::integer(size);
  if (name == "depth") return Value::integer(loop.depth0 + 1);
  if (name == "depth0") return Value::integer(loop.depth0);
  if (name == "previtem") {
    return index > 0 ? (*loop.items)[loop.index0 - 1] : Value::undefined("there is no previous item");
  }
  if (name == "nextitem") {
    return index + 1 < size ? (*loop.items)[loop.index0 + 1] : Value::undefined("there is no next item");
  }
  if (name == "cycle" || name == "changed") {
    auto method = std::make_shared<MethodObject>();
    method->self = self;
    method->name = name;
    return Value::object(Kind::kMethod, std::move(method));
  }
  return Value::undefined(fmt::format("'loop' has no attribute '{}'", printable(name)));
}

std::string object_name(const Value& value) {
  return value.is_none() ? "None" : fmt::format("{} object", type_name(value));
}

}  // namespace

Value Interpreter::attribute(const Value& object, const std::string& name) {
  if (object.is_undefined()) fail("{}", object.undefined_message());
  if (object.is(Kind::kNamespace)) {
    const auto& members = static_cast<const NamespaceObject&>(*object.pointer()).members;
    if (const Value* found = members.get(name)) return *found;
    return Value::undefined(fmt::format("the namespace has no attribute '{}'", printable(name)));
  }
  if (object.is(Kind::kLoop)) return loop_attribute(static_cast<LoopObject&>(*object.pointer()), name, object);
  if (object.is(Kind::kTuple) && object.list_object().name == kGroupTuple) {
    if (name == "grouper") return object.items()[0];
    if (name == "list") return object.items()[1];
  }
  const bool cycler = object.is(Kind::kCycler);
  if (cycler && name == "current") {
    const auto& self = static_cast<const CyclerObject&>(*object.pointer());
    return self.items[self.position];
  }
  if (methods_of(object.kind()).contains(name) || (cycler && (name == "next" || name == "reset"))) {
    auto method = std::make_shared<MethodObject>();
    method->self = object;
    method->name = name;
    return Value::object(Kind::kMethod, std::move(method));
  }
  if (would_modify(object.kind(), name)) {
    return Value::undefined(fmt::format("'{}' would change a {}, which templates cannot do", name, type_name(object)));
  }
  if (object.is(Kind::kDict)) {
    if (const Value* found = object.dict_object().get(name)) return *found;
  }
  if (object.is(Kind::kFunction) && name == "name") {
    return text(static_cast<const FunctionObject&>(*object.pointer()).name);
  }
  return Value::undefined(fmt::format("'{}' has no attribute '{}'", object_name(object), printable(name)));
}

namespace {

Value make_function(const char* name, std::function<Value(Interpreter&, const Arguments&)> call) {
  auto function = std::make_shared<FunctionObject>();
  function->name = name;
  function->call = std::move(call);
  return Value::object(Kind::kFunction, std::move(function));
}

// dict(mapping or pairs, name=value ...)
std::shared_ptr<DictObject> make_dict(Interpreter& interpreter, const Arguments& arguments) {
  if (arguments.positional.size() > 1) fail("dict expected at most 1 argument, got {}", arguments.positional.size());
  auto dict = std::make_shared<DictObject>();
  for (const Value& source : arguments.positional) {
    if (source.is(Kind::kDict)) {
      for (const auto& [key, value] : source.dict_object().members) dict->set(key, value);
      continue;
    }
    if (source.is_undefined()) fail("{}", source.undefined_message());
    for (const Value& pair : interpreter.iterate(source)) {
      const std::vector<Value> both = interpreter.iterate(pair);
      if (both.size() != 2) fail("dict(): an element has length {}, 2 is wanted", both.size());
      dict->set(both[0], both[1]);
    }
  }
  for (const auto& [name, value] : arguments.named) dict->set(Value::string(name), value);
  interpreter.charge(dict->members.size() * 2 * sizeof(Value) + 64);
  return dict;
}

Value make_range(Interpreter& interpreter, const Arguments& arguments) {
  constexpr int64_t kMaxRange = 100000;  // as in jinja2's sandbox
  if (!arguments.named.empty() || arguments.positional.empty() || arguments.positional.size() > 3) {
    fail("range() takes from 1 to 3 positional arguments");
  }
  int64_t parts[3] = {0, 0, 1};
  for (size_t i = 0; i < arguments.positional.size(); ++i) {
    const Value& value = arguments.positional[i];
    if (value.is_undefined()) fail("{}", value.undefined_message());
    if (!value.is_integer()) fail("'{}' object cannot be interpreted as an integer", type_name(value));
    parts[i] = value.as_integer();
  }
  if (arguments.positional.size() == 1) std::swap(parts[0], parts[1]);
  if (parts[2] == 0) fail("range() arg 3 must not be zero");
  std::vector<Value> items;
  for (int64_t i = parts[0]; parts[2] > 0 ? i < parts[1] : i > parts[1];) {
    if (static_cast<int64_t>(items.size()) >= kMaxRange) fail("range of more than {} numbers", kMaxRange);
    items.push_back(Value::integer(i));
    if (__builtin_add_overflow(i, parts[2], &i)) break;
  }
  return interpreter.list(std::move(items), Kind::kRange);
}

std::string format_time(std::time_t now, const std::string& format) {
  std::tm broken{};
  if (localtime_r(&now, &broken) == nullptr) fail("the time cannot be broken down");
  if (format.size() > 1000) fail("strftime_now(): a format of {} bytes", format.size());
  if (format.empty()) return "";
  // A mark at the end tells an empty result from a buffer that is too small.
  const std::string marked = format + "|";
  std::string out(256, '\0');
  while (true) {
    const size_t written = std::strftime(out.data(), out.size(), marked.c_str(), &broken);
    if (written > 0) {
      out.resize(written - 1);
      return to_valid_utf8(out);
    }
    if (out.size() > 1 << 20) fail("strftime_now(): the result is too long");
    out.resize(out.size() * 4);
  }
}

}  // namespace

void Interpreter::add_globals() {
  globals_["raise_exception"] = make_function("raise_exception", [](Interpreter&, const Arguments& arguments) -> Value {
    const Bound bound(arguments, "raise_exception", {"message"});
    throw RaisedByTemplate{str(bound[0])};
  });
  globals_["strftime_now"] = make_function("strftime_now", [](Interpreter& interpreter, const Arguments& arguments) {
    const Bound bound(arguments, "strftime_now", {"format"});
    return interpreter.text(format_time(interpreter.now(), bound.string(0, "")));
  });
  globals_["range"] = make_function("range", make_range);
  globals_["dict"] = make_function("dict", [](Interpreter& interpreter, const Arguments& arguments) {
    return Value::dict(make_dict(interpreter, arguments));
  });
  globals_["namespace"] = make_function("namespace", [](Interpreter& interpreter, const Arguments& arguments) {
    auto space = std::make_shared<NamespaceObject>();
    space->members = *make_dict(interpreter, arguments);
    for (const auto& [key, value] : space->members.members) {
      if (key.is_string() && key.text().starts_with('_')) {
        fail("a namespace cannot have the attribute '{}'", printable(key.text()));
      }
    }
    interpreter.remember(space);
    return Value::object(Kind::kNamespace, std::move(space));
  });
  globals_["cycler"] = make_function("cycler", [](Interpreter&, const Arguments& arguments) {
    if (arguments.positional.empty()) fail("cycler() wants at least one item");
    auto cycler = std::make_shared<CyclerObject>();
    cycler->items = arguments.positional;
    for (const Value& value : cycler->items) cycler->depth = std::max(cycler->depth, value.depth() + 1);
    if (cycler->depth > kMaxValueDepth) fail("a value nested deeper than {} levels", kMaxValueDepth);
    return Value::object(Kind::kCycler, std::move(cycler));
  });
  globals_["joiner"] = make_function("joiner", [](Interpreter&, const Arguments& arguments) {
    const Bound bound(arguments, "joiner", {"|", "sep"});
    auto joiner = std::make_shared<JoinerObject>();
    joiner->separator = bound.string(0, ", ");
    return Value::object(Kind::kJoiner, std::move(joiner));
  });
}

namespace {

using Test = bool (*)(Interpreter&, const Value&, const Arguments&);

const Value& one_argument(const Arguments& arguments, const char* name) {
  if (arguments.positional.size() != 1 || !arguments.named.empty()) fail("the test '{}' wants one argument", name);
  return arguments.positional[0];
}

bool is_case(const std::string& text, bool wanted_upper) {
  bool seen = false;
  for (size_t i = 0; i < text.size();) {
    const char32_t c = next_code_point(text, i);
    if (wanted_upper ? is_lower(c) : is_upper(c)) return false;
    seen = seen || (wanted_upper ? is_upper(c) : is_lower(c));
  }
  return seen;
}

int64_t modulo(const Value& value, const Value& divisor) {
  if (!value.is_integer() || !divisor.is_integer()) fail("this test wants integers, not {}", type_name(value));
  if (divisor.as_integer() == 0) fail("division by zero");
  return divisor.as_integer() == -1 ? 0 : value.as_integer() % divisor.as_integer();
}

bool is_iterable(const Value& value) {
  switch (value.kind()) {
    case Kind::kUndefined:
    case Kind::kString:
    case Kind::kList:
    case Kind::kTuple:
    case Kind::kDict:
    case Kind::kView:
    case Kind::kRange:
    case Kind::kGenerator:
    case Kind::kLoop:
      return true;
    default:
      return false;
  }
}

const std::unordered_map<std::string, Test>& tests() {
  static const std::unordered_map<std::string, Test> kTests = [] {
    std::unordered_map<std::string, Test> t;
    using I = Interpreter;
    using V = const Value;
    using A = const Arguments;
    t["defined"] = [](I&, V& v, A&) { return !v.is_undefined(); };
    t["undefined"] = [](I&, V& v, A&) { return v.is_undefined(); };
    t["none"] = [](I&, V& v, A&) { return v.is_none(); };
    t["boolean"] = [](I&, V& v, A&) { return v.is(Kind::kBool); };
    t["true"] = [](I&, V& v, A&) { return v.is(Kind::kBool) && v.as_bool(); };
    t["false"] = [](I&, V& v, A&) { return v.is(Kind::kBool) && !v.as_bool(); };
    t["integer"] = [](I&, V& v, A&) { return v.is(Kind::kInt); };
    t["float"] = [](I&, V& v, A&) { return v.is(Kind::kFloat); };
    t["number"] = [](I&, V& v, A&) { return v.is_number(); };
    t["string"] = [](I&, V& v, A&) { return v.is_string(); };
    t["mapping"] = [](I&, V& v, A&) { return v.is(Kind::kDict); };
    t["sequence"] = [](I&, V& v, A&) {
      return v.is_string() || v.is_sequence() || v.is(Kind::kDict) || v.is(Kind::kRange) || v.is_undefined();
    };
    t["iterable"] = [](I&, V& v, A&) { return is_iterable(v); };
    t["callable"] = [](I&, V& v, A&) {
      return v.is(Kind::kFunction) || v.is(Kind::kMethod) || v.is(Kind::kLoop) || v.is(Kind::kJoiner);
    };
    t["odd"] = [](I&, V& v, A&) { return modulo(v, Value::integer(2)) != 0; };
    t["even"] = [](I&, V& v, A&) { return modulo(v, Value::integer(2)) == 0; };
    t["divisibleby"] = [](I&, V& v, A& a) { return modulo(v, one_argument(a, "divisibleby")) == 0; };
    t["lower"] = [](I&, V& v, A&) { return is_case(str(v), false); };
    t["upper"] = [](I&, V& v, A&) { return is_case(str(v), true); };
    t["escaped"] = [](I&, V& v, A&) { return v.is_markup(); };
    t["sameas"] = [](I&, V& v, A& a) { return v.same_object(one_argument(a, "sameas")); };
    t["in"] = [](I& i, V& v, A& a) { return i.contains(one_argument(a, "in"), v); };
    t["=="] = t["eq"] = t["equalto"] = [](I&, V& v, A& a) { return equal(v, one_argument(a, "eq")); };
    t["!="] = t["ne"] = [](I&, V& v, A& a) { return !equal(v, one_argument(a, "ne")); };
    t[">"] = t["gt"] = t["greaterthan"] = [](I&, V& v, A& a) { return compare(v, one_argument(a, "gt"), ">") == 1; };
    t["<"] = t["lt"] = t["lessthan"] = [](I&, V& v, A& a) { return compare(v, one_argument(a, "lt"), "<") == -1; };
    t[">="] = t["ge"] = [](I&, V& v, A& a) {
      const int order = compare(v, one_argument(a, "ge"), ">=");
      return order == 0 || order == 1;
    };
    t["<="] = t["le"] = [](I&, V& v, A& a) {
      const int order = compare(v, one_argument(a, "le"), "<=");
      return order == 0 || order == -1;
    };
    return t;
  }();
  return kTests;
}

}  // namespace

bool Interpreter::test(const std::string& name, const Value& value, const Arguments& arguments) {
  const auto found = tests().find(name);
  if (found == tests().end()) fail("there is no test '{}'", printable(name));
  return found->second(*this, value, arguments);
}

}  // namespace fourfold::text::jinja
