// HTTP requests in every cut, and everything that must not be taken for one.
#include "serve/http_parser.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace fourfold::serve {
namespace {

struct Parsed {
  int status = 0;  // 0: a request
  std::string reason;
  HttpRequest request;
  size_t taken = 0;
};

Parsed parse(const std::string& bytes, const std::vector<size_t>& cuts, const HttpLimits& limits = {}) {
  HttpParser parser(limits);
  Parsed out;
  size_t begin = 0;
  const auto feed = [&](size_t end) {
    if (parser.done() || parser.failed()) return;
    out.taken += parser.feed(std::string_view(bytes).substr(begin, end - begin));
    begin = end;
  };
  for (const size_t cut : cuts) feed(cut);
  feed(bytes.size());
  if (parser.failed()) {
    out.status = parser.failure().status;
    out.reason = parser.failure().reason;
  } else if (parser.done()) {
    out.request = parser.take();
  } else {
    out.status = -1;  // wants more
  }
  return out;
}

// The same result in one piece, byte by byte, and in every cut in two.
Parsed parse_all_ways(const std::string& bytes, const HttpLimits& limits = {}) {
  const Parsed whole = parse(bytes, {}, limits);
  std::vector<size_t> every;
  for (size_t i = 1; i < bytes.size(); ++i) every.push_back(i);
  const auto same = [&](const Parsed& other, size_t cut) {
    EXPECT_EQ(whole.status, other.status) << "cut at " << cut;
    EXPECT_EQ(whole.reason, other.reason) << "cut at " << cut;
    EXPECT_EQ(whole.request.body, other.request.body) << "cut at " << cut;
    EXPECT_EQ(whole.request.path, other.request.path) << "cut at " << cut;
    EXPECT_EQ(whole.request.headers, other.request.headers) << "cut at " << cut;
  };
  same(parse(bytes, every, limits), 0);
  for (const size_t cut : every) same(parse(bytes, {cut}, limits), cut);
  return whole;
}

std::string post(const std::string& headers, const std::string& body) {
  return "POST /v1/completions HTTP/1.1\r\nHost: a\r\n" + headers + "\r\n" + body;
}

TEST(HttpParser, ReadsARequest) {
  const Parsed parsed = parse_all_ways(
      "POST /v1/messages/count_tokens?beta=true HTTP/1.1\r\nHost: localhost:8000\r\nX-Api-Key:  k \r\n"
      "Content-Length: 3\r\n\r\n{}!");
  ASSERT_EQ(parsed.status, 0) << parsed.reason;
  EXPECT_EQ(parsed.request.method, "POST");
  EXPECT_EQ(parsed.request.path, "/v1/messages/count_tokens");
  EXPECT_EQ(parsed.request.query, "beta=true");
  EXPECT_EQ(*parsed.request.header("x-api-key"), "k");
  EXPECT_EQ(parsed.request.body, "{}!");
  EXPECT_TRUE(parsed.request.keep_alive);
}

TEST(HttpParser, ReadsChunks) {
  const Parsed parsed = parse_all_ways(
      post("Transfer-Encoding: Chunked\r\n", "4\r\nWiki\r\nA;x=1\r\npedia and \r\n0\r\nTrailer: t\r\n\r\n"));
  ASSERT_EQ(parsed.status, 0) << parsed.reason;
  EXPECT_EQ(parsed.request.body, "Wikipedia and ");
  EXPECT_EQ(parsed.request.header("trailer"), nullptr);
}

TEST(HttpParser, LeavesTheNextRequestAlone) {
  const std::string one = "GET /health HTTP/1.1\r\nHost: a\r\n\r\n";
  const Parsed parsed = parse(one + one, {});
  EXPECT_EQ(parsed.status, 0);
  EXPECT_EQ(parsed.taken, one.size());
}

TEST(HttpParser, TakesABlankLineBeforeARequest) {
  EXPECT_EQ(parse_all_ways("\r\nGET / HTTP/1.1\r\nHost: a\r\n\r\n").status, 0);
  EXPECT_EQ(parse_all_ways("\r\n\r\nGET / HTTP/1.1\r\nHost: a\r\n\r\n").status, 400);
}

TEST(HttpParser, KeepsConnectionsAsTheVersionSays) {
  EXPECT_FALSE(parse("GET / HTTP/1.0\r\n\r\n", {}).request.keep_alive);
  EXPECT_TRUE(parse("GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n", {}).request.keep_alive);
  EXPECT_FALSE(parse("GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n", {}).request.keep_alive);
}

struct Refusal {
  const char* name;
  std::string bytes;
  int status;
};

// Each of these is read in two ways by some pair of programs, or makes a server hold what it need not.
TEST(HttpParser, Refuses) {
  const std::string line = "GET / HTTP/1.1\r\n", host = "Host: a\r\n";
  const std::vector<Refusal> refusals = {
      {"length and chunked", post("Content-Length: 3\r\nTransfer-Encoding: chunked\r\n", "0\r\n\r\n"), 400},
      {"chunked and length", post("Transfer-Encoding: chunked\r\nContent-Length: 3\r\n", "0\r\n\r\n"), 400},
      {"two lengths", post("Content-Length: 3\r\nContent-Length: 4\r\n", "abcd"), 400},
      {"two equal lengths", post("Content-Length: 3\r\nContent-Length: 3\r\n", "abc"), 400},
      {"a list of lengths", post("Content-Length: 3, 3\r\n", "abc"), 400},
      {"+3", post("Content-Length: +3\r\n", "abc"), 400},
      {"-3", post("Content-Length: -3\r\n", "abc"), 400},
      {"0x3", post("Content-Length: 0x3\r\n", "abc"), 400},
      {"no length", post("Content-Length:\r\n", ""), 400},
      {"an endless length", post("Content-Length: 99999999999999999999\r\n", ""), 400},
      {"xchunked", post("Transfer-Encoding: xchunked\r\n", "0\r\n\r\n"), 501},
      {"gzip, chunked", post("Transfer-Encoding: gzip, chunked\r\n", "0\r\n\r\n"), 400},
      {"chunked, chunked", post("Transfer-Encoding: chunked, chunked\r\n", "0\r\n\r\n"), 400},
      {"chunked twice", post("Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n", "0\r\n\r\n"), 400},
      {"no coding", post("Transfer-Encoding:\r\n", "0\r\n\r\n"), 501},
      {"chunked in 1.0", "POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400},
      {"folded header", line + host + "X: a\r\n b\r\n\r\n", 400},
      {"folded first header", line + " Host: a\r\n\r\n", 400},
      {"no host", line + "\r\n", 400},
      {"two hosts", line + host + host + "\r\n", 400},
      {"a host with a path", line + "Host: a/b\r\n\r\n", 400},
      {"space before the colon", line + host + "X : a\r\n\r\n", 400},
      {"no colon", line + host + "X\r\n\r\n", 400},
      {"no name", line + host + ": a\r\n\r\n", 400},
      {"NUL in a value", line + host + std::string("X: a\0b\r\n\r\n", 11), 400},
      {"CR in a value", line + host + "X: a\rb\r\n\r\n", 400},
      {"NUL in a name", line + host + std::string("X\0: a\r\n\r\n", 9), 400},
      {"bare LF", "GET / HTTP/1.1\nHost: a\n\n", 400},
      {"bare LF in the head", line + host + "X: a\nY: b\r\n\r\n", 400},
      {"two spaces", "GET  / HTTP/1.1\r\nHost: a\r\n\r\n", 400},
      {"a tab", "GET\t/ HTTP/1.1\r\nHost: a\r\n\r\n", 400},
      {"no version", "GET /\r\n\r\n", 400},
      {"HTTP/2.0", "GET / HTTP/2.0\r\nHost: a\r\n\r\n", 505},
      {"HTTP/1.10", "GET / HTTP/1.10\r\nHost: a\r\n\r\n", 400},
      {"small letters", "get / HTTP/1.1\r\nHost: a\r\n\r\n", 400},
      {"TLS", std::string("\x16\x03\x01\x02", 4), 400},
      {"no slash", "GET health HTTP/1.1\r\nHost: a\r\n\r\n", 400},
      {"bytes from 0x80 on in the target", "GET /\xc3\xa9 HTTP/1.1\r\nHost: a\r\n\r\n", 400},
      {"coded body", post("Content-Encoding: gzip\r\nContent-Length: 3\r\n", "abc"), 415},
      {"other expectation", post("Expect: 200-ok\r\nContent-Length: 3\r\n", "abc"), 417},
      {"chunk size with sign", post("Transfer-Encoding: chunked\r\n", "+1\r\na\r\n0\r\n\r\n"), 400},
      {"chunk size 0x", post("Transfer-Encoding: chunked\r\n", "0x1\r\na\r\n0\r\n\r\n"), 400},
      {"no chunk size", post("Transfer-Encoding: chunked\r\n", ";a\r\n"), 400},
      {"chunk size overflows", post("Transfer-Encoding: chunked\r\n", "10000000000000001\r\na\r\n"), 400},
      {"chunk without end", post("Transfer-Encoding: chunked\r\n", "1\r\nab\r\n0\r\n\r\n"), 400},
      {"chunk line ends in LF", post("Transfer-Encoding: chunked\r\n", "1\na\r\n0\r\n\r\n"), 400},
      {"control character in an extension", post("Transfer-Encoding: chunked\r\n", "1;a\x01\r\na\r\n0\r\n\r\n"), 400},
      {"folded trailer", post("Transfer-Encoding: chunked\r\n", "0\r\n a: b\r\n\r\n"), 400},
  };
  for (const Refusal& refusal : refusals) {
    const Parsed parsed = parse_all_ways(refusal.bytes);
    EXPECT_EQ(parsed.status, refusal.status) << refusal.name << ": " << parsed.reason;
    if (parsed.status > 0) {
      EXPECT_FALSE(parsed.reason.empty()) << refusal.name;
    }
  }
}

TEST(HttpParser, HasLimits) {
  HttpLimits limits;
  limits.head = 200;
  limits.target = 50;
  limits.headers = 4;
  limits.body = 10;
  limits.chunk_extensions = 20;
  const std::string line = "GET / HTTP/1.1\r\nHost: a\r\n";
  const auto status = [&](const std::string& bytes) { return parse_all_ways(bytes, limits).status; };
  EXPECT_EQ(status("GET /" + std::string(60, 'a') + " HTTP/1.1\r\nHost: a\r\n\r\n"), 414);
  EXPECT_EQ(status("GET /" + std::string(300, 'a')), 414);
  EXPECT_EQ(status(line + "X: " + std::string(300, 'a')), 431);
  EXPECT_EQ(status(line + "a: 1\r\nb: 1\r\nc: 1\r\n\r\n"), 0);
  EXPECT_EQ(status(line + "a: 1\r\nb: 1\r\nc: 1\r\nd: 1\r\n\r\n"), 431);
  EXPECT_EQ(status(post("Content-Length: 11\r\n", "")), 413);
  EXPECT_EQ(status(post("Transfer-Encoding: chunked\r\n", "6\r\nabcdef\r\n5\r\n")), 413);
  EXPECT_EQ(status(post("Transfer-Encoding: chunked\r\n", "6\r\nabcdef\r\n4\r\nabcd\r\n0\r\n\r\n")), 0);
  EXPECT_EQ(status(post("Transfer-Encoding: chunked\r\n", "1;" + std::string(100, 'a'))), 400);
  EXPECT_EQ(status(post("Transfer-Encoding: chunked\r\n",
                        "1;" + std::string(10, 'a') + "\r\na\r\n1;" + std::string(10, 'a') + "\r\na\r\n")),
            400);
  EXPECT_EQ(status(post("Transfer-Encoding: chunked\r\n", "0\r\na: b\r\na: b\r\na: b\r\na: b\r\na: b\r\n\r\n")), 431);
}

}  // namespace
}  // namespace fourfold::serve
