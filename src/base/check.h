// Errors. A bad input is an Error with one line that names the thing, what was found and what was wanted; main() prints
// it and exits with status 2. FF_ASSERT is for our own mistakes only and says where it stands.
#pragma once

#include <fmt/format.h>

#include <stdexcept>
#include <string>
#include <string_view>

namespace fourfold {

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Throws Error with the formatted message.
template <typename... Args>
[[noreturn]] void fail(fmt::format_string<Args...> format, Args&&... args) {
  throw Error(fmt::format(format, std::forward<Args>(args)...));
}

// Text from a file or a request as it may stand in an error message: control characters and invalid bytes escaped, cut
// at `limit` bytes.
std::string printable(std::string_view text, size_t limit = 80);

[[noreturn]] void assertion_failed(const char* condition, const char* file, int line);

#define FF_ASSERT(condition) \
  ((condition) ? static_cast<void>(0) : ::fourfold::assertion_failed(#condition, __FILE__, __LINE__))

}  // namespace fourfold
