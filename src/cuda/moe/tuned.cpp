#include "cuda/moe/tuned.h"

#include <cmath>

#include "base/check.h"
#include "base/console.h"
#include "base/file.h"
#include "base/json.h"
#include "jit/sha256.h"
#include "jit/sources.h"
#include "plan/moe/plan.h"

namespace fourfold::cuda {
namespace {

namespace fs = std::filesystem;

constexpr int kVersion = 2;
constexpr uint64_t kMaxBytes = 1 << 20;
constexpr size_t kDigits = 64;

fs::path path_of(const fs::path& store, const std::string& identity) {
  return store / (jit::to_hex(jit::sha256(identity)) + ".tuned");
}

// All device sources and the list of families: what a measurement was made with.
std::string sources_hash() {
  jit::Sha256 hash;
  for (const jit::EmbeddedSource& source : jit::embedded_sources()) {
    hash.update_field(source.name);
    hash.update_field(source.text);
  }
  for (const plan::moe::FamilyRow& row : plan::moe::families()) hash.update_field(row.source);
  return jit::to_hex(hash.finish());
}

TunedChoice parse_choice(const Json& json, const std::string& what) {
  const auto text = [&](const char* field) {
    const auto it = json.find(field);
    if (it == json.end() || !it->is_string()) fail("{}: {} is missing or no string", what, field);
    return it->get<std::string>();
  };
  const auto us = json.find("us");
  if (us == json.end() || !us->is_number()) fail("{}: us is missing or no number", what);
  return {text("gate_up"), text("down"), us->get<double>(), text("activations")};
}

}  // namespace

std::string tuned_identity(const std::string& device, int driver_version, const plan::moe::Problem& p) {
  const Json json = {{"version", kVersion},
                     {"device", device},
                     {"driver", driver_version},
                     {"sources", sources_hash()},
                     {"experts", p.experts},
                     {"top_k", p.top_k},
                     {"hidden", p.hidden},
                     {"intermediate", p.intermediate},
                     {"weights", static_cast<int>(p.weights)},
                     {"activations", plan::moe::to_string(p.activations)},
                     {"activation", static_cast<int>(p.activation)},
                     {"shared_slices", p.shared_slices()}};
  return json.dump();
}

std::string tuned_identity(const Device& device, const plan::moe::Problem& problem) {
  return tuned_identity(device.info().name, device.driver().version(), problem);
}

std::optional<TunedTable> TunedTable::load(const fs::path& store, const std::string& identity) {
  const fs::path path = path_of(store, identity);
  std::error_code error;
  if (!fs::exists(path, error)) return std::nullopt;
  try {
    const std::string content = read_file(path, kMaxBytes);
    if (content.size() < kDigits + 2) fail("{}: {} bytes are too few", path.string(), content.size());
    const size_t body = content.size() - kDigits - 1;
    if (jit::to_hex(jit::sha256(std::string_view(content).substr(0, body))) != content.substr(body, kDigits)) {
      fail("{}: content does not match its SHA-256", path.string());
    }
    const Json json = parse_json(content.substr(0, body), path.string());
    if (!json.is_object() || !json.contains("identity") || !json.contains("buckets") || !json["buckets"].is_object()) {
      fail("{}: wanted an object with identity and buckets", path.string());
    }
    if (json["identity"] != parse_json(identity, "identity")) fail("{}: was measured on something else", path.string());
    TunedTable table(identity);
    table.path_ = path;
    for (const int64_t bucket : plan::token_buckets()) {
      const auto it = json["buckets"].find(std::to_string(bucket));
      if (it != json["buckets"].end()) {
        table.set(bucket, parse_choice(*it, fmt::format("{}: {} tokens", path.string(), bucket)));
      }
    }
    return table;
  } catch (const Error& damage) {
    warn(fmt::format("{}; the plans are used instead", damage.what()));
    return std::nullopt;
  }
}

void TunedTable::save(const fs::path& store) {
  Json buckets = Json::object();
  for (const auto& [bucket, choice] : choices_) {
    buckets[std::to_string(bucket)] = {{"activations", choice.activations},
                                       {"gate_up", choice.gate_up},
                                       {"down", choice.down},
                                       {"us", choice.microseconds}};
  }
  const Json json = {{"identity", parse_json(identity_, "identity")}, {"buckets", buckets}};
  std::string content = json.dump(1) + "\n";
  content += jit::to_hex(jit::sha256(content)) + "\n";
  path_ = path_of(store, identity_);
  write_file_atomically(path_, content);
}

const TunedChoice* TunedTable::find(int64_t bucket) const {
  const auto it = choices_.find(bucket);
  return it == choices_.end() ? nullptr : &it->second;
}

}  // namespace fourfold::cuda
