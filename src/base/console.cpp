#include "base/console.h"

#include <cstdio>

#include "base/check.h"

namespace fourfold {

void write_stderr(std::string_view text) {
  std::fwrite(text.data(), 1, text.size(), stderr);
  std::fflush(stderr);
}

void warn(std::string_view text) { eprint("fourfold: warning: {}\n", printable(text, 2000)); }

}  // namespace fourfold
