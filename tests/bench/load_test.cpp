// The client against servers that answer, refuse, break off and are not there. All of them on this machine.
#include "bench/load.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <cstdlib>
#include <mutex>
#include <set>

#include "base/check.h"
#include "bench/client.h"
#include "bench/server.h"
#include "serve/http_server.h"
#include "tests/serve/certificate.h"

namespace fourfold::bench {
namespace {

constexpr const char* kPiece = "data: {\"choices\":[{\"text\":\"x\"}]}\n\n";
constexpr const char* kEnd = "data: {\"choices\":[{\"text\":\"\",\"finish_reason\":\"stop\"}]}\n\ndata: [DONE]\n\n";

class Server {
 public:
  explicit Server(const serve::HttpServerOptions& options = {})
      : http_(
            options, [this](std::shared_ptr<serve::Exchange> exchange) { handle(exchange); },
            [](const serve::HttpFailure& failure) { return respond(failure.status, failure.reason); }) {}

  Url url() const { return Url::parse("http://127.0.0.1:" + std::to_string(http_.port())); }
  std::set<std::string> bodies;
  std::mutex mutex;

 private:
  static serve::HttpResponse respond(int status, std::string body) {
    serve::HttpResponse response;
    response.status = status;
    response.body = std::move(body);
    return response;
  }
  void handle(const std::shared_ptr<serve::Exchange>& exchange) {
    const serve::HttpRequest& request = exchange->request();
    {
      const std::lock_guard lock(mutex);
      bodies.insert(request.body);
    }
    if (request.path == "/refuse") return exchange->respond(respond(503, "no room"));
    if (request.path == "/v1/models") return exchange->respond(respond(200, R"({"data":[{"id":"m"}]})"));
    exchange->begin(200, {{"content-type", "text/event-stream"}});
    exchange->write(kPiece);
    if (request.path == "/break") return exchange->abort();
    exchange->write(kPiece);
    exchange->write(kEnd);
    exchange->end();
  }
  serve::HttpServer http_;
};

Load load(const Url& url, const std::string& path, int64_t count, int64_t concurrency) {
  Load out;
  out.url = url;
  out.path = path;
  out.concurrency = concurrency;
  for (int64_t i = 0; i < count; ++i) out.bodies.push_back(std::to_string(i));
  return out;
}

TEST(Load, SendsEachRequestOnce) {
  Server server;
  int64_t last = 0;
  const LoadResult result = run_load(load(server.url(), "/stream", 40, 6), [&](int64_t done) { last = done; });
  EXPECT_EQ(last, 40);
  EXPECT_EQ(server.bodies.size(), 40u);
  EXPECT_LE(result.peak, 6);
  for (const RequestRecord& request : result.requests) {
    EXPECT_TRUE(request.good()) << request.error;
    EXPECT_EQ(request.delivered(), 2);
    EXPECT_GE(request.first, request.start);
    EXPECT_GE(request.end, request.first);
    EXPECT_LE(request.end, result.seconds);
  }
}

TEST(Load, FailuresAreNamed) {
  Server server;
  const auto error = [](const LoadResult& result) { return result.requests.front().error; };
  EXPECT_EQ(error(run_load(load(server.url(), "/refuse", 3, 1))), "status 503: no room");
  EXPECT_NE(error(run_load(load(server.url(), "/break", 1, 1))), "");
  Url nobody = server.url();
  nobody.port = 1;
  EXPECT_NE(error(run_load(load(nobody, "/stream", 1, 1))).find("cannot connect"), std::string::npos);
}

// The server's certificate is for localhost, and trusted by SSL_CERT_FILE alone; the address is no name of it.
TEST(Load, TlsIsCheckedAgainstTheName) {
  const serve::Certificate certificate;
  ::setenv("SSL_CERT_FILE", certificate.certificate_path().c_str(), 1);
  serve::HttpServerOptions options;
  options.tls = certificate.context();
  Server server(options);
  const std::string port = std::to_string(server.url().port);
  const LoadResult good = run_load(load(Url::parse("https://localhost:" + port), "/stream", 10, 3));
  for (const RequestRecord& request : good.requests) {
    EXPECT_TRUE(request.good()) << request.error;
    EXPECT_EQ(request.delivered(), 2);
  }
  EXPECT_EQ(server.bodies.size(), 10u);
  const LoadResult other = run_load(load(Url::parse("https://127.0.0.1:" + port), "/stream", 1, 1));
  EXPECT_NE(other.requests[0].error.find("no TLS"), std::string::npos) << other.requests[0].error;
  EXPECT_FALSE(run_load(load(Url::parse("http://127.0.0.1:" + port), "/stream", 1, 1)).requests[0].good());
}

TEST(Load, ArrivalsArePoisson) {
  const std::vector<double> times = poisson_times(20000, 50, 7);
  EXPECT_EQ(times.front(), 0);
  EXPECT_NEAR(times.back() / 20000, 1.0 / 50, 0.001);
  int64_t late = 0;  // gaps longer than the mean: 1/e of them
  for (size_t i = 1; i < times.size(); ++i) late += times[i] - times[i - 1] > 1.0 / 50 ? 1 : 0;
  EXPECT_NEAR(static_cast<double>(late) / 20000, std::exp(-1), 0.02);
  Server server;
  Load open = load(server.url(), "/stream", 20, 1);
  open.rate = 2000;
  for (const RequestRecord& request : run_load(open).requests) EXPECT_TRUE(request.good()) << request.error;
}

TEST(Load, ServersAreAsked) {
  Server server;
  EXPECT_EQ(first_model(server.url(), ""), "m");
  const auto memory = server_memory(server.url());  // this process
  ASSERT_TRUE(memory);
  EXPECT_GT(memory->resident, 1 << 20);
  EXPECT_GE(memory->peak, memory->resident);
  const auto counters = DraftCounters::parse(
      "# HELP x y\nvllm:spec_decode_num_drafts_total{engine=\"0\"} "
      "10\nvllm:spec_decode_num_draft_tokens_total{a=\"b\"} 20\n"
      "vllm:spec_decode_num_accepted_tokens_total{} 1.5e1\n"
      "vllm:spec_decode_num_accepted_tokens_per_pos_total{position=\"1\"} 5\n");
  ASSERT_TRUE(counters);
  EXPECT_EQ(counters->rounds, 10);
  EXPECT_EQ(counters->drafted, 20);
  EXPECT_EQ(counters->accepted, 15);
  EXPECT_EQ(counters->by_position, (std::vector<double>{0, 5}));
  EXPECT_FALSE(DraftCounters::parse("other 1\n"));
}

}  // namespace
}  // namespace fourfold::bench
