// Work in a process of its own that is killed when it takes too long: a driver that hangs, a probe that crashes and a
// tool that waits must not take the doctor with them.
#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "base/json.h"

namespace fourfold::doctor {

struct ChildResult {
  bool ok = false;
  std::string failure;  // "took longer than 5 s", "ended by signal 11", ...
  std::string output;
};

// What `work` returns, made in a child.
ChildResult run_child(const std::function<std::string()>& work, std::chrono::milliseconds limit);
// The standard output of a program found in PATH.
ChildResult run_program(const std::vector<std::string>& arguments, std::chrono::milliseconds limit);

// As run_child(), for facts: {"failure": "..."} where there are none.
Json child_facts(const std::function<Json()>& work, std::chrono::milliseconds limit);

}  // namespace fourfold::doctor
