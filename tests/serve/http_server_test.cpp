// The network side against clients that are slow, gone, greedy or wrong. All of them on this machine.
#include "serve/http_server.h"

#include <gtest/gtest.h>
#include <netinet/tcp.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "base/check.h"
#include "base/random.h"
#include "tests/serve/socket_client.h"

namespace fourfold::serve {
namespace {

using std::chrono::milliseconds;

HttpResponse text_response(int status, std::string body) {
  HttpResponse response;
  response.status = status;
  response.body = std::move(body);
  return response;
}

HttpResponse refuser(const HttpFailure& failure) { return text_response(failure.status, failure.reason); }

// /echo: method and body. /size: how long the body is, and its beginning. /hold: an answer when release() says so.
// /wait: an answer that never comes. /stream: pieces without end. /drop: forgotten.
class Fixture {
 public:
  explicit Fixture(HttpServerOptions options = {})
      : server(
            options, [this](std::shared_ptr<Exchange> exchange) { handle(exchange); }, refuser) {}

  void handle(const std::shared_ptr<Exchange>& exchange) {
    const HttpRequest& request = exchange->request();
    if (request.path == "/wait") {
      exchange->on_gone([this, exchange] { note_gone(); });
    } else if (request.path == "/hold") {
      const std::lock_guard lock(mutex);
      held = exchange;
      condition.notify_all();
    } else if (request.path == "/size") {
      exchange->respond(text_response(200, fmt::format("{} {}", request.body.size(), request.body.substr(0, 8))));
    } else if (request.path == "/stream") {
      exchange->begin(200, {});
      exchange->on_gone([this, exchange] { note_gone(); });
      exchange->on_drained([this, weak = std::weak_ptr(exchange)] { pour(weak); });
      pour(exchange);
    } else if (request.path == "/pieces") {
      exchange->begin(200, {});
      for (const char* piece : {"a", "bc", "", "def"}) exchange->write(piece);
      exchange->end();
    } else if (request.path != "/drop") {
      exchange->respond(text_response(200, request.method + " " + request.body));
    }
  }

  void pour(const std::weak_ptr<Exchange>& weak) {
    const auto exchange = weak.lock();
    if (!exchange) return;
    const std::string piece(4096, 'x');
    while (!exchange->gone() && !exchange->crowded()) {
      exchange->write(piece);
      poured += piece.size();
    }
  }

  void note_gone() {
    const std::lock_guard lock(mutex);
    ++gone;
    condition.notify_all();
  }
  bool wait_gone(milliseconds time) {
    std::unique_lock lock(mutex);
    return condition.wait_for(lock, time, [&] { return gone > 0; });
  }

  // Answers the request to /hold, which has come or is to come.
  void release() {
    std::unique_lock lock(mutex);
    ASSERT_TRUE(condition.wait_for(lock, std::chrono::seconds(10), [&] { return held != nullptr; }));
    const auto exchange = std::exchange(held, nullptr);
    exchange->post([exchange] { exchange->respond(text_response(200, "released")); });
  }

  SocketClient client() const { return SocketClient(server.port()); }

