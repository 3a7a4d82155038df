// Every environment variable that fourfold reads, in one table, so that `fourfold --help` can list them.
#pragma once

#include <optional>
#include <span>
#include <string>

namespace fourfold {

struct EnvVariable {
  const char* name;
  const char* meaning;
};

std::span<const EnvVariable> env_variables();

// The value of a variable of the table, or nothing when it is unset or empty.
std::optional<std::string> env(const char* name);

}  // namespace fourfold
