#include "cmd/config_file.h"

#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <set>

#include "base/check.h"
#include "base/file.h"
#include "base/json.h"

namespace fourfold::cmd {
namespace {

constexpr uint64_t kMaxFile = 1u << 20;
constexpr int kMaxDepth = 16, kMaxValues = 10'000;  // an anchor may stand for much

class Reader {
 public:
  Reader(const std::filesystem::path& path, const std::function<ConfigOption(const std::string&)>& find)
      : name_(printable(path.string(), 200)), find_(find) {}

  std::vector<std::string> arguments(const YAML::Node& root) {
    if (root.IsNull()) return {};
    if (!root.IsMap()) refuse(root, "is no mapping of options to values");
    for (const auto& entry : root) option(entry.first, entry.second);
    // What an option does not take as its value comes first.
    positional_.insert(positional_.end(), options_.begin(), options_.end());
    return positional_;
  }

 private:
  [[noreturn]] void refuse(const YAML::Node& node, const std::string& what) const {
    fail("{} line {}: {}", name_, node.Mark().line + 1, what);
  }

  void option(const YAML::Node& key, const YAML::Node& value) {
    if (!key.IsScalar()) refuse(key, "an option's name is no word");
    std::string name = key.Scalar();
    std::replace(name.begin(), name.end(), '_', '-');
    const ConfigOption option = find_(name);
    if (!option.known) refuse(key, fmt::format("there is no option {}", printable(name, 60)));
    if (!names_.insert(name).second) refuse(key, fmt::format("{} stands there twice", name));
    if (option.given) return;
    if (option.flag) {
      bool on = false;
      if (!value.IsScalar() || !YAML::convert<bool>::decode(value, on)) {
        refuse(value, fmt::format("{} is wanted as true or false", name));
      }
      if (on) options_.push_back("--" + name);
    } else if (value.IsSequence()) {
      if (!option.list) refuse(value, fmt::format("{} takes one value, and no list", name));
      for (const YAML::Node& item : value) add(name, text(item, name), option);
    } else {
      add(name, text(value, name), option);
    }
  }

  void add(const std::string& name, const std::string& value, const ConfigOption& option) {
    option.positional ? positional_.push_back(value) : options_.push_back(fmt::format("--{}={}", name, value));
  }

  std::string text(const YAML::Node& value, const std::string& name) {
    if (value.IsMap()) return json(value, 0).dump();
    if (!value.IsScalar()) refuse(value, fmt::format("{} has no value", name));
    return value.Scalar();
  }

  Json json(const YAML::Node& node, int depth) {
    if (depth > kMaxDepth || ++values_ > kMaxValues) refuse(node, "the value is too large");
    if (node.IsMap()) {
      Json out = Json::object();
      for (const auto& entry : node) out[text(entry.first, "a name")] = json(entry.second, depth + 1);
      return out;
    }
    if (node.IsSequence()) {
      Json out = Json::array();
      for (const YAML::Node& item : node) out.push_back(json(item, depth + 1));
      return out;
    }
    if (!node.IsScalar()) return nullptr;
    // What is in quotes has the tag "!" and is a string; otherwise what JSON reads as something else is that.
    const Json plain = node.Tag() == "!" ? Json(Json::value_t::discarded) : Json::parse(node.Scalar(), nullptr, false);
    return plain.is_primitive() && !plain.is_discarded() && !plain.is_string() ? plain : Json(node.Scalar());
  }

  const std::string name_;
  const std::function<ConfigOption(const std::string&)>& find_;
  std::set<std::string> names_;
  std::vector<std::string> positional_, options_;
  int values_ = 0;
};

}  // namespace

std::vector<std::string> config_arguments(const std::filesystem::path& path,
                                          const std::function<ConfigOption(const std::string&)>& find) {
  const std::string text = read_file(path, kMaxFile);
  try {
    return Reader(path, find).arguments(YAML::Load(text));
  } catch (const YAML::Exception& error) {
    fail("{} line {}: {}", printable(path.string(), 200), error.mark.line + 1, error.msg);
  }
}

}  // namespace fourfold::cmd
