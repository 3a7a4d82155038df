// A server without a model: requests take pages and slots and use the prefix cache in the way the engine does, and what
// they compute is written down. Pages hold, for each position, the hash of the tokens up to it; slots the hash of the
// tokens that a state has seen. So whatever a hit returns can be compared with what it must be.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "base/random.h"
#include "engine/pages.h"
#include "engine/prefix_cache.h"
#include "engine/prefix_policy.h"
#include "engine/states.h"

namespace fourfold::engine {

using Tokens = std::vector<int32_t>;

inline Tokens random_tokens(Random& random, int64_t count, int32_t low = 100, int32_t high = 30000) {
  Tokens tokens(static_cast<size_t>(count));
  for (int32_t& t : tokens) t = low + static_cast<int32_t>(random.below(static_cast<uint64_t>(high - low)));
  return tokens;
}

inline void append(Tokens& to, const Tokens& more) { to.insert(to.end(), more.begin(), more.end()); }

inline uint64_t prefix_hash(std::span<const int32_t> tokens) {
  uint64_t hash = 1;
  for (const int32_t token : tokens) hash = Random(hash ^ (static_cast<uint64_t>(token) << 17)).next();
  return hash;
}

struct PrefixServerOptions {
  bool recurrent = true;
  int64_t pages = 4096;
  int64_t page_size = 64;
  int64_t cached_states = 16;
  int64_t lanes = 8;
  int64_t stride = 4096;
};

class PrefixServer {
 public:
  using Options = PrefixServerOptions;
  explicit PrefixServer(const Options& options)
      : options_(options),
        pages_(options.pages, options.page_size),
        slots_(options.recurrent ? options.cached_states + 2 * options.lanes : 0),
        cache_({options.recurrent, options.cached_states, 1, 1}, pages_, slots_),
        page_hashes_(static_cast<size_t>(options.pages * options.page_size), 0),
        slot_hashes_(static_cast<size_t>(slots_.total()), 0) {}

  // A request that runs.
  struct Run {
    std::string salt;
    Tokens tokens;  // prompt and answer
    int64_t prompt = 0;
    int64_t hit = 0;
    int64_t cached = 0;  // positions computed
    std::vector<int32_t> pages;
    int32_t slot = -1;
    std::vector<Boundary> boundaries;
  };

  // Takes what is cached, and computes the prompt, up to its boundaries one after the other.
  Run start(const std::string& salt, Tokens prompt, const std::vector<int64_t>& hints = {}, int64_t answers = 1) {
    Run run;
    run.salt = salt;
    run.prompt = static_cast<int64_t>(prompt.size());
    run.tokens = std::move(prompt);
    const PrefixHit hit = take(run, true);
    possible += longest_common_prefix(run.salt, run.tokens);
    hits += hit.tokens;
    boundaries_for({run.prompt, hints, hit.tokens, hit.parting, answers, options_.stride}, run.boundaries);
    if (!options_.recurrent) run.boundaries.clear();
    for (const Boundary& boundary : run.boundaries) {
      compute(run, boundary.position);
      keep(run, boundary.kind);
    }
    compute(run, run.prompt);
    return run;
  }

  // The answer's tokens are computed, but for the last one, which no step has fed.
  void answer(Run& run, const Tokens& tokens) {
    run.tokens.insert(run.tokens.end(), tokens.begin(), tokens.end());
    compute(run, std::max(run.prompt, static_cast<int64_t>(run.tokens.size()) - 1));
  }
  void finish(Run& run) {
    keep(run, BoundaryKind::kEnd);
    drop(run);
  }
  void cancel(Run& run) { drop(run); }

  void preempt(Run& run) {
    keep(run, BoundaryKind::kPaused);
    drop(run);
  }
  // Returns how many tokens need not be computed again.
  int64_t resume(Run& run) {
    const PrefixHit hit = take(run, false);
    compute(run, static_cast<int64_t>(run.tokens.size()) - 1);
    return hit.tokens;
  }

  // All of it.
  Tokens request(const std::string& salt, Tokens prompt, const std::vector<int64_t>& hints,
                 const Tokens& answer_tokens) {
    Run run = start(salt, std::move(prompt), hints);
    answer(run, answer_tokens);
    finish(run);
    return answer_tokens;
  }

  void check() const {
    pages_.check();
    slots_.check();
    cache_.check();
  }

  PageAllocator& pages() { return pages_; }
  SlotAllocator& slots() { return slots_; }
  PrefixCache& cache() { return cache_; }
  const Options& options() const { return options_; }
  double share() const { return possible == 0 ? 1.0 : static_cast<double>(hits) / static_cast<double>(possible); }

  // Tokens of prompts that had been computed before, by a request of the same salt; and those of them that were taken.
  int64_t possible = 0, hits = 0;

  // Literally: the longest prefix of the prompt, at least a token short, with which a computed sequence begins.
  int64_t longest_common_prefix(const std::string& salt, const Tokens& prompt) const {
    int64_t longest = 0;
    const auto sequences = computed_.find(salt);
    if (sequences == computed_.end()) return 0;
    for (const Tokens& tokens : sequences->second) {
      const auto end = std::mismatch(prompt.begin(), prompt.end() - 1, tokens.begin(), tokens.end()).first;
      longest = std::max<int64_t>(longest, end - prompt.begin());
    }
    return longest;
  }

