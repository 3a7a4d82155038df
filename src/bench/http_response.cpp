#include "bench/http_response.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>

#include "base/check.h"

namespace fourfold::bench {
namespace {

bool is_digit(char c) { return c >= '0' && c <= '9'; }

std::string lower(std::string_view text) {
  std::string out(text);
  for (char& c : out) c = c >= 'A' && c <= 'Z' ? static_cast<char>(c + 32) : c;
  return out;
}

bool is_token(std::string_view text) {
  constexpr std::string_view kOthers = "!#$%&'*+-.^_`|~";
  return !text.empty() && std::all_of(text.begin(), text.end(), [&](char c) {
    return is_digit(c) || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || kOthers.find(c) != std::string_view::npos;
  });
}

}  // namespace

void ResponseReader::fail(std::string why) {
  state_ = State::kFailed;
  failure_ = std::move(why);
}

const std::string* ResponseReader::header(std::string_view name) const {
  for (const auto& [key, value] : headers_) {
    if (key == name) return &value;
  }
  return nullptr;
}

bool ResponseReader::count_body(uint64_t more) {
  body_bytes_ += more;
  if (body_bytes_ <= limits_.body) return true;
  fail(fmt::format("a body of more than {} bytes", limits_.body));
  return false;
}

void ResponseReader::feed(std::string_view bytes, std::string& body) {
  while (!bytes.empty() && state_ != State::kFailed) {
    if (state_ == State::kDone) return fail("bytes behind the end of the response");
    if (state_ == State::kUntilEnd) {
      if (count_body(bytes.size())) body += bytes;
      return;
    }
    if (state_ == State::kLength || state_ == State::kChunk) {
      const auto count = static_cast<size_t>(std::min<uint64_t>(remaining_, bytes.size()));
      body += bytes.substr(0, count);
      bytes.remove_prefix(count);
      remaining_ -= count;
      if (remaining_ == 0) state_ = state_ == State::kLength ? State::kDone : State::kChunkEnd;
      continue;
    }
    const size_t feed_at = bytes.find('\n');
    const size_t count = feed_at == std::string_view::npos ? bytes.size() : feed_at + 1;
    head_bytes_ += count;
    if (head_bytes_ > limits_.head) return fail(fmt::format("lines of more than {} bytes", limits_.head));
    line_ += bytes.substr(0, count);
    bytes.remove_prefix(count);
    if (feed_at == std::string_view::npos) return;
    const std::string line = std::exchange(line_, {});
    if (line.size() < 2 || line[line.size() - 2] != '\r') return fail("a line that does not end in CR LF");
    take_line(std::string_view(line).substr(0, line.size() - 2));
  }
}

void ResponseReader::end() {
  if (state_ == State::kUntilEnd) {
    state_ = State::kDone;
  } else if (state_ != State::kDone && state_ != State::kFailed) {
    fail(state_ <= State::kHeaders ? "the connection ended before the head of the response was whole"
                                   : "the connection ended inside of the body");
  }
}

void ResponseReader::take_line(std::string_view line) {
  switch (state_) {
    case State::kStatus:
      return status_line(line);
    case State::kHeaders:
      return line.empty() ? end_of_head() : header_line(line);
    case State::kChunkSize:
      return chunk_line(line);
    case State::kChunkEnd:
      if (!line.empty()) return fail("bytes between a chunk and its end");
      state_ = State::kChunkSize;
      head_bytes_ = 0;
      return;
    default:  // trailers: of no interest here
      if (line.empty()) state_ = State::kDone;
  }
}

void ResponseReader::status_line(std::string_view line) {
  const bool good = line.size() >= 12 && line.starts_with("HTTP/1.") && (line[7] == '0' || line[7] == '1') &&
                    line[8] == ' ' && is_digit(line[9]) && is_digit(line[10]) && is_digit(line[11]) &&
                    (line.size() == 12 || line[12] == ' ');
  if (!good) return fail(fmt::format("the status line \"{}\", wanted HTTP/1.1", printable(line, 60)));
  status_ = (line[9] - '0') * 100 + (line[10] - '0') * 10 + (line[11] - '0');
  state_ = State::kHeaders;
}

void ResponseReader::header_line(std::string_view line) {
  const size_t colon = line.find(':');
  if (colon == std::string_view::npos || !is_token(line.substr(0, colon))) {
    return fail(fmt::format("the header \"{}\"", printable(line, 60)));
  }
  std::string_view value = line.substr(colon + 1);
  while (value.starts_with(' ') || value.starts_with('\t')) value.remove_prefix(1);
  while (value.ends_with(' ') || value.ends_with('\t')) value.remove_suffix(1);
  headers_.emplace_back(lower(line.substr(0, colon)), value);
}

void ResponseReader::end_of_head() {
  if (status_ / 100 == 1) {  // 100 Continue and its kind: the real one follows
    headers_.clear();
    state_ = State::kStatus;
    return;
  }
  head_bytes_ = 0;
  const std::string* coding = header("transfer-encoding");
  const std::string* length = header("content-length");
  const auto times = [&](std::string_view name) {
    return std::count_if(headers_.begin(), headers_.end(), [&](const auto& one) { return one.first == name; });
  };
  if (times("content-length") + times("transfer-encoding") > 1) return fail("two lengths of one body");
  if (coding != nullptr) {
    if (lower(*coding) != "chunked") return fail(fmt::format("the transfer coding {}", printable(*coding, 40)));
    state_ = State::kChunkSize;
  } else if (length != nullptr) {
    const auto [stop, error] = std::from_chars(length->data(), length->data() + length->size(), remaining_);
    const bool digits = !length->empty() && std::all_of(length->begin(), length->end(), is_digit);
    if (!digits || error != std::errc() || stop != length->data() + length->size()) {
      return fail(fmt::format("the content length {}", printable(*length, 40)));
    }
    if (count_body(remaining_)) state_ = remaining_ == 0 ? State::kDone : State::kLength;
  } else {
    state_ = status_ == 204 || status_ == 304 ? State::kDone : State::kUntilEnd;
  }
}

void ResponseReader::chunk_line(std::string_view line) {
  line = line.substr(0, line.find(';'));
  uint64_t size = 0;
  const auto [stop, error] = std::from_chars(line.data(), line.data() + line.size(), size, 16);
  if (line.empty() || line.size() > 15 || error != std::errc() || stop != line.data() + line.size()) {
    return fail(fmt::format("the chunk size \"{}\"", printable(line, 40)));
  }
  remaining_ = size;
  if (count_body(size)) state_ = size == 0 ? State::kTrailers : State::kChunk;
}

}  // namespace fourfold::bench
