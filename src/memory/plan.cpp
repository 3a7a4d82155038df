#include "memory/plan.h"

#include <algorithm>

#include "base/check.h"
#include "base/math.h"
#include "engine/options.h"

namespace fourfold::memory {
namespace {

double gb(uint64_t bytes) { return static_cast<double>(bytes) * 1e-9; }

engine::EngineOptions with_rows(engine::EngineOptions options) {
  options.max_step_tokens = std::max(std::min(options.max_step_tokens, options.max_context), options.max_sequences);
  return options;
}

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

int64_t least_cache(const engine::EngineOptions& engine) {
  return std::max(engine.max_context, engine.max_sequences * std::min(engine.max_context, kSensibleContext) / 2);
}

}  // namespace

uint64_t Plan::budget() const {
  const auto all = static_cast<uint64_t>(utilization * static_cast<double>(total));
  return all > in_use ? all - in_use : 0;
}

Plan plan(const Demand& demand, const cuda::CardMemory& card, double utilization) {
  Plan out;
  out.card = card.info.name;
  out.device = demand.cuda.device;
  out.total = card.memory.total;
  out.in_use = card.memory.total - std::min(card.memory.free, card.memory.total);
  out.utilization = utilization;

  const std::shared_ptr<ops::Backend> backend = cuda::make_counting_backend(demand.cuda, card.info, card.memory.total);
  engine::EngineOptions engine = with_rows(demand.engine);
  if (demand.least_cache) engine.cache_tokens = least_cache(engine);
  model::ModelOptions options = demand.model;
  options.progress = {};
  if (options.max_step_tokens == 0) options.max_step_tokens = engine.max_step_tokens;
  if (options.max_logit_rows == 0) options.max_logit_rows = engine::logit_rows(engine);
  const std::unique_ptr<model::WeightSource> shapes = demand.shapes();
  options.mtp = options.mtp && shapes->config().mtp_layers > 0;
  const std::unique_ptr<model::Model> model = model::load_model(*shapes, backend, options);
  out.engine = engine::resolve(engine, *model);
  const engine::Sizes sizes = engine::sizes_of(out.engine, *model);
  model::Caches caches =
      model->make_caches(sizes.pages + demand.more_pages, sizes.step.page_size, sizes.slots + demand.more_slots);
  const std::unique_ptr<ops::Stepper> stepper = model->make_stepper(sizes.step, caches);
  out.token_bytes = static_cast<uint64_t>(model->cache_bytes_per_token());
  out.state_bytes = static_cast<uint64_t>(model->state_bytes_per_slot());

  const cuda::MemoryCounts counts = cuda::memory_of(*backend);
  uint64_t buffers = 0;
  for (size_t i = 0; i < cuda::kMemoryKinds; ++i) {
    const auto kind = static_cast<cuda::MemoryKind>(i);
    const uint64_t bytes = counts.of[i].bytes;
    buffers += bytes;
    if (bytes == 0) continue;
    std::string note;
    if (kind == cuda::MemoryKind::kKeysAndValues) {
      note = fmt::format("{} positions of {} bytes", (sizes.pages + demand.more_pages) * sizes.step.page_size,
                         out.token_bytes);
    } else if (kind == cuda::MemoryKind::kStates) {
      note = fmt::format("{} of {:.1f} MB", sizes.slots + demand.more_slots, gb(out.state_bytes) * 1e3);
    } else if (kind == cuda::MemoryKind::kActivations || kind == cuda::MemoryKind::kWorkspaces) {
      note = fmt::format("{} rows a step", sizes.step.rows);
    }
    out.items.push_back({cuda::memory_kind_name(kind), bytes, std::move(note)});
  }
  out.items.push_back({"kernels and graphs", cuda::kBesideBuffers, "at most"});
  // What weights are loaded through has gone when there are caches.
  uint64_t weights = 0;
  for (size_t i = 0; i <= static_cast<size_t>(cuda::MemoryKind::kWeightsF32); ++i) weights += counts.of[i].bytes;
  const uint64_t rounding = counts.taken - buffers;
  const uint64_t taken = std::max(counts.taken, weights + rounding + cuda::kLoadingBytes);
  out.items.push_back({"whole pages", taken - buffers,
                       taken > counts.taken ? "of the driver, and memory to load through" : "of the driver"});
  for (const Plan::Item& item : out.items) out.planned += item.bytes;
  return out;
}

std::string text(const Plan& plan) {
  std::string out = fmt::format("memory of {}: {:.2f} GB, {:.2f} in use; {:.0f} % may be taken\n", plan.card,
                                gb(plan.total), gb(plan.in_use), 100 * plan.utilization);
  for (const Plan::Item& item : plan.items) {
    out +=
        fmt::format("  {:<20}{:>10.3f} GB{}{}\n", item.name, gb(item.bytes), item.note.empty() ? "" : "  ", item.note);
  }
  out += fmt::format("  {:<20}{:>10.3f} GB\n", "together", gb(plan.planned));
  if (plan.fits()) return out + fmt::format("  {:<20}{:>10.3f} GB\n", "left", gb(plan.left()));
  return out + fmt::format("  {:<20}{:>10.3f} GB\n", "there is", gb(plan.budget()));
}

Json json(const Plan& plan) {
  Json out = {{"card", plan.card},
              {"total", plan.total},
              {"in_use", plan.in_use},
              {"utilization", plan.utilization},
              {"budget", plan.budget()},
              {"planned", plan.planned},
              {"left", plan.left()},
              {"max_model_len", plan.engine.max_context},
              {"max_num_seqs", plan.engine.max_sequences},
              {"kv_cache_tokens", plan.engine.cache_tokens},
              {"items", Json::array()}};
  for (const Plan::Item& item : plan.items) {
    out["items"].push_back({{"name", item.name}, {"bytes", item.bytes}, {"note", item.note}});
  }
  return out;
}

Plan require(const Demand& demand, const cuda::CardMemory& card, double utilization) {
  Plan asked = plan(demand, card, utilization);
  if (asked.fits()) return asked;
  const auto fits = [&](int64_t context, int64_t sequences) {
    Demand other = demand;
    other.engine.max_context = context;
    other.engine.max_sequences = sequences;
    if (other.engine.cache_tokens > 0) other.engine.cache_tokens = std::max(context, other.engine.cache_tokens);
    return plan(other, card, utilization).fits();
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
                              context, sequences, gb(asked.planned), asked.card, gb(asked.budget()), best),
                  text(asked));
}