 private:
  static void require(bool condition, const char* what) {
    if (!condition) throw std::runtime_error(what);
  }
  uint64_t& hash_at(const std::vector<int32_t>& pages, int64_t position) {
    const int64_t page = pages.at(static_cast<size_t>(position / options_.page_size));
    return page_hashes_.at(static_cast<size_t>(page * options_.page_size + position % options_.page_size));
  }

  PrefixHit take(Run& run, bool counted) {
    const PrefixHit seen = cache_.match(run.salt, run.tokens);
    const PrefixHit hit = cache_.acquire(run.salt, run.tokens, run.pages, counted);
    require(seen.tokens == hit.tokens && seen.matched == hit.matched && seen.known == hit.known, "match() is wrong");
    require(hit.tokens < static_cast<int64_t>(run.tokens.size()), "a hit of the whole prompt");
    require(hit.tokens <= hit.matched && hit.matched <= hit.known, "a hit of what is not there");
    require(static_cast<int64_t>(run.pages.size()) == hit.tokens / options_.page_size, "pages of the hit");
    run.hit = run.cached = hit.tokens;
    if (hit.copy_from >= 0) {
      const int64_t positions = hit.tokens % options_.page_size;
      require(positions > 0, "a page to copy without positions");
      room(pages_.pages_for(hit.tokens) - static_cast<int64_t>(run.pages.size()));
      require(pages_.grow(run.pages, hit.tokens), "no page for a copy");
      const auto from = page_hashes_.begin() + hit.copy_from * options_.page_size;
      std::copy(from, from + options_.page_size, page_hashes_.begin() + run.pages.back() * options_.page_size);
      pages_.release(hit.copy_from);
    }
    uint64_t hash = prefix_hash({});
    for (int64_t i = 0; i < hit.tokens; ++i) {
      hash = Random(hash ^ (static_cast<uint64_t>(run.tokens[static_cast<size_t>(i)]) << 17)).next();
      require(hash_at(run.pages, i) == hash, "a page holds something else");
    }
    if (options_.recurrent) {
      require((hit.state >= 0) == (hit.tokens > 0), "a hit without a state");
      run.slot = slots_.take();
      require(run.slot >= 0, "no slot for a request");
      if (hit.state >= 0) {
        require(slot_hashes_.at(static_cast<size_t>(hit.state)) == hash, "a state of something else");
        slot_hashes_.at(static_cast<size_t>(run.slot)) = hash;
        slots_.release(hit.state);
      }
    }
    return hit;
  }

  void room(int64_t more) {
    if (pages_.free() < more) require(cache_.reclaim(more), "no pages left");
  }

  // Up to `end` positions.
  void compute(Run& run, int64_t end) {
    if (end <= run.cached) return;
    room(pages_.pages_for(end) - static_cast<int64_t>(run.pages.size()));
    require(pages_.grow(run.pages, end), "no pages");
    uint64_t hash = run.cached == 0 ? prefix_hash({}) : hash_at(run.pages, run.cached - 1);
    if (options_.recurrent && run.cached > 0) {
      require(hash == slot_hashes_.at(static_cast<size_t>(run.slot)), "the state is not that of the pages");
    }
    for (int64_t i = run.cached; i < end; ++i) {
      hash = Random(hash ^ (static_cast<uint64_t>(run.tokens[static_cast<size_t>(i)]) << 17)).next();
      const int32_t page = run.pages[static_cast<size_t>(i / options_.page_size)];
      require(pages_.writable(page, i % options_.page_size), "writes what others read");
      hash_at(run.pages, i) = hash;
    }
    run.cached = end;
    if (options_.recurrent) {
      require(slots_.writable(run.slot), "writes a state that others read");
      slot_hashes_.at(static_cast<size_t>(run.slot)) = hash;
    }
    // What is not cached was computed nevertheless.
    computed_[run.salt].insert(Tokens(run.tokens.begin(), run.tokens.begin() + end));
  }

  // Hands what is computed to the cache, and goes on in a slot of its own.
  void keep(Run& run, BoundaryKind kind) {
    const BoundaryState state{run.cached, run.slot, kind};
    cache_.insert(run.salt, std::span(run.tokens).first(static_cast<size_t>(run.cached)), run.pages,
                  options_.recurrent ? std::span(&state, 1) : std::span<const BoundaryState>{});
    if (!options_.recurrent || slots_.writable(run.slot)) return;
    const int32_t next = slots_.take();
    require(next >= 0, "no slot behind a boundary");
    slot_hashes_.at(static_cast<size_t>(next)) = slot_hashes_.at(static_cast<size_t>(run.slot));
    slots_.release(run.slot);
    run.slot = next;
  }

  void drop(Run& run) {
    pages_.release(run.pages);
    if (run.slot >= 0) slots_.release(run.slot);
    run.slot = -1;
    run.cached = 0;
  }

  Options options_;
  PageAllocator pages_;
  SlotAllocator slots_;
  PrefixCache cache_;
  std::vector<uint64_t> page_hashes_, slot_hashes_;
  std::map<std::string, std::set<Tokens>> computed_;
};

}  // namespace fourfold::engine
