// Responses are read the same in every cut, and what is none is a failure.
#include "bench/http_response.h"

#include <gtest/gtest.h>

#include "base/check.h"
#include "bench/url.h"

namespace fourfold::bench {
namespace {

struct Read {
  ResponseReader reader;
  std::string body;
};

// The whole text, cut into pieces of `piece` bytes, then the end of the connection.
Read read(const std::string& text, size_t piece) {
  ResponseLimits limits;
  limits.head = 200;
  limits.body = 100;
  Read out{ResponseReader(limits), ""};
  for (size_t at = 0; at < text.size(); at += piece) out.reader.feed(text.substr(at, piece), out.body);
  out.reader.end();
  return out;
}

TEST(HttpResponse, IsTheSameInEveryCut) {
  const struct {
    const char *text, *body;
  } kCases[] = {
      {"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", "hello"},
      {"HTTP/1.1 200\r\ncontent-length:0\r\n\r\n", ""},
      {"HTTP/1.0 200 OK\r\n\r\nup to the end", "up to the end"},
      {"HTTP/1.1 100 Continue\r\nX: y\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nx", "x"},
      {"HTTP/1.1 200 OK\r\nTransfer-Encoding: Chunked\r\n\r\n3\r\nabc\r\nA;x=y\r\n0123456789\r\n0\r\nTrailer: "
       "1\r\n\r\n",
       "abc0123456789"},
  };
  for (const auto& one : kCases) {
    const std::string text = one.text;
    for (size_t piece = 1; piece <= text.size(); ++piece) {
      const Read found = read(text, piece);
      EXPECT_TRUE(found.reader.done()) << text << piece << found.reader.failure();
      EXPECT_EQ(found.reader.status(), 200);
      EXPECT_EQ(found.body, one.body) << text << piece;
    }
  }
}

TEST(HttpResponse, RefusesWhatIsNone) {
  for (const char* text : {
           "",
           "HTTP/1.1 200 OK\r\n",
           "HTTP/2 200\r\n\r\n",
           "HTTP/1.1 2x0 OK\r\n\r\n",
           "HTTP/1.1 200 OK\n\n",
           "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhell",  // not whole
           "HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nxy",    // more than whole
           "HTTP/1.1 200 OK\r\nContent-Length: +1\r\n\r\nx",    // no digits
           "HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 1\r\n\r\nx",
           "HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
           "HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
           "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n",  // no last chunk
           "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabcd\r\n0\r\n\r\n",
           "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0x3\r\nabc\r\n0\r\n\r\n",
           "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nfffffffffffffff\r\n",
           "HTTP/1.1 200 OK\r\nContent-Length: 101\r\n\r\n",  // beyond the limit
           "HTTP/1.1 200 OK\r\nno header\r\n\r\n",
           "HTTP/1.1 200 OK\r\nspace : x\r\n\r\n",
       }) {
    for (const size_t piece : {size_t{1}, size_t{7}, size_t{1000}}) {
      const Read found = read(text, piece);
      EXPECT_TRUE(found.reader.failed()) << text;
      EXPECT_FALSE(found.reader.failure().empty());
    }
  }
  EXPECT_TRUE(read("HTTP/1.1 200 OK\r\nX: " + std::string(300, 'x') + "\r\n\r\n", 64).reader.failed());
}

TEST(Url, HasItsParts) {
  const Url url = Url::parse("http://[::1]:81/a/v1/");
  EXPECT_EQ(url.host, "::1");
  EXPECT_EQ(url.port, 81);
  EXPECT_EQ(url.text(), "http://[::1]:81/a");
  EXPECT_TRUE(url.local());
  EXPECT_EQ(Url::parse("http://example.org").text(), "http://example.org:80");
  EXPECT_FALSE(Url::parse("http://example.org").local());
  EXPECT_EQ(Url::parse("https://example.org/v1").text(), "https://example.org:443");
  for (const char* text : {"", "localhost:8000", "ftp://localhost", "http://", "http://a:0", "http://a:70000",
                           "http://a:x", "http://u@a", "http://a/?b", "http://a b", "http://[::1", "http://[::1]x"}) {
    EXPECT_THROW(Url::parse(text), Error) << text;
  }
}

}  // namespace
}  // namespace fourfold::bench
