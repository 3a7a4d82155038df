// TLS in every cut, and the server behind it.
#include "serve/tls.h"

#include <gtest/gtest.h>
#include <openssl/ssl.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <string>

#include "base/check.h"
#include "serve/http_server.h"
#include "tests/serve/certificate.h"
#include "tests/serve/socket_client.h"

namespace fourfold::serve {
namespace {

namespace fs = std::filesystem;
using std::chrono::milliseconds;

// The client's side, without a socket.
class Client {
 public:
  explicit Client(int version = TLS1_3_VERSION, const std::string& protocols = "\x08http/1.1")
      : context_(::SSL_CTX_new(::TLS_client_method())), ssl_(nullptr) {
    ::SSL_CTX_set_security_level(context_, 0);
    ::SSL_CTX_set_min_proto_version(context_, version);
    ::SSL_CTX_set_max_proto_version(context_, version);
    ssl_ = ::SSL_new(context_);
    ::SSL_set_alpn_protos(ssl_, reinterpret_cast<const unsigned char*>(protocols.data()),
                          static_cast<unsigned>(protocols.size()));
    ::SSL_set_bio(ssl_, ::BIO_new(::BIO_s_mem()), ::BIO_new(::BIO_s_mem()));
    ::SSL_set_connect_state(ssl_);
  }
  ~Client() {
    ::SSL_free(ssl_);
    ::SSL_CTX_free(context_);
  }
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  void take(std::string_view bytes) {
    if (!bytes.empty()) ::BIO_write(::SSL_get_rbio(ssl_), bytes.data(), static_cast<int>(bytes.size()));
    char buffer[4096];
    for (int count; (count = ::SSL_read(ssl_, buffer, sizeof buffer)) > 0;) {
      received.append(buffer, static_cast<size_t>(count));
    }
    ended = (::SSL_get_shutdown(ssl_) & SSL_RECEIVED_SHUTDOWN) != 0;
  }
  // What is to be sent.
  std::string give() {
    if (connected() && !to_say.empty()) {
      ::SSL_write(ssl_, to_say.data(), static_cast<int>(to_say.size()));
      to_say.clear();
    }
    std::string out(::BIO_ctrl_pending(::SSL_get_wbio(ssl_)), '\0');
    if (!out.empty()) ::BIO_read(::SSL_get_wbio(ssl_), out.data(), static_cast<int>(out.size()));
    return out;
  }
  void say_goodbye() { ::SSL_shutdown(ssl_); }
  bool connected() const { return ::SSL_is_init_finished(ssl_) != 0; }

  std::string to_say, received;
  bool ended = false;

