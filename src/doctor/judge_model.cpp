#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "doctor/finding.h"

namespace fourfold::doctor {
namespace {

std::string gigabytes(double bytes) { return fmt::format("{:.2f} GB", bytes / 1e9); }

struct Room {
  std::string where;
  double bytes = 0;
  bool host = false;
};

// The memory that a model may take: the host's, cut by the control group, and each GPU's; or the one that they share,
// where what the driver calls free leaves out what the system can free.
std::vector<Room> rooms(const Facts& facts) {
  std::vector<Room> out;
  const Facts memory = facts.at("memory");
  auto available = memory.number("available_bytes");
  if (const auto limit = memory.number("limit_bytes"); limit && available) available = std::min(*available, *limit);
  if (available) out.push_back({"main memory", *available, true});
  for (const Facts& device : facts.at("probes").at("gpu").list("devices")) {
    const std::string name = device.text("name").value_or("a GPU");
    if (shares_host_memory(device) && available) {
      out.front().where = fmt::format("the memory that {} and the processor share", name);
    } else if (const auto free = device.number("memory_free")) {
      out.push_back({name, *free, false});
    }
  }
  return out;
}

}  // namespace

std::vector<Finding> judge_model(const Facts& facts) {
  std::vector<Finding> out;
  const Facts model = facts.at("model");
  if (model.json().is_null()) return out;
  if (const auto failure = model.text("failure")) {
    out.push_back(
        {"model.unreadable", Level::kError, *failure, "the model cannot be looked at", "fourfold inspect DIR"});
    return out;
  }
  const std::vector<Facts> problems = model.list("problems");
  for (const Facts& problem : problems) {
    if (!problem.json().is_string()) continue;
    out.push_back({"model.problem", Level::kError, printable(problem.json().get<std::string>(), 400),
                   "the checkpoint cannot be loaded",
                   "fourfold inspect DIR lists all of it; copy the checkpoint again"});
  }
  if (problems.empty()) {
    out.push_back({"model.checkpoint", Level::kGood,
                   fmt::format("{}: complete", model.text("architecture").value_or("")), "", ""});
  }
  const auto weights = model.number("weight_bytes"), positions = model.number("max_positions");
  const double state = model.number("state_bytes_per_sequence").value_or(0);
  const double per_token = model.number("kv_bytes_per_token").value_or(0);
  if (!weights || !positions) return out;
  bool fits_anywhere = false;
  for (const Room& room : rooms(facts)) {
    const double left = room.bytes - *weights - state;
    const double context = per_token > 0 ? std::floor(std::max(0.0, left) / per_token) : (left > 0 ? *positions : 0);
    fits_anywhere = fits_anywhere || context >= 2;
    if (context < 2) {
      out.push_back({"model.memory", room.host ? Level::kWarning : Level::kNote,
                     fmt::format("{} of weights and {} for a sequence, {} free in {}", gigabytes(*weights),
                                 gigabytes(state), gigabytes(room.bytes), room.where),
                     fmt::format("the model does not fit into {}", room.where),
                     "a smaller model or format, or end what else holds memory"});
    } else if (context < *positions) {
      out.push_back({"model.context", Level::kNote,
                     fmt::format("{}: {:.0f} of {:.0f} positions fit in all (one sequence, f16 keys and values)",
                                 room.where, context, *positions),
                     "longer contexts, and more sequences at once, are refused",
                     fmt::format("--max-model-len {:.0f} at most", context)});
    } else {
      out.push_back({"model.memory", Level::kGood,
                     fmt::format("{}: all {:.0f} positions fit ({} of weights, {} free)", room.where, *positions,
                                 gigabytes(*weights), gigabytes(room.bytes)),
                     "", ""});
    }
  }
  if (!fits_anywhere && !rooms(facts).empty()) {
    out.push_back({"model.fits", Level::kError, fmt::format("{} of weights fit nowhere here", gigabytes(*weights)),
                   "the model cannot run on this machine", "a smaller model"});
  }
  const auto read = facts.at("probes").at("cpu").number("read_gb_per_s");
  const auto bytes = model.number("bytes_per_token");
  if (read && bytes && *bytes > 0) {
    out.push_back({"model.speed", Level::kGood,
                   fmt::format("at most {:.0f} tokens/s of one sequence on the CPU: {:.1f} MB a token at {:.1f} GB/s",
                               *read * 1e9 / *bytes, *bytes / 1e6, *read),
                   "", ""});
  }
  return out;
}

}  // namespace fourfold::doctor
