// The server with the demo model on a backend whose steps wait until they may go on: what cannot be timed otherwise.
#include "serve/server.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <functional>
#include <thread>

#include "base/check.h"
#include "base/console.h"
#include "base/json.h"
#include "cpu/backend.h"
#include "cpu/reference/reference.h"
#include "serve/service.h"
#include "tests/serve/socket_client.h"
#include "tests/serve/stalling_backend.h"

namespace fourfold::serve {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

ServiceOptions demo_options(const std::shared_ptr<Gate>& gate) {
  ServiceOptions options;
  options.directory = FOURFOLD_SOURCE_DIR "/models/demo";
  options.make_backend = [gate](const auto&) { return std::make_shared<StallingBackend>(cpu::make_backend({}), gate); };
  options.context = 512;
  options.engine.max_sequences = 1;
  options.engine.max_queued = 8;
  options.log_requests = false;
  return options;
}

std::string post(const std::string& body, const std::string& headers = "") {
  return fmt::format(
      "POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nConnection: close\r\n{}"
      "Content-Length: {}\r\n\r\n{}",
      headers, body.size(), body);
}

std::string ask(uint16_t port, const std::string& request) {
  SocketClient client(port);
  client.send(request);
  return client.receive("", seconds(60));
}

std::string get(uint16_t port, const std::string& path) {
  return ask(port, "GET " + path + " HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n");
}

// A loaded service behind a port.
class Fixture {
 public:
  explicit Fixture(const ServiceOptions& options)
      : service(options),
        http(
            {}, [this](std::shared_ptr<Exchange> exchange) { service.handle(exchange); },
            [](const HttpFailure& failure) {
              return ApiError(failure.status, failure.reason).response(ErrorForm::kOpenAi);
            }) {
    service.load();
  }
  ~Fixture() {
    http.close();
    service.stop();
  }
  uint16_t port() const { return http.port(); }
  engine::EngineStats stats() const { return service.model()->engine->stats(); }
  void wait_for(const std::function<bool()>& condition) const {
    for (int i = 0; i < 6000 && !condition(); ++i) std::this_thread::sleep_for(milliseconds(10));
    ASSERT_TRUE(condition());
  }

  Service service;
  HttpServer http;
};

// Health turns, requests are told, and the process ends with the status that a supervisor looks for.
void serve_until_stuck() {
  ServerOptions options;
  options.service = demo_options(std::make_shared<Gate>());  // never opened
  options.service.stuck = seconds(1);
  std::thread client;
  serve(options, [&](uint16_t port) {
    client = std::thread([port] {
      while (get(port, "/ready").find(" 200 ") == std::string::npos) std::this_thread::sleep_for(milliseconds(10));
      std::string whole, stream;
      std::thread first([&] { whole = ask(port, post(R"({"prompt": "a"})")); });
      std::thread second([&] { stream = ask(port, post(R"({"prompt": "b", "stream": true})")); });
      first.join();
      second.join();
      const bool told = whole.starts_with("HTTP/1.1 503 ") && whole.find("the engine has stopped") != std::string::npos;
      const bool ended = stream.find("the engine has stopped") != std::string::npos && stream.ends_with("0\r\n\r\n");
      if (!told || !ended) {
        eprint("not told: {}\n{}\n", printable(whole, 2000), printable(stream, 2000));
        std::_Exit(1);
      }
    });
  });
  std::_Exit(2);
}

TEST(ServerDeathTest, AStuckEngineEndsTheProcess) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_EXIT(serve_until_stuck(), testing::ExitedWithCode(kStuckStatus), "the engine has not come round for 1 s");
}

TEST(Server, HealthTellsOfAStuckEngine) {
  const auto gate = std::make_shared<Gate>();
  ServiceOptions options = demo_options(gate);
  options.stuck = seconds(0);
  Fixture fixture(options);
  EXPECT_EQ(get(fixture.port(), "/live").substr(9, 3), "200");
  std::thread client([&] { ask(fixture.port(), post(R"({"prompt": "a", "max_tokens": 1})")); });
  fixture.wait_for([&] { return fixture.service.stuck(); });
  EXPECT_EQ(get(fixture.port(), "/health").substr(9, 3), "503");
  EXPECT_EQ(get(fixture.port(), "/live").substr(9, 3), "503");
  gate->open();
  client.join();
}

// ---- a model of several ranks (docs/ranks.md)

class RankBackend final : public cpu::ReferenceBackend {
 public:
  RankBackend(const cpu::CpuOptions& options, std::shared_ptr<std::atomic<int64_t>> left)
      : ReferenceBackend(options), left_(std::move(left)) {}
  void moe(const ops::MoeParams& params, const ops::Tensor& x, const ops::Tensor& out) override {
    if (options().member != nullptr && options().member->rank() == 1 && --*left_ < 0) fail("lost its mind");
    ReferenceBackend::moe(params, x, out);
  }

 private:
  std::shared_ptr<std::atomic<int64_t>> left_;  // expert layers of rank 1 until it fails
};

