// HTTP/1.1 responses from bytes, in any cut: the other side of a benchmark's request.
//
// Strict, since what is read loosely is measured wrongly: lines end in CR LF, a body has one Content-Length or the
// transfer coding "chunked" or ends with the connection, and one that ends before it is whole is a failure.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace fourfold::bench {

struct ResponseLimits {
  size_t head = 64 << 10;           // bytes of the status line and the headers
  size_t body = size_t{256} << 20;  // bytes
};

class ResponseReader {
 public:
  explicit ResponseReader(const ResponseLimits& limits = {}) : limits_(limits) {}

  // Takes bytes as they come; those of the body are appended to `body`.
  void feed(std::string_view bytes, std::string& body);
  // The connection has ended: a failure unless that is how the body ends.
  void end();

  bool head_done() const { return state_ > State::kHeaders && state_ != State::kFailed; }
  bool done() const { return state_ == State::kDone; }
  bool failed() const { return state_ == State::kFailed; }
  const std::string& failure() const { return failure_; }
  int status() const { return status_; }
  // The value of a header, by its name in lower case; null where there is none. Of several, the first.
  const std::string* header(std::string_view name) const;

 private:
  enum class State { kStatus, kHeaders, kLength, kUntilEnd, kChunkSize, kChunk, kChunkEnd, kTrailers, kDone, kFailed };

  void fail(std::string why);
  void take_line(std::string_view line);
  void status_line(std::string_view line);
  void header_line(std::string_view line);
  void end_of_head();
  void chunk_line(std::string_view line);
  bool count_body(uint64_t more);

  ResponseLimits limits_;
  State state_ = State::kStatus;
  std::string line_, failure_;
  size_t head_bytes_ = 0;
  uint64_t remaining_ = 0, body_bytes_ = 0;
  int status_ = 0;
  std::vector<std::pair<std::string, std::string>> headers_;
};

}  // namespace fourfold::bench
