// Token counts for which operations are planned. A plan is for a number of tokens; a server sees all of them, so it has
// the plans of a few counts, each of which stands for itself and everything down to the next smaller one.
#pragma once

#include <cstdint>
#include <iterator>
#include <span>

namespace fourfold::plan {

inline constexpr int64_t kTokenBuckets[] = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384};

inline std::span<const int64_t> token_buckets() { return kTokenBuckets; }

// The smallest bucket that holds that many tokens; the largest of all where none does.
inline int64_t bucket_of(int64_t tokens) {
  for (const int64_t bucket : kTokenBuckets) {
    if (tokens <= bucket) return bucket;
  }
  return kTokenBuckets[std::size(kTokenBuckets) - 1];
}

}  // namespace fourfold::plan