ServiceOptions ranked_options(int64_t ranks, const std::shared_ptr<std::atomic<int64_t>>& left) {
  ServiceOptions options = demo_options(nullptr);
  options.ranks.ranks = ranks;
  options.make_backend = [left](const chat::BackendRequest& request) {
    cpu::CpuOptions backend;
    backend.threads = 1;
    backend.member = request.member;
    return std::make_shared<RankBackend>(backend, left);
  };
  return options;
}

TEST(Server, RanksAnswerAsOneDoes) {
  std::string texts[2];
  for (const int64_t ranks : {1, 2}) {
    Fixture fixture(ranked_options(ranks, std::make_shared<std::atomic<int64_t>>(1 << 30)));
    const std::string answer = ask(
        fixture.port(), post(R"({"prompt": "The capital of", "max_tokens": 8, "ignore_eos": true, "temperature": 0})"));
    ASSERT_TRUE(answer.starts_with("HTTP/1.1 200 ")) << answer;
    const Json body = parse_json(answer.substr(answer.find("\r\n\r\n") + 4), "answer");
    texts[ranks - 1] = body["choices"][0]["text"].get<std::string>();
    EXPECT_EQ(body["usage"]["completion_tokens"], 8);
  }
  EXPECT_EQ(texts[0], texts[1]);
}

TEST(Server, ARankThatFailsEndsEveryRequestWithTheCause) {
  const auto left = std::make_shared<std::atomic<int64_t>>(1 << 30);
  Fixture fixture(ranked_options(2, left));
  left->store(60);
  const std::string request = R"({"prompt": "a", "max_tokens": 400, "ignore_eos": true, "temperature": 0})";
  std::string answers[2];
  std::thread clients[2];
  for (size_t i = 0; i < 2; ++i) clients[i] = std::thread([&, i] { answers[i] = ask(fixture.port(), post(request)); });
  for (std::thread& client : clients) client.join();
  // One was being answered, and one waited for it, or came too late.
  for (const std::string& answer : answers) {
    EXPECT_NE(answer.find("rank 1: lost its mind"), std::string::npos) << answer;
    EXPECT_TRUE(answer.starts_with("HTTP/1.1 50")) << answer;
  }
  for (const char* path : {"/health", "/live"}) EXPECT_EQ(get(fixture.port(), path).substr(9, 3), "503");
  EXPECT_NE(get(fixture.port(), "/health").find("the engine has failed: rank 1: lost its mind"), std::string::npos);
}

TEST(Server, TokensAreReservedBeforeTheyAreCounted) {
  const auto gate = std::make_shared<Gate>();
  ServiceOptions options = demo_options(gate);
  options.engine.max_queued_tokens = 100;
  Fixture fixture(options);
  const std::string shorter = post(R"({"prompt": ")" + std::string(30, 'a') + R"(", "max_tokens": 1})");
  const std::string longer = post(R"({"prompt": ")" + std::string(450, 'a') + R"(", "max_tokens": 1})");
  std::vector<std::thread> clients;
  std::vector<std::string> answers(2);
  clients.emplace_back([&] { answers[0] = ask(fixture.port(), shorter); });
  fixture.wait_for([&] { return fixture.stats().running == 1; });
  clients.emplace_back([&] { answers[1] = ask(fixture.port(), shorter); });
  fixture.wait_for([&] { return fixture.stats().waiting == 1; });
  const std::string refused = ask(fixture.port(), longer);
  EXPECT_EQ(refused.substr(9, 3), "503") << refused;
  EXPECT_NE(refused.find("retry-after: "), std::string::npos);
  gate->open();
  for (std::thread& client : clients) client.join();
  for (const std::string& answer : answers) EXPECT_EQ(answer.substr(9, 3), "200") << answer;
  EXPECT_EQ(ask(fixture.port(), longer).substr(9, 3), "200") << "alone it may";
}

TEST(Server, DeadlinesEndRequestsThatWait) {
  const auto gate = std::make_shared<Gate>();
  Fixture fixture(demo_options(gate));
  std::string running, waiting;
  std::thread first([&] { running = ask(fixture.port(), post(R"({"prompt": "a", "max_tokens": 1})")); });
  fixture.wait_for([&] { return fixture.stats().running == 1; });
  std::thread second([&] {
    waiting = ask(fixture.port(), post(R"({"prompt": "b", "max_tokens": 1})", "X-Request-Timeout: 0.05\r\n"));
  });
  fixture.wait_for([&] { return fixture.stats().waiting == 1; });
  std::this_thread::sleep_for(milliseconds(60));
  gate->open();
  first.join();
  second.join();
  EXPECT_EQ(running.substr(9, 3), "200") << running;
  EXPECT_EQ(waiting.substr(9, 3), "504") << waiting;
  for (const char* wrong : {"0", "-1", "a", "1e9", "", "nan"}) {
    const std::string answer =
        ask(fixture.port(), post(R"({"prompt": "b"})", fmt::format("X-Request-Timeout: {}\r\n", wrong)));
    EXPECT_EQ(answer.substr(9, 3), "400") << answer;
  }
}

