#include "engine/prefix_cache.h"

#include <algorithm>
#include <bit>

#include "base/check.h"
#include "base/random.h"

namespace fourfold::engine {
namespace {

// The hash of a sequence of tokens can be taken back token by token, so that a prefix's is at hand when its last page
// is given up. It serves the statistics only; equal hashes of different prefixes would count a few tokens wrongly.
constexpr uint64_t kMultiplier = 0x9e3779b97f4a7c15;

constexpr uint64_t inverse(uint64_t odd) {
  uint64_t x = odd;  // right in its last three bits; each round doubles them
  for (int i = 0; i < 6; ++i) x *= 2 - odd * x;
  return x;
}
constexpr uint64_t kInverse = inverse(kMultiplier);
static_assert(kMultiplier * kInverse == 1);

uint64_t hash_on(uint64_t hash, int32_t token) { return (hash + static_cast<uint64_t>(token) + 1) * kMultiplier; }
uint64_t hash_back(uint64_t hash, int32_t token) { return hash * kInverse - static_cast<uint64_t>(token) - 1; }

uint64_t hash_on(uint64_t hash, std::span<const int32_t> tokens) {
  for (const int32_t token : tokens) hash = hash_on(hash, token);
  return hash;
}

uint64_t hash_of_salt(const std::string& salt) {
  uint64_t hash = 0x6a09e667f3bcc908;
  for (const char c : salt) hash = Random(hash ^ static_cast<unsigned char>(c)).next();
  return hash;
}

}  // namespace

struct PrefixCache::Node {
  Node* parent = nullptr;
  Node *newer = nullptr, *older = nullptr;  // in its list
  int64_t begin = 0;
  std::vector<int32_t> tokens;                  // of positions [begin, end()); only a root has none
  std::vector<int32_t> pages;                   // from page begin / page_size to that of the last position
  std::vector<std::unique_ptr<Node>> children;  // ascending in their first token
  const std::string* salt = nullptr;            // of a root: its key
  uint64_t hash = 0;                            // of the salt and all tokens in [0, end())
  int32_t slot = -1;                            // the state after the last token
  int64_t states = 0;                           // on this node and below it
  size_t index = 0;                             // in states_, where slot >= 0
  bool answer_ends = false;                     // an answer's last token is this node's; its state may be gone
  StateRecord record;

  int64_t end() const { return begin + static_cast<int64_t>(tokens.size()); }
  bool is_root() const { return parent == nullptr; }

  auto place_of(int32_t token) {
    return std::lower_bound(children.begin(), children.end(), token,
                            [](const auto& child, int32_t t) { return child->tokens.front() < t; });
  }
  Node* child(int32_t token) {
    const auto place = place_of(token);
    return place != children.end() && (*place)->tokens.front() == token ? place->get() : nullptr;
  }
};

// Most recently used first. A node always comes before those below it, so the last one is a leaf (or has leaves in the
// list of nodes without states only).
struct PrefixCache::List {
  Node* newest = nullptr;
  Node* oldest = nullptr;

