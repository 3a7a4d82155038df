// What the prefix cache tells of its blocks: a router that believes it knows what is cached.
#include <gtest/gtest.h>

#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "base/property.h"
#include "base/random.h"
#include "engine/prefix_cache.h"

namespace fourfold::engine {
namespace {

using Tokens = std::vector<int32_t>;

class Router final : public CacheObserver {
 public:
  explicit Router(int64_t page_size) : page_size_(static_cast<size_t>(page_size)) {}

  void stored(std::optional<uint64_t> parent, std::span<const uint64_t> blocks,
              std::span<const int32_t> tokens) override {
    ASSERT_TRUE(tokens.size() == blocks.size() * page_size_);
    for (const uint64_t block : blocks) {
      ASSERT_TRUE(!parent || names_.contains(*parent));
      const Place place{parent, Tokens(tokens.begin(), tokens.begin() + static_cast<std::ptrdiff_t>(page_size_))};
      ASSERT_TRUE(places_.emplace(place, block).second);
      ASSERT_TRUE(names_.emplace(block, place).second);
      parent = block;
      tokens = tokens.subspan(page_size_);
    }
  }
  void removed(uint64_t block) override {
    const auto name = names_.find(block);
    ASSERT_TRUE(name != names_.end());
    places_.erase(name->second);
    names_.erase(name);
  }
  void cleared() override {
    places_.clear();
    names_.clear();
  }

  // Blocks of the prompt's beginning that are cached.
  int64_t cached(const Tokens& prompt) const {
    std::optional<uint64_t> parent;
    int64_t count = 0;
    for (size_t i = 0; i + page_size_ <= prompt.size(); i += page_size_) {
      const auto begin = prompt.begin() + static_cast<std::ptrdiff_t>(i);
      const auto found = places_.find({parent, Tokens(begin, begin + static_cast<std::ptrdiff_t>(page_size_))});
      if (found == places_.end()) break;
      parent = found->second;
      ++count;
    }
    return count;
  }
  size_t size() const { return places_.size(); }

 private:
  using Place = std::pair<std::optional<uint64_t>, Tokens>;
  const size_t page_size_;
  std::map<Place, uint64_t> places_;
  std::map<uint64_t, Place> names_;
};

FOURFOLD_PROPERTY(CacheObserver, KnowsWhatIsCached) {
  const int64_t page_size = 1 + static_cast<int64_t>(random.below(5));
  PageAllocator pages(60, page_size);
  SlotAllocator slots(0);
  const auto router = std::make_shared<Router>(page_size);
  PrefixCache cache({false, 0, 1, 1, router}, pages, slots);
  std::vector<Tokens> sequences;
  for (int step = 0; step < 60; ++step) {
    if (random.below(8) == 0) cache.clear();
    Tokens tokens;
    if (!sequences.empty()) tokens = sequences[random.below(sequences.size())];
    tokens.resize(random.below(tokens.size() + 1));
    for (uint64_t i = 1 + random.below(20); i > 0; --i) tokens.push_back(static_cast<int32_t>(random.below(3)));
    const auto length = static_cast<int64_t>(tokens.size());
    cache.reclaim(pages.pages_for(length));
    std::vector<int32_t> own;
    if (!pages.grow(own, length)) continue;
    // What others may not share is told to nobody.
    const bool salted = random.below(3) == 0;
    cache.insert(salted ? "salt" : "", tokens, own, {});
    pages.release(own);
    if (!salted) sequences.push_back(tokens);
    cache.check();
    for (const Tokens& sequence : sequences) {
      ASSERT_TRUE(router->cached(sequence) == cache.match("", sequence).matched / page_size);
    }
  }
  cache.reclaim(pages.total());
  ASSERT_TRUE(router->size() == 0u);
}

}  // namespace
}  // namespace fourfold::engine