 private:
  SSL_CTX* context_;
  SSL* ssl_;
};

TEST(Tls, SaysTheSameInEveryCut) {
  const Certificate certificate;
  const auto context = certificate.context();
  for (const int version : {TLS1_2_VERSION, TLS1_3_VERSION}) {
    for (const size_t cut : {size_t{1}, size_t{7}, size_t{1} << 20}) {
      const auto session = context->accept();
      Client client(version);
      client.to_say = std::string(40'000, 'q') + "end";
      const std::string answer = std::string(50'000, 'a') + "end";
      std::string plain;
      bool answered = false;
      for (int round = 0; round < 20 && !client.received.ends_with("end"); ++round) {
        client.take("");
        const std::string bytes = client.give();
        std::string out;
        for (size_t i = 0; i < bytes.size(); i += cut) {
          ASSERT_EQ(session->receive(std::string_view(bytes).substr(i, cut), plain, out), TlsSession::State::kOpen);
        }
        if (plain.ends_with("end") && !std::exchange(answered, true)) session->send(answer, out);
        client.take(out);
      }
      EXPECT_EQ(plain, std::string(40'000, 'q') + "end");
      EXPECT_EQ(client.received, answer);
      client.say_goodbye();
      std::string out;
      EXPECT_EQ(session->receive(client.give(), plain, out), TlsSession::State::kClosed);
      session->close(out);
      client.take(out);
      EXPECT_TRUE(client.ended);
    }
  }
}

TEST(Tls, RefusesWhatIsNotTaken) {
  const Certificate certificate;
  const auto context = certificate.context();
  const auto refused = [&](const std::string& bytes) {
    std::string plain, out;
    const auto session = context->accept();
    return session->receive(bytes, plain, out) == TlsSession::State::kFailed && plain.empty() &&
           !session->established();
  };
  EXPECT_TRUE(refused("GET / HTTP/1.1\r\nHost: a\r\n\r\n"));
  Client old(TLS1_1_VERSION), other(TLS1_3_VERSION, "\x02h2");
  old.take("");
  other.take("");
  EXPECT_TRUE(refused(old.give()));
  EXPECT_TRUE(refused(other.give()));
}

TEST(Tls, SaysWhatIsWrongWithItsFiles) {
  const Certificate certificate, other;
  const auto refusal = [&](const fs::path& chain, const fs::path& key) -> std::string {
    try {
      const TlsContext context(chain, key);
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  std::ofstream(certificate.path("text")) << "no certificate";
  EXPECT_NE(refusal("/nowhere", certificate.key_path()).find("--ssl-certfile /nowhere"), std::string::npos);
  EXPECT_NE(refusal(certificate.path("text"), certificate.key_path()).find("--ssl-certfile"), std::string::npos);
  EXPECT_NE(refusal(certificate.certificate_path(), certificate.path("text")).find("--ssl-keyfile"), std::string::npos);
  EXPECT_EQ(refusal(certificate.certificate_path(), certificate.key_path()), "");
}

// Answers with method and body; a body of many pieces for /pieces.
void echo(const std::shared_ptr<Exchange>& exchange) {
  const HttpRequest& request = exchange->request();
  if (request.path == "/pieces") {
    exchange->begin(200, {});
    for (int i = 0; i < 100; ++i) exchange->write(std::string(3000, static_cast<char>('a' + i % 26)));
    return exchange->end();
  }
  HttpResponse response;
  response.body = request.method + " " + request.body;
  exchange->respond(response);
}

HttpResponse refuse(const HttpFailure& failure) {
  HttpResponse response;
  response.status = failure.status;
  response.body = failure.reason;
  return response;
}

// Talks until the answer has `until`, or the server has ended the connection.
void talk(SocketClient& socket, Client& client, const std::string& until) {
  for (int i = 0; i < 5000 && client.received.find(until) == std::string::npos && !socket.closed(); ++i) {
    client.take("");
    const std::string bytes = client.give();
    if (!bytes.empty()) socket.send(bytes);
    client.take(socket.receive("\n", milliseconds(20)));
  }
}

TEST(Tls, ServesConnections) {
  const Certificate certificate;
  HttpServerOptions options;
  options.tls = certificate.context();
  const HttpServer server(options, echo, refuse);
  SocketClient socket(server.port());
  Client client;
  const std::string host = " HTTP/1.1\r\nHost: localhost\r\n";
  client.to_say = "POST /" + host + "Content-Length: 3\r\n\r\noneGET /pieces" + host + "\r\n";
  talk(socket, client, "\r\n0\r\n\r\n");
  EXPECT_NE(client.received.find("POST one"), std::string::npos);
  EXPECT_NE(client.received.find(std::string(3000, 'v')), std::string::npos);
  EXPECT_FALSE(client.ended);
  client.received.clear();
  client.to_say = "POST /" + host + "Connection: close\r\nContent-Length: 3\r\n\r\ntwo";
  talk(socket, client, "POST two");
  EXPECT_NE(client.received.find("POST two"), std::string::npos);
  for (int i = 0; i < 500 && !client.ended && !socket.closed(); ++i)
    client.take(socket.receive("\n", milliseconds(20)));
  EXPECT_TRUE(client.ended) << "the end is told from a connection that was cut";

  SocketClient plain(server.port());
  plain.send("GET /" + host + "\r\n");
  EXPECT_EQ(plain.receive().find("HTTP"), std::string::npos);
  EXPECT_TRUE(plain.closed());
}

TEST(Tls, HandshakesThatDoNotEndAreCutOff) {
  const Certificate certificate;
  HttpServerOptions options;
  options.tls = certificate.context();
  options.head = milliseconds(100);
  const HttpServer server(options, echo, refuse);
  SocketClient silent(server.port()), begun(server.port());
  Client client;
  client.take("");
  begun.send(client.give().substr(0, 50));
  silent.receive();
  begun.receive();
  EXPECT_TRUE(silent.closed());
  EXPECT_TRUE(begun.closed());
}

// ---- Unix sockets

class UnixClient {
 public:
  explicit UnixClient(const std::string& path) : fd_(::socket(AF_UNIX, SOCK_STREAM, 0)) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    path.copy(address.sun_path, sizeof address.sun_path - 1);
    connected_ = ::connect(fd_, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0;
  }
  ~UnixClient() { ::close(fd_); }
  UnixClient(const UnixClient&) = delete;
  UnixClient& operator=(const UnixClient&) = delete;
  bool connected() const { return connected_; }
  std::string ask(const std::string& request) const {
    if (::send(fd_, request.data(), request.size(), MSG_NOSIGNAL) < 0) return "";
    std::string out;
    char buffer[4096];
    for (ssize_t count; (count = ::recv(fd_, buffer, sizeof buffer, 0)) > 0;) {
      out.append(buffer, static_cast<size_t>(count));
    }
    return out;
  }

 private:
  int fd_;
  bool connected_ = false;
};

TEST(UnixSocket, IsServedAndLeavesNothing) {
  const Certificate directory;  // for its directory
  const std::string path = directory.path("socket").string();
  HttpServerOptions options;
  options.unix_socket = path;
  const std::string request = "POST / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: 2\r\n\r\nhi";
  {
    const HttpServer server(options, echo, refuse);
    EXPECT_EQ(server.port(), 0);
    EXPECT_TRUE(UnixClient(path).ask(request).ends_with("POST hi"));
    EXPECT_THROW(HttpServer(options, echo, refuse), Error) << "one server alone has it";
    EXPECT_TRUE(UnixClient(path).ask(request).ends_with("POST hi"));
  }
  EXPECT_FALSE(fs::exists(fs::symlink_status(path)));
  // What a server left that was killed is no obstacle; what is no socket is.
  {
    const int fd = ::socket(AF_UNIX, SOCK_STREAM, 0);
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    path.copy(address.sun_path, sizeof address.sun_path - 1);
    ASSERT_EQ(::bind(fd, reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
    ::close(fd);
  }
  {
    const HttpServer server(options, echo, refuse);
    EXPECT_TRUE(UnixClient(path).ask(request).ends_with("POST hi"));
  }
  std::ofstream(path) << "a file";
  EXPECT_THROW(HttpServer(options, echo, refuse), Error);
  EXPECT_TRUE(fs::exists(path));
  options.unix_socket = std::string(200, 'a');
  EXPECT_THROW(HttpServer(options, echo, refuse), Error);
}

}  // namespace
}  // namespace fourfold::serve
