// The network side: connections, deadlines, bounded buffers. What is asked is somebody else's business: each request is
// given to a handler as an Exchange.
//
// A read is pending on every connection all the time, so that a client that vanishes is noticed whatever its request
// is doing. A few threads serve all connections; whoever handles requests must not keep them.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "serve/http_message.h"
#include "serve/http_parser.h"
#include "serve/tls.h"

namespace fourfold::serve {

// One request and its answer.
//
// post() may be called from any thread and never blocks, dispatch() from posted work of any exchange of the same
// network; everything else only from the handler or from posted work, which run one at a time for each exchange. Work
// that is posted holds on to the exchange by itself. An exchange that is dropped without an answer answers 500.
class Exchange {
 public:
  virtual ~Exchange() = default;
  virtual const HttpRequest& request() const = 0;
  virtual void post(std::function<void()> work) = 0;
  // As post(), and at once where nothing else of this exchange is being done.
  virtual void dispatch(std::function<void()> work) = 0;

  // A whole answer. What is said to an exchange that was answered, or whose client is gone, is lost.
  virtual void respond(HttpResponse response) = 0;

  // An answer in pieces: begin(), write()s, end(). abort() instead of end() tells the client that something is missing.
  virtual void begin(int status, Headers headers) = 0;
  virtual void write(std::string_view piece) = 0;
  virtual void end() = 0;
  virtual void abort() = 0;

  // The client has closed its side, or does not take what is sent. Called once, and at once when it is known already.
  virtual void on_gone(std::function<void()> call) = 0;
  virtual bool gone() const = 0;
  // Bytes that are waiting to be sent. Who writes more while crowded() is true makes the server hold it; on_drained is
  // called when that has changed.
  virtual bool crowded() const = 0;
  virtual void on_drained(std::function<void()> call) = 0;
  // Calls once, later; the last call counts.
  virtual void after(std::chrono::milliseconds time, std::function<void()> call) = 0;
};

struct HttpServerOptions {
  std::string host = "127.0.0.1";
  uint16_t port = 0;                      // 0: any that is free
  std::string unix_socket;                // a path: listens there, and on no port
  std::shared_ptr<const TlsContext> tls;  // null: without
  int threads = 0;                        // 0: one, and two where there are eight processors or more
  size_t max_connections = 16384;
  HttpLimits limits;
  size_t bodies = size_t{512} << 20;  // bytes of all bodies that are being read together
  size_t crowded = 256 << 10;         // bytes to be sent, of one connection
  // A client that sends or takes nothing for so long is cut off.
  std::chrono::milliseconds idle{75'000};    // between requests
  std::chrono::milliseconds head{10'000};    // from the first byte of a request to the end of its head
  std::chrono::milliseconds body{20'000};    // between two pieces of a body
  std::chrono::milliseconds whole{300'000};  // for the whole of it
  std::chrono::milliseconds write{30'000};   // between two pieces of an answer that is there
};

struct HttpServerStats {
  int64_t connections = 0, accepted = 0, refused = 0;  // refused: requests that were not HTTP as it is taken
};

class HttpServer {
 public:
  using Handler = std::function<void(std::shared_ptr<Exchange>)>;
  // The body of an answer to what is no acceptable request.
  using Refuser = std::function<HttpResponse(const HttpFailure&)>;

  // Opens the port, or the socket: an Error when that cannot be done. Requests are handled from here on. Where a socket
  // of that name is left of a server that is gone, its place is taken.
  HttpServer(const HttpServerOptions& options, Handler handler, Refuser refuser);
  ~HttpServer();  // close()
  HttpServer(const HttpServer&) = delete;
  HttpServer& operator=(const HttpServer&) = delete;

  uint16_t port() const;  // 0: a Unix socket
  HttpServerStats stats() const;
  // Connections end with the answer that is being given, those without a request at once.
  void finish_connections();
  // Cuts off whatever is left, and returns when no work runs any more.
  void close();

  struct Shared;

 private:
  std::unique_ptr<Shared> shared_;
};

}  // namespace fourfold::serve
