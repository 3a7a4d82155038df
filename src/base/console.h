// Standard error, for people: progress, notes, warnings, errors.
#pragma once

#include <fmt/format.h>

#include <string_view>
#include <utility>

namespace fourfold {

void write_stderr(std::string_view text);  // as it is

// Formats and writes to standard error. What cannot be written there (a full disk, a closed pipe) is lost: fmt::print
// would throw, and a message that cannot be shown must not end the work, nor become another error.
template <typename... Args>
void eprint(fmt::format_string<Args...> format, Args&&... args) {
  write_stderr(fmt::format(format, std::forward<Args>(args)...));
}

// "fourfold: warning: TEXT" on a line of its own.
void warn(std::string_view text);

}  // namespace fourfold
