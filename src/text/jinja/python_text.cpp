#include "text/jinja/python_text.h"

#include <utf8proc.h>

#include <algorithm>

#include "base/check.h"
#include "text/unicode.h"

namespace fourfold::text::jinja {
namespace {

utf8proc_category_t category(char32_t c) { return utf8proc_category(static_cast<utf8proc_int32_t>(c)); }

}  // namespace

bool is_space(char32_t c) { return is_whitespace(c) || (c >= 0x1C && c <= 0x1F); }

bool is_printable(char32_t c) {
  if (c < 0x7F) return c >= 0x20;
  switch (category(c)) {
    case UTF8PROC_CATEGORY_CN:
    case UTF8PROC_CATEGORY_CC:
    case UTF8PROC_CATEGORY_CF:
    case UTF8PROC_CATEGORY_CS:
    case UTF8PROC_CATEGORY_CO:
    case UTF8PROC_CATEGORY_ZL:
    case UTF8PROC_CATEGORY_ZP:
    case UTF8PROC_CATEGORY_ZS:
      return false;
    default:
      return true;
  }
}

bool is_alpha(char32_t c) {
  switch (category(c)) {
    case UTF8PROC_CATEGORY_LU:
    case UTF8PROC_CATEGORY_LL:
    case UTF8PROC_CATEGORY_LT:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_LO:
      return true;
    default:
      return false;
  }
}

bool is_decimal(char32_t c) { return category(c) == UTF8PROC_CATEGORY_ND; }
bool is_upper(char32_t c) { return category(c) == UTF8PROC_CATEGORY_LU; }
bool is_lower(char32_t c) { return category(c) == UTF8PROC_CATEGORY_LL; }

namespace {

bool is_cased(char32_t c) { return is_upper(c) || is_lower(c) || category(c) == UTF8PROC_CATEGORY_LT; }

// Full case mappings with more than one character; the rest are utf8proc's simple ones.
void append_upper(std::string& out, char32_t c) {
  switch (c) {
    case 0xDF:
      out += "SS";
      return;
    case 0x149:
      out += "\xCA\xBCN";
      return;
    case 0x1F0:
      out += "J\xCC\x8C";
      return;
    case 0xFB00:
      out += "FF";
      return;
    case 0xFB01:
      out += "FI";
      return;
    case 0xFB02:
      out += "FL";
      return;
    case 0xFB03:
      out += "FFI";
      return;
    case 0xFB04:
      out += "FFL";
      return;
    case 0xFB05:
    case 0xFB06:
      out += "ST";
      return;
    default:
      append_utf8(out, to_upper(c));
  }
}

void append_title(std::string& out, char32_t c) {
  switch (c) {
    case 0xDF:
      out += "Ss";
      return;
    case 0xFB00:
      out += "Ff";
      return;
    case 0xFB01:
      out += "Fi";
      return;
    case 0xFB02:
      out += "Fl";
      return;
    case 0xFB03:
      out += "Ffi";
      return;
    case 0xFB04:
      out += "Ffl";
      return;
    case 0xFB05:
    case 0xFB06:
      out += "St";
      return;
    case 0x149:
    case 0x1F0:
      append_upper(out, c);
      return;
    default:
      append_utf8(out, static_cast<char32_t>(utf8proc_totitle(static_cast<utf8proc_int32_t>(c))));
  }
}

// A capital sigma becomes a final sigma at the end of a word.
void append_lower(std::string& out, std::u32string_view text, size_t i) {
  const char32_t c = text[i];
  if (c == 0x130) {
    out += "i\xCC\x87";
    return;
  }
  if (c == 0x3A3) {
    const auto ignorable = [](char32_t x) {
      const auto kind = category(x);
      return kind == UTF8PROC_CATEGORY_MN || kind == UTF8PROC_CATEGORY_ME || kind == UTF8PROC_CATEGORY_CF ||
             kind == UTF8PROC_CATEGORY_LM || kind == UTF8PROC_CATEGORY_SK || x == '\'' || x == '.' || x == ':' ||
             x == 0xB7 || x == 0x2019;
    };
    size_t before = i, after = i + 1;
    while (before > 0 && ignorable(text[before - 1])) --before;
    while (after < text.size() && ignorable(text[after])) ++after;
    const bool final = before > 0 && is_cased(text[before - 1]) && !(after < text.size() && is_cased(text[after]));
    append_utf8(out, final ? 0x3C2 : 0x3C3);
    return;
  }
  append_utf8(out, to_lower(c));
}

}  // namespace

std::string upper(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  for (size_t i = 0; i < text.size();) append_upper(out, next_code_point(text, i));
  return out;
}

std::string lower(std::string_view text) {
  const std::u32string wide = to_utf32(text);
  std::string out;
  out.reserve(text.size());
  for (size_t i = 0; i < wide.size(); ++i) append_lower(out, wide, i);
  return out;
}

std::string capitalize(std::string_view text) {
  const std::u32string wide = to_utf32(text);
  std::string out;
  for (size_t i = 0; i < wide.size(); ++i) {
    if (i == 0) {
      append_title(out, wide[0]);
    } else {
      append_lower(out, wide, i);
    }
  }
  return out;
}

std::string title(std::string_view text) {
  const std::u32string wide = to_utf32(text);
  std::string out;
  bool inside = false;
  for (size_t i = 0; i < wide.size(); ++i) {
    if (inside) {
      append_lower(out, wide, i);
    } else {
      append_title(out, wide[i]);
    }
    inside = is_cased(wide[i]);
  }
  return out;
}

std::string_view strip(std::string_view text, bool left, bool right, const std::string* chars) {
  std::u32string set;
  if (chars != nullptr) set = to_utf32(*chars);
  const auto drop = [&](char32_t c) { return chars == nullptr ? is_space(c) : set.find(c) != std::u32string::npos; };
  size_t begin = 0, end = text.size();
  while (left && begin < end) {
    size_t next = begin;
    if (!drop(next_code_point(text, next))) break;
    begin = next;
  }
  while (right && end > begin) {
    size_t last = end - 1;
    while (last > begin && is_continuation(text[last])) --last;
    size_t position = last;
    if (!drop(next_code_point(text, position))) break;
    end = last;
  }
  return text.substr(begin, end - begin);
}

std::vector<std::string> split(std::string_view text, const std::string* separator, int64_t limit) {
  std::vector<std::string> out;
  if (separator != nullptr) {
    if (separator->empty()) fail("empty separator");
    size_t done = 0;
    while (limit < 0 || static_cast<int64_t>(out.size()) < limit) {
      const size_t at = text.find(*separator, done);
      if (at == std::string_view::npos) break;
      out.emplace_back(text.substr(done, at - done));
      done = at + separator->size();
    }
    out.emplace_back(text.substr(done));
    return out;
  }
  size_t i = 0;
  while (true) {
    text = strip(text.substr(i), true, false);
    i = 0;
    if (text.empty()) return out;
    if (limit >= 0 && static_cast<int64_t>(out.size()) >= limit) break;
    while (i < text.size()) {
      size_t next = i;
      if (is_space(next_code_point(text, next))) break;
      i = next;
    }
    out.emplace_back(text.substr(0, i));
  }
  out.emplace_back(strip(text, false, true));
  return out;
}

std::vector<std::string> rsplit(std::string_view text, const std::string* separator, int64_t limit) {
  std::vector<std::string> out;
  if (separator != nullptr) {
    if (separator->empty()) fail("empty separator");
    while (limit < 0 || static_cast<int64_t>(out.size()) < limit) {
      const size_t at = text.rfind(*separator);
      if (at == std::string_view::npos) break;
      out.emplace_back(text.substr(at + separator->size()));
      text = text.substr(0, at);
    }
    out.emplace_back(text);
  } else {
    while (true) {
      text = strip(text, false, true);
      if (text.empty()) break;
      if (limit >= 0 && static_cast<int64_t>(out.size()) >= limit) {
        out.emplace_back(strip(text, true, false));
        break;
      }
      size_t begin = text.size();
      while (begin > 0) {
        size_t last = begin - 1;
        while (last > 0 && is_continuation(text[last])) --last;
        size_t position = last;
        if (is_space(next_code_point(text, position))) break;
        begin = last;
      }
      out.emplace_back(text.substr(begin));
      text = text.substr(0, begin);
    }
  }
  std::reverse(out.begin(), out.end());
  return out;
}

std::vector<std::string> split_lines(std::string_view text, bool keep_ends) {
  std::vector<std::string> out;
  size_t begin = 0;
  for (size_t i = 0; i < text.size();) {
    const size_t at = i;
    const char32_t c = next_code_point(text, i);
    const bool ends = (c >= 0x0A && c <= 0x0D) || (c >= 0x1C && c <= 0x1E) || c == 0x85 || c == 0x2028 || c == 0x2029;
    if (!ends) continue;
    if (c == '\r' && i < text.size() && text[i] == '\n') ++i;
    out.emplace_back(text.substr(begin, (keep_ends ? i : at) - begin));
    begin = i;
  }
  if (begin < text.size()) out.emplace_back(text.substr(begin));
  return out;
}

std::string replace(std::string_view text, std::string_view from, std::string_view to, int64_t count, size_t limit) {
  std::string out;
  const auto add = [&](std::string_view part) {
    if (out.size() + part.size() > limit) fail("replace makes more than {} bytes", limit);
    out += part;
  };
  size_t done = 0;
  int64_t replaced = 0;
  if (from.empty()) {
    // Between all characters and at both ends.
    for (size_t i = 0; i <= text.size() && (count < 0 || replaced < count); ++replaced) {
      add(text.substr(done, i - done));
      add(to);
      done = i;
      if (i == text.size()) break;
      i += utf8_length(static_cast<unsigned char>(text[i]));
    }
  } else {
    for (size_t at = text.find(from); at != std::string_view::npos && (count < 0 || replaced < count);
         at = text.find(from, done), ++replaced) {
      add(text.substr(done, at - done));
      add(to);
      done = at + from.size();
    }
  }
  add(text.substr(done));
  return out;
}

size_t byte_of_char(std::string_view text, size_t character) {
  size_t byte = 0;
  while (character > 0 && byte < text.size()) {
    byte += utf8_length(static_cast<unsigned char>(text[byte]));
    --character;
  }
  return std::min(byte, text.size());
}

void append_json_string(std::string& out, std::string_view text, bool ensure_ascii) {
  out += '"';
  for (size_t i = 0; i < text.size();) {
    const size_t at = i;
    const char32_t c = next_code_point(text, i);
    switch (c) {
      case '"':
        out += "\\\"";
        continue;
      case '\\':
        out += "\\\\";
        continue;
      case '\n':
        out += "\\n";
        continue;
      case '\r':
        out += "\\r";
        continue;
      case '\t':
        out += "\\t";
        continue;
      case '\f':
        out += "\\f";
        continue;
      case '\b':
        out += "\\b";
        continue;
      default:
        break;
    }
    if (c < 0x20 || (ensure_ascii && c == 0x7F)) {
      out += fmt::format("\\u{:04x}", static_cast<unsigned>(c));
    } else if (ensure_ascii && c >= 0x80) {
      if (c >= 0x10000) {
        const char32_t v = c - 0x10000;
        out += fmt::format("\\u{:04x}\\u{:04x}", 0xD800 + static_cast<unsigned>(v >> 10),
                           0xDC00 + static_cast<unsigned>(v & 0x3FF));
      } else {
        out += fmt::format("\\u{:04x}", static_cast<unsigned>(c));
      }
    } else {
      out += text.substr(at, i - at);
    }
  }
  out += '"';
}

}  // namespace fourfold::text::jinja
