#include "engine/options.h"

#include <algorithm>
#include <new>

#include "base/check.h"
#include "base/math.h"
#include "engine/draft_lists.h"

namespace fourfold::engine {
namespace {

void check_limit(const char* field, int64_t value, int64_t low, int64_t high) {
  if (value < low || value > high) fail("engine: {} is {}, wanted {} to {}", field, value, low, high);
}

// An eighth of what the caches of a full set of running sequences take goes to states of the prefix cache.
constexpr int64_t kStatesShare = 8;
constexpr int64_t kLeastStates = 16, kMostStates = 4096;

// The last token of each sequence, and its drafts.
int64_t least_logit_rows(const EngineOptions& options) {
  const int64_t drafts = options.drafts == kAutoDrafts ? ops::kMaxDrafts : options.drafts;
  return std::min(options.max_sequences * (1 + drafts), options.max_step_tokens);
}

}  // namespace

int64_t logit_rows(const EngineOptions& options) {
  return std::min(least_logit_rows(options) + options.spare_logit_rows, step_tokens(options));
}

int64_t step_tokens(const EngineOptions& options) {
  const int64_t most = std::min(options.max_context, options.max_step_tokens) * options.max_sequences;
  return std::max(std::min(options.max_step_tokens, most), options.max_sequences);
}

EngineOptions resolve(EngineOptions options, const model::Model& model) {
  check_limit("max_context", options.max_context, 2, model.config().max_positions);
  check_limit("max_sequences", options.max_sequences, 1, std::min<int64_t>(4096, model.options().max_logit_rows));
  check_limit("max_step_tokens", options.max_step_tokens, options.max_sequences, model.options().max_step_tokens);
  options.max_step_tokens = step_tokens(options);
  check_limit("spare_logit_rows", options.spare_logit_rows, 0, 65536);
  check_limit("page_size", options.page_size, 1, 65536);
  check_limit("max_queued", options.max_queued, 1, 1 << 20);
  check_limit("max_queued_tokens", options.max_queued_tokens, 1, int64_t{1} << 40);
  check_limit("cached_states", options.cached_states, 0, 1 << 20);
  check_limit("drafts", options.drafts, kAutoDrafts, ops::kMaxDrafts);
  if (options.drafts > 0 && !model.has_mtp()) {
    fail("engine: drafts is {}, and the model has no MTP head to make them", options.drafts);
  }
  if (!model.has_mtp()) options.drafts = 0;
  check_limit("draft_tokens", options.draft_tokens, kAutoDraftTokens, int64_t{1} << 30);
  const int64_t ranks = model.options().shard.ranks();
  if (options.drafts != 0 && ranks > 1 && options.draft_tokens > 0) {
    fail("engine: drafts from the first {} tokens are for one rank, here are {}", options.draft_tokens, ranks);
  }
  if (options.drafts == 0 || ranks > 1) options.draft_tokens = 0;
  const int64_t wanted = least_logit_rows(options);
  if (model.options().max_logit_rows < wanted) {
    fail("engine: the model has {} rows of logits a step, wanted {} (max_sequences {}, drafts {})",
         model.options().max_logit_rows, wanted, options.max_sequences, options.drafts);
  }
  if (options.cache_tokens == 0) {
    options.cache_tokens = std::max(options.max_context, options.max_sequences * ((options.max_context + 1) / 2));
  }
  check_limit("cache_tokens", options.cache_tokens, options.max_context, int64_t{1} << 30);
  if (!options.prefix_cache || model.state_bytes_per_slot() == 0) {
    options.cached_states = 0;
  } else if (options.cached_states == 0) {
    const int64_t state = model.state_bytes_per_slot();
    const int64_t sequence = options.max_context * model.cache_bytes_per_token() + state;
    options.cached_states =
        std::clamp(options.max_sequences * sequence / kStatesShare / state, kLeastStates, kMostStates);
  }
  return options;
}

Sizes sizes_of(const EngineOptions& resolved, const model::Model& model) {
  Sizes sizes;
  sizes.step.lanes = resolved.max_sequences;
  sizes.step.rows = resolved.max_step_tokens;
  sizes.step.logit_rows = std::min(model.options().max_logit_rows, resolved.max_step_tokens);
  sizes.step.drafts = resolved.drafts == kAutoDrafts ? ops::kMaxDrafts : resolved.drafts;
  sizes.step.context = resolved.max_context;
  sizes.step.page_size = resolved.page_size;
  sizes.step.vocabulary = model.config().vocabulary;
  sizes.step.draft_lists = DraftLists::of(resolved.draft_tokens, sizes.step.vocabulary);
  sizes.pages = ceil_div(resolved.cache_tokens, resolved.page_size);
  // A sequence has a slot for each row that may become its end.
  sizes.slots = resolved.max_sequences * (1 + sizes.step.drafts) + resolved.cached_states;
  sizes.prefixes.recurrent = model.state_bytes_per_slot() > 0;
  sizes.prefixes.max_states = resolved.cached_states;
  sizes.prefixes.observer = resolved.cache_observer;
  sizes.prefixes.page_bytes = resolved.page_size * model.cache_bytes_per_token();
  sizes.prefixes.state_bytes = model.state_bytes_per_slot();
  return sizes;
}

model::Caches make_caches(model::Model& model, const Sizes& sizes) {
  try {
    return model.make_caches(sizes.pages, sizes.step.page_size, sizes.slots);
  } catch (const std::bad_alloc&) {
    fail("engine: no memory for the caches: {} positions of {} bytes and {} states of {} bytes",
         sizes.pages * sizes.step.page_size, model.cache_bytes_per_token(), sizes.slots, model.state_bytes_per_slot());
  }
}

}  // namespace fourfold::engine