  std::mutex mutex;
  std::condition_variable condition;
  int gone = 0;
  std::shared_ptr<Exchange> held;
  std::atomic<size_t> poured{0};
  HttpServer server;
};

const std::string kHost = " HTTP/1.1\r\nHost: localhost\r\n";

std::string status_line(const std::string& answer) { return answer.substr(0, answer.find("\r\n")); }

TEST(HttpServer, AnswersAndKeepsTheConnection) {
  const Fixture fixture;
  SocketClient client = fixture.client();
  for (int i = 0; i < 3; ++i) {
    ASSERT_TRUE(client.send("POST /echo" + kHost + "Content-Length: 2\r\n\r\nhi"));
    const std::string answer = client.receive("POST hi");
    EXPECT_EQ(status_line(answer), "HTTP/1.1 200 OK");
    EXPECT_NE(answer.find("content-length: 7\r\n"), std::string::npos);
    EXPECT_FALSE(client.closed());
  }
}

TEST(HttpServer, AnswersInTheOrderOfRequests) {
  const Fixture fixture;
  SocketClient client = fixture.client();
  client.send("POST /echo" + kHost + "Content-Length: 1\r\n\r\n1POST /pieces" + kHost +
              "Content-Length: 1\r\n\r\n2POST /echo" + kHost + "Content-Length: 1\r\n\r\n3");
  const std::string answers = client.receive("POST 3");
  const size_t first = answers.find("POST 1"), second = answers.find("2\r\nbc\r\n3\r\ndef\r\n0\r\n\r\n");
  ASSERT_NE(first, std::string::npos);
  ASSERT_NE(second, std::string::npos);
  EXPECT_LT(first, second);
  EXPECT_NE(answers.find("POST 3"), std::string::npos);
}

// More than the server and the sockets between hold: the client is stopped until the first one is answered, and then
// has the answers to all, in order.
TEST(HttpServer, ReadsWhatIsSentAheadWhenItsTurnComes) {
  constexpr int kRequests = 300;
  constexpr size_t kBytes = 100'000;
  Fixture fixture;
  SocketClient client = fixture.client();
  std::atomic<int> sent{0};
  std::thread sender([&] {
    client.send("GET /hold" + kHost + "\r\n");
    for (int i = 0; i < kRequests; ++i) {
      std::string body = fmt::format("{:08d}", i);
      body.resize(kBytes, 'x');
      if (!client.send("POST /size" + kHost + fmt::format("Content-Length: {}\r\n\r\n", kBytes) + body)) return;
      ++sent;
    }
  });
  // Until it stands still.
  for (int before = -1; before != sent || sent == 0;) {
    before = sent;
    std::this_thread::sleep_for(milliseconds(200));
  }
  EXPECT_LT(sent, kRequests);
  EXPECT_EQ(client.receive("", milliseconds(1)), "");
  EXPECT_FALSE(client.closed());
  fixture.release();
  const std::string last = fmt::format("{} {:08d}", kBytes, kRequests - 1);
  const std::string answers = client.receive(last, std::chrono::seconds(60));
  client.finish_sending();
  sender.join();
  size_t at = answers.find("released");
  for (int i = 0; i < kRequests && at != std::string::npos; ++i) {
    at = answers.find(fmt::format("{} {:08d}", kBytes, i), at);
    EXPECT_NE(at, std::string::npos) << i;
  }
  EXPECT_NE(at, std::string::npos);
}

// Although nothing of it is read any more.
TEST(HttpServer, NoticesWhoIsGoneWithRequestsSentAhead) {
  Fixture fixture;
  SocketClient client = fixture.client();
  ASSERT_TRUE(client.send("GET /wait" + kHost + "\r\nPOST /echo" + kHost + "Content-Length: 1000000\r\n\r\n" +
                          std::string(100'000, 'x')));
  EXPECT_FALSE(fixture.wait_gone(milliseconds(600)));
  client.close();
  EXPECT_TRUE(fixture.wait_gone(std::chrono::seconds(10)));
}

TEST(HttpServer, AnswersHeadAndOldClients) {
  const Fixture fixture;
  SocketClient head = fixture.client();
  head.send("HEAD /echo" + kHost + "Connection: close\r\n\r\n");
  const std::string answer = head.receive();
  EXPECT_NE(answer.find("content-length: 5\r\n"), std::string::npos);
  EXPECT_TRUE(answer.ends_with("\r\n\r\n"));
  SocketClient old = fixture.client();
  old.send("GET /pieces HTTP/1.0\r\n\r\n");
  const std::string pieces = old.receive();
  EXPECT_TRUE(pieces.ends_with("\r\n\r\nabcdef")) << pieces;
  EXPECT_EQ(pieces.find("chunked"), std::string::npos);
}

TEST(HttpServer, AsksForABodyThatIsHeldBack) {
  const Fixture fixture;
  SocketClient client = fixture.client();
  client.send("POST /echo" + kHost + "Expect: 100-continue\r\nContent-Length: 2\r\n\r\n");
  EXPECT_EQ(client.receive("\r\n\r\n"), "HTTP/1.1 100 Continue\r\n\r\n");
  client.send("ok");
  EXPECT_TRUE(client.receive("POST ok").ends_with("POST ok"));
}

TEST(HttpServer, RefusesAndCloses) {
  const Fixture fixture;
  for (const char* const bytes :
       {"GET / HTTP/1.1\r\n\r\n", "GET / HTTP/1.1\nHost: a\n\n", "\x16\x03\x01 hello",
        "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 3, 3\r\n\r\nabcGET / HTTP/1.1\r\nHost: a\r\n\r\n"}) {
    SocketClient client = fixture.client();
    client.send(bytes);
    const std::string answer = client.receive();
    EXPECT_TRUE(answer.starts_with("HTTP/1.1 400 ")) << answer;
    EXPECT_NE(answer.find("connection: close\r\n"), std::string::npos);
    EXPECT_EQ(answer.find("HTTP/1.1", 8), std::string::npos) << "only one answer";
    EXPECT_TRUE(client.closed());
  }
  EXPECT_EQ(fixture.server.stats().refused, 4);
}

TEST(HttpServer, TellsOfALargeBodyBeforeItHasCome) {
  HttpServerOptions options;
  options.limits.body = 1000;
  const Fixture fixture(options);
  SocketClient client = fixture.client();
  client.send("POST /echo" + kHost + "Content-Length: 100000000\r\n\r\n");
  const std::string piece(1 << 20, 'x');
  for (int i = 0; i < 8 && client.send(piece); ++i) {
  }
  EXPECT_TRUE(client.receive("more").starts_with("HTTP/1.1 413 "));
}

TEST(HttpServer, BoundsTheBodiesOfAllConnections) {
  HttpServerOptions options;
  options.limits.body = 1 << 20;
  options.bodies = 1 << 20;
  const Fixture fixture(options);
  SocketClient first = fixture.client(), second = fixture.client();
  const std::string head = "POST /echo" + kHost + "Content-Length: 1000000\r\n\r\n", half(600'000, 'x');
  first.send(head + half);
  std::this_thread::sleep_for(milliseconds(500));
  second.send(head + half);
  EXPECT_TRUE(second.receive("\r\n\r\n").starts_with("HTTP/1.1 503 "));
  first.send(std::string(400'000, 'x'));
  EXPECT_TRUE(first.receive("\r\n\r\n").starts_with("HTTP/1.1 200 "));
  // What was held is free again.
  SocketClient third = fixture.client();
  third.send(head + half + std::string(400'000, 'x'));
  EXPECT_TRUE(third.receive("\r\n\r\n").starts_with("HTTP/1.1 200 "));
}

TEST(HttpServer, EndsRequestsThatDoNotCome) {
  HttpServerOptions options;
  options.head = milliseconds(200);
  options.body = milliseconds(200);
  options.whole = milliseconds(600);
  const Fixture fixture(options);
  // A byte from time to time does not help.
  SocketClient slow = fixture.client();
  bool open = true;
  for (int i = 0; i < 40 && open; ++i) {
    open = slow.send("G") && slow.receive("408", milliseconds(50)).empty() && !slow.closed();
  }
  EXPECT_FALSE(open);
  SocketClient body = fixture.client();
  body.send("POST /echo" + kHost + "Content-Length: 10\r\n\r\nabc");
  EXPECT_TRUE(body.receive().starts_with("HTTP/1.1 408 "));
  SocketClient endless = fixture.client();
  endless.send("POST /echo" + kHost + "Transfer-Encoding: chunked\r\n\r\n");
  std::string answer;
  for (int i = 0; i < 40 && answer.empty() && endless.send("1\r\nx\r\n"); ++i) {
    answer = endless.receive("\r\n\r\n", milliseconds(50));
  }
  EXPECT_TRUE(answer.starts_with("HTTP/1.1 408 ")) << answer;
}

TEST(HttpServer, ClosesConnectionsThatSayNothing) {
  HttpServerOptions options;
  options.idle = milliseconds(150);
  const Fixture fixture(options);
  SocketClient client = fixture.client();
  EXPECT_EQ(client.receive("", milliseconds(2000)), "");
  EXPECT_TRUE(client.closed());
}

TEST(HttpServer, NoticesWhoIsGone) {
  for (const bool reset : {false, true}) {
    Fixture fixture;
    SocketClient client = fixture.client();
    client.send("POST /wait" + kHost + "Content-Length: 2\r\n\r\n{}");
    EXPECT_FALSE(fixture.wait_gone(milliseconds(150)));
    if (reset) {
      client.close();
    } else {
      client.finish_sending();
    }
    EXPECT_TRUE(fixture.wait_gone(milliseconds(10'000)));
  }
}

TEST(HttpServer, AnswersWhoHasClosedItsSideAtOnce) {
  const Fixture fixture;
  SocketClient client = fixture.client();
  client.send("POST /echo" + kHost + "Content-Length: 2\r\n\r\nhi");
  client.finish_sending();
  EXPECT_TRUE(client.receive().ends_with("POST hi"));
}

TEST(HttpServer, HoldsLittleForSlowReadersAndCutsThemOff) {
  HttpServerOptions options;
  options.write = milliseconds(300);
  options.crowded = 64 << 10;
  Fixture fixture(options);
  const SocketClient client(fixture.server.port(), 4096);
  client.send("GET /stream" + kHost + "\r\n");
  EXPECT_TRUE(fixture.wait_gone(milliseconds(3000)));
  // What the system's buffers took, and what the server holds.
  EXPECT_LT(fixture.poured.load(), size_t{8} << 20);
  EXPECT_EQ(fixture.server.stats().connections, 0);
}

// A peer that is gone without a word (half-open) is asked for by the system.
TEST(HttpServer, AsksForPeersThatSayNothing) {
  const Fixture fixture;
  SocketClient client = fixture.client();
  client.send("POST /echo" + kHost + "Content-Length: 2\r\n\r\nhi");
  client.receive("POST hi");
  sockaddr_in own{};
  socklen_t size = sizeof own;
  ASSERT_EQ(::getsockname(client.fd(), reinterpret_cast<sockaddr*>(&own), &size), 0);
  // The server is in this process: its end is the socket whose peer the client is.
  int found = -1;
  for (int fd = 0; fd < 1024 && found < 0; ++fd) {
    sockaddr_in peer{};
    size = sizeof peer;
    if (::getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &size) == 0 && peer.sin_port == own.sin_port) found = fd;
  }
  ASSERT_GE(found, 0);
  const auto option = [&](int level, int name) {
    int value = 0;
    socklen_t length = sizeof value;
    EXPECT_EQ(::getsockopt(found, level, name, &value, &length), 0);
    return value;
  };
  EXPECT_NE(option(SOL_SOCKET, SO_KEEPALIVE), 0);
  EXPECT_LE(option(IPPROTO_TCP, TCP_KEEPIDLE) + option(IPPROTO_TCP, TCP_KEEPINTVL) * option(IPPROTO_TCP, TCP_KEEPCNT),
            60);
}

TEST(HttpServer, AnswersARequestThatWasForgotten) {
  const Fixture fixture;
  SocketClient client = fixture.client();
  client.send("GET /drop" + kHost + "Connection: close\r\n\r\n");
  EXPECT_TRUE(client.receive().starts_with("HTTP/1.1 500 "));
}

TEST(HttpServer, ServesBesideManyIdleConnections) {
  const Fixture fixture;
  std::vector<SocketClient> idle;
  for (int i = 0; i < 400; ++i) idle.push_back(fixture.client());
  SocketClient client = fixture.client();
  client.send("POST /echo" + kHost + "Content-Length: 2\r\n\r\nhi");
  EXPECT_TRUE(client.receive("POST hi").ends_with("POST hi"));
  EXPECT_EQ(fixture.server.stats().connections, 401);
}

TEST(HttpServer, WaitsWithConnectionsBeyondTheLimit) {
  HttpServerOptions options;
  options.max_connections = 2;
  const Fixture fixture(options);
  SocketClient first = fixture.client();
  auto second = std::make_unique<SocketClient>(fixture.server.port());
  std::this_thread::sleep_for(milliseconds(500));
  SocketClient third = fixture.client();
  third.send("POST /echo" + kHost + "Content-Length: 2\r\n\r\nhi");
  EXPECT_EQ(third.receive("POST hi", milliseconds(200)), "");
  second.reset();
  EXPECT_TRUE(third.receive("POST hi").ends_with("POST hi"));
}

TEST(HttpServer, EndsBehindTheAnswersThatAreBeingGiven) {
  Fixture fixture;
  SocketClient idle = fixture.client(), busy = fixture.client();
  busy.send("POST /wait" + kHost + "Content-Length: 2\r\n\r\n{}");
  std::this_thread::sleep_for(milliseconds(500));
  fixture.server.finish_connections();
  idle.receive("", milliseconds(1000));
  EXPECT_TRUE(idle.closed());
  EXPECT_EQ(busy.receive("", milliseconds(100)), "");
  EXPECT_FALSE(busy.closed());
  EXPECT_THROW(fixture.client().receive("", milliseconds(100)), std::runtime_error);
  fixture.server.close();
  EXPECT_TRUE(fixture.wait_gone(milliseconds(10'000)));
}

TEST(HttpServer, SaysNothingToWhoIsGone) {
  Fixture fixture;
  SocketClient client = fixture.client();
  client.send("POST /wait" + kHost + "Content-Length: 2\r\n\r\n{}");
  client.finish_sending();
  EXPECT_EQ(client.receive(), "");
  EXPECT_TRUE(client.closed());
  EXPECT_TRUE(fixture.wait_gone(milliseconds(10'000)));
}

// Requests with bytes changed, lost, doubled: an answer or a closed connection each, and the server goes on.
TEST(HttpServer, OutlivesWhatIsNotHttp) {
  const Fixture fixture;
  Random random(7);
  const std::string good =
      "POST /echo" + kHost + "X-A: b\r\nTransfer-Encoding: chunked\r\n\r\n3;a=b\r\nabc\r\n0\r\nT: u\r\n\r\n";
  for (int round = 0; round < 300; ++round) {
    std::string bytes = good;
    const uint64_t changes = 1 + random.below(4);
    for (uint64_t i = 0; i < changes; ++i) {
      const size_t place = static_cast<size_t>(random.below(bytes.size()));
      switch (random.below(3)) {
        case 0:
          bytes[place] = static_cast<char>(random.below(256));
          break;
        case 1:
          bytes.erase(place, 1 + static_cast<size_t>(random.below(5)));
          break;
        default:
          bytes.insert(place, bytes.substr(place, static_cast<size_t>(random.below(20))));
      }
    }
    SocketClient client = fixture.client();
    client.send(bytes);
    client.finish_sending();
    const std::string answer = client.receive();
    EXPECT_TRUE(client.closed()) << printable(bytes, 400);
    if (!answer.empty()) {
      EXPECT_TRUE(answer.starts_with("HTTP/1.1 ")) << printable(answer, 400);
      EXPECT_FALSE(answer.starts_with("HTTP/1.1 500")) << printable(bytes, 400);
    }
  }
  SocketClient client = fixture.client();
  client.send(good);
  EXPECT_TRUE(client.receive("POST abc").ends_with("POST abc"));
}

}  // namespace
}  // namespace fourfold::serve
