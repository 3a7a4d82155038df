#include "bench/server.h"

#include <fmt/format.h>

#include <charconv>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <system_error>

#include "base/check.h"
#include "base/json.h"
#include "bench/client.h"

namespace fourfold::bench {
namespace {

namespace fs = std::filesystem;

HttpAnswer get(const Url& url, const std::string& path, const std::string& api_key) {
  return fetch({url, "GET", path, "", api_key, std::chrono::seconds(20)});
}

// The inode of the socket that listens at the port, as the kernel lists it.
std::string listening_inode(uint16_t port) {
  for (const char* list : {"/proc/net/tcp", "/proc/net/tcp6"}) {
    std::ifstream file(list);
    std::string line;
    std::getline(file, line);
    while (std::getline(file, line)) {
      std::istringstream words(line);
      std::string number, local, remote, state, queues, timer, retransmits, user, timeout, inode;
      words >> number >> local >> remote >> state >> queues >> timer >> retransmits >> user >> timeout >> inode;
      if (state == "0A" && local.ends_with(fmt::format(":{:04X}", port))) return inode;
    }
  }
  return "";
}

}  // namespace

std::string first_model(const Url& url, const std::string& api_key) {
  const HttpAnswer answer = get(url, "/v1/models", api_key);
  if (answer.status != 200) {
    fail("{}/v1/models: status {}: {}", url.text(), answer.status, printable(answer.body, 200));
  }
  const Json json = parse_json(answer.body, url.text() + "/v1/models");
  const auto data = json.is_object() ? json.find("data") : json.end();
  if (!json.is_object() || data == json.end() || !data->is_array() || data->empty() || !data->front().is_object() ||
      !data->front().contains("id") || !data->front()["id"].is_string()) {
    fail("{}/v1/models: no model in it; --model names one", url.text());
  }
  return data->front()["id"].get<std::string>();
}

std::optional<DraftCounters> DraftCounters::parse(std::string_view metrics) {
  DraftCounters out;
  bool found = false;
  while (!metrics.empty()) {
    const size_t end = std::min(metrics.find('\n'), metrics.size());
    const std::string_view line = metrics.substr(0, end);
    metrics.remove_prefix(std::min(end + 1, metrics.size()));
    constexpr std::string_view kPrefix = "vllm:spec_decode_num_";
    if (!line.starts_with(kPrefix)) continue;
    const std::string_view rest = line.substr(kPrefix.size());
    const size_t name_end = rest.find_first_of("{ "), value_at = rest.rfind(' ');
    if (name_end == std::string_view::npos) continue;
    const std::string_view name = rest.substr(0, name_end);
    const double value = std::strtod(std::string(rest.substr(value_at + 1)).c_str(), nullptr);
    found = true;
    if (name == "drafts_total") out.rounds += value;
    if (name == "draft_tokens_total") out.drafted += value;
    if (name == "accepted_tokens_total") out.accepted += value;
    if (name == "accepted_tokens_per_pos_total") {
      constexpr std::string_view kPosition = "position=\"";
      const size_t at = rest.find(kPosition);
      size_t position = 0;
      if (at == std::string_view::npos) continue;
      const char* digits = rest.data() + at + kPosition.size();
      if (std::from_chars(digits, rest.data() + rest.size(), position).ec != std::errc() || position >= 64) continue;
      if (out.by_position.size() <= position) out.by_position.resize(position + 1);
      out.by_position[position] += value;
    }
  }
  return found ? std::optional(out) : std::nullopt;
}

std::optional<DraftCounters> draft_counters(const Url& url, const std::string& api_key) {
  try {
    const HttpAnswer answer = get(url, "/metrics", api_key);
    return answer.status == 200 ? DraftCounters::parse(answer.body) : std::nullopt;
  } catch (const Error&) {
    return std::nullopt;
  }
}

std::optional<ServerMemory> server_memory(const Url& url) {
  if (!url.local()) return std::nullopt;
  const std::string inode = listening_inode(url.port);
  if (inode.empty()) return std::nullopt;
  const std::string wanted = fmt::format("socket:[{}]", inode);
  std::error_code ignored;
  for (const auto& process : fs::directory_iterator("/proc", ignored)) {
    if (process.path().filename().string().find_first_not_of("0123456789") != std::string::npos) continue;
    std::error_code denied;
    for (fs::directory_iterator fd(process.path() / "fd", denied), end; !denied && fd != end; fd.increment(denied)) {
      std::error_code gone;
      if (fs::read_symlink(fd->path(), gone) != wanted) continue;
      std::ifstream status(process.path() / "status");
      ServerMemory memory;
      for (std::string word; status >> word;) {
        int64_t kilobytes = 0;
        if (word == "VmRSS:" && status >> kilobytes) memory.resident = kilobytes << 10;
        if (word == "VmHWM:" && status >> kilobytes) memory.peak = kilobytes << 10;
      }
      if (memory.resident > 0) return memory;
    }
  }
  return std::nullopt;
}

}  // namespace fourfold::bench
