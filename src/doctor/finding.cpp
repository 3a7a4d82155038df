#include "doctor/finding.h"

#include <algorithm>
#include <iterator>

#include "base/check.h"

namespace fourfold::doctor {
namespace {
const Json kNothing;
}

const char* level_name(Level level) {
  switch (level) {
    case Level::kGood:
      return "good";
    case Level::kNote:
      return "note";
    case Level::kWarning:
      return "warning";
    case Level::kError:
      return "error";
  }
  return "";
}

Facts Facts::at(std::string_view name) const {
  if (!json_->is_object()) return Facts(kNothing);
  const auto found = json_->find(std::string(name));
  return found == json_->end() ? Facts(kNothing) : Facts(*found);
}

std::vector<Facts> Facts::list(std::string_view name) const {
  std::vector<Facts> out;
  const Json& found = at(name).json();
  if (!found.is_array()) return out;
  for (const Json& item : found) out.emplace_back(item);
  return out;
}

std::optional<double> Facts::number(std::string_view name) const {
  const Json& found = at(name).json();
  return found.is_number() ? std::optional(found.get<double>()) : std::nullopt;
}

std::optional<bool> Facts::flag(std::string_view name) const {
  const Json& found = at(name).json();
  return found.is_boolean() ? std::optional(found.get<bool>()) : std::nullopt;
}

std::optional<std::string> Facts::text(std::string_view name) const {
  const Json& found = at(name).json();
  return found.is_string() ? std::optional(printable(found.get<std::string>(), 300)) : std::nullopt;
}

bool shares_host_memory(const Facts& device) { return device.text("host_memory").value_or("").starts_with("one pool"); }

std::vector<Finding> judge(const Json& facts) {
  std::vector<Finding> all;
  for (auto* one : {judge_host, judge_gpu, judge_model}) {
    std::vector<Finding> some = one(Facts(facts));
    std::move(some.begin(), some.end(), std::back_inserter(all));
  }
  return all;
}

int exit_status(const std::vector<Finding>& findings) {
  Level worst = Level::kGood;
  for (const Finding& finding : findings) worst = std::max(worst, finding.level);
  return worst == Level::kError ? 2 : worst == Level::kWarning ? 1 : 0;
}

Json findings_json(const std::vector<Finding>& findings) {
  Json out = Json::array();
  for (const Finding& one : findings) {
    out.push_back({{"id", one.id},
                   {"level", level_name(one.level)},
                   {"evidence", one.evidence},
                   {"consequence", one.consequence},
                   {"fix", one.fix}});
  }
  return out;
}

}  // namespace fourfold::doctor
