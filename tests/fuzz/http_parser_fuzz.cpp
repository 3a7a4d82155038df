// Bytes of a connection, taken in one piece and in pieces: the same requests, and the same refusal. What is taken for a
// request is one that other programs read in the same way.
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "serve/http_parser.h"

namespace {

using namespace fourfold::serve;

struct Outcome {
  std::vector<HttpRequest> requests;
  bool failed = false;
  std::string reason;
};

// `step` bytes at a time.
Outcome parse(std::string_view bytes, size_t step) {
  HttpLimits limits;
  limits.body = 1 << 16;
  HttpParser parser(limits);
  Outcome out;
  while (!bytes.empty()) {
    std::string_view piece = bytes.substr(0, step);
    bytes.remove_prefix(piece.size());
    while (!piece.empty()) {
      const size_t taken = parser.feed(piece);
      if (parser.failed()) {
        out.failed = true;
        out.reason = parser.failure().reason;
        if (parser.failure().status < 400 || out.reason.empty()) __builtin_trap();
        return out;
      }
      if (taken == 0 && !parser.done()) __builtin_trap();
      piece.remove_prefix(taken);
      if (parser.done()) out.requests.push_back(parser.take());
      if (parser.body_bytes() > limits.body) __builtin_trap();
    }
  }
  return out;
}

size_t count(const HttpRequest& request, std::string_view name) {
  size_t out = 0;
  for (const auto& [key, value] : request.headers) out += key == name ? 1 : 0;
  return out;
}

void check(const HttpRequest& request) {
  const size_t hosts = count(request, "host"), lengths = count(request, "content-length");
  const size_t codings = count(request, "transfer-encoding");
  if (hosts > 1 || (hosts == 0 && !request.http_1_0)) __builtin_trap();
  if (lengths + codings > 1) __builtin_trap();
  if (lengths + codings == 0 && !request.body.empty()) __builtin_trap();
  for (const auto& [name, value] : request.headers) {
    if (name.empty() || value.find_first_of(std::string_view("\r\n\0", 3)) != std::string::npos) __builtin_trap();
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  const Outcome whole = parse(bytes, size + 1);
  for (const HttpRequest& request : whole.requests) check(request);
  for (const size_t step : {size_t{1}, size_t{7}}) {
    const Outcome other = parse(bytes, step);
    if (other.failed != whole.failed || other.reason != whole.reason) __builtin_trap();
    if (other.requests.size() != whole.requests.size()) __builtin_trap();
    for (size_t i = 0; i < whole.requests.size(); ++i) {
      const HttpRequest &a = whole.requests[i], &b = other.requests[i];
      if (a.method != b.method || a.path != b.path || a.headers != b.headers || a.body != b.body) __builtin_trap();
    }
  }
  return 0;
}
