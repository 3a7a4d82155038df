// What an API answers instead of what was asked for, in that API's own form.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "base/check.h"
#include "base/json.h"
#include "serve/http_message.h"

namespace fourfold::serve {

enum class ErrorForm { kOpenAi, kAnthropic };

class ApiError : public Error {
 public:
  ApiError(int the_status, const std::string& message) : Error(message), status(the_status) {}

  int status;
  std::string param;               // the field that is wrong
  std::string code;                // a word that clients look for, such as context_length_exceeded
  std::optional<int> retry_after;  // seconds

  // A field of the request.
  static ApiError field(std::string_view field, const std::string& message);
  static ApiError busy(const std::string& message, int retry_after = 1);
  static ApiError too_late();  // the deadline has passed before the first token
  static ApiError too_long(int64_t tokens, int64_t limit, ErrorForm form, std::string_view field);

  Json body(ErrorForm form) const;
  HttpResponse response(ErrorForm form) const;
};

// JSON as it is sent. Bytes that are no UTF-8 become U+FFFD.
std::string dump(const Json& json);
HttpResponse json_response(const Json& json, int status = 200);
HttpResponse json_text_response(std::string json, int status = 200);  // of JSON that is written already

}  // namespace fourfold::serve
