#include "serve/text_line.h"

#include <algorithm>
#include <charconv>

#include "serve/api_error.h"
#include "serve/service.h"

namespace fourfold::serve {

void append_json_text(std::string_view text, std::string& out) {
  const bool plain = std::all_of(text.begin(), text.end(), [](char c) {
    return static_cast<unsigned char>(c) >= 0x20 && static_cast<unsigned char>(c) < 0x7f && c != '"' && c != '\\';
  });
  if (plain) {
    out += text;
    return;
  }
  const std::string quoted = dump(Json(text));
  out.append(quoted, 1, quoted.size() - 2);
}

namespace {

// A mark as it stands in the text, as far as its number.
const std::string& quoted_mark() {
  static const std::string mark = "\"" + random_id("json_") + ":";
  return mark;
}

}  // namespace

std::string json_mark(size_t index) { return quoted_mark().substr(1) + std::to_string(index); }

std::string put_in(std::string_view json, const std::function<std::string_view(size_t)>& texts) {
  std::string out;
  for (;;) {
    const size_t at = json.find(quoted_mark());
    out += json.substr(0, at);
    if (at == std::string_view::npos) return out;
    json.remove_prefix(at + quoted_mark().size());
    size_t index = 0;
    const char* const end = std::from_chars(json.data(), json.data() + json.size(), index).ptr;
    json.remove_prefix(static_cast<size_t>(end - json.data()) + 1);
    out += texts(index);
  }
}

const std::string& TextLine::place() {
  static const std::string place = random_id("text_");
  return place;
}

void TextLine::set(std::string_view line) {
  pieces_.clear();
  for (size_t begin = 0; begin != std::string_view::npos;) {
    const size_t at = line.find(place(), begin);
    pieces_.emplace_back(line.substr(begin, at - begin));
    begin = at == std::string_view::npos ? at : at + place().size();
  }
}

void TextLine::append(std::string_view text, std::string& out) const {
  for (size_t i = 0; i < pieces_.size(); ++i) {
    if (i > 0) append_json_text(text, out);
    out += pieces_[i];
  }
}

}  // namespace fourfold::serve
