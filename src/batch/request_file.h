// The requests of a batch: one JSON object a line, in OpenAI's form.
//
//   {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}
#pragma once

#include <cstdint>
#include <fstream>
#include <optional>
#include <string>
#include <string_view>

#include "base/json.h"

namespace fourfold::batch {

inline constexpr size_t kMaxLine = size_t{32} << 20;  // bytes, as of a body that the server takes

struct BatchRequest {
  std::string custom_id, url, body;
};

// The request of a line: an Error that says what is wrong with it. Where the line has a custom_id, `custom_id` is set
// whatever else is wrong.
BatchRequest parse_request(std::string_view line, std::optional<std::string>& custom_id);

// A file's lines one by one. Empty ones have a number and nothing else.
class RequestFile {
 public:
  // An Error where it cannot be read, or is no regular file: one that cannot be read again cannot be gone on with.
  explicit RequestFile(const std::string& path);

  int64_t lines() const { return lines_; }  // in all, the empty ones excepted
  // The next line that is not empty; nothing at the end. Of one that is too long, `too_long` is set and its beginning
  // is all there is.
  struct Line {
    int64_t number = 0;  // 1 is the first
    std::string text;
    bool too_long = false;
  };
  std::optional<Line> next();

 private:
  std::string path_;
  std::ifstream file_;
  int64_t lines_ = 0, number_ = 0;
};

}  // namespace fourfold::batch
