#include "serve/api_keys.h"

#include <algorithm>
#include <charconv>
#include <cmath>

#include "base/check.h"
#include "base/file.h"
#include "serve/api_error.h"

namespace fourfold::serve {
namespace {

constexpr size_t kMinKey = 4, kMaxKeys = 10'000;
constexpr uint64_t kMaxFile = 4u << 20;

std::vector<std::string_view> words_of(std::string_view line) {
  std::vector<std::string_view> out;
  constexpr std::string_view kSpace = " \t\r";
  for (;;) {
    const size_t begin = line.find_first_not_of(kSpace);
    if (begin == std::string_view::npos || line[begin] == '#') return out;
    line.remove_prefix(begin);
    const size_t end = std::min(line.find_first_of(kSpace), line.size());
    out.push_back(line.substr(0, end));
    line.remove_prefix(end);
  }
}

int64_t number_of(std::string_view text, int64_t low, int64_t high, const std::string& where) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < low || value > high) {
    fail("{} is '{}', an integer from {} to {} is wanted", where, printable(text, 40), low, high);
  }
  return value;
}

}  // namespace

int32_t engine_priority(int32_t of_key, int64_t of_request) {
  const int64_t within = std::clamp<int64_t>(of_request, -kMaxRequestPriority, kMaxRequestPriority);
  return static_cast<int32_t>(of_key * (2 * int64_t{kMaxRequestPriority} + 1) + within);
}

ApiKey::ApiKey(std::string key, std::string name, const KeyLimits& limits)
    : key_(std::move(key)), name_(std::move(name)), limits_(limits), tokens_(static_cast<double>(limits.per_minute)) {}

// All of both is compared.
bool ApiKey::is(std::string_view given) const {
  unsigned different = key_.size() == given.size() ? 0 : 1;
  for (size_t i = 0; i < key_.size(); ++i) {
    const char other = given.empty() ? '\0' : given[i % given.size()];
    different |= static_cast<unsigned char>(key_[i]) ^ static_cast<unsigned char>(other);
  }
  return different == 0;
}

std::shared_ptr<void> ApiKey::admit(const std::shared_ptr<ApiKey>& key, Time now) {
  const auto refuse = [&](const std::string& message, double seconds) {
    ApiError error(429, message);
    error.code = "rate_limit_exceeded";
    error.retry_after = static_cast<int>(std::clamp(std::ceil(seconds), 1.0, 60.0));
    throw error;
  };
  const KeyLimits& limits = key->limits_;
  const std::lock_guard lock(key->mutex_);
  if (limits.running > 0 && key->running_ >= limits.running) {
    refuse(fmt::format("{} requests of this API key are being answered or waiting, more are not taken", limits.running),
           1);
  }
  if (limits.per_minute > 0) {
    const double rate = static_cast<double>(limits.per_minute) / 60;
    if (key->refilled_ != Time()) {
      const double passed = std::chrono::duration<double>(now - key->refilled_).count();
      key->tokens_ = std::min(key->tokens_ + passed * rate, static_cast<double>(limits.per_minute));
    }
    key->refilled_ = now;
    if (key->tokens_ < 1) {
      refuse(fmt::format("this API key has asked {} times within a minute, more is not taken", limits.per_minute),
             (1 - key->tokens_) / rate);
    }
    key->tokens_ -= 1;
  }
  ++key->running_;
  return {nullptr, [key](void*) {
            const std::lock_guard unlock(key->mutex_);
            --key->running_;
          }};
}

void ApiKeys::add(std::string key, std::string name, const KeyLimits& limits, const std::string& where) {
  if (key.size() < kMinKey || key.find_first_of(" \t\r\n") != std::string::npos) {
    fail("{}: a key is shorter than {} bytes or has white space in it", where, kMinKey);
  }
  if (find(key)) fail("{}: the same key is given twice", where);
  if (keys_.size() >= kMaxKeys) fail("{}: there are more than {} keys", where, kMaxKeys);
  keys_.push_back(std::make_shared<ApiKey>(std::move(key), std::move(name), limits));
}

void ApiKeys::read(const std::filesystem::path& path) {
  const std::string text = read_file(path, kMaxFile);
  size_t line_number = 0;
  for (std::string_view rest = text; !rest.empty();) {
    const size_t end = std::min(rest.find('\n'), rest.size());
    const std::vector<std::string_view> words = words_of(rest.substr(0, end));
    rest.remove_prefix(std::min(end + 1, rest.size()));
    const std::string where = fmt::format("{} line {}", printable(path.string(), 200), ++line_number);
    if (words.empty()) continue;
    std::string name = fmt::format("key-{}", keys_.size() + 1);
    KeyLimits limits;
    for (const std::string_view word : std::span(words).subspan(1)) {
      const size_t equals = word.find('=');
      const std::string_view field = word.substr(0, equals);
      const std::string_view value = equals == std::string_view::npos ? "" : word.substr(equals + 1);
      const std::string place = fmt::format("{}: {}", where, printable(field, 40));
      if (field == "name" && !value.empty() && value.size() <= 64) {
        name = value;
      } else if (field == "max-requests") {
        limits.running = number_of(value, 1, 1 << 20, place);
      } else if (field == "requests-per-minute") {
        limits.per_minute = number_of(value, 1, 1 << 30, place);
      } else if (field == "priority") {
        limits.priority = static_cast<int32_t>(number_of(value, -kMaxKeyPriority, kMaxKeyPriority, place));
      } else {
        fail("{} is not known, wanted name=, max-requests=, requests-per-minute= or priority=", place);
      }
    }
    add(std::string(words.front()), name, limits, where);
  }
}

std::shared_ptr<ApiKey> ApiKeys::find(std::string_view given) const {
  std::shared_ptr<ApiKey> found;
  for (const auto& key : keys_) {
    if (key->is(given)) found = key;
  }
  return given.empty() ? nullptr : found;
}

}  // namespace fourfold::serve
