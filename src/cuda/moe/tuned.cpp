#include "cuda/moe/tuned.h"

#include <cmath>

#include "base/check.h"
#include "base/json.h"
#include "cuda/device/tuned_file.h"
#include "plan/moe/plan.h"

namespace fourfold::cuda {
namespace {

namespace fs = std::filesystem;

constexpr int kVersion = 2;
// What a measurement was made with beside the sources.
std::vector<std::string> family_sources() {
  std::vector<std::string> all;
  for (const plan::moe::FamilyRow& row : plan::moe::families()) all.emplace_back(row.source);
  return all;
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
                     {"sources", sources_hash(family_sources())},
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
  TunedTable table(identity);
  const bool there = load_tuned(store, identity, [&](const Json& json, const fs::path& path) {
    if (!json.contains("buckets") || !json["buckets"].is_object()) fail("{}: wanted buckets", path.string());
    table.path_ = path;
    for (const int64_t bucket : plan::token_buckets()) {
      const auto it = json["buckets"].find(std::to_string(bucket));
      if (it != json["buckets"].end()) {
        table.set(bucket, parse_choice(*it, fmt::format("{}: {} tokens", path.string(), bucket)));
      }
    }
  });
  return there ? std::optional(table) : std::nullopt;
}

void TunedTable::save(const fs::path& store) {
  Json buckets = Json::object();
  for (const auto& [bucket, choice] : choices_) {
    buckets[std::to_string(bucket)] = {{"activations", choice.activations},
                                       {"gate_up", choice.gate_up},
                                       {"down", choice.down},
                                       {"us", choice.microseconds}};
  }
  path_ = save_tuned(store, identity_, {{"buckets", buckets}});
}

const TunedChoice* TunedTable::find(int64_t bucket) const {
  const auto it = choices_.find(bucket);
  return it == choices_.end() ? nullptr : &it->second;
}

}  // namespace fourfold::cuda
