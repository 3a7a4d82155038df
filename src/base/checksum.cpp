#include "base/checksum.h"

#include <bit>
#include <cstring>

namespace fourfold {
namespace {

constexpr size_t kLanes = 4;  // independent chains of multiplications, so that memory is the limit
constexpr uint64_t kFactor = 0x9e3779b97f4a7c15ull;

// One to one in either argument: what differs in one word goes on to differ.
uint64_t mixed(uint64_t hash, uint64_t word) { return std::rotl((hash ^ word) * kFactor, 29); }

}  // namespace

uint64_t checksum(std::span<const std::byte> bytes) {
  uint64_t lanes[kLanes] = {1, 2, 3, 4};
  const std::byte* data = bytes.data();
  size_t left = bytes.size();
  for (; left >= 8 * kLanes; left -= 8 * kLanes, data += 8 * kLanes) {
    uint64_t words[kLanes];
    std::memcpy(words, data, sizeof words);
    for (size_t lane = 0; lane < kLanes; ++lane) lanes[lane] = mixed(lanes[lane], words[lane]);
  }
  uint64_t hash = bytes.size();
  for (const uint64_t lane : lanes) hash = mixed(hash, lane);
  while (left > 0) {
    const size_t count = left < 8 ? left : 8;
    uint64_t word = 0;
    std::memcpy(&word, data, count);
    hash = mixed(hash, word);
    data += count;
    left -= count;
  }
  return hash ^ hash >> 32;
}

}  // namespace fourfold
