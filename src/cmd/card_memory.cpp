#include "cmd/card_memory.h"

#include <algorithm>
#include <functional>
#include <memory>
#include <set>

#include "base/check.h"
#include "base/console.h"
#include "model/checkpoint.h"
#include "model/shape_source.h"

namespace fourfold::cmd {
namespace {

std::optional<memory::Plan> on_card(
    const BackendArgs& backend, const MemoryArgs& args, const Planned& planned,
    const std::function<memory::Plan(const memory::Demand&, const memory::Cards&, double)>& make) {
  const auto on_cpu = [&]() -> std::optional<memory::Plan> {
    if (args.utilization) {
      fail("--gpu-memory-utilization {}: the model runs on the CPU, wanted --device cuda", *args.utilization);
    }
    return std::nullopt;
  };
  if (device_name(backend) == "cpu") return on_cpu();
  // Where no card can be taken at all, nothing is read for it.
  if (!chosen_device(backend, planned.dummy != nullptr ? 0 : 1)) return on_cpu();
  std::unique_ptr<model::Checkpoint> checkpoint;
  uint64_t weight_bytes = 0;
  if (planned.dummy != nullptr) {
    weight_bytes = dummy_bytes(*planned.dummy, planned.mtp);
  } else {
    checkpoint = std::make_unique<model::Checkpoint>(planned.directory);
    for (const model::SafetensorsFile& shard : checkpoint->shards()) weight_bytes += shard.bytes();
  }
  const std::optional<int> device = chosen_device(backend, planned.dummy != nullptr ? 0 : weight_bytes);
  if (!device) return on_cpu();
  memory::Demand demand;
  demand.cuda = cuda_options(backend, *device);
  demand.ranks = backend.ranks;
  demand.by_expert = backend.by_expert;
  demand.model = planned.model;
  demand.model.mtp = planned.mtp;
  demand.engine = planned.engine;
  demand.more_pages = planned.more_pages;
  demand.more_slots = planned.more_slots;
  demand.shapes = [&]() -> std::unique_ptr<model::WeightSource> {
    if (checkpoint != nullptr) return model::shapes_of(*checkpoint);
    return model::shapes_of(dummy_config(*planned.dummy, planned.mtp), dummy_formats(*planned.dummy));
  };
  try {
    memory::Cards cards = {cuda::card_memory(*device)};
    for (int64_t rank = 1; rank < backend.ranks; ++rank) {
      cards.push_back(cuda::card_memory(chosen_device(backend, weight_bytes, rank).value()));
    }
    return make(demand, cards, args.utilization.value_or(memory::kUtilization));
  } catch (const memory::NotEnough& error) {
    eprint("{}", error.table());
    fail("--device {}: {}", device_name(backend), error.what());
  } catch (const Error& error) {
    if (device_name(backend) == "auto") return on_cpu();  // loading will find the same, and take the CPU
    fail("--device {}: {}", device_name(backend), error.what());
  }
}

}  // namespace

void add_memory_options(Command& command, MemoryArgs& args) {
  command
      .add_option("--gpu-memory-utilization", args.utilization,
                  "Part of a GPU's memory that may be taken, others' included (default: 0.92)")
      .real_range(0.01, 1.0);
}

std::optional<memory::Plan> require_memory(const BackendArgs& backend, const MemoryArgs& args, const Planned& planned,
                                           size_t* less) {
  return on_card(backend, args, planned, [&](memory::Demand demand, const memory::Cards& cards, double utilization) {
    for (size_t tried = 0;; ++tried) {
      if (less != nullptr) *less = tried;
      if (tried == planned.less.size()) return memory::require(demand, cards, utilization);
      try {
        return memory::require(demand, cards, utilization);
      } catch (const memory::NotEnough&) {
        const Planned::Less& next = planned.less[tried];
        demand.engine = next.engine;
        demand.more_pages = next.more_pages;
        demand.more_slots = next.more_slots;
      }
    }
  });
}

std::optional<memory::Plan> largest_memory(const BackendArgs& backend, const MemoryArgs& args, const Planned& planned,
                                           const memory::Wishes& wishes, int64_t usual_sequences, int64_t positions) {
  return on_card(backend, args, planned,
                 [&](const memory::Demand& demand, const memory::Cards& cards, double utilization) {
                   return memory::largest(demand, wishes, usual_sequences, positions, cards, utilization);
                 });
}

uint64_t taken_since(const memory::Plan& plan) {
  uint64_t taken = 0;
  std::set<int> seen;
  for (const memory::Plan::Share& share : plan.ranks) {
    if (!seen.insert(share.device).second) continue;
    const cuda::DeviceMemory memory = cuda::card_memory(share.device).memory;
    const uint64_t used = memory.total - std::min(memory.free, memory.total);
    taken += used - std::min(used, share.in_use);
  }
  return taken;
}

std::string taken_text(const memory::Plan& plan, uint64_t taken) {
  uint64_t planned = 0;
  for (const memory::Plan::Share& share : plan.ranks) planned += share.planned;
  const std::string ranks = plan.ranks.size() > 1 ? fmt::format(", {} ranks", plan.ranks.size()) : "";
  return fmt::format("memory of {}{}: {:.3f} of {:.3f} GB planned are taken\n", plan.ranks[0].card, ranks,
                     static_cast<double>(taken) * 1e-9, static_cast<double>(planned) * 1e-9);
}

}  // namespace fourfold::cmd
