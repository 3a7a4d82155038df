// What a machine's facts amount to.
//
// Facts are one JSON object (docs/doctor.md names its fields); judging them needs no machine, so that recorded ones can
// be judged anywhere. A fact that could not be found out is missing or null, and nothing is concluded from it.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"

namespace fourfold::doctor {

enum class Level { kGood, kNote, kWarning, kError };
const char* level_name(Level level);

struct Finding {
  std::string id;  // "cpu.quota"
  Level level = Level::kGood;
  std::string evidence;     // what was found
  std::string consequence;  // what it means; empty for what is good
  std::string fix;          // one line; empty where there is nothing to do
};

// Reads facts that may have come from anybody's file: a field of another kind than wanted is as good as missing.
class Facts {
 public:
  explicit Facts(const Json& json) : json_(&json) {}
  Facts at(std::string_view name) const;  // an object's field; facts of nothing where there is none
  std::vector<Facts> list(std::string_view name) const;
  std::optional<double> number(std::string_view name) const;
  std::optional<bool> flag(std::string_view name) const;
  std::optional<std::string> text(std::string_view name) const;  // printable
  const Json& json() const { return *json_; }

 private:
  const Json* json_;
};

// Whether a device of the driver's probe has one pool of memory with the processor (jit::host_memory_name).
bool shares_host_memory(const Facts& device);

// All findings, the good ones included.
std::vector<Finding> judge(const Json& facts);
std::vector<Finding> judge_host(const Facts& facts);
std::vector<Finding> judge_gpu(const Facts& facts);
std::vector<Finding> judge_model(const Facts& facts);

// 2 with an error, 1 with a warning, otherwise 0.
int exit_status(const std::vector<Finding>& findings);
Json findings_json(const std::vector<Finding>& findings);

}  // namespace fourfold::doctor
