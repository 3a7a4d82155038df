#include "base/check.h"

namespace fourfold {

std::string printable(std::string_view text, size_t limit) {
  std::string out;
  for (char character : text) {
    if (out.size() >= limit) return out + "...";
    const auto byte = static_cast<unsigned char>(character);
    if (byte < 0x20 || byte == 0x7f) {
      out += fmt::format("\\x{:02x}", byte);
    } else {
      out += character;
    }
  }
  return out;
}

void assertion_failed(const char* condition, const char* file, int line) {
  throw std::logic_error(fmt::format("internal error: {} does not hold at {}:{}", condition, file, line));
}

}  // namespace fourfold
