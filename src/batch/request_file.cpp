#include "batch/request_file.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "base/check.h"
#include "base/file.h"

namespace fourfold::batch {
namespace {

constexpr const char* kUrls[] = {"/v1/chat/completions", "/v1/completions", "/v1/responses"};

bool is_space(char c) { return c == ' ' || c == '\t' || c == '\r'; }

}  // namespace

BatchRequest parse_request(std::string_view line, std::optional<std::string>& custom_id) {
  JsonLimits limits;
  limits.max_bytes = kMaxLine + 1;
  limits.max_values = 4u << 20;
  limits.reject_duplicate_keys = false;
  const Json json = parse_json(line, "the line", limits);
  if (!json.is_object()) fail("the line is {}, wanted an object", json_kind(json));
  const auto field = [&](const char* name) -> const Json& {
    const auto found = json.find(name);
    if (found == json.end()) fail("`{}` is missing", name);
    return *found;
  };
  const Json& id = field("custom_id");
  if (!id.is_string()) fail("`custom_id` is {}, wanted a string", json_kind(id));
  custom_id = id.get<std::string>();
  if (custom_id->empty() || custom_id->size() > 512)
    fail("`custom_id` has {} bytes, wanted 1 to 512", custom_id->size());
  if (const Json& method = field("method"); method != "POST") {
    fail("`method` is {}, wanted \"POST\"", printable(method.dump(), 40));
  }
  const Json& url = field("url");
  if (std::none_of(std::begin(kUrls), std::end(kUrls), [&](const char* one) { return url == one; })) {
    fail("`url` is {}, wanted one of {}", printable(url.dump(), 80), fmt::join(kUrls, ", "));
  }
  const Json& body = field("body");
  if (!body.is_object()) fail("`body` is {}, wanted an object", json_kind(body));
  if (const auto stream = body.find("stream"); stream != body.end() && *stream != false && !stream->is_null()) {
    fail("`body.stream` is {}, but an answer of a batch is whole", printable(stream->dump(), 40));
  }
  return {*custom_id, url.get<std::string>(), body.dump(-1, ' ', false, Json::error_handler_t::replace)};
}

RequestFile::RequestFile(const std::string& path) : path_(path) {
  if (!file_exists(path)) fail("{}: no regular file, and a batch must be readable again", printable(path, 200));
  file_.open(path, std::ios::binary);
  if (!file_) fail("{}: cannot be read", printable(path, 200));
  // How many there are, for those who wait.
  std::array<char, 1 << 16> buffer;
  bool filled = false;
  while (file_.read(buffer.data(), buffer.size()), file_.gcount() > 0) {
    for (const char c : std::string_view(buffer.data(), static_cast<size_t>(file_.gcount()))) {
      if (c == '\n') {
        lines_ += filled ? 1 : 0;
        filled = false;
      } else {
        filled = filled || !is_space(c);
      }
    }
  }
  if (file_.bad()) fail("{}: cannot be read", printable(path, 200));
  lines_ += filled ? 1 : 0;
  file_.clear();
  file_.seekg(0);
}

std::optional<RequestFile::Line> RequestFile::next() {
  std::streambuf& buffer = *file_.rdbuf();
  for (int c = buffer.sgetc(); c != EOF; c = buffer.sgetc()) {
    Line line;
    line.number = ++number_;
    bool filled = false;
    while ((c = buffer.sbumpc()) != EOF && c != '\n') {
      filled = filled || !is_space(static_cast<char>(c));
      if (line.text.size() < kMaxLine) {
        line.text += static_cast<char>(c);
      } else {
        line.too_long = true;
      }
    }
    if (filled) return line;
  }
  return std::nullopt;
}

}  // namespace fourfold::batch
