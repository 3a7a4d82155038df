#include "base/json.h"

#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/file.h"

namespace fourfold {
namespace {

// Receives the events of nlohmann's parser (which keeps its own stack on the heap) and builds the value. Members are
// gathered in a plain vector and moved into the object when it closes: the object type itself would compare each new
// key with all earlier ones, and would copy whole subtrees when it grows.
class Builder {
 public:
  using Member = std::function<void(std::string&&, Json&&)>;

  // `member`: null, or takes the members of the object that the root has under `under` (empty: of the root).
  Builder(std::string_view text, std::string_view name, const JsonLimits& limits, std::string_view under = {},
          const Member* member = nullptr)
      : text_(text), name_(name), limits_(limits), under_(under), member_(member) {}

  bool null() { return add(nullptr); }
  bool boolean(bool value) { return add(value); }
  bool number_integer(int64_t value) { return add(value); }
  bool number_unsigned(uint64_t value) { return add(value); }
  bool number_float(double value, const std::string&) { return add(value); }
  bool string(std::string& value) { return add(std::move(value)); }
  bool binary(Json::binary_t&) { fail("{}: binary value in JSON", name_); }

  bool start_object(size_t) { return open(true); }
  bool start_array(size_t) { return open(false); }

  bool key(std::string& value) {
    top().key = std::move(value);
    return true;
  }

  bool end_object() {
    Frame& frame = top();
    --depth_;
    Json object = Json::object();
    auto& members = object.get_ref<Json::object_t&>();
    members.reserve(frame.values.size());
    for (size_t i = 0; i < frame.values.size(); ++i) {
      // Through the base class: ordered_map::emplace would search for the key.
      static_cast<Json::object_t::Container&>(members).emplace_back(std::move(frame.keys[i]),
                                                                    std::move(frame.values[i]));
    }
    return place(std::move(object));
  }

  bool end_array() {
    Frame& frame = top();
    --depth_;
    Json array = Json::array();
    array.get_ref<Json::array_t&>().assign(std::make_move_iterator(frame.values.begin()),
                                           std::make_move_iterator(frame.values.end()));
    return place(std::move(array));
  }

  bool parse_error(size_t position, const std::string& last_token, const nlohmann::detail::exception& error) {
    std::string reason = error.what();
    // "[json.exception.parse_error.101] parse error at line 1, column 2: syntax error while ...": keep the end.
    if (const size_t bracket = reason.find("] "); bracket != std::string::npos) reason.erase(0, bracket + 2);
    if (const size_t colon = reason.find(": "); reason.starts_with("parse error at") && colon != std::string::npos) {
      reason.erase(0, colon + 2);
    }
    if (const size_t last = reason.find("; last read"); last != std::string::npos) reason.erase(last);
    if (position > text_.size()) {
      fail("{}: not valid JSON: it ends after {} bytes, in the middle of a value", name_, text_.size());
    }
    fail("{}: not valid JSON at byte {}, near '{}': {}", name_, position == 0 ? 0 : position - 1,
         printable(last_token, 40), printable(reason, 200));
  }

  Json take() { return std::move(root_); }

 private:
  // Of an array or object that is open; kept for the next one at that depth, with its memory.
  struct Frame {
    bool is_object = false;
    bool handed_over = false;  // its members
    std::string key;
    std::vector<std::string> keys;
    std::vector<Json> values;
    std::unordered_map<std::string, size_t> places;  // filled once the object is large
    std::unordered_set<std::string> seen;            // keys that were handed over
  };
  Frame& top() { return stack_[depth_ - 1]; }

  // A few keys are compared one by one, many are hashed.
  static constexpr size_t kSmallObject = 16;

  bool open(bool is_object) {
    count();
    if (depth_ >= limits_.max_depth) fail("{}: JSON nested deeper than {} levels", name_, limits_.max_depth);
    const bool handed_over =
        member_ != nullptr && is_object && (under_.empty() ? depth_ == 0 : depth_ == 1 && is_under(stack_[0]));
    if (depth_++ == stack_.size()) stack_.emplace_back();
    Frame& frame = top();
    frame.is_object = is_object;
    frame.handed_over = handed_over;
    frame.keys.clear();
    frame.values.clear();
    if (!frame.places.empty()) frame.places.clear();
    if (!frame.seen.empty()) frame.seen.clear();
    return true;
  }
  bool is_under(const Frame& root) const { return root.is_object && root.key == under_; }

