// HTTP/1.1 requests from bytes, in any cut.
//
// Strict, because proxies and servers that read the same bytes differently are how requests are smuggled: lines end in
// CR LF; no folded header, no space before a colon, exactly one Host; a body has one Content-Length of digits alone or
// the transfer coding "chunked" alone, never both. What is refused says why, and the connection ends behind it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "serve/http_message.h"

namespace fourfold::serve {

struct HttpLimits {
  size_t target = 8 << 10;         // bytes of a request's target
  size_t head = 32 << 10;          // bytes of request line and headers
  size_t headers = 100;            // lines
  size_t body = size_t{32} << 20;  // bytes
  size_t chunk_extensions = 4096;  // bytes, of all chunks of a body together
};

class HttpParser {
 public:
  explicit HttpParser(const HttpLimits& limits) : limits_(limits) {}

  // Takes bytes up to the end of one request, or of what shows that it is none; how many they were.
  size_t feed(std::string_view bytes);

  bool begun() const { return state_ != State::kStart || !line_.empty(); }  // a byte of the request has come
  bool in_body() const { return state_ >= State::kBody && state_ < State::kDone; }
  bool done() const { return state_ == State::kDone; }
  bool failed() const { return state_ == State::kFailed; }
  // The client waits for "100 Continue" before it sends the body.
  bool expects_continue() const { return expects_continue_; }
  size_t body_bytes() const { return request_.body.size(); }
  const HttpFailure& failure() const { return failure_; }

  // The request that is done; the next one begins.
  HttpRequest take();

 private:
  enum class State { kStart, kHeaders, kBody, kChunkSize, kChunk, kChunkEnd, kTrailers, kDone, kFailed };

  void fail(int status, std::string reason);
  void take_line(std::string_view line);
  void request_line(std::string_view line);
  bool header_line(std::string_view line, std::string& name, std::string& value);
  void end_of_head();
  void chunk_line(std::string_view line);
  size_t take_body(std::string_view bytes);

  HttpLimits limits_;
  State state_ = State::kStart;
  HttpRequest request_;
  HttpFailure failure_;
  std::string line_;       // the part of a line that has come
  size_t head_bytes_ = 0;  // of lines: of the head, and then of the trailers
  size_t lines_ = 0;       // of headers or trailers
  uint64_t remaining_ = 0;
  size_t extension_bytes_ = 0;
  bool expects_continue_ = false;
  bool blank_before_ = false;
};

}  // namespace fourfold::serve