  void push_newest(Node* node) {
    node->newer = nullptr;
    node->older = newest;
    (newest != nullptr ? newest->newer : oldest) = node;
    newest = node;
  }
  void insert_before(Node* node, Node* older) {
    node->older = older;
    node->newer = older->newer;
    (older->newer != nullptr ? older->newer->older : newest) = node;
    older->newer = node;
  }
  void erase(Node* node) {
    (node->newer != nullptr ? node->newer->older : newest) = node->older;
    (node->older != nullptr ? node->older->newer : oldest) = node->newer;
    node->newer = node->older = nullptr;
  }
};

// How far the tree goes along with a prompt.
struct PrefixCache::Walk {
  Node* node = nullptr;      // the last one that shares a token with the prompt; or the root; null: unknown salt
  int64_t matched = 0;       // tokens
  Node* state = nullptr;     // the last one that ends before the prompt's last token and has a state
  bool through_end = false;  // an answer ends behind `state`
  bool goes_on = false;      // what is cached goes on from `matched`
};

PrefixCache::PrefixCache(const PrefixCacheOptions& options, PageAllocator& pages, SlotAllocator& slots)
    : options_(options), pages_(pages), slots_(slots) {
  FF_ASSERT(options.max_states >= 0);
  lists_[0] = std::make_unique<List>();
  lists_[1] = std::make_unique<List>();
  states_.reserve(static_cast<size_t>(options.max_states) + 1);
  ghosts_.resize(std::bit_ceil(static_cast<uint64_t>(std::max<int64_t>(8 * pages.total(), 4096))));
}

PrefixCache::~PrefixCache() { clear(); }

PrefixCache::List& PrefixCache::list_of(const Node& node) { return *lists_[node.states > 0 ? 1 : 0]; }

PrefixCache::Walk PrefixCache::walk(const std::string& salt, std::span<const int32_t> prompt) const {
  Walk walk;
  const auto root = roots_.find(salt);
  if (root == roots_.end()) return walk;
  walk.node = root->second.get();
  const int64_t length = static_cast<int64_t>(prompt.size());
  while (walk.matched < length) {
    Node* next = walk.node->child(prompt[static_cast<size_t>(walk.matched)]);
    if (next == nullptr) {
      walk.goes_on = !walk.node->children.empty();
      return walk;
    }
    const auto rest = prompt.subspan(static_cast<size_t>(walk.matched));
    const auto ends = std::mismatch(next->tokens.begin(), next->tokens.end(), rest.begin(), rest.end());
    walk.node = next;
    walk.matched += ends.first - next->tokens.begin();
    if (ends.first != next->tokens.end()) break;
    if (next->slot >= 0 && walk.matched < length) {
      walk.state = next;
      walk.through_end = false;
    } else {
      walk.through_end = walk.through_end || next->answer_ends;
    }
  }
  walk.goes_on = walk.matched < walk.node->end() || !walk.node->children.empty();
  return walk;
}

PrefixHit PrefixCache::describe(const Walk& walk, const std::string& salt, std::span<const int32_t> prompt) const {
  PrefixHit hit;
  const int64_t length = static_cast<int64_t>(prompt.size());
  const int64_t page_size = pages_.page_size();
  hit.matched = walk.matched;
  hit.parting = walk.goes_on || walk.matched == length ? walk.matched : 0;

  const Node* node = walk.state;
  if (options_.recurrent) {
    if (node != nullptr) {
      hit.tokens = node->end();
      hit.state = node->slot;
    }
  } else {
    node = walk.node;
    hit.tokens = std::max<int64_t>(std::min(walk.matched, length - 1), 0);
    while (node != nullptr && node->begin >= hit.tokens && !node->is_root()) node = node->parent;
  }
  if (hit.tokens % page_size > 0) {
    hit.copy_from = node->pages[static_cast<size_t>(hit.tokens / page_size - node->begin / page_size)];
  }

  hit.known = hit.matched;
  uint64_t hash = hash_of_salt(salt);
  for (int64_t position = 0; position < length; ++position) {
    hash = hash_on(hash, prompt[static_cast<size_t>(position)]);
    const int64_t end = position + 1;
    if (end > hit.matched && end % page_size == 0 && remembers(hash)) hit.known = end;
  }
  return hit;
}

PrefixHit PrefixCache::match(const std::string& salt, std::span<const int32_t> prompt) const {
  return describe(walk(salt, prompt), salt, prompt);
}

PrefixHit PrefixCache::acquire(const std::string& salt, std::span<const int32_t> prompt, std::vector<int32_t>& pages,
                               bool counted) {
  FF_ASSERT(pages.empty());
  ++clock_;
  const Walk found = walk(salt, prompt);
  const PrefixHit hit = describe(found, salt, prompt);
  if (counted) {
    const int64_t most = std::max<int64_t>(static_cast<int64_t>(prompt.size()) - 1, 0);
    const int64_t matched = std::min(hit.matched, most);
    stats_.prompt_tokens += static_cast<int64_t>(prompt.size());
    stats_.hit_tokens += hit.tokens;
    stats_.missed_no_state += matched - hit.tokens;
    stats_.missed_evicted += std::min(hit.known, most) - matched;
  }
  if (hit.tokens == 0) return hit;

  Node* node = options_.recurrent ? found.state : found.node;
  // Each node on the way up gives the full pages whose last position is its own.
  const int64_t page_size = pages_.page_size();
  int64_t full = hit.tokens / page_size;
  pages.resize(static_cast<size_t>(full), -1);
  for (const Node* n = node; !n->is_root(); n = n->parent) {
    const int64_t first = n->begin / page_size;
    for (; full > first; --full) pages[static_cast<size_t>(full - 1)] = n->pages[static_cast<size_t>(full - 1 - first)];
  }
  for (const int32_t page : pages) pages_.share(page);
  if (hit.copy_from >= 0) pages_.hold(hit.copy_from);
  if (hit.state >= 0) slots_.share(hit.state);

  if (counted && hit.state >= 0) {
    record_hit(node->record, clock_,
               habit_shown(node->record, static_cast<int64_t>(prompt.size()), found.matched, found.goes_on,
                           found.through_end));
    for (Node* n = node->parent; n != nullptr; n = n->parent) {
      if (n->slot >= 0) record_pass(n->record, clock_);
    }
  } else if (hit.state >= 0 && node->record.kind == BoundaryKind::kPaused) {
    ++node->record.passes;  // it has served its purpose
  }
  touch(node);
  return hit;
}

void PrefixCache::insert(const std::string& salt, std::span<const int32_t> tokens, std::span<const int32_t> pages,
                         std::span<const BoundaryState> states) {
  const int64_t length = static_cast<int64_t>(tokens.size());
  FF_ASSERT(static_cast<int64_t>(pages.size()) >= pages_.pages_for(length));
  if (length == 0 || (options_.recurrent && options_.max_states == 0)) return;
  ++clock_;
  const auto entry = roots_.try_emplace(salt).first;
  std::unique_ptr<Node>& root = entry->second;
  if (root == nullptr) {
    root = std::make_unique<Node>();
    root->salt = &entry->first;
    root->hash = hash_of_salt(salt);
  }
  const Walk found = walk(salt, tokens);
  Node* node = found.node;
  if (found.matched < length) {
    if (found.matched < node->end()) node = split(node, found.matched);
    node = extend(node, tokens, pages);
  }
  Node* const deepest = node;
  touch(deepest);

  // The path is walked once more, with the states.
  node = root.get();
  int64_t last = 0;
  FF_ASSERT(options_.recurrent || states.empty());
  for (const BoundaryState& state : states) {
    FF_ASSERT(state.position > last && state.position <= length);
    last = state.position;
    while (node->end() < state.position) node = node->child(tokens[static_cast<size_t>(node->end())]);
    if (state.position < node->end()) node = split(node, state.position);
    attach(node, state);
  }
  if (!states.empty()) touch(deepest);  // attach() has moved parts of the path
  while (static_cast<int64_t>(states_.size()) > options_.max_states) drop_worst_state(true);
}

// Moves the node and those above it to the front of their lists, which keeps each before those below it.
void PrefixCache::touch(Node* node) {
  for (; !node->is_root(); node = node->parent) {
    List& list = list_of(*node);
    list.erase(node);
    list.push_newest(node);
  }
}

// Cuts a node in two; the upper one, which is returned, ends at `position`.
PrefixCache::Node* PrefixCache::split(Node* node, int64_t position) {
  FF_ASSERT(position > node->begin && position < node->end());
  const int64_t page_size = pages_.page_size();
  const auto cut = node->tokens.begin() + (position - node->begin);
  const int64_t first = node->begin / page_size;
  const int64_t upper_pages = pages_.pages_for(position) - first;

  std::unique_ptr<Node>& place = *node->parent->place_of(node->tokens.front());
  FF_ASSERT(place.get() == node);
  auto upper = std::make_unique<Node>();
  upper->parent = node->parent;
  upper->begin = node->begin;
  upper->tokens.assign(node->tokens.begin(), cut);
  upper->pages.assign(node->pages.begin(), node->pages.begin() + upper_pages);
  upper->hash = hash_on(node->parent->hash, upper->tokens);
  upper->states = node->states;

  node->tokens.erase(node->tokens.begin(), cut);
  node->begin = position;
  // A page that both have a part of has two places now.
  node->pages.erase(node->pages.begin(), node->pages.begin() + (position / page_size - first));
  if (position % page_size > 0) pages_.cache(upper->pages.back(), position % page_size);

  list_of(*node).insert_before(upper.get(), node);
  Node* result = upper.get();
  node->parent = result;
  result->children.push_back(std::move(place));
  place = std::move(upper);
  return result;
}

// Adds the tokens behind `node` as a leaf below it.
PrefixCache::Node* PrefixCache::extend(Node* node, std::span<const int32_t> tokens, std::span<const int32_t> pages) {
  const int64_t page_size = pages_.page_size();
  const int64_t length = static_cast<int64_t>(tokens.size());
  const int64_t begin = node->end();
  const int64_t first = begin / page_size;
  auto leaf = std::make_unique<Node>();
  leaf->parent = node;
  leaf->begin = begin;
  leaf->tokens.assign(tokens.begin() + begin, tokens.end());
  leaf->pages.assign(pages.begin() + first, pages.begin() + pages_.pages_for(length));
  leaf->hash = hash_on(node->hash, leaf->tokens);
  for (int64_t page = first; page < pages_.pages_for(length); ++page) {
    pages_.cache(pages[static_cast<size_t>(page)], std::min(page_size, length - page * page_size));
  }
  // The leaf's first page holds the end of the nodes above it as well: theirs is not needed any more.
  if (begin % page_size > 0) {
    const int32_t page = leaf->pages.front();
    const int32_t old = node->pages.back();
    for (Node* n = node; page != old && !n->is_root() && n->end() > first * page_size && n->pages.back() == old;
         n = n->parent) {
      pages_.cache(page, n->end() - first * page_size);
      n->pages.back() = page;
      pages_.uncache(old);
    }
  }
  Node* result = leaf.get();
  node->children.insert(node->place_of(result->tokens.front()), std::move(leaf));
  list_of(*result).push_newest(result);
  tell_stored(result, tokens);
  return result;
}

// Of the blocks that end within the leaf, which is the last part of `tokens`.
void PrefixCache::tell_stored(const Node* leaf, std::span<const int32_t> tokens) const {
  const int64_t page_size = pages_.page_size();
  const int64_t first = leaf->begin / page_size * page_size, last = leaf->end() / page_size * page_size;
  const Node* root = leaf;
  while (!root->is_root()) root = root->parent;
  if (options_.observer == nullptr || last <= first || !root->salt->empty()) return;
  uint64_t hash = leaf->parent->hash;
  for (int64_t i = leaf->begin; i > first; --i) hash = hash_back(hash, tokens[static_cast<size_t>(i - 1)]);
  const std::optional<uint64_t> parent = first > 0 ? std::optional(hash) : std::nullopt;
  std::vector<uint64_t> blocks;
  for (int64_t i = first; i < last; ++i) {
    hash = hash_on(hash, tokens[static_cast<size_t>(i)]);
    if ((i + 1) % page_size == 0) blocks.push_back(hash);
  }
  options_.observer->stored(parent, blocks,
                            tokens.subspan(static_cast<size_t>(first), static_cast<size_t>(last - first)));
}

// Of the block that ends with the node.
void PrefixCache::tell_removed(const Node* node) const {
  const Node* root = node;
  while (!root->is_root()) root = root->parent;
  if (options_.observer != nullptr && root->salt->empty()) options_.observer->removed(node->hash);
}

StateRecord* PrefixCache::state_before(const Node* node, int64_t& distance) const {
  for (Node* n = node->parent; n != nullptr; n = n->parent) {
    if (n->slot < 0) continue;
    distance = node->end() - n->end();
    return &n->record;
  }
  distance = node->end();
  return nullptr;
}

void PrefixCache::attach(Node* node, const BoundaryState& state) {
  if (state.kind == BoundaryKind::kEnd) node->answer_ends = true;
  if (node->slot >= 0) {
    // Computed twice: as good as used.
    node->record.kind = std::min(node->record.kind, state.kind);
    node->record.used = node->record.touched = clock_;
    return;
  }
  int64_t distance = 0;
  slots_.share(state.slot);
  node->slot = state.slot;
  node->record = make_record(state.kind, clock_, state_before(node, distance));
  node->index = states_.size();
  states_.push_back(node);
  for (Node* n = node; n != nullptr; n = n->parent) {
    if (n->states++ == 0 && !n->is_root()) {
      lists_[0]->erase(n);
      lists_[1]->push_newest(n);
    }
  }
}

void PrefixCache::drop_state(Node* node) {
  slots_.release(node->slot);
  node->slot = -1;
  states_[node->index] = states_.back();
  states_[node->index]->index = node->index;
  states_.pop_back();
  for (Node* n = node; n != nullptr; n = n->parent) {
    if (--n->states == 0 && !n->is_root()) {
      lists_[1]->erase(n);
      lists_[0]->push_newest(n);
    }
  }
}

void PrefixCache::drop_worst_state(bool held_too) {
  Node* worst = nullptr;
  StateRank lowest;
  for (Node* node : states_) {
    if (!held_too && !slots_.writable(node->slot)) continue;
    StatePlace place;
    place.before = state_before(node, place.distance);
    place.position = node->end();
    place.has_below = node->states > 1;
    const StateRank r = rank(node->record, place);
    if (worst != nullptr && r >= lowest) continue;
    worst = node;
    lowest = r;
  }
  if (worst != nullptr) drop_state(worst);
}

bool PrefixCache::reclaim_state() {
  const size_t before = states_.size();
  drop_worst_state(false);
  return states_.size() < before;
}

// Gives a leaf's last page up, and what depends on it. True when the page became free.
bool PrefixCache::drop_last_page(Node* node) {
  FF_ASSERT(node->children.empty() && !node->pages.empty());
  if (node->slot >= 0) drop_state(node);
  node->answer_ends = false;
  const int64_t page_size = pages_.page_size();
  const int64_t page_begin = (node->end() - 1) / page_size * page_size;
  if (node->end() % page_size == 0) {
    remember(node->hash);
    tell_removed(node);
  }
  while (node->end() > std::max(node->begin, page_begin)) {
    node->hash = hash_back(node->hash, node->tokens.back());
    node->tokens.pop_back();
  }
  const bool freed = pages_.uncache(node->pages.back());
  node->pages.pop_back();
  if (node->tokens.empty()) remove(node);
  return freed;
}

void PrefixCache::remove(Node* leaf) {
  list_of(*leaf).erase(leaf);
  Node* parent = leaf->parent;
  auto& siblings = parent->children;
  const auto place = std::find_if(siblings.begin(), siblings.end(), [&](const auto& c) { return c.get() == leaf; });
  FF_ASSERT(place != siblings.end());
  siblings.erase(place);  // with the leaf
  if (parent->is_root() && siblings.empty()) roots_.erase(roots_.find(*parent->salt));
}

bool PrefixCache::reclaim(int64_t count) {
  // Leaves whose last page becomes free when the tree gives it up; those that no hit can use any more first.
  const auto next_victim = [&]() -> Node* {
    for (const auto& list : lists_) {
      for (Node* node = list->oldest; node != nullptr; node = node->newer) {
        if (node->children.empty() && pages_.holders(node->pages.back()) == 0) return node;
      }
    }
    return nullptr;
  };
  while (pages_.free() < count && pages_.only_cached() > 0) {
    Node* node = next_victim();
    // Pages that nobody needs lie behind others that somebody does: the tree forgets those, too.
    if (node == nullptr) node = lists_[0]->oldest != nullptr ? lists_[0]->oldest : lists_[1]->oldest;
    drop_last_page(node);
  }
  return pages_.free() >= count;
}

void PrefixCache::clear() {
  while (Node* node = lists_[0]->oldest != nullptr ? lists_[0]->oldest : lists_[1]->oldest) {
    if (node->slot >= 0) drop_state(node);
    for (const int32_t page : node->pages) pages_.uncache(page);
    remove(node);
  }
  if (options_.observer != nullptr) options_.observer->cleared();
}

void PrefixCache::remember(uint64_t hash) { ghosts_[(hash >> 20) & (ghosts_.size() - 1)] = hash; }

bool PrefixCache::remembers(uint64_t hash) const { return ghosts_[(hash >> 20) & (ghosts_.size() - 1)] == hash; }

PrefixStats PrefixCache::stats() const {
  PrefixStats stats = stats_;
  stats.pages = pages_.cached();
  stats.states = static_cast<int64_t>(states_.size());
  stats.bytes = stats.pages * options_.page_bytes + stats.states * options_.state_bytes;
  return stats;
}

void PrefixCache::check() const {
  const int64_t page_size = pages_.page_size();
  std::unordered_map<const Node*, int64_t> order;  // in its list
  for (const auto& list : lists_) {
    int64_t at = 0;
    const Node* newer = nullptr;
    for (const Node* node = list->newest; node != nullptr; newer = node, node = node->older) {
      FF_ASSERT(node->newer == newer);
      FF_ASSERT((node->states > 0) == (list == lists_[1]));
      order[node] = at++;
    }
    FF_ASSERT(list->oldest == newer);
  }
  std::vector<int64_t> places(static_cast<size_t>(pages_.total()));
  size_t nodes = 0, states = 0;
  std::vector<const Node*> pending;
  for (const auto& [salt, root] : roots_) {
    FF_ASSERT(root->is_root() && root->tokens.empty() && root->pages.empty() && root->slot < 0);
    FF_ASSERT(!root->children.empty() && root->hash == hash_of_salt(salt));
    pending.push_back(root.get());
  }
  while (!pending.empty()) {
    const Node* node = pending.back();
    pending.pop_back();
    int64_t below = node->slot >= 0 ? 1 : 0;
    int32_t previous = -1;
    for (const auto& child : node->children) {
      FF_ASSERT(child->parent == node && child->begin == node->end() && !child->tokens.empty());
      FF_ASSERT(child->tokens.front() > previous);
      previous = child->tokens.front();
      below += child->states;
      pending.push_back(child.get());
    }
    FF_ASSERT(below == node->states);
    if (node->is_root()) continue;
    ++nodes;
    FF_ASSERT(node->hash == hash_on(node->parent->hash, node->tokens));
    FF_ASSERT(order.contains(node));
    if (!node->parent->is_root() && (node->parent->states > 0) == (node->states > 0)) {
      FF_ASSERT(order.at(node->parent) < order.at(node));
    }
    FF_ASSERT(static_cast<int64_t>(node->pages.size()) == pages_.pages_for(node->end()) - node->begin / page_size);
    for (const int32_t page : node->pages) ++places.at(static_cast<size_t>(page));
    if (node->slot >= 0) {
      FF_ASSERT(options_.recurrent && states_.at(node->index) == node && slots_.holders(node->slot) > 0);
      ++states;
    }
  }
  FF_ASSERT(nodes == order.size() && states == states_.size());
  FF_ASSERT(static_cast<int64_t>(states) <= options_.max_states);
  for (int64_t page = 0; page < pages_.total(); ++page) {
    FF_ASSERT(pages_.places(static_cast<int32_t>(page)) == places[static_cast<size_t>(page)]);
  }
}

}  // namespace fourfold::engine