  void count() {
    if (++values_ > limits_.max_values) fail("{}: JSON with more than {} values", name_, limits_.max_values);
  }

  template <typename T>
  bool add(T&& value) {
    count();
    return place(Json(std::forward<T>(value)));
  }

  bool place(Json&& value) {
    if (depth_ == 0) {
      root_ = std::move(value);
      return true;
    }
    Frame& frame = top();
    if (!frame.is_object) {
      frame.values.push_back(std::move(value));
      return true;
    }
    if (frame.handed_over) {
      if (limits_.reject_duplicate_keys && !frame.seen.insert(frame.key).second) twice(frame);
      (*member_)(std::move(frame.key), std::move(value));
      return true;
    }
    const size_t existing = find(frame);
    if (existing == frame.keys.size()) {
      if (frame.keys.size() >= kSmallObject) frame.places.emplace(frame.key, existing);
      frame.keys.push_back(std::move(frame.key));
      frame.values.push_back(std::move(value));
    } else if (limits_.reject_duplicate_keys) {
      twice(frame);
    } else {
      frame.values[existing] = std::move(value);
    }
    return true;
  }

  [[noreturn]] void twice(const Frame& frame) const {
    fail("{}: JSON object holds the key '{}' twice", name_, printable(frame.key));
  }

  size_t find(const Frame& frame) const {
    const size_t small = std::min(frame.keys.size(), kSmallObject);
    for (size_t i = 0; i < small; ++i) {
      if (frame.keys[i] == frame.key) return i;
    }
    const auto found = frame.places.find(frame.key);
    return found == frame.places.end() ? frame.keys.size() : found->second;
  }

  std::string_view text_;
  std::string_view name_;
  const JsonLimits& limits_;
  std::string_view under_;
  const Member* member_;
  std::vector<Frame> stack_;  // the first `depth_` are open
  size_t depth_ = 0;
  Json root_;
  size_t values_ = 0;
};

Json parse(std::string_view text, std::string_view name, const JsonLimits& limits, Builder& builder) {
  if (text.size() > limits.max_bytes) {
    fail("{}: {} bytes of JSON, at most {} are accepted", name, text.size(), limits.max_bytes);
  }
  // The parser takes a NUL for the end of the text, and what follows for nothing.
  if (const size_t nul = text.find('\0'); nul != std::string_view::npos) {
    fail("{}: not valid JSON at byte {}: a NUL character", name, nul);
  }
  Json::sax_parse(text.begin(), text.end(), &builder, Json::input_format_t::json, /*strict=*/true);
  return builder.take();
}

}  // namespace

Json parse_json(std::string_view text, std::string_view name, const JsonLimits& limits) {
  Builder builder(text, name, limits);
  return parse(text, name, limits, builder);
}

Json parse_json_members(std::string_view text, std::string_view name, std::string_view under, const JsonLimits& limits,
                        const std::function<void(std::string&& key, Json&& value)>& member) {
  Builder builder(text, name, limits, under, &member);
  return parse(text, name, limits, builder);
}

Json parse_json_file(const std::filesystem::path& path, const JsonLimits& limits) {
  return parse_json(read_file(path, limits.max_bytes), path.string(), limits);
}

const char* json_kind(const Json& value) {
  switch (value.type()) {
    case Json::value_t::null:
      return "null";
    case Json::value_t::boolean:
      return "boolean";
    case Json::value_t::number_integer:
    case Json::value_t::number_unsigned:
      return "integer";
    case Json::value_t::number_float:
      return "number";
    case Json::value_t::string:
      return "string";
    case Json::value_t::array:
      return "array";
    case Json::value_t::object:
      return "object";
    default:
      return "unknown";
  }
}

}  // namespace fourfold
