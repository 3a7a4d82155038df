// One HTTP request to a server, asynchronously or not.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "bench/http_response.h"
#include "bench/url.h"

namespace boost::asio {
class io_context;
}

namespace fourfold::bench {

struct HttpCall {
  Url url;
  std::string method = "POST", path;  // behind the URL's
  std::string body, api_key;
  std::chrono::seconds silence{600};  // without a byte from the server, and the call has failed
};

// A call on a connection of its own, so that calls do not wait for each other. Its handlers run on the context's
// thread.
class HttpTransfer : public std::enable_shared_from_this<HttpTransfer> {
 public:
  struct Handlers {
    std::function<void(std::string_view body)> piece;  // what came of the body, as it comes
    // It is over: the reader has status and headers; `error` is empty where the response is whole.
    std::function<void(const ResponseReader& response, const std::string& error)> end;
  };

  static std::shared_ptr<HttpTransfer> make(boost::asio::io_context& io, HttpCall call, Handlers handlers);
  virtual ~HttpTransfer() = default;
  // The call keeps itself until its end.
  virtual void start() = 0;
};

struct HttpAnswer {
  int status = 0;
  std::string body;
};

// Waits for the whole response: an Error where there is none.
HttpAnswer fetch(const HttpCall& call);

}  // namespace fourfold::bench
