// HTTP messages as the rest of the server sees them: plain values, whatever carries them.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace fourfold::serve {

using Headers = std::vector<std::pair<std::string, std::string>>;

struct HttpRequest {
  std::string method;
  std::string path;   // "/v1/models"
  std::string query;  // what follows the question mark
  Headers headers;    // names in lower case
  std::string body;
  bool http_1_0 = false;
  bool keep_alive = true;

  // The value of a header, by its name in lower case; null where there is none. Of several, the first.
  const std::string* header(std::string_view name) const;
};

struct HttpResponse {
  int status = 200;
  Headers headers;
  std::string body;    // not sent with a 304, of which it is what a 200 would have
  bool close = false;  // the connection, behind this response
};

// A request that is not HTTP as this server takes it, or beyond its limits.
struct HttpFailure {
  int status = 400;
  std::string reason;
};

const char* status_text(int status);

}  // namespace fourfold::serve
