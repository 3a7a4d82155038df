// What was computed before: prefixes of prompts and answers whose keys, values and recurrent states are still there.
//
// A radix tree over tokens for each salt. A node stands for tokens [begin, end) of every sequence below it and holds
// the pages of these positions; where it begins within a page, that page holds the positions before it as well, so
// nodes that part within a page have a page each. The recurrent state after a node's last token may be kept with it.
//
// A hit is the longest prefix for which pages and (models with recurrent layers) a state exist, at least one token
// short of the prompt: something must be fed to get the next token. Full pages are shared; a last page that is filled
// in part is shared by copy.
//
// What is kept: pages, as long as nobody else needs them (reclaim()), least recently used ends of the tree first.
// States are few: up to max_states. Which of them go is the policy at the top of prefix_policy.h.
//
// References: the tree holds its own (PageAllocator::cache, SlotAllocator::share); callers keep theirs. Nothing here
// takes a reference from a caller, and acquire() gives the caller new ones. So what a running request, or a step, still
// needs never goes away because the tree gives it up.
//
// Not thread-safe: the engine thread's. acquire() and match() are linear in the prompt and allocate nothing (acquire()
// appends to `pages`); insert() allocates nodes.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "engine/engine.h"
#include "engine/pages.h"
#include "engine/prefix_policy.h"
#include "engine/states.h"

namespace fourfold::engine {

struct PrefixCacheOptions {
  bool recurrent = true;    // a hit needs a state
  int64_t max_states = 16;  // kept at most; only for recurrent models
  int64_t page_bytes = 0;   // for the statistics
  int64_t state_bytes = 0;
  std::shared_ptr<CacheObserver> observer = nullptr;  // null: nobody is told
};

// A state for insert(): after `position` tokens, in `slot`.
struct BoundaryState {
  int64_t position = 0;
  int32_t slot = -1;
  BoundaryKind kind = BoundaryKind::kEnd;
};

struct PrefixHit {
  // Tokens whose keys, values and state the caller need not compute; less than the prompt's length.
  int64_t tokens = 0;
  // Prefix of the prompt whose pages were there, at least `tokens`.
  int64_t matched = 0;
  // `matched`, when what is cached goes on differently from there, or the whole prompt is there; otherwise 0. A state
  // there pays (boundaries_for()).
  int64_t parting = 0;
  // Prefix of the prompt that was computed before, as far as is remembered, at least `matched`.
  int64_t known = 0;
  // tokens % page_size > 0: the page whose first positions are to be copied into the caller's page of index
  // tokens / page_size. The caller holds it and releases it (PageAllocator::release) when the step that copies has
  // ended.
  int32_t copy_from = -1;
  // The slot with the state after `tokens` tokens; -1 when there are none, or no recurrent layers. The caller holds it
  // and releases it (SlotAllocator::release) when the step that reads it has ended. It must not be written.
  int32_t state = -1;
};

class PrefixCache {
 public:
  PrefixCache(const PrefixCacheOptions& options, PageAllocator& pages, SlotAllocator& slots);
  ~PrefixCache();  // gives everything back
  PrefixCache(const PrefixCache&) = delete;
  PrefixCache& operator=(const PrefixCache&) = delete;

  // What acquire() would find now; copy_from and state are named, but not held. Changes nothing.
  PrefixHit match(const std::string& salt, std::span<const int32_t> prompt) const;

  // The longest hit for a request that begins (or begins anew: then `prompt` is all its tokens). Appends the
  // tokens / page_size full pages to `pages`, which must be empty; the caller holds them, copy_from and state.
  // `counted`: the prompt counts in the statistics, and the hit as evidence of what is worth keeping (not so when a
  // preempted request comes back).
  PrefixHit acquire(const std::string& salt, std::span<const int32_t> prompt, std::vector<int32_t>& pages,
                    bool counted = true);

  // `tokens` are computed and committed: pages[i] holds their keys and values of positions [i, i + 1) x page_size (all
  // of `tokens`; further pages are ignored). The tree keeps what it does not have yet. `states` ascend in position,
  // each in (0, tokens.size()]; a state where there is one already is not taken, nor one that is worth less than all
  // others when there are max_states. The caller may go on writing behind tokens.size(), in the last page too, but not
  // in the slots that were taken (SlotAllocator::writable() tells).
  void insert(const std::string& salt, std::span<const int32_t> tokens, std::span<const int32_t> pages,
              std::span<const BoundaryState> states);

  // Gives up cached pages until `count` are free. True when they are; always so when
  // PageAllocator::free() + only_cached() >= count.
  bool reclaim(int64_t count);
  // Gives up the least valuable state whose slot becomes free by it. False when there is none.
  bool reclaim_state();
  void clear();

  PrefixStats stats() const;

  // Asserts the invariants: linear in what is held.
  void check() const;

 private:
  struct Node;
  struct List;
  struct Walk;

  Walk walk(const std::string& salt, std::span<const int32_t> prompt) const;
  PrefixHit describe(const Walk& walk, const std::string& salt, std::span<const int32_t> prompt) const;
  List& list_of(const Node& node);
  void touch(Node* node);
  Node* split(Node* node, int64_t position);
  Node* extend(Node* node, std::span<const int32_t> tokens, std::span<const int32_t> pages);
  void attach(Node* node, const BoundaryState& state);
  void drop_state(Node* node);
  void drop_worst_state(bool held_too);
  bool drop_last_page(Node* node);
  void remove(Node* leaf);
  void tell_stored(const Node* leaf, std::span<const int32_t> tokens) const;
  void tell_removed(const Node* node) const;
  void remember(uint64_t hash);
  bool remembers(uint64_t hash) const;
  StateRecord* state_before(const Node* node, int64_t& distance) const;

  PrefixCacheOptions options_;
  PageAllocator& pages_;
  SlotAllocator& slots_;
  std::unordered_map<std::string, std::unique_ptr<Node>> roots_;  // by salt; none without children
  std::unique_ptr<List> lists_[2];                                // nodes without a state on or below them; the others
  std::vector<Node*> states_;                                     // nodes with a state
  std::vector<uint64_t> ghosts_;                                  // hashes of prefixes whose last page was given up
  int64_t clock_ = 0;
  PrefixStats stats_;
};

}  // namespace fourfold::engine
