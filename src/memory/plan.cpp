#include "memory/plan.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "base/check.h"
#include "base/json.h"
#include "base/math.h"
#include "cuda/device/device.h"
#include "engine/options.h"
#include "model/ranked.h"
#include "plan/arch.h"

namespace fourfold::memory {
namespace {

double gb(uint64_t bytes) { return static_cast<double>(bytes) * 1e-9; }

// The greatest value of [low, high] that `fits`, which a smaller one does if a greater one does; low - 1: none does.
template <typename F>
int64_t greatest(int64_t low, int64_t high, F&& fits) {
  int64_t below = low - 1;
  while (below < high) {
    const int64_t middle = below + (high - below + 1) / 2;
    if (fits(middle)) {
      below = middle;
    } else {
      high = middle - 1;
    }
  }
  return below;
}

constexpr int64_t kLeastContext = 64;
constexpr int64_t kSensibleContext = 8192;
constexpr int64_t kLeastSpareLogitRows = 32;
constexpr std::chrono::duration<double> kLongestStep = cuda::kStepDeadline / 2;

int64_t least_cache(const engine::EngineOptions& engine) {
  return std::max(engine.max_context, engine.max_sequences * std::min(engine.max_context, kSensibleContext) / 2);
}

}  // namespace

uint64_t Plan::Share::budget() const {
  const auto all = static_cast<uint64_t>(utilization * static_cast<double>(total));
  const uint64_t taken = in_use + others;
  return all > taken ? all - taken : 0;
}

const Plan::Share& Plan::tightest() const {
  const auto room = [](const Share& share) {
    return static_cast<int64_t>(share.budget()) - static_cast<int64_t>(share.planned);
  };
  return *std::min_element(ranks.begin(), ranks.end(),
                           [&](const Share& a, const Share& b) { return room(a) < room(b); });
}

namespace {

// What a rank's backend has counted.
Plan::Share share_of(const ops::Backend& backend, const cuda::CardMemory& card, int device, double utilization,
                     const std::function<std::string(cuda::MemoryKind)>& note) {
  Plan::Share out;
  out.card = card.info.name;
  out.device = device;
  out.total = card.memory.total;
  out.in_use = card.memory.total - std::min(card.memory.free, card.memory.total);
  out.utilization = utilization;
  const cuda::MemoryCounts counts = cuda::memory_of(backend);
  uint64_t buffers = 0, weights = 0;
  for (size_t i = 0; i < cuda::kMemoryKinds; ++i) {
    const auto kind = static_cast<cuda::MemoryKind>(i);
    const uint64_t bytes = counts.of[i].bytes;
    buffers += bytes;
    if (kind <= cuda::MemoryKind::kWeightsF32) weights += bytes;
    if (bytes > 0) out.items.push_back({cuda::memory_kind_name(kind), bytes, note(kind)});
  }
  out.items.push_back({"kernels and graphs", cuda::kBesideBuffers, "at most"});
  // What weights are loaded through has gone when there are caches.
  const uint64_t rounding = counts.taken - buffers;
  const uint64_t taken = std::max(counts.taken, weights + rounding + cuda::kLoadingBytes);
  out.items.push_back({"whole pages", taken - buffers,
                       taken > counts.taken ? "of the driver, and memory to load through" : "of the driver"});
  for (const Plan::Item& item : out.items) out.planned += item.bytes;
  return out;
}

}  // namespace

Plan plan(const Demand& demand, const Cards& cards, double utilization) {
  const auto ranks = static_cast<size_t>(demand.ranks);
  FF_ASSERT(ranks >= 1 && (cards.size() == ranks || cards.size() == 1));
  const bool alike = cards.size() != ranks;
  const auto card_of = [&](size_t rank) -> const cuda::CardMemory& { return cards[alike ? 0 : rank]; };
  const auto device_of = [&](size_t rank) {
    return ranks == 1 ? demand.cuda.device : alike ? static_cast<int>(rank) : cards[rank].device;
  };

  std::vector<std::shared_ptr<ops::Backend>> backends(ranks);
  const auto make_backend = [&](const std::shared_ptr<ranks::Member>& member) {
    const size_t rank = member == nullptr ? 0 : static_cast<size_t>(member->rank());
    cuda::CudaOptions options = demand.cuda;
    options.member = member;
    options.device = device_of(rank);
    const cuda::CardMemory& card = card_of(rank);
    return backends[rank] = cuda::make_counting_backend(options, card.info, card.memory.total);
  };
  engine::EngineOptions engine = demand.engine;
  engine.max_step_tokens = engine::step_tokens(engine);
  if (demand.least_cache) engine.cache_tokens = least_cache(engine);
  model::ModelOptions options = demand.model;
  options.progress = {};
  if (options.max_step_tokens == 0) options.max_step_tokens = engine.max_step_tokens;
  if (options.max_logit_rows == 0) options.max_logit_rows = engine::logit_rows(engine);
  const std::unique_ptr<model::WeightSource> shapes = demand.shapes();
  options.mtp = options.mtp && shapes->config().mtp_layers > 0;
  const std::unique_ptr<model::Model> model =
      model::load_model(*shapes, make_backend, {.ranks = demand.ranks, .by_expert = demand.by_expert}, options);
  Plan out;
  out.engine = engine::resolve(engine, *model);
  const engine::Sizes sizes = engine::sizes_of(out.engine, *model);
  const int64_t pages = sizes.pages + demand.more_pages, slots = sizes.slots + demand.more_slots;
  model::Caches caches = model->make_caches(pages, sizes.step.page_size, slots);
  const std::unique_ptr<ops::Stepper> stepper = model->make_stepper(sizes.step, caches);
  const int64_t tokens = std::min(sizes.step.rows, out.engine.max_context);
  const double flops = model->cost(tokens, out.engine.max_context - tokens, 1).flops *
                       (static_cast<double>(sizes.step.rows) / static_cast<double>(tokens));
  for (const cuda::CardMemory& card : cards) {
    const plan::Gpu gpu = cuda::gpu_row_of(card.info);
    const bool wgmma = plan::arch_of(gpu).wgmma;
    const double rate = plan::reachable_bf16(gpu, wgmma, true) * 1e12 / (wgmma ? 2 : 3);
    out.longest_step_seconds = std::max(out.longest_step_seconds, flops / (static_cast<double>(ranks) * rate));
  }
  // Ranks have equal shares of these.
  const uint64_t token_bytes = static_cast<uint64_t>(model->cache_bytes_per_token()) / ranks;
  const uint64_t state_bytes = static_cast<uint64_t>(model->state_bytes_per_slot()) / ranks;

  const auto note = [&](cuda::MemoryKind kind) -> std::string {
    if (kind == cuda::MemoryKind::kKeysAndValues) {
      return fmt::format("{} positions of {} bytes", pages * sizes.step.page_size, token_bytes);
    }
    if (kind == cuda::MemoryKind::kStates) return fmt::format("{} of {:.1f} MB", slots, gb(state_bytes) * 1e3);
    if (kind == cuda::MemoryKind::kActivations || kind == cuda::MemoryKind::kWorkspaces) {
      return fmt::format("{} rows a step", sizes.step.rows);
    }
    return "";
  };
  uint64_t most = 1;  // ranks of one card
  for (size_t i = 0; i < ranks; ++i) {
    out.ranks.push_back(share_of(*backends[i], card_of(i), device_of(i), utilization, note));
  }
  for (Plan::Share& share : out.ranks) {
    uint64_t here = 0;
    for (const Plan::Share& other : out.ranks) {
      if (other.device != share.device) continue;
      ++here;
      share.others += other.planned;
    }
    share.others -= share.planned;
    most = std::max(most, here);
  }
  out.token_bytes = token_bytes * most;
  out.state_bytes = state_bytes * most;
  return out;
}

std::string text(const Plan& plan) {
  const Plan::Share& share = plan.tightest();
  const size_t count = plan.ranks.size();
  const auto rank = static_cast<size_t>(&share - plan.ranks.data());
  std::string out = fmt::format(
      "memory of {}{}: {:.2f} GB, {:.2f} in use{}; {:.0f} % may be taken\n", share.card,
      count > 1 ? fmt::format(", rank {} of {}", rank, count) : "", gb(share.total), gb(share.in_use),
      share.others > 0 ? fmt::format(", {:.2f} for other ranks", gb(share.others)) : "", 100 * share.utilization);
  for (const Plan::Item& item : share.items) {
    out +=
        fmt::format("  {:<20}{:>10.3f} GB{}{}\n", item.name, gb(item.bytes), item.note.empty() ? "" : "  ", item.note);
  }
  out += fmt::format("  {:<20}{:>10.3f} GB\n", "together", gb(share.planned));
  out += share.fits() ? fmt::format("  {:<20}{:>10.3f} GB\n", "left", gb(share.left()))
                      : fmt::format("  {:<20}{:>10.3f} GB\n", "there is", gb(share.budget()));
  for (size_t i = 0; i < count; ++i) {
    if (i == rank) continue;
    const Plan::Share& other = plan.ranks[i];
    out += fmt::format("  {:<20}{:>10.3f} GB  of {:.3f} on device {}\n", fmt::format("rank {}", i), gb(other.planned),
                       gb(other.budget()), other.device);
  }
  return out;
}

namespace {

Json share_json(const Plan::Share& share) {
  Json out = {{"card", share.card},       {"total", share.total},
              {"in_use", share.in_use},   {"utilization", share.utilization},
              {"budget", share.budget()}, {"planned", share.planned},
              {"left", share.left()},     {"items", Json::array()}};
  for (const Plan::Item& item : share.items) {
    out["items"].push_back({{"name", item.name}, {"bytes", item.bytes}, {"note", item.note}});
  }
  return out;
}

}  // namespace

Json json(const Plan& plan) {
  Json out = share_json(plan.tightest());
  out["max_model_len"] = plan.engine.max_context;
  out["max_num_seqs"] = plan.engine.max_sequences;
  out["kv_cache_tokens"] = plan.engine.cache_tokens;
  if (plan.ranks.size() == 1) return out;
  for (size_t i = 0; i < plan.ranks.size(); ++i) {
    Json rank = share_json(plan.ranks[i]);
    rank["rank"] = i;
    rank["device"] = plan.ranks[i].device;
    out["ranks"].push_back(std::move(rank));
  }
  return out;
}

Plan require(const Demand& demand, const Cards& cards, double utilization) {
  Plan asked = plan(demand, cards, utilization);
  if (asked.fits()) return asked;
  const auto fits = [&](int64_t context, int64_t sequences) {
    Demand other = demand;
    other.engine.max_context = context;
    other.engine.max_sequences = sequences;
    if (other.engine.cache_tokens > 0) other.engine.cache_tokens = std::max(context, other.engine.cache_tokens);
    return plan(other, cards, utilization).fits();
  };
  const int64_t context = demand.engine.max_context, sequences = demand.engine.max_sequences;
  // In whole pages.
  const int64_t unit = std::min(kLeastContext, context);
  const auto best_context = [&](int64_t with) {
    return unit * greatest(1, context / unit, [&](int64_t units) { return fits(units * unit, with); });
  };
  std::string best;
  if (const int64_t shorter = best_context(sequences); shorter > 0) {
    best = fmt::format("a context of {} with {} at once", shorter, sequences);
  }
  if (const int64_t fewer = greatest(1, sequences, [&](int64_t count) { return fits(context, count); }); fewer > 0) {
    best += fmt::format("{}{} at once with a context of {}", best.empty() ? "" : ", or ", fewer, context);
  }
  if (best.empty()) {
    const int64_t alone = best_context(1);
    best = alone > 0 ? fmt::format("a context of {} with 1 at once", alone) : "nothing, the weights are too large";
  }
  throw NotEnough(fmt::format("a context of {} with {} at once takes {:.3f} GB of {}, wanted at most {:.3f} GB; what "
                              "fits: {}",
                              context, sequences, gb(asked.planned()), asked.tightest().card, gb(asked.budget()), best),
                  text(asked));
}

cuda::CardMemory published_card(const plan::Gpu& gpu) {
  constexpr std::pair<const char*, int> kGigabytes[] = {
      {"a100", 80},         {"l40s", 45},     {"rtx-4090", 24}, {"h100", 80},        {"h200", 140},     {"b200", 180},
      {"rtx-pro-6000", 95}, {"rtx-5090", 32}, {"rtx-5080", 16}, {"rtx-5070-ti", 16}, {"dgx-spark", 119}};
  constexpr uint64_t kContext = uint64_t{600} << 20;
  cuda::CardMemory card;
  card.info = cuda::info_of(gpu);
  for (const auto& [name, gigabytes] : kGigabytes) {
    if (gpu.name == name) card.memory.total = static_cast<uint64_t>(gigabytes) << 30;
  }
  if (card.memory.total == 0) fail("{}: nobody has noted how much memory it has", gpu.name);
  card.memory.free = card.memory.total - kContext;
  return card;
}

Plan largest(Demand demand, const Wishes& wishes, int64_t usual_sequences, int64_t positions, const Cards& cards,
             double utilization) {
  engine::EngineOptions& engine = demand.engine;
  // What can be given up is given up in turns: the context to a usual length, then sequences, then both.
  engine.max_context = wishes.context > 0 ? wishes.context : positions;
  engine.max_sequences = wishes.sequences > 0 ? wishes.sequences : usual_sequences;
  engine.cached_states = engine.prefix_cache ? 1 : 0;  // as many as there is room for, below
  engine.cache_tokens = wishes.cache_tokens;
  if (wishes.step_tokens > 0) engine.max_step_tokens = wishes.step_tokens;
  const int64_t spare_rows = engine.spare_logit_rows;
  engine.spare_logit_rows = std::min(spare_rows, kLeastSpareLogitRows);
  demand.least_cache = wishes.cache_tokens == 0;
  Plan found = plan(demand, cards, utilization);
  while (!found.fits()) {
    const bool shorter = wishes.context == 0 && engine.max_context > kLeastContext;
    const bool fewer = wishes.sequences == 0 && engine.max_sequences > 1;
    if (shorter && (engine.max_context > kSensibleContext || !fewer)) {
      engine.max_context = std::max(engine.max_context / 2, kLeastContext);
    } else if (fewer) {
      engine.max_sequences /= 2;
    } else {
      return require(demand, cards, utilization);
    }
    found = plan(demand, cards, utilization);
  }
  // Where there is room, longer steps and more sequences; `more`: bytes that these may take.
  const auto takes = [&](int64_t& option, int64_t value, uint64_t more) {
    const int64_t before = std::exchange(option, value);
    Plan larger = plan(demand, cards, utilization);
    const bool in_time = larger.longest_step_seconds <= std::max(kLongestStep.count(), found.longest_step_seconds);
    if (larger.fits() && in_time && found.left() <= larger.left() + more) {
      found = std::move(larger);
      return true;
    }
    option = before;
    return false;
  };
  if (wishes.step_tokens == 0) {
    const int64_t least = engine.max_step_tokens;
    const int64_t most = engine.max_context * engine.max_sequences;
    for (int64_t tokens = std::min(wishes.most_step_tokens, most); tokens > least; tokens /= 2) {
      if (takes(engine.max_step_tokens, tokens, found.left() / 8)) break;
    }
  }
  if (wishes.sequences == 0 && wishes.cache_tokens == 0 && engine.max_sequences == usual_sequences) {
    const int64_t most = std::min(kCardSequences, engine.max_step_tokens);
    uint64_t room = found.left() / 3;
    while (engine.max_sequences * 2 <= most) {
      const uint64_t left = found.left();
      if (!takes(engine.max_sequences, engine.max_sequences * 2, room)) break;
      room -= left - std::min(left, found.left());
    }
  }
  if (engine.spare_logit_rows < spare_rows) takes(engine.spare_logit_rows, spare_rows, found.left() / 8);
  // The rest: a quarter to states that prompts begin with, the others to keys and values.
  uint64_t rest = found.left();
  engine.cache_tokens = found.engine.cache_tokens;
  demand.least_cache = false;
  if (engine.prefix_cache && found.state_bytes > 0) {
    const uint64_t share = wishes.cache_tokens > 0 ? rest / 2 : rest / 4;
    const auto states = static_cast<int64_t>(share / found.state_bytes);
    engine.cached_states = std::clamp<int64_t>(states, 1, 16 * engine.max_sequences + 64);
    rest -= static_cast<uint64_t>(engine.cached_states - 1) * found.state_bytes;
  } else {
    engine.cached_states = 0;
  }
  if (wishes.cache_tokens == 0 && found.token_bytes > 0) {
    const auto more = static_cast<int64_t>(rest / found.token_bytes) / engine.page_size * engine.page_size;
    const int64_t most = engine.max_sequences * engine.max_context;
    engine.cache_tokens =
        std::clamp(engine.cache_tokens + more, engine.cache_tokens, std::max(most, engine.cache_tokens));
    engine.cache_tokens = std::min<int64_t>(engine.cache_tokens, int64_t{1} << 30);
  }
  // Whole pages of the driver: what was the last bit of the rest may be a little too much.
  found = plan(demand, cards, utilization);
  while (!found.fits() && engine.cache_tokens > least_cache(engine) && wishes.cache_tokens == 0) {
    const uint64_t over = found.planned() - found.budget();
    const auto tokens = static_cast<int64_t>(over / found.token_bytes) + engine.page_size;
    engine.cache_tokens =
        std::max(engine.cache_tokens - tokens / engine.page_size * engine.page_size, least_cache(engine));
    found = plan(demand, cards, utilization);
  }
  return found.fits() ? found : require(demand, cards, utilization);
}

}  // namespace fourfold::memory
