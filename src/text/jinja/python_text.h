// Python's string functions on UTF-8 text: positions count characters, not bytes.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace fourfold::text::jinja {

bool is_space(char32_t c);      // str.isspace
bool is_printable(char32_t c);  // str.isprintable
bool is_alpha(char32_t c);
bool is_decimal(char32_t c);
bool is_upper(char32_t c);
bool is_lower(char32_t c);

std::string upper(std::string_view text);
std::string lower(std::string_view text);
std::string capitalize(std::string_view text);
std::string title(std::string_view text);  // str.title: a letter after a non-letter

// Without `chars`, whitespace.
std::string_view strip(std::string_view text, bool left, bool right, const std::string* chars = nullptr);

// limit < 0: all. Without a separator: runs of whitespace, no empty parts.
std::vector<std::string> split(std::string_view text, const std::string* separator, int64_t limit);
std::vector<std::string> rsplit(std::string_view text, const std::string* separator, int64_t limit);
std::vector<std::string> split_lines(std::string_view text, bool keep_ends);

// count < 0: all.
std::string replace(std::string_view text, std::string_view from, std::string_view to, int64_t count, size_t limit);

// The byte at which a character begins; the size of the text when it has fewer.
size_t byte_of_char(std::string_view text, size_t character);

// Appends the text as a JSON string with its quotes, escaped as Python's json module does.
void append_json_string(std::string& out, std::string_view text, bool ensure_ascii);

}  // namespace fourfold::text::jinja
