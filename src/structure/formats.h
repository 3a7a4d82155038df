// The formats of strings, as patterns that are all of the text.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace fourfold::structure {

std::optional<std::string> format_pattern(std::string_view format);
// Their names, for people.
std::string known_formats();

}  // namespace fourfold::structure
