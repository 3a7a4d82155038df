#include "cuda/device/tuned_file.h"

#include "base/check.h"
#include "base/console.h"
#include "base/file.h"
#include "base/json.h"
#include "jit/sha256.h"
#include "jit/sources.h"

namespace fourfold::cuda {
namespace {

namespace fs = std::filesystem;

constexpr uint64_t kMaxBytes = 1 << 20;
constexpr size_t kDigits = 64;

fs::path path_of(const fs::path& store, const std::string& identity) {
  return store / (jit::to_hex(jit::sha256(identity)) + ".tuned");
}

}  // namespace

std::string sources_hash(std::span<const std::string> more) {
  jit::Sha256 hash;
  for (const jit::EmbeddedSource& source : jit::embedded_sources()) {
    hash.update_field(source.name);
    hash.update_field(source.text);
  }
  for (const std::string& each : more) hash.update_field(each);
  return jit::to_hex(hash.finish());
}

bool load_tuned(const fs::path& store, const std::string& identity,
                const std::function<void(const Json& content, const fs::path& path)>& read) {
  const fs::path path = path_of(store, identity);
  std::error_code error;
  if (!fs::exists(path, error)) return false;
  try {
    const std::string content = read_file(path, kMaxBytes);
    if (content.size() < kDigits + 2) fail("{}: {} bytes are too few", path.string(), content.size());
    const size_t body = content.size() - kDigits - 1;
    if (jit::to_hex(jit::sha256(std::string_view(content).substr(0, body))) != content.substr(body, kDigits)) {
      fail("{}: content does not match its SHA-256", path.string());
    }
    const Json json = parse_json(content.substr(0, body), path.string());
    if (!json.is_object() || !json.contains("identity")) fail("{}: wanted an object with identity", path.string());
    if (json["identity"] != parse_json(identity, "identity")) fail("{}: was measured on something else", path.string());
    read(json, path);
    return true;
  } catch (const Error& damage) {
    warn(fmt::format("{}; the plans are used instead", damage.what()));
    return false;
  }
}

fs::path save_tuned(const fs::path& store, const std::string& identity, Json content) {
  content["identity"] = parse_json(identity, "identity");
  std::string text = content.dump(1) + "\n";
  text += jit::to_hex(jit::sha256(text)) + "\n";
  const fs::path path = path_of(store, identity);
  write_file_atomically(path, text);
  return path;
}

}  // namespace fourfold::cuda
