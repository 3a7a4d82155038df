// The values of the template language, with the behaviour of the Python objects that jinja2 would hold.
//
// Values are immutable apart from namespaces, and shared. Containers know how deeply they are nested, so that walking
// or destroying one cannot exhaust the stack.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/json.h"

namespace fourfold::text::jinja {

enum class Kind : uint8_t {
  kUndefined,
  kNone,
  kBool,
  kInt,
  kFloat,
  kString,
  kList,
  kTuple,
  kDict,
  kView,       // dict.keys(), values(), items()
  kRange,      // range(...)
  kGenerator,  // what a lazy filter returns: can be walked once, always true, has no length
  kNamespace,
  kLoop,  // the variable "loop"
  kCycler,
  kJoiner,
  kFunction,  // a global function or macro
  kMethod,    // a bound method, such as "abc".upper
};

class Value;

struct Object {
  virtual ~Object() = default;
  int depth = 0;  // of nested containers
};

struct StringObject : Object {
  std::string text;
};

struct ListObject;
struct DictObject;

class Value {
 public:
  Value() = default;  // undefined
  static Value undefined(std::string message);
  static Value none();
  static Value boolean(bool value);
  static Value integer(int64_t value);
  static Value real(double value);
  static Value string(std::string value, bool markup = false);
  static Value list(std::vector<Value> items, Kind kind = Kind::kList, const char* name = "");
  static Value tuple(std::vector<Value> items) { return list(std::move(items), Kind::kTuple); }
  static Value generator(std::vector<Value> items, const char* name = "generator") {
    return list(std::move(items), Kind::kGenerator, name);
  }
  static Value dict(std::shared_ptr<DictObject> dict);
  static Value object(Kind kind, std::shared_ptr<Object> object);

  Kind kind() const { return kind_; }
  bool is(Kind kind) const { return kind_ == kind; }
  bool is_undefined() const { return kind_ == Kind::kUndefined; }
  bool is_none() const { return kind_ == Kind::kNone; }
  bool is_string() const { return kind_ == Kind::kString; }
  bool is_integer() const { return kind_ == Kind::kInt || kind_ == Kind::kBool; }
  bool is_number() const { return is_integer() || kind_ == Kind::kFloat; }
  bool is_sequence() const { return kind_ == Kind::kList || kind_ == Kind::kTuple; }
  bool is_markup() const { return markup_; }
  bool same_object(const Value& other) const;  // Python's `is`

  bool as_bool() const { return integer_ != 0; }
  int64_t as_integer() const { return integer_; }  // also of a boolean
  double as_real() const { return kind_ == Kind::kFloat ? real_ : static_cast<double>(integer_); }
  const std::string& text() const { return static_cast<const StringObject&>(*object_).text; }
  const std::vector<Value>& items() const;  // of a list, tuple, view, range or generator
  ListObject& list_object() const;
  const DictObject& dict_object() const;
  const std::shared_ptr<Object>& pointer() const { return object_; }
  int depth() const { return object_ ? object_->depth : 0; }
  std::string undefined_message() const;

 private:
  Kind kind_ = Kind::kUndefined;
  bool markup_ = false;
  union {
    int64_t integer_ = 0;
    double real_;
  };
  std::shared_ptr<Object> object_;
};

struct ListObject : Object {  // also tuples, views, generators
  std::vector<Value> items;
  size_t consumed = 0;    // generators: how many were taken
  const char* name = "";  // views, generators and groups: what Python calls it
};

// The pair of a key and a list that groupby makes: a tuple whose members have the names grouper and list. Told by its
// address, which an array has only one of.
inline constexpr char kGroupTuple[] = "GroupTuple";

inline ListObject& Value::list_object() const { return static_cast<ListObject&>(*object_); }
inline const std::vector<Value>& Value::items() const { return list_object().items; }

// Keeps the order of insertion; keys are any hashable values.
struct DictObject : Object {
  std::vector<std::pair<Value, Value>> members;

  // The place of a key or npos. Keys that compare equal are one key (1, 1.0 and true).
  size_t find(const Value& key) const;
  const Value* get(std::string_view key) const;
  void set(const Value& key, Value value);

 private:
  void index(size_t place);
  std::unordered_multimap<size_t, size_t> places_;  // hash of key to place; used once the dict is large
};

struct NamespaceObject : Object {
  DictObject members;
};

struct LoopObject : Object {
  std::shared_ptr<const std::vector<Value>> items;
  size_t index0 = 0;
  int depth0 = 0;
  std::vector<Value> last_changed;
  bool has_last_changed = false;
  std::function<Value(const Value&)> recurse;  // set in a recursive loop
};

struct CyclerObject : Object {
  std::vector<Value> items;
  size_t position = 0;
};

struct JoinerObject : Object {
  std::string separator;
  bool used = false;
};

struct MethodObject : Object {
  Value self;
  std::string name;
};

struct Arguments {
  std::vector<Value> positional;
  std::vector<std::pair<std::string, Value>> named;
};

class Interpreter;

struct FunctionObject : Object {
  std::string name;
  std::function<Value(Interpreter&, const Arguments&)> call;
};

constexpr int kMaxValueDepth = 200;

// The work that one render may do, in small steps. While a Fuel lives, the functions below and everything of the
// interpreter on this thread draw on it; an Error when it is used up.
class Fuel {
 public:
  explicit Fuel(uint64_t steps);
  ~Fuel();
  Fuel(const Fuel&) = delete;
  Fuel& operator=(const Fuel&) = delete;
  static void spend(uint64_t steps);

 private:
  uint64_t left_;
  uint64_t total_;
  Fuel* outer_;
};

// From JSON; an integer beyond 64 bits is an Error.
Value from_json(const Json& json);

bool truthy(const Value& value);
// Python's ==.
bool equal(const Value& a, const Value& b);
// -1, 0, 1; an Error for types that Python does not order. `op` is for the message.
int compare(const Value& a, const Value& b, const char* op);
// An Error for an unhashable key.
size_t hash_of(const Value& value);
// "str", "int", "NoneType", ...
std::string type_name(const Value& value);

std::string str(const Value& value);
std::string repr(const Value& value);
std::string float_repr(double value);
std::string string_repr(std::string_view text);

struct JsonStyle {
  bool ensure_ascii = false;
  bool sort_keys = false;
  bool pretty = false;
  std::string indent;
  std::string item_separator = ", ";
  std::string key_separator = ": ";
};
// Python's json.dumps. `limit`: an Error beyond so many bytes.
std::string to_json(const Value& value, const JsonStyle& style, size_t limit);

}  // namespace fourfold::text::jinja
