#include "bench/client.h"

#include <fmt/format.h>

#include <array>
#include <boost/asio/connect.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/ssl.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/write.hpp>
#include <optional>
#include <utility>

#include "base/check.h"

namespace fourfold::bench {
namespace {

namespace asio = boost::asio;
using asio::ip::tcp;
using ErrorCode = boost::system::error_code;
using Clock = std::chrono::steady_clock;

std::string request_text(const HttpCall& call) {
  std::string text = fmt::format("{} {}{} HTTP/1.1\r\nHost: {}\r\nConnection: close\r\nAccept: */*\r\n", call.method,
                                 call.url.path, call.path, call.url.authority());
  if (!call.api_key.empty()) text += fmt::format("Authorization: Bearer {}\r\n", call.api_key);
  if (!call.body.empty()) {
    text += fmt::format("Content-Type: application/json\r\nContent-Length: {}\r\n", call.body.size());
  }
  return text + "\r\n" + call.body;
}

// The certificates that this machine trusts (or those of SSL_CERT_FILE), read once.
asio::ssl::context& trusted() {
  static asio::ssl::context context = [] {
    asio::ssl::context made(asio::ssl::context::tls_client);
    made.set_default_verify_paths();
    made.set_verify_mode(asio::ssl::verify_peer);
    return made;
  }();
  return context;
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
      self->socket_.non_blocking(true, ignored);
      self->call_.url.tls ? self->handshake() : self->write();
    });
  }

  void handshake() {
    if (ended_) return;
    const std::string& host = call_.url.host;
    tls_.emplace(socket_, trusted());
    tls_->set_verify_callback(asio::ssl::host_name_verification(host));
    ::SSL_set_tlsext_host_name(tls_->native_handle(), host.c_str());
    tls_->async_handshake(asio::ssl::stream_base::client, [self = self()](ErrorCode error) {
      if (error) return self->end("no TLS: " + error.message());
      self->write();
    });
  }

  // Calls with what is written to and read from.
  template <typename F>
  void with_stream(F&& call) {
    tls_ ? call(*tls_) : call(socket_);
  }

  void write() {
    if (ended_) return;
    with_stream([this](auto& stream) {
      asio::async_write(stream, asio::buffer(request_), [self = self()](ErrorCode error, size_t) {
        // A server may answer and close before it has read everything: what it said is still there.
        if (error && error != asio::error::broken_pipe && error != asio::error::connection_reset) {
          return self->end("cannot send the request: " + error.message());
        }
        self->request_ = {};
        self->read();
      });
    });
  }

  // What comes is read where it is there: one call of the system for each piece of a stream.
  void read() {
    if (ended_) return;
    if (!tls_) {
      socket_.async_wait(tcp::socket::wait_read, [self = self()](ErrorCode error) {
        if (self->ended_) return;
        size_t count = 0;
        if (!error) count = self->socket_.read_some(asio::buffer(self->buffer_), error);
        if (error == asio::error::would_block || error == asio::error::try_again) return self->read();
        self->take(error, count);
      });
      return;
    }
    with_stream([this](auto& stream) {
      stream.async_read_some(asio::buffer(buffer_),
                             [self = self()](ErrorCode error, size_t count) { self->take(error, count); });
    });
  }

  void take(ErrorCode error, size_t count) {
    if (ended_) return;
    if (error) {
      reader_.end();
      return end(error == asio::error::eof ? "" : "the connection broke: " + error.message());
    }
    std::string body;
    reader_.feed(std::string_view(buffer_.data(), count), body);
    if (!body.empty() && handlers_.piece) handlers_.piece(body);
    if (reader_.done() || reader_.failed()) return end("");
    last_ = Clock::now();
    read();
  }

  // One timer, which looks again when something has come since.
  void wait() {
    timer_.expires_at(last_ + call_.silence);
    timer_.async_wait([weak = weak_from_this()](ErrorCode error) {
      const auto self = std::static_pointer_cast<Transfer>(weak.lock());
      if (error || !self || self->ended_) return;
      if (Clock::now() < self->last_ + self->call_.silence) return self->wait();
      self->end(fmt::format("nothing came for {} s", self->call_.silence.count()));
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
  std::optional<asio::ssl::stream<tcp::socket&>> tls_;
  asio::steady_timer timer_;
  Clock::time_point last_ = Clock::now();  // when something came
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
