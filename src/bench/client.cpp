#include "bench/client.h"

#include <fmt/format.h>

#include <array>
#include <boost/asio/connect.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/write.hpp>
#include <utility>

#include "base/check.h"

namespace fourfold::bench {
namespace {

namespace asio = boost::asio;
using asio::ip::tcp;
using ErrorCode = boost::system::error_code;

std::string request_text(const HttpCall& call) {
  std::string text = fmt::format("{} {}{} HTTP/1.1\r\nHost: {}\r\nConnection: close\r\nAccept: */*\r\n", call.method,
                                 call.url.path, call.path, call.url.authority());
  if (!call.api_key.empty()) text += fmt::format("Authorization: Bearer {}\r\n", call.api_key);
  if (!call.body.empty()) {
    text += fmt::format("Content-Type: application/json\r\nContent-Length: {}\r\n", call.body.size());
  }
  return text + "\r\n" + call.body;
}

class Transfer final : public HttpTransfer {
 public:
  Transfer(asio::io_context& io, HttpCall call, Handlers handlers)
      : call_(std::move(call)), handlers_(std::move(handlers)), resolver_(io), socket_(io), timer_(io) {}

  void start() override {
    request_ = request_text(call_);
    call_.body.clear();
    wait();
    resolver_.async_resolve(call_.url.host, std::to_string(call_.url.port),
                            [self = self()](ErrorCode error, const tcp::resolver::results_type& places) {
                              if (error) return self->end("cannot find " + self->call_.url.host);
                              self->connect(places);
                            });
  }

 private:
  std::shared_ptr<Transfer> self() { return std::static_pointer_cast<Transfer>(shared_from_this()); }

  void connect(const tcp::resolver::results_type& places) {
    if (ended_) return;
    asio::async_connect(socket_, places, [self = self()](ErrorCode error, const tcp::endpoint&) {
      if (error)
        return self->end(fmt::format("cannot connect to {}: {}", self->call_.url.authority(), error.message()));
      ErrorCode ignored;
      self->socket_.set_option(tcp::no_delay(true), ignored);
      self->write();
    });
  }

  void write() {
    if (ended_) return;
    asio::async_write(socket_, asio::buffer(request_), [self = self()](ErrorCode error, size_t) {
      // A server may answer and close before it has read everything: what it said is still there.
      if (error && error != asio::error::broken_pipe && error != asio::error::connection_reset) {
        return self->end("cannot send the request: " + error.message());
      }
      self->request_ = {};
      self->read();
    });
  }

  void read() {
    if (ended_) return;
    socket_.async_read_some(asio::buffer(buffer_), [self = self()](ErrorCode error, size_t count) {
      if (self->ended_) return;
      if (error) {
        self->reader_.end();
        return self->end(error == asio::error::eof ? "" : "the connection broke: " + error.message());
      }
      std::string body;
      self->reader_.feed(std::string_view(self->buffer_.data(), count), body);
      if (!body.empty() && self->handlers_.piece) self->handlers_.piece(body);
      if (self->reader_.done() || self->reader_.failed()) return self->end("");
      self->wait();
      self->read();
    });
  }

  void wait() {
    timer_.expires_after(call_.silence);
    timer_.async_wait([weak = weak_from_this()](ErrorCode error) {
      const auto self = std::static_pointer_cast<Transfer>(weak.lock());
      if (!error && self) self->end(fmt::format("nothing came for {} s", self->call_.silence.count()));
    });
  }

  void end(std::string error) {
    if (std::exchange(ended_, true)) return;
    if (reader_.done()) error.clear();
    if (reader_.failed()) error = "no HTTP: " + reader_.failure();
    ErrorCode ignored;
    timer_.cancel();
    resolver_.cancel();
    socket_.close(ignored);
    const Handlers handlers = std::move(handlers_);
    if (handlers.end) handlers.end(reader_, error);
  }

  HttpCall call_;
  Handlers handlers_;
  tcp::resolver resolver_;
  tcp::socket socket_;
  asio::steady_timer timer_;
  ResponseReader reader_;
  std::string request_;
  std::array<char, 16384> buffer_{};
  bool ended_ = false;
};

}  // namespace

std::shared_ptr<HttpTransfer> HttpTransfer::make(asio::io_context& io, HttpCall call, Handlers handlers) {
  return std::make_shared<Transfer>(io, std::move(call), std::move(handlers));
}

HttpAnswer fetch(const HttpCall& call) {
  asio::io_context io;
  HttpAnswer answer;
  std::string failure;
  const auto transfer = HttpTransfer::make(io, call,
                                           {[&](std::string_view piece) { answer.body += piece; },
                                            [&](const ResponseReader& response, const std::string& error) {
                                              answer.status = response.status();
                                              failure = error;
                                            }});
  transfer->start();
  io.run();
  if (!failure.empty()) fail("{}{}: {}", call.url.text(), call.path, failure);
  return answer;
}

}  // namespace fourfold::bench