TEST(Server, TheKeysPriorityDecidesWhoIsNext) {
  const auto gate = std::make_shared<Gate>();
  ServiceOptions options = demo_options(gate);
  KeyLimits low, high;
  low.priority = 1;
  high.priority = -1;
  low.running = 2;
  options.api_keys.add("low-key", "low", low, "test");
  options.api_keys.add("high-key", "high", high, "test");
  Fixture fixture(options);
  const auto client = [&](const std::string& key, const std::string& prompt, int priority) {
    return std::thread([&, key, prompt, priority] {
      const std::string body = fmt::format(R"({{"prompt": "{}", "max_tokens": 1, "priority": {}}})", prompt, priority);
      const std::string answer = ask(fixture.port(), post(body, "Authorization: Bearer " + key + "\r\n"));
      EXPECT_EQ(answer.substr(9, 3), "200") << answer;
    });
  };
  std::vector<std::thread> clients;
  clients.push_back(client("low-key", "a", 0));
  fixture.wait_for([&] { return fixture.stats().running == 1; });
  clients.push_back(client("low-key", "a b c d e f g h", -5));
  fixture.wait_for([&] { return fixture.stats().waiting == 1; });
  const int64_t tokens = fixture.stats().waiting_tokens;
  clients.push_back(client("high-key", "a", 5));
  fixture.wait_for([&] { return fixture.stats().waiting == 2; });
  const std::string refused = ask(fixture.port(), post(R"({"prompt": "a"})", "Authorization: Bearer low-key\r\n"));
  EXPECT_EQ(refused.substr(9, 3), "429") << refused;
  EXPECT_NE(refused.find("retry-after: "), std::string::npos);
  gate->pass(1);
  fixture.wait_for([&] {
    const engine::EngineStats stats = fixture.stats();
    return stats.finished[static_cast<int>(engine::FinishReason::kLength)] == 1 && stats.running == 1;
  });
  EXPECT_EQ(fixture.stats().waiting_tokens, tokens) << "the long prompt waits still";
  gate->open();
  for (std::thread& one : clients) one.join();
}

// A client behind a proxy must not take waiting for the end of the connection.
TEST(Server, WhoWaitsIsToldThatTheConnectionLives) {
  const auto gate = std::make_shared<Gate>();
  Fixture fixture(demo_options(gate));
  SocketClient client(fixture.port());
  client.send(post(R"({"prompt": "a", "stream": true, "max_tokens": 1})"));
  EXPECT_NE(client.receive(": waiting\n\n", seconds(60)).find("text/event-stream"), std::string::npos);
  EXPECT_NE(client.receive(": waiting\n\n", seconds(60)).find(": waiting\n\n"), std::string::npos);
  gate->open();
  EXPECT_NE(client.receive("", seconds(60)).find("data: [DONE]"), std::string::npos);
}

TEST(Server, ThePortAnswersWhileTheModelLoads) {
  const auto gate = std::make_shared<Gate>();
  ServiceOptions options = demo_options(gate);
  options.make_backend = [gate](const auto&) {
    gate->wait();
    return cpu::make_backend({});
  };
  Service service(options);
  HttpServer http(
      {}, [&](std::shared_ptr<Exchange> exchange) { service.handle(exchange); },
      [](const HttpFailure& failure) { return ApiError(failure.status, failure.reason).response(ErrorForm::kOpenAi); });
  std::thread loader([&] { service.load(); });
  const std::string health = get(http.port(), "/health");
  EXPECT_EQ(health.substr(9, 3), "503");
  EXPECT_NE(health.find("\"status\":\"loading\""), std::string::npos) << health;
  EXPECT_NE(health.find("\"phase\":\""), std::string::npos);
  EXPECT_EQ(get(http.port(), "/live").substr(9, 3), "200");
  EXPECT_EQ(get(http.port(), "/metrics").substr(9, 3), "200");
  for (const std::string& answer : {get(http.port(), "/v1/models"), ask(http.port(), post(R"({"prompt": "a"})"))}) {
    EXPECT_EQ(answer.substr(9, 3), "503") << answer;
    EXPECT_NE(answer.find("the model is not ready"), std::string::npos);
    EXPECT_NE(answer.find("retry-after: "), std::string::npos);
  }
  gate->open();
  loader.join();
  EXPECT_EQ(get(http.port(), "/health").substr(9, 3), "200");
  http.close();
  service.stop();
}

// Also when it does not stream, and while its request waits.
TEST(Server, WhoVanishesIsForgotten) {
  const auto gate = std::make_shared<Gate>();
  Fixture fixture(demo_options(gate));
  std::thread first([&] { ask(fixture.port(), post(R"({"prompt": "a", "max_tokens": 1})")); });
  fixture.wait_for([&] { return fixture.stats().running == 1; });
  {
    SocketClient waiting(fixture.port());
    waiting.send(post(R"({"prompt": "b"})"));
    fixture.wait_for([&] { return fixture.stats().waiting == 1; });
  }
  fixture.wait_for([&] { return fixture.service.in_flight() == 1; });
  gate->open();
  first.join();
  fixture.wait_for([&] { return fixture.stats().idle; });
  EXPECT_EQ(fixture.stats().finished[static_cast<int>(engine::FinishReason::kCancelled)], 1);
}

}  // namespace
}  // namespace fourfold::serve
