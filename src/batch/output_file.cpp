#include "batch/output_file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cstring>
#include <span>
#include <string_view>
#include <utility>

#include "base/check.h"
#include "base/checksum.h"
#include "base/json.h"

namespace fourfold::batch {
namespace {

constexpr std::string_view kId = "batch_req_";
constexpr size_t kMaxAnswer = size_t{256} << 20;
constexpr auto kSync = std::chrono::seconds(1);

uint64_t mark(const std::optional<std::string>& custom_id) {
  return custom_id ? checksum(std::as_bytes(std::span(*custom_id))) : 0;
}

std::string quoted(const std::string& text) { return Json(text).dump(-1, ' ', false, Json::error_handler_t::replace); }

std::string beginning(int64_t number, const std::optional<std::string>& custom_id) {
  return fmt::format(R"({{"id":"{}{}","custom_id":{},)", kId, number, custom_id ? quoted(*custom_id) : "null");
}

}  // namespace

OutputFile::OutputFile(std::string path) : path_(std::move(path)) {
  fd_ = ::open(path_.c_str(), O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
  if (fd_ < 0) fail("{}: {}", printable(path_, 200), std::strerror(errno));
  try {
    load();
  } catch (...) {
    ::close(fd_);
    throw;
  }
}

OutputFile::~OutputFile() { ::close(fd_); }

void OutputFile::load() {
  struct stat info {};
  if (::fstat(fd_, &info) != 0 || !S_ISREG(info.st_mode)) fail("{}: no regular file", printable(path_, 200));
  if (::flock(fd_, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
    fail("{}: another program is writing it", printable(path_, 200));
  }
  std::string line, buffer(1 << 20, '\0');
  off_t at = 0, whole = 0;
  int64_t place = 0;
  for (;;) {
    const ssize_t count = ::pread(fd_, buffer.data(), buffer.size(), at);
    if (count < 0) fail("{}: {}", printable(path_, 200), std::strerror(errno));
    if (count == 0) break;
    at += count;
    std::string_view rest(buffer.data(), static_cast<size_t>(count));
    for (size_t end; (end = rest.find('\n')) != std::string_view::npos; rest.remove_prefix(end + 1)) {
      line += rest.substr(0, end);
      whole += static_cast<off_t>(line.size()) + 1;
      take(line, ++place);
      line.clear();
    }
    line += rest;
    if (line.size() > kMaxAnswer) fail("{}: line {} is longer than any answer", printable(path_, 200), place + 1);
  }
  if (whole == at) return;
  // A file that never was a batch's is not cut.
  const std::string_view shown = R"({"id":"batch_req_)";
  if (!line.starts_with(shown) && !shown.starts_with(line)) {
    fail("{}: line {} is no answer of a batch, and nothing is written behind it", printable(path_, 200), place + 1);
  }
  if (::ftruncate(fd_, whole) != 0) fail("{}: {}", printable(path_, 200), std::strerror(errno));
}

void OutputFile::take(const std::string& line, int64_t place) {
  const std::string where = fmt::format("{}:{}", path_, place);
  JsonLimits limits;
  limits.max_bytes = kMaxAnswer;
  const Json json = parse_json(line, where, limits);
  const auto field = [&](const char* name) { return json.is_object() && json.contains(name) ? json[name] : Json(); };
  const Json id = field("id"), custom = field("custom_id"), response = field("response");
  int64_t number = 0;
  bool good = id.is_string() && (custom.is_string() || custom.is_null());
  if (good) {
    const std::string text = id.get<std::string>();
    const char* end = text.data() + text.size();
    good = text.starts_with(kId);
    if (good) {
      const auto [stop, error] = std::from_chars(text.data() + kId.size(), end, number);
      good = error == std::errc() && stop == end && number > 0;
    }
  }
  if (!good) fail("{}: no answer of a batch, and nothing is written behind it", printable(where, 200));
  const auto name = custom.is_string() ? std::optional(custom.get<std::string>()) : std::nullopt;
  if (!answered_.emplace(number, mark(name)).second)
    fail("{}: a second answer to line {}", printable(where, 200), number);
  if (!response.is_object() || !response.contains("status_code") || response["status_code"] != 200) ++failures_;
}

bool OutputFile::has(int64_t number, const std::optional<std::string>& custom_id) const {
  const auto found = answered_.find(number);
  if (found == answered_.end()) return false;
  if (found->second != mark(custom_id)) {
    fail("{}: its answer to line {} is for another custom_id than the line's: these files do not belong together",
         printable(path_, 200), number);
  }
  return true;
}

void OutputFile::add_response(int64_t number, const std::string& custom_id, int status, const std::string& request_id,
                              const std::string& body) {
  append(number, custom_id,
         fmt::format(R"({}"response":{{"status_code":{},"request_id":{},"body":{}}},"error":null}})",
                     beginning(number, custom_id), status, quoted(request_id), body),
         status != 200);
}

void OutputFile::add_error(int64_t number, const std::optional<std::string>& custom_id, const std::string& message) {
  append(number, custom_id,
         fmt::format(R"({}"response":null,"error":{{"code":"invalid_request","message":{}}}}})",
                     beginning(number, custom_id), quoted(fmt::format("line {}: {}", number, message))),
         true);
}

void OutputFile::append(int64_t number, const std::optional<std::string>& custom_id, const std::string& line,
                        bool failure) {
  const bool first = answered_.emplace(number, mark(custom_id)).second;
  FF_ASSERT(first && line.find('\n') == std::string::npos);
  const std::string text = line + "\n";
  for (std::string_view rest = text; !rest.empty();) {
    const ssize_t count = ::write(fd_, rest.data(), rest.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) fail("{}: {}", printable(path_, 200), std::strerror(errno));
    rest.remove_prefix(static_cast<size_t>(count));
  }
  failures_ += failure ? 1 : 0;
  if (std::chrono::steady_clock::now() - synced_ > kSync) sync();
}

void OutputFile::sync() {
  if (::fdatasync(fd_) != 0 && errno != EINVAL && errno != EROFS)
    fail("{}: {}", printable(path_, 200), std::strerror(errno));
  synced_ = std::chrono::steady_clock::now();
}

}  // namespace fourfold::batch
