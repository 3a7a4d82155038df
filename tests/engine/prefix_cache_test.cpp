// The prefix cache: bookkeeping against literal models, and what it finds in the traffic it is made for.
#include "engine/prefix_cache.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>

#include "base/property.h"
#include "prefix_server.h"

namespace fourfold::engine {
namespace {

// ---- where states are made

std::vector<Boundary> boundaries(const BoundaryInputs& inputs) {
  std::vector<Boundary> out = {{99, BoundaryKind::kEnd}};
  boundaries_for(inputs, out);
  return out;
}

using enum BoundaryKind;

TEST(Boundaries, HintsAreKept) {
  const std::vector<int64_t> hints = {300, 900};
  EXPECT_EQ(boundaries({.prompt = 1000, .hints = hints}), (std::vector<Boundary>{{300, kSystem}, {900, kTurn}}));
  // What the hit has behind it is there already; nothing is made at the prompt's end, where no hit may be.
  EXPECT_EQ(boundaries({.prompt = 1000, .hints = hints, .hit = 300}), (std::vector<Boundary>{{900, kTurn}}));
  EXPECT_EQ(boundaries({.prompt = 900, .hints = hints}), (std::vector<Boundary>{{300, kSystem}}));
  EXPECT_EQ(boundaries({.prompt = 901, .hints = hints, .hit = 899}), (std::vector<Boundary>{{900, kTurn}}));
  // One hint alone is a turn's.
  EXPECT_EQ(boundaries({.prompt = 1000, .hints = std::span(hints).first(1)}), (std::vector<Boundary>{{300, kTurn}}));
}

TEST(Boundaries, OfManyHintsTheFirstAndTheLast) {
  std::vector<int64_t> hints(50);
  std::iota(hints.begin(), hints.end(), 10);
  EXPECT_EQ(boundaries({.prompt = 1000, .hints = hints}), (std::vector<Boundary>{{10, kSystem}, {59, kTurn}}));
}

TEST(Boundaries, HintsThatDoNotAscendOrLieOutsideAreIgnored) {
  std::vector<int64_t> hints = {-5, 40, 2000};
  EXPECT_EQ(boundaries({.prompt = 1000, .hints = hints}), (std::vector<Boundary>{}));
  hints = {40, 50, 40};
  EXPECT_EQ(boundaries({.prompt = 1000, .hints = hints}), (std::vector<Boundary>{{40, kSystem}}));
  hints = {40, 50, 30};
  EXPECT_EQ(boundaries({.prompt = 1000, .hints = hints}), (std::vector<Boundary>{{40, kSystem}}));
}

TEST(Boundaries, WhereRequestsPart) {
  EXPECT_EQ(boundaries({.prompt = 1000, .hit = 100, .parting = 600}), (std::vector<Boundary>{{600, kParting}}));
  // A few tokens behind the hit or a hint (the opening of an answer): not worth a state.
  EXPECT_EQ(boundaries({.prompt = 1000, .hit = 100, .parting = 131}), (std::vector<Boundary>{}));
  EXPECT_EQ(boundaries({.prompt = 1000, .hit = 100, .parting = 132}), (std::vector<Boundary>{{132, kParting}}));
  const std::vector<int64_t> hints = {597};
  EXPECT_EQ(boundaries({.prompt = 1000, .hints = hints, .hit = 100, .parting = 600}),
            (std::vector<Boundary>{{597, kTurn}}));
  // A hint behind it does not serve those who part before it.
  EXPECT_EQ(boundaries({.prompt = 1000, .hints = hints, .hit = 100, .parting = 590}),
            (std::vector<Boundary>{{590, kParting}, {597, kTurn}}));
  // The whole prompt was there: one token short.
  EXPECT_EQ(boundaries({.prompt = 1000, .hit = 100, .parting = 1000}), (std::vector<Boundary>{{999, kParting}}));
}

TEST(Boundaries, SeveralAnswersBeginOneTokenShort) {
  EXPECT_EQ(boundaries({.prompt = 20, .answers = 3}), (std::vector<Boundary>{{19, kParting}}));
  EXPECT_EQ(boundaries({.prompt = 20, .hit = 19, .answers = 3}), (std::vector<Boundary>{}));
  EXPECT_EQ(boundaries({.prompt = 1, .answers = 3}), (std::vector<Boundary>{}));
}

TEST(Boundaries, StrideIsSparseAndKeepsClearOfOthers) {
  EXPECT_EQ(boundaries({.prompt = 10000, .stride = 4096}), (std::vector<Boundary>{{4096, kStride}, {8192, kStride}}));
  EXPECT_EQ(boundaries({.prompt = 9000, .stride = 4096}), (std::vector<Boundary>{{4096, kStride}}));
  const std::vector<int64_t> hints = {3500, 9900};
  EXPECT_EQ(boundaries({.prompt = 10000, .hints = hints, .stride = 4096}),
            (std::vector<Boundary>{{3500, kSystem}, {8192, kStride}, {9900, kTurn}}));
  EXPECT_EQ(boundaries({.prompt = 10000, .hit = 4000, .stride = 4096}), (std::vector<Boundary>{{8192, kStride}}));
  EXPECT_EQ(boundaries({.prompt = 5, .stride = 1}), (std::vector<Boundary>{{1, kStride}, {2, kStride}, {3, kStride}}));
}

FOURFOLD_PROPERTY(Boundaries, AscendWithinThePrompt) {
  BoundaryInputs inputs;
  inputs.prompt = 1 + static_cast<int64_t>(random.below(3000));
  inputs.hit = static_cast<int64_t>(random.below(static_cast<uint64_t>(inputs.prompt)));
  inputs.parting = random.below(2) == 0 ? 0 : inputs.hit + static_cast<int64_t>(random.below(2000));
  inputs.answers = 1 + static_cast<int64_t>(random.below(2));
  inputs.stride = 1 + static_cast<int64_t>(random.below(1000));
  std::vector<int64_t> hints(random.below(6));
  for (int64_t& h : hints) h = static_cast<int64_t>(random.below(3200));
  if (random.below(4) > 0) std::sort(hints.begin(), hints.end());
  inputs.hints = hints;
  int64_t last = inputs.hit;
  for (const Boundary& b : boundaries(inputs)) {
    ASSERT_TRUE(b.position > last && b.position < inputs.prompt);
    last = b.position;
  }
}

// ---- the tree against a map from prefixes to states

// All that is known of a cache whose pages are never given up.
struct LiteralCache {
  using Key = std::pair<std::string, Tokens>;
  std::map<Key, StateRecord> states;
  std::vector<Key> sequences;
  std::set<Key> answer_ends;
  int64_t clock = 0;

