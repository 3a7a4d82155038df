#include "serve/api_error.h"

namespace fourfold::serve {
namespace {

const char* openai_type(int status) {
  switch (status) {
    case 401:
      return "authentication_error";
    case 404:
      return "not_found_error";
    case 429:
      return "rate_limit_error";
    case 503:
      return "service_unavailable_error";
    case 504:
      return "timeout_error";
    case 501:
    case 505:
      return "invalid_request_error";  // HTTP as it is not spoken here
    default:
      return status >= 500 ? "internal_server_error" : "invalid_request_error";
  }
}

const char* anthropic_type(int status) {
  switch (status) {
    case 401:
      return "authentication_error";
    case 404:
      return "not_found_error";
    case 413:
      return "request_too_large";
    case 429:
      return "rate_limit_error";
    case 503:
      return "overloaded_error";
    case 504:
      return "timeout_error";
    default:
      return status >= 500 ? "api_error" : "invalid_request_error";
  }
}

}  // namespace

ApiError ApiError::field(std::string_view field, const std::string& message) {
  ApiError error(400, message);
  error.param = field;
  return error;
}

ApiError ApiError::busy(const std::string& message, int retry_after) {
  ApiError error(503, message);
  error.retry_after = retry_after;
  return error;
}

ApiError ApiError::too_late() { return {504, "the request's time was over before the first token was there"}; }

// Clients compact a conversation when they meet one of these words.
ApiError ApiError::too_long(int64_t tokens, int64_t limit, ErrorForm form, std::string_view field) {
  ApiError error(
      400,
      form == ErrorForm::kAnthropic
          ? fmt::format("prompt is too long: {} tokens > {} maximum", tokens, limit - 1)
          : fmt::format("This model's maximum context length is {} tokens, of which at least one is for the answer. "
                        "However, the request has {} tokens: the prompt is too long.",
                        limit, tokens));
  error.code = "context_length_exceeded";
  error.param = field;
  return error;
}

Json ApiError::body(ErrorForm form) const {
  if (form == ErrorForm::kAnthropic) {
    const std::string message =
        param.empty() || std::string_view(what()).starts_with(param) ? what() : fmt::format("{}: {}", param, what());
    Json error = {{"type", anthropic_type(status)}, {"message", message}};
    if (!code.empty()) error["details"] = {{"error_code", code}};
    return {{"type", "error"}, {"error", std::move(error)}};
  }
  return {{"error",
           {{"message", what()},
            {"type", openai_type(status)},
            {"param", param.empty() ? Json() : Json(param)},
            {"code", code.empty() ? Json() : Json(code)}}}};
}

HttpResponse ApiError::response(ErrorForm form) const {
  HttpResponse response = json_response(body(form), status);
  if (retry_after) response.headers.emplace_back("retry-after", std::to_string(*retry_after));
  if (status == 401) response.headers.emplace_back("www-authenticate", "Bearer");
  return response;
}

std::string dump(const Json& json) { return json.dump(-1, ' ', false, Json::error_handler_t::replace); }

HttpResponse json_response(const Json& json, int status) { return json_text_response(dump(json), status); }

HttpResponse json_text_response(std::string json, int status) {
  HttpResponse response;
  response.status = status;
  response.headers.emplace_back("content-type", "application/json");
  response.body = std::move(json);
  return response;
}

}  // namespace fourfold::serve