cuda::CardMemory published_card(const plan::Gpu& gpu) {
  constexpr std::pair<const char*, int> kGigabytes[] = {
      {"a100", 80},         {"l40s", 45},     {"rtx-4090", 24}, {"h100", 80},        {"h200", 140},     {"b200", 180},
      {"rtx-pro-6000", 95}, {"rtx-5090", 32}, {"rtx-5080", 16}, {"rtx-5070-ti", 16}, {"dgx-spark", 119}};
  constexpr uint64_t kContext = uint64_t{600} << 20;
  const plan::Arch& arch = plan::arch_of(gpu);
  cuda::CardMemory card;
  card.info.name = gpu.title;
  card.info.major = std::stoi(std::string(gpu.arch.substr(3))) / 10;
  card.info.minor = std::stoi(std::string(gpu.arch.substr(3))) % 10;
  card.info.sms = gpu.sms;
  card.info.smem_per_block = arch.smem_per_block;
  card.info.smem_per_sm = arch.smem_per_sm;
  for (const auto& [name, gigabytes] : kGigabytes) {
    if (gpu.name == name) card.memory.total = static_cast<uint64_t>(gigabytes) << 30;
  }
  if (card.memory.total == 0) fail("{}: nobody has noted how much memory it has", gpu.name);
  card.memory.free = card.memory.total - kContext;
  return card;
}

Plan largest(Demand demand, const Wishes& wishes, int64_t most_sequences, int64_t positions,
             const cuda::CardMemory& card, double utilization) {
  engine::EngineOptions& engine = demand.engine;
  // What can be given up is given up in turns: the context to a usual length, then sequences, then both.
  engine.max_context = wishes.context > 0 ? wishes.context : positions;
  engine.max_sequences = wishes.sequences > 0 ? wishes.sequences : most_sequences;
  engine.cached_states = engine.prefix_cache ? 1 : 0;  // as many as there is room for, below
  engine.cache_tokens = wishes.cache_tokens;
  demand.least_cache = wishes.cache_tokens == 0;
  for (;;) {
    if (plan(demand, card, utilization).fits()) break;
    const bool shorter = wishes.context == 0 && engine.max_context > kLeastContext;
    const bool fewer = wishes.sequences == 0 && engine.max_sequences > 1;
    if (shorter && (engine.max_context > kSensibleContext || !fewer)) {
      engine.max_context = std::max(engine.max_context / 2, kLeastContext);
    } else if (fewer) {
      engine.max_sequences /= 2;
    } else {
      return require(demand, card, utilization);
    }
  }
  // The rest: a quarter to states that prompts begin with, the others to keys and values.
  Plan found = plan(demand, card, utilization);
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
  found = plan(demand, card, utilization);
  while (!found.fits() && engine.cache_tokens > least_cache(engine) && wishes.cache_tokens == 0) {
    const uint64_t over = found.planned - found.budget();
    const auto tokens = static_cast<int64_t>(over / found.token_bytes) + engine.page_size;
    engine.cache_tokens =
        std::max(engine.cache_tokens - tokens / engine.page_size * engine.page_size, least_cache(engine));
    found = plan(demand, card, utilization);
  }
  return found.fits() ? found : require(demand, card, utilization);
}

}  // namespace fourfold::memory