  static bool begins(const Tokens& tokens, const Tokens& prefix) {
    return prefix.size() <= tokens.size() && std::equal(prefix.begin(), prefix.end(), tokens.begin());
  }
  // The longest state of at most `most` tokens that `tokens` begin with.
  const Key* longest(const std::string& salt, const Tokens& tokens, size_t most) const {
    const Key* best = nullptr;
    for (const auto& [key, record] : states) {
      if (key.first != salt || key.second.size() > most || !begins(tokens, key.second)) continue;
      if (best == nullptr || key.second.size() > best->second.size()) best = &key;
    }
    return best;
  }
  int64_t matched(const std::string& salt, const Tokens& prompt) const {
    int64_t longest_match = 0;
    for (const auto& [s, tokens] : sequences) {
      if (s != salt) continue;
      const auto end = std::mismatch(prompt.begin(), prompt.end(), tokens.begin(), tokens.end()).first;
      longest_match = std::max<int64_t>(longest_match, end - prompt.begin());
    }
    return longest_match;
  }
  bool goes_on(const std::string& salt, const Tokens& prompt) const {
    const int64_t at = matched(salt, prompt);
    return std::any_of(sequences.begin(), sequences.end(), [&](const Key& sequence) {
      return sequence.first == salt && static_cast<int64_t>(sequence.second.size()) > at &&
             begins(sequence.second, Tokens(prompt.begin(), prompt.begin() + at));
    });
  }
  int64_t acquire(const std::string& salt, const Tokens& prompt, bool counted) {
    ++clock;
    const Key* hit = longest(salt, prompt, prompt.size() - 1);
    if (hit == nullptr) return 0;
    if (counted) {
      const bool through_end = std::any_of(answer_ends.begin(), answer_ends.end(), [&](const Key& end) {
        return end.first == salt && end.second.size() > hit->second.size() && begins(prompt, end.second);
      });
      const Habit shown = habit_shown(states.at(*hit), static_cast<int64_t>(prompt.size()), matched(salt, prompt),
                                      goes_on(salt, prompt), through_end);
      for (auto& [key, record] : states) {
        if (key.first != salt || !begins(hit->second, key.second)) continue;
        if (key.second.size() == hit->second.size()) {
          record_hit(record, clock, shown);
        } else {
          record_pass(record, clock);
        }
      }
    } else if (states.at(*hit).kind == kPaused) {
      ++states.at(*hit).passes;
    }
    return static_cast<int64_t>(hit->second.size());
  }
  void insert(const std::string& salt, const Tokens& tokens, std::span<const BoundaryState> boundary, size_t most) {
    ++clock;
    sequences.emplace_back(salt, tokens);
    for (const BoundaryState& b : boundary) {
      const Key key{salt, Tokens(tokens.begin(), tokens.begin() + b.position)};
      if (b.kind == kEnd) answer_ends.insert(key);
      const auto known = states.find(key);
      if (known != states.end()) {
        known->second.kind = std::min(known->second.kind, b.kind);
        known->second.used = known->second.touched = clock;
        continue;
      }
      const Key* before = longest(salt, key.second, key.second.size() - 1);
      StateRecord* record = before != nullptr ? &states.at(*before) : nullptr;
      states.emplace(key, make_record(b.kind, clock, record));
    }
    while (states.size() > most) {
      const auto lowest = std::min_element(states.begin(), states.end(), [&](const auto& a, const auto& b) {
        return rank(a.second, place(a.first)) < rank(b.second, place(b.first));
      });
      states.erase(lowest);
    }
  }
  StatePlace place(const Key& key) const {
    StatePlace p;
    const Key* before = longest(key.first, key.second, key.second.size() - 1);
    p.before = before != nullptr ? &states.at(*before) : nullptr;
    p.position = static_cast<int64_t>(key.second.size());
    p.distance = p.position - (before != nullptr ? static_cast<int64_t>(before->second.size()) : 0);
    p.has_below = std::any_of(states.begin(), states.end(), [&](const auto& s) {
      return s.first.first == key.first && s.first.second.size() > key.second.size() &&
             begins(s.first.second, key.second);
    });
    return p;
  }
};

FOURFOLD_PROPERTY(PrefixCache, FindsWhatAMapOfPrefixesFinds) {
  const int64_t page_size = 1 + static_cast<int64_t>(random.below(9));
  const int64_t most = 1 + static_cast<int64_t>(random.below(12));
  const bool recurrent = random.below(4) > 0;
  PageAllocator pages(6000, page_size);
  SlotAllocator slots(most + 40);
  PrefixCache cache({recurrent, most, 7, 1000}, pages, slots);
  LiteralCache literal;
  PrefixStats expected;
  const std::vector<std::string> salts = {"", "a", "b"};
  std::vector<Tokens> seen = {{1}};
  for (int step = 0; step < 80; ++step) {
    const std::string& salt = salts[random.below(salts.size())];
    // A piece of something seen before, and something new behind it: of few different tokens, so that all kinds of
    // parting happen.
    Tokens tokens = seen[random.below(seen.size())];
    tokens.resize(random.below(tokens.size() + 1));
    append(tokens, random_tokens(random, 1 + static_cast<int64_t>(random.below(30)), 0, 3));
    seen.push_back(tokens);
    if (random.below(2) == 0) {
      const bool counted = random.below(4) > 0;
      std::vector<int32_t> taken;
      const PrefixHit hit = cache.acquire(salt, tokens, taken, counted);
      const int64_t most_tokens = static_cast<int64_t>(tokens.size()) - 1;
      const int64_t matched = literal.matched(salt, tokens);
      const int64_t tokens_hit = recurrent ? literal.acquire(salt, tokens, counted) : std::min(matched, most_tokens);
      ASSERT_TRUE(hit.matched == matched);
      ASSERT_TRUE(hit.known == matched);
      const bool parts = literal.goes_on(salt, tokens) || matched == static_cast<int64_t>(tokens.size());
      ASSERT_TRUE(hit.parting == (parts ? matched : 0));
      ASSERT_TRUE(hit.tokens == tokens_hit);
      ASSERT_TRUE((hit.state >= 0) == (recurrent && tokens_hit > 0));
      ASSERT_TRUE((hit.copy_from >= 0) == (tokens_hit % page_size > 0));
      ASSERT_TRUE(static_cast<int64_t>(taken.size()) == tokens_hit / page_size);
      if (counted) {
        expected.prompt_tokens += static_cast<int64_t>(tokens.size());
        expected.hit_tokens += tokens_hit;
        expected.missed_no_state += std::min(matched, most_tokens) - tokens_hit;
      }
      if (hit.copy_from >= 0) pages.release(hit.copy_from);
      if (hit.state >= 0) slots.release(hit.state);
      pages.release(taken);
    } else {
      std::vector<int32_t> own;
      ASSERT_TRUE(pages.grow(own, static_cast<int64_t>(tokens.size())));
      std::vector<BoundaryState> states;
      for (int64_t position = 1; position <= static_cast<int64_t>(tokens.size()); ++position) {
        if (!recurrent || random.below(10) > 0) continue;
        const int32_t slot = slots.take();
        ASSERT_TRUE(slot >= 0);
        states.push_back({position, slot, static_cast<BoundaryKind>(random.below(6))});
        if (states.size() == 20) break;
      }
      cache.insert(salt, tokens, own, states);
      literal.insert(salt, tokens, states, static_cast<size_t>(most));
      for (const BoundaryState& state : states) slots.release(state.slot);
      pages.release(own);
    }
    cache.check();
    pages.check();
    slots.check();
    // Nobody runs: all that is used is the cache's.
    ASSERT_TRUE(pages.used() == pages.cached() && pages.only_cached() == pages.used());
    ASSERT_TRUE(slots.used() == cache.stats().states);
    ASSERT_TRUE(cache.stats().states == static_cast<int64_t>(literal.states.size()));
    for (const auto& [key, record] : literal.states) {
      Tokens prompt = key.second;
      prompt.push_back(50);
      ASSERT_TRUE(cache.match(key.first, prompt).tokens == static_cast<int64_t>(key.second.size()));
    }
  }
  const PrefixStats stats = cache.stats();
  ASSERT_TRUE(stats.prompt_tokens == expected.prompt_tokens && stats.hit_tokens == expected.hit_tokens);
  ASSERT_TRUE(stats.missed_no_state == expected.missed_no_state && stats.missed_evicted == 0);
  ASSERT_TRUE(stats.bytes == 7 * pages.used() + 1000 * slots.used() && stats.pages == pages.used());
  cache.clear();
  ASSERT_TRUE(pages.used() == 0 && slots.used() == 0);
}

// Requests that run at once, are preempted, cancelled and continued, with pages and states too few: what a hit returns
// is what was computed, and what is given up is no more than was asked for. PrefixServer looks into every page.
FOURFOLD_PROPERTY(PrefixCache, ReturnsWhatWasComputed) {
  PrefixServerOptions options;
  options.recurrent = random.below(4) > 0;
  options.page_size = 1 + static_cast<int64_t>(random.below(9));
  options.pages = 500 / options.page_size + 60;
  options.cached_states = static_cast<int64_t>(random.below(10));
  options.lanes = 4;
  options.stride = 16;
  PrefixServer server(options);
  std::vector<Tokens> seen = {{1}};
  std::vector<PrefixServer::Run> running, paused;
  for (int step = 0; step < 100; ++step) {
    const uint64_t what = random.below(10);
    if (what < 5 && running.size() < 4) {
      Tokens tokens = seen[random.below(seen.size())];
      tokens.resize(random.below(tokens.size() + 1));
      append(tokens, random_tokens(random, 1 + static_cast<int64_t>(random.below(40)), 0, 3));
      tokens.resize(std::min<size_t>(tokens.size(), 90));
      seen.push_back(tokens);
      std::vector<int64_t> hints;
      for (uint64_t i = random.below(4); i > 0; --i) hints.push_back(static_cast<int64_t>(random.below(90)));
      std::sort(hints.begin(), hints.end());
      const std::string salt = random.below(3) == 0 ? "other" : "";
      running.push_back(server.start(salt, tokens, hints, 1 + static_cast<int64_t>(random.below(2))));
    } else if (what == 5 && !paused.empty() && running.size() < 4) {
      server.resume(paused.back());
      running.push_back(std::move(paused.back()));
      paused.pop_back();
    } else if (what == 6) {
      const int64_t count = static_cast<int64_t>(random.below(static_cast<uint64_t>(options.pages)));
      const int64_t free = server.pages().free(), reach = free + server.pages().only_cached();
      ASSERT_TRUE(server.cache().reclaim(count) == (count <= reach));
      ASSERT_TRUE(server.pages().free() == std::max(free, std::min(count, reach)));
    } else if (what == 7 && options.recurrent) {
      const int64_t free = server.slots().free();
      const int64_t states = server.cache().stats().states;
      const bool freed = server.cache().reclaim_state();
      ASSERT_TRUE(freed == (states > 0));  // no step reads one here
      ASSERT_TRUE(server.slots().free() == free + (freed ? 1 : 0));
    } else if (!running.empty()) {
      const size_t i = random.below(running.size());
      if (random.below(2) == 0 && running[i].tokens.size() < 110) {
        server.answer(running[i], random_tokens(random, 1 + static_cast<int64_t>(random.below(10)), 0, 3));
      }
      const uint64_t end = random.below(4);
      if (end > 0) {
        if (end == 1) {
          seen.push_back(running[i].tokens);
          server.finish(running[i]);
        } else if (end == 2) {
          server.cancel(running[i]);
        } else {
          server.preempt(running[i]);
          paused.push_back(std::move(running[i]));
        }
        running.erase(running.begin() + static_cast<int64_t>(i));
      }
    }
    server.check();
  }
  const PrefixStats stats = server.cache().stats();
  ASSERT_TRUE(stats.hit_tokens == server.hits);
  ASSERT_TRUE(stats.hit_tokens + stats.missed_no_state + stats.missed_evicted <= server.possible);
  for (auto& run : running) server.cancel(run);
  server.check();
  ASSERT_TRUE(server.pages().used() == server.pages().only_cached());
}

// Without states: the end of what was least recently used goes, page by page.
FOURFOLD_PROPERTY(PrefixCache, GivesUpTheLeastRecentlyUsedEndFirst) {
  const int64_t page_size = 1 + static_cast<int64_t>(random.below(5));
  PageAllocator pages(4000, page_size);
  SlotAllocator slots(0);
  PrefixCache cache({false, 0, 1, 1}, pages, slots);
  // The time of each use of a sequence, as far as it was used.
  std::vector<std::pair<Tokens, int64_t>> uses;
  std::vector<Tokens> sequences;
  const auto held = [&](const Tokens& tokens) { return cache.match("", tokens).matched; };
  const auto last_use = [&](const Tokens& prefix) {
    int64_t time = -1;
    for (const auto& [tokens, t] : uses) {
      if (LiteralCache::begins(tokens, prefix)) time = std::max(time, t);
    }
    return time;
  };
  for (int64_t step = 0; step < 40; ++step) {
    Tokens tokens;
    if (!sequences.empty()) tokens = sequences[random.below(sequences.size())];
    // Every use is one of all of it, to an end of the tree.
    const auto longer = [&](const Tokens& other) {
      return other.size() > tokens.size() && LiteralCache::begins(other, tokens);
    };
    if (sequences.empty() || random.below(3) > 0) {
      tokens.resize(random.below(tokens.size() + 1));
      append(tokens, random_tokens(random, 1 + static_cast<int64_t>(random.below(20)), 0, 3));
      if (std::any_of(sequences.begin(), sequences.end(), longer)) continue;
      std::vector<int32_t> own;
      ASSERT_TRUE(pages.grow(own, static_cast<int64_t>(tokens.size())));
      cache.insert("", tokens, own, {});
      pages.release(own);
      sequences.push_back(tokens);
      uses.emplace_back(tokens, step);
    } else {
      if (std::any_of(sequences.begin(), sequences.end(), longer)) continue;
      Tokens prompt = tokens;
      prompt.push_back(50);
      std::vector<int32_t> own;
      const PrefixHit hit = cache.acquire("", prompt, own);
      ASSERT_TRUE(hit.tokens == static_cast<int64_t>(tokens.size()));
      if (hit.copy_from >= 0) pages.release(hit.copy_from);
      pages.release(own);
      uses.emplace_back(tokens, step);
    }
  }
  while (pages.used() > 0) {
    std::vector<int64_t> before;
    for (const Tokens& tokens : sequences) before.push_back(held(tokens));
    ASSERT_TRUE(cache.reclaim(pages.free() + 1));
    cache.check();
    // The last use of anything that was given up lies before that of any end that is still there whole.
    int64_t victim = -1, other = std::numeric_limits<int64_t>::max();
    for (size_t i = 0; i < sequences.size(); ++i) {
      const int64_t now = held(sequences[i]);
      if (now < before[i]) {
        const Tokens lost(sequences[i].begin(), sequences[i].begin() + before[i]);
        victim = std::max(victim, last_use(lost));
      } else if (now > 0) {
        other = std::min(other, last_use(Tokens(sequences[i].begin(), sequences[i].begin() + now)));
      }
    }
    ASSERT_TRUE(victim <= other);
  }
}

TEST(PrefixCache, APageThatIsFilledInPartIsSharedByCopy) {
  PageAllocator pages(8, 4);
  SlotAllocator slots(4);
  PrefixCache cache({true, 4, 1, 1}, pages, slots);
  std::vector<int32_t> own;
  ASSERT_TRUE(pages.grow(own, 6));
  const int32_t slot = slots.take();
  const BoundaryState state{6, slot, kTurn};
  cache.insert("", Tokens{1, 2, 3, 4, 5, 6}, own, {&state, 1});
  // Its owner may go on behind what is cached, and only there; not in the state.
  EXPECT_TRUE(pages.writable(own[1], 2));
  EXPECT_FALSE(pages.writable(own[1], 1));
  EXPECT_FALSE(pages.writable(own[0], 3));
  EXPECT_FALSE(slots.writable(slot));

  std::vector<int32_t> taken;
  const PrefixHit hit = cache.acquire("", Tokens{1, 2, 3, 4, 5, 6, 7}, taken);
  EXPECT_EQ(hit.tokens, 6);
  EXPECT_EQ(hit.state, slot);
  EXPECT_EQ(hit.copy_from, own[1]);
  EXPECT_EQ(taken, std::vector<int32_t>{own[0]});
  EXPECT_EQ(pages.holders(own[0]), 2);
  EXPECT_FALSE(pages.writable(taken[0], 0));

  // What the step reads stays, whatever becomes of the tree and of the first request.
  pages.release(own);
  slots.release(slot);
  cache.clear();
  EXPECT_EQ(pages.used(), 2);
  EXPECT_EQ(slots.used(), 1);
  pages.release(hit.copy_from);
  pages.release(taken);
  slots.release(hit.state);
  EXPECT_EQ(pages.used(), 0);
  EXPECT_EQ(slots.used(), 0);
}

TEST(PrefixCache, APageThatIsContinuedReplacesItsBeginning) {
  PageAllocator pages(8, 8);
  SlotAllocator slots(8);
  PrefixCache cache({true, 8, 1, 1}, pages, slots);
  Tokens tokens;
  for (int32_t turn = 0; turn < 3; ++turn) {
    // Each turn adds two tokens, in a copy of the page.
    append(tokens, {turn, turn});
    std::vector<int32_t> own;
    ASSERT_TRUE(pages.grow(own, static_cast<int64_t>(tokens.size())));
    const int32_t slot = slots.take();
    const BoundaryState state{static_cast<int64_t>(tokens.size()), slot, kEnd};
    cache.insert("", tokens, own, {&state, 1});
    pages.release(own);
    slots.release(slot);
    cache.check();
  }
  EXPECT_EQ(pages.used(), 1);
  EXPECT_EQ(slots.used(), 3);
}

TEST(PrefixCache, PagesOfRunningRequestsAreNotGivenUpForNothing) {
  PrefixServer server({.recurrent = false, .pages = 8, .page_size = 4});
  Random random(1);
  const Tokens a = random_tokens(random, 12), b = random_tokens(random, 12);
  auto first = server.start("", a);
  server.cache().insert("", a, first.pages, {});
  server.request("", b, {}, {7});
  // b is newer, but a's pages would not become free.
  EXPECT_TRUE(server.cache().reclaim(4));
  EXPECT_EQ(server.cache().match("", a).matched, 12);
  EXPECT_EQ(server.cache().match("", b).matched, 4);
  EXPECT_FALSE(server.cache().reclaim(6));
  EXPECT_EQ(server.pages().free(), 5);
  EXPECT_EQ(server.cache().match("", a).matched, 12);
  server.check();
  server.cancel(first);
}

TEST(PrefixCache, PagesThatNoHitCanUseGoFirst) {
  PrefixServer server({.pages = 64, .page_size = 4, .cached_states = 2});
  Random random(1);
  Tokens tokens = random_tokens(random, 40);
  // An older conversation with its state, and a newer one whose states are taken away.
  server.request("", random_tokens(random, 40), std::vector<int64_t>{20}, {7});
  server.request("", tokens, std::vector<int64_t>{20}, {7});
  EXPECT_EQ(server.cache().stats().states, 2);
  while (server.cache().reclaim_state()) {
  }
  const Tokens third = random_tokens(random, 40);
  server.request("", third, std::vector<int64_t>{20}, {7});
  const int64_t free = server.pages().free();
  ASSERT_TRUE(server.cache().reclaim(free + 20));
  EXPECT_EQ(server.cache().match("", tokens).matched, 0);
  Tokens more = third;
  append(more, {8, 9});
  EXPECT_EQ(server.cache().match("", more).tokens, 40);
  server.check();
}

TEST(PrefixCache, MissesHaveReasons) {
  PrefixServer server({.pages = 64, .page_size = 4, .cached_states = 8});
  Random random(1);
  const Tokens first = random_tokens(random, 40);
  server.request("x", first, {}, {7});
  // The same again: pages are there, but no state within the prompt.
  auto run = server.start("x", first);
  PrefixStats stats = server.cache().stats();
  EXPECT_EQ(stats.prompt_tokens, 80);
  EXPECT_EQ(stats.hit_tokens, 0);
  EXPECT_EQ(stats.missed_no_state, 39);
  EXPECT_EQ(stats.missed_evicted, 0);
  server.cancel(run);
  // It made a state where the two part. Now everything goes.
  ASSERT_TRUE(server.cache().reclaim(64));
  EXPECT_EQ(server.cache().stats().pages, 0);
  EXPECT_EQ(server.cache().match("x", first).known, 40);
  EXPECT_EQ(server.cache().match("y", first).known, 0);
  run = server.start("x", first);
  server.cancel(run);
  run = server.start("y", first);
  server.cancel(run);
  stats = server.cache().stats();
  EXPECT_EQ(stats.hit_tokens, 0);
  EXPECT_EQ(stats.missed_no_state, 39);
  EXPECT_EQ(stats.missed_evicted, 39);
  // Of a prompt whose end was given away, both.
  const Tokens longer = random_tokens(random, 100);
  server.request("", longer, std::vector<int64_t>{10, 70}, {7});
  while (server.cache().match("", longer).matched > 48) ASSERT_TRUE(server.cache().reclaim(server.pages().free() + 1));
  const PrefixHit hit = server.cache().match("", longer);
  EXPECT_EQ(hit.tokens, 10);
  EXPECT_EQ(hit.matched, 48);
  EXPECT_EQ(hit.known, 100);
}

// ---- which states stay

TEST(StatePolicy, Classes) {
  StateRecord before;
  before.kind = kTurn;
  before.used = 5;
  StateRecord state;
  state.made = state.used = 10;
  StatePlace place;
  place.before = &before;

  state.kind = kEnd;
  EXPECT_EQ(classify(state, place), StateClass::kSpare);
  EXPECT_EQ(classify(state, {}), StateClass::kLive);  // nothing before it that would do
  before.hits = 1;
  EXPECT_EQ(classify(state, place), StateClass::kSpare);  // hit before this one was made
  before.used = 11;
  EXPECT_EQ(classify(state, place), StateClass::kDead);
  state.hits = 1;
  EXPECT_EQ(classify(state, place), StateClass::kLive);
  state.hits = 0;
  state.kind = kTurn;
  EXPECT_EQ(classify(state, place), StateClass::kLive);

  // Left behind once; more often where requests parted.
  state.passes = 1;
  EXPECT_EQ(classify(state, place), StateClass::kPast);
  state.hits = 1;
  EXPECT_EQ(classify(state, place), StateClass::kPast);
  state.hits = 2;
  EXPECT_EQ(classify(state, place), StateClass::kLive);
  state.passes = 2;
  EXPECT_EQ(classify(state, place), StateClass::kPast);
  state.hits = 30;
  EXPECT_EQ(classify(state, place), StateClass::kLive);
  state.passes = 3;
  EXPECT_EQ(classify(state, place), StateClass::kPast);
  state = {};
  state.kind = kParting;
  state.passes = 1;
  EXPECT_EQ(classify(state, place), StateClass::kLive);
  state.passes = 2;
  EXPECT_EQ(classify(state, place), StateClass::kPast);

  state = {};
  state.kind = kStride;
  EXPECT_EQ(classify(state, place), StateClass::kPast);
  state.hits = 1;
  EXPECT_EQ(classify(state, place), StateClass::kLive);

  state = {};
  state.kind = kSystem;
  state.passes = 100;
  EXPECT_EQ(classify(state, place), StateClass::kLive);

  // A known habit.
  before = {};
  state = {};
  state.kind = kEnd;
  state.habit = Habit::kPastEnds;
  EXPECT_EQ(classify(state, place), StateClass::kDead);
  state.kind = kTurn;
  EXPECT_EQ(classify(state, place), StateClass::kLive);
  state.habit = Habit::kFromEnds;
  EXPECT_EQ(classify(state, place), StateClass::kLive);
  place.has_below = true;
  EXPECT_EQ(classify(state, place), StateClass::kPast);
}

TEST(StatePolicy, Habits) {
  StateRecord state;
  state.kind = kTurn;
  // The prompt parts from the cached answer, or runs through its end.
  EXPECT_EQ(habit_shown(state, 100, 53, true, false), Habit::kPastEnds);
  EXPECT_EQ(habit_shown(state, 100, 80, true, true), Habit::kFromEnds);
  EXPECT_EQ(habit_shown(state, 100, 80, false, true), Habit::kFromEnds);
  // Nothing to part from; the same prompt again.
  EXPECT_EQ(habit_shown(state, 100, 50, false, false), Habit::kUnknown);
  EXPECT_EQ(habit_shown(state, 100, 100, true, false), Habit::kUnknown);
  state.kind = kEnd;
  EXPECT_EQ(habit_shown(state, 100, 53, true, false), Habit::kFromEnds);
  state.kind = kSystem;
  EXPECT_EQ(habit_shown(state, 100, 53, true, false), Habit::kUnknown);

  // It is kept, and handed on to the states behind.
  state.kind = kTurn;
  record_hit(state, 3, Habit::kPastEnds);
  EXPECT_EQ(make_record(kTurn, 4, &state).habit, Habit::kPastEnds);
  EXPECT_EQ(make_record(kEnd, 4, &state).habit, Habit::kPastEnds);
  record_hit(state, 5, Habit::kUnknown);
  EXPECT_EQ(make_record(kEnd, 6, &state).habit, Habit::kPastEnds);
  record_hit(state, 7, Habit::kFromEnds);
  EXPECT_EQ(make_record(kEnd, 8, &state).habit, Habit::kFromEnds);
}

TEST(StatePolicy, PastStatesGoByWhatTheirLossCosts) {
  StateRecord older, newer;
  older.kind = newer.kind = kTurn;
  older.passes = newer.passes = 1;
  older.used = 1;
  newer.used = 2;
  EXPECT_LT(rank(newer, {.distance = 10}), rank(older, {.distance = 20}));
  EXPECT_LT(rank(older, {.distance = 10}), rank(newer, {.distance = 10}));
  // Live ones by use.
  newer.passes = older.passes = 0;
  EXPECT_LT(rank(older, {.distance = 20}), rank(newer, {.distance = 10}));
  // And the end of a system prompt by what lies below it.
  StateRecord system;
  system.kind = kSystem;
  system.touched = 3;
  EXPECT_LT(rank(newer, {}), rank(system, {}));
}

}  // namespace
}  // namespace fourfold::engine
