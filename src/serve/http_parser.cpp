#include "serve/http_parser.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>

#include "base/check.h"

namespace fourfold::serve {
namespace {

bool is_token(char c) {
  constexpr std::string_view kOthers = "!#$%&'*+-.^_`|~";
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
         kOthers.find(c) != std::string_view::npos;
}

bool is_token(std::string_view text) {
  return !text.empty() && std::all_of(text.begin(), text.end(), [](char c) { return is_token(c); });
}

// What the value of a header may hold: printable characters, bytes from 0x80 on, tabs.
bool is_field_byte(char c) {
  const auto byte = static_cast<unsigned char>(c);
  return byte == '\t' || (byte >= 0x20 && byte != 0x7f);
}

char lower(char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; }

std::string lower(std::string_view text) {
  std::string out(text);
  for (char& c : out) c = lower(c);
  return out;
}

std::string_view trimmed(std::string_view text) {
  while (!text.empty() && (text.front() == ' ' || text.front() == '\t')) text.remove_prefix(1);
  while (!text.empty() && (text.back() == ' ' || text.back() == '\t')) text.remove_suffix(1);
  return text;
}

// Host: a name, an IPv4 address or one in brackets, and a port. Loose about which names exist, strict about bytes.
bool is_host(std::string_view text) {
  return !text.empty() && text.size() <= 255 && std::all_of(text.begin(), text.end(), [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
           std::string_view("-._~:[]%").find(c) != std::string_view::npos;
  });
}

}  // namespace

const std::string* HttpRequest::header(std::string_view name) const {
  for (const auto& [key, value] : headers) {
    if (key == name) return &value;
  }
  return nullptr;
}

const char* status_text(int status) {
  switch (status) {
    case 100:
      return "Continue";
    case 200:
      return "OK";
    case 204:
      return "No Content";
    case 304:
      return "Not Modified";
    case 400:
      return "Bad Request";
    case 401:
      return "Unauthorized";
    case 403:
      return "Forbidden";
    case 404:
      return "Not Found";
    case 405:
      return "Method Not Allowed";
    case 408:
      return "Request Timeout";
    case 413:
      return "Content Too Large";
    case 414:
      return "URI Too Long";
    case 415:
      return "Unsupported Media Type";
    case 417:
      return "Expectation Failed";
    case 429:
      return "Too Many Requests";
    case 431:
      return "Request Header Fields Too Large";
    case 500:
      return "Internal Server Error";
    case 501:
      return "Not Implemented";
    case 503:
      return "Service Unavailable";
    case 504:
      return "Gateway Timeout";
    case 505:
      return "HTTP Version Not Supported";
    default:
      return "Status";
  }
}

size_t HttpParser::feed(std::string_view bytes) {
  size_t taken = 0;
  while (taken < bytes.size() && state_ != State::kDone && state_ != State::kFailed) {
    const std::string_view rest = bytes.substr(taken);
    if (state_ == State::kBody || state_ == State::kChunk) {
      taken += take_body(rest);
      continue;
    }
    if (state_ == State::kStart && line_.empty() && !(rest[0] >= 'A' && rest[0] <= 'Z') && rest[0] != '\r') {
      fail(400, fmt::format("a request begins with byte 0x{:02x}, wanted a method in capital letters",
                            static_cast<unsigned char>(rest[0])));
      break;
    }
    const size_t newline = rest.find('\n');
    const std::string_view piece = rest.substr(0, newline == std::string_view::npos ? rest.size() : newline + 1);
    head_bytes_ += piece.size();
    taken += piece.size();
    const bool chunk = state_ == State::kChunkSize || state_ == State::kChunkEnd;
    if (chunk ? line_.size() + piece.size() > limits_.chunk_extensions : head_bytes_ > limits_.head) {
      if (chunk) {
        fail(400, fmt::format("a chunk's size and extensions are longer than {} bytes", limits_.chunk_extensions));
      } else if (state_ == State::kStart) {
        fail(414, fmt::format("the request line is longer than {} bytes", limits_.head));
      } else {
        fail(431, fmt::format("the head of the request is longer than {} bytes", limits_.head));
      }
      break;
    }
    line_ += piece;
    if (newline == std::string_view::npos) break;
    if (line_.size() < 2 || line_[line_.size() - 2] != '\r') {
      fail(400, "a line ends in LF alone, wanted CR LF");
      break;
    }
    line_.resize(line_.size() - 2);
    const std::string line = std::exchange(line_, {});
    take_line(line);
  }
  return taken;
}

HttpRequest HttpParser::take() {
  HttpRequest out = std::move(request_);
  *this = HttpParser(limits_);
  return out;
}

void HttpParser::fail(int status, std::string reason) {
  state_ = State::kFailed;
  failure_ = {status, std::move(reason)};
  request_.body = {};
}

void HttpParser::take_line(std::string_view line) {
  switch (state_) {
    case State::kStart:
      if (line.empty() && !blank_before_) {  // some clients send one behind a body
        blank_before_ = true;
        return;
      }
      return request_line(line);
    case State::kHeaders: {
      if (line.empty()) return end_of_head();
      std::string name, value;
      if (header_line(line, name, value)) request_.headers.emplace_back(std::move(name), std::move(value));
      return;
    }
    case State::kChunkSize:
      return chunk_line(line);
    case State::kChunkEnd:
      if (!line.empty()) return fail(400, "a chunk is longer than its size says");
      state_ = State::kChunkSize;
      return;
    case State::kTrailers: {
      if (line.empty()) {
        state_ = State::kDone;
        return;
      }
      std::string name, value;
      header_line(line, name, value);  // checked, and left out: nothing behind a body changes what a request means
      return;
    }
    default:
      FF_ASSERT(false);
  }
}

void HttpParser::request_line(std::string_view line) {
  const size_t first = line.find(' '), last = line.rfind(' ');
  if (first == std::string_view::npos || first == last || line.find(' ', first + 1) != last) {
    return fail(400, "the request line is no method, target and version with single spaces between them");
  }
  const std::string_view method = line.substr(0, first);
  std::string_view target = line.substr(first + 1, last - first - 1);
  const std::string_view version = line.substr(last + 1);
  if (method.size() > 32 || !std::all_of(method.begin(), method.end(), [](char c) { return c >= 'A' && c <= 'Z'; })) {
    return fail(400, "the method is not made of capital letters");
  }
  if (target.size() > limits_.target) {
    return fail(414, fmt::format("the target has {} bytes, at most {} are taken", target.size(), limits_.target));
  }
  if (target.empty() || !std::all_of(target.begin(), target.end(), [](char c) { return c > 0x20 && c < 0x7f; })) {
    return fail(400, "the target has bytes that no URL has");
  }
  if (version != "HTTP/1.1" && version != "HTTP/1.0") {
    const bool is_version = version.size() == 8 && version.starts_with("HTTP/") && version[6] == '.';
    return fail(is_version ? 505 : 400, "the version is not HTTP/1.1 or HTTP/1.0");
  }
  if (target.starts_with("http://") || target.starts_with("https://")) {  // as it is sent to proxies
    target.remove_prefix(target.find("//") + 2);
    const size_t slash = target.find('/');
    if (!is_host(target.substr(0, slash))) return fail(400, "the target names no host");
    target = slash == std::string_view::npos ? std::string_view("/") : target.substr(slash);
  }
  if (target[0] != '/' && !(target == "*" && method == "OPTIONS")) {
    return fail(400, "the target does not begin with a slash");
  }
  request_.method = method;
  request_.http_1_0 = version == "HTTP/1.0";
  request_.keep_alive = !request_.http_1_0;
  const std::string_view plain = target.substr(0, target.find('#'));
  const size_t question = plain.find('?');
  request_.path = plain.substr(0, question);
  if (question != std::string_view::npos) request_.query = plain.substr(question + 1);
  state_ = State::kHeaders;
}

bool HttpParser::header_line(std::string_view line, std::string& name, std::string& value) {
  if (++lines_ > limits_.headers) {
    fail(431, fmt::format("the request has more than {} headers", limits_.headers));
    return false;
  }
  if (line.front() == ' ' || line.front() == '\t') {
    fail(400, "a header goes on in the next line");
    return false;
  }
  const size_t colon = line.find(':');
  if (colon == std::string_view::npos || !is_token(line.substr(0, colon))) {
    fail(400, "a line of the head is no header: a name, a colon without space before it, a value");
    return false;
  }
  name = lower(line.substr(0, colon));
  const std::string_view text = trimmed(line.substr(colon + 1));
  if (!std::all_of(text.begin(), text.end(), is_field_byte)) {
    fail(400, fmt::format("header {} has control characters", name));
    return false;
  }
  value = text;
  return true;
}

void HttpParser::end_of_head() {
  const std::string* length = nullptr;
  const std::string* coding = nullptr;
  const std::string* host = nullptr;
  const auto only = [&](const std::string*& place, const std::pair<std::string, std::string>& header) {
    if (place != nullptr) fail(400, fmt::format("there are two headers {}", header.first));
    place = &header.second;
  };
  for (const auto& header : request_.headers) {
    const auto& [name, value] = header;
    if (name == "content-length") only(length, header);
    if (name == "transfer-encoding") only(coding, header);
    if (name == "host") only(host, header);
    if (name == "connection") {
      const std::string words = lower(value);
      if (words.find("close") != std::string::npos) {
        request_.keep_alive = false;
      } else if (request_.http_1_0 && words.find("keep-alive") != std::string::npos) {
        request_.keep_alive = true;
      }
    }
    if (name == "content-encoding" && lower(value) != "identity") {
      return fail(415, fmt::format("the body's Content-Encoding is '{}', only identity is taken", printable(value)));
    }
    if (name == "expect") {
      if (lower(value) != "100-continue") {
        return fail(417, fmt::format("Expect is '{}', only 100-continue is known", printable(value)));
      }
      expects_continue_ = !request_.http_1_0;
    }
  }
  if (failed()) return;
  if (host == nullptr && !request_.http_1_0) return fail(400, "there is no header Host");
  if (host != nullptr && !host->empty() && !is_host(*host)) return fail(400, "the header Host names no host");
  if (coding != nullptr) {
    if (length != nullptr) return fail(400, "there are both Content-Length and Transfer-Encoding");
    if (request_.http_1_0) return fail(400, "Transfer-Encoding is no part of HTTP/1.0");
    if (lower(*coding) != "chunked") {
      return fail(coding->find(',') == std::string::npos ? 501 : 400,
                  fmt::format("Transfer-Encoding is '{}', only chunked is taken", printable(*coding)));
    }
    head_bytes_ = lines_ = 0;
    state_ = State::kChunkSize;
    return;
  }
  if (length != nullptr) {
    const bool digits = !length->empty() && length->size() <= 18 &&
                        std::all_of(length->begin(), length->end(), [](char c) { return c >= '0' && c <= '9'; });
    if (!digits) return fail(400, fmt::format("Content-Length is '{}', wanted a number", printable(*length)));
    std::from_chars(length->data(), length->data() + length->size(), remaining_);
    if (remaining_ > limits_.body) {
      return fail(413, fmt::format("the body has {} bytes, at most {} are taken", remaining_, limits_.body));
    }
  }
  if (remaining_ == 0) expects_continue_ = false;
  state_ = remaining_ == 0 ? State::kDone : State::kBody;
}

void HttpParser::chunk_line(std::string_view line) {
  const size_t end = std::min(line.find_first_not_of("0123456789abcdefABCDEF"), line.size());
  const std::string_view digits = line.substr(0, end);
  const std::string_view extensions = line.substr(end);
  if (digits.empty() || digits.size() > 15) return fail(400, "a chunk's size is no hexadecimal number");
  if (!extensions.empty()) {
    const std::string_view text = trimmed(extensions);
    if (text.empty() || text[0] != ';' || !std::all_of(text.begin(), text.end(), is_field_byte)) {
      return fail(400, "behind a chunk's size stands what is no extension");
    }
    extension_bytes_ += extensions.size();
    if (extension_bytes_ > limits_.chunk_extensions) {
      return fail(400, fmt::format("extensions of chunks have more than {} bytes", limits_.chunk_extensions));
    }
  }
  std::from_chars(digits.data(), digits.data() + digits.size(), remaining_, 16);
  if (remaining_ > limits_.body - request_.body.size()) {
    return fail(413, fmt::format("the body has more than {} bytes", limits_.body));
  }
  head_bytes_ = 0;
  state_ = remaining_ == 0 ? State::kTrailers : State::kChunk;
}

size_t HttpParser::take_body(std::string_view bytes) {
  const auto count = static_cast<size_t>(std::min<uint64_t>(remaining_, bytes.size()));
  request_.body.append(bytes.substr(0, count));
  remaining_ -= count;
  if (remaining_ == 0) state_ = state_ == State::kBody ? State::kDone : State::kChunkEnd;
  return count;
}

}  // namespace fourfold::serve
