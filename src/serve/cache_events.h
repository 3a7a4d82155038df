// What the prefix cache holds, told to routers over ZeroMQ in the form of vLLM (0.24 and later, whose events are maps),
// so that they send requests to the replica that has their prompt's beginning.
//
// A message has three parts: the topic, a sequence number of 8 bytes (the highest first), and an array in MessagePack:
// [seconds since 1970, events, 0], the last being the data-parallel rank. Whoever connects to the replay endpoint and
// sends a sequence number gets the messages from there on that are still held, and one without topic and events, with
// the number -1, behind them.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/engine.h"

namespace fourfold::serve {

struct CacheEventsOptions {
  std::string endpoint = "tcp://*:5557";
  std::string replay_endpoint;  // empty: none
  std::string topic;
  int64_t buffer_steps = 10'000;      // messages that are held for replay
  int64_t high_water_mark = 100'000;  // messages that wait for a slow subscriber; more are lost for it
  int64_t max_queue_size = 100'000;   // events that wait to be sent; more are lost, and a clearing is told instead

  // vLLM's --kv-events-config, JSON. An Error names the field.
  static CacheEventsOptions read(std::string_view text, bool& enabled);
};

struct CacheEvent {
  enum class Kind { kStored, kRemoved, kCleared } kind = Kind::kCleared;
  std::vector<uint64_t> blocks;    // their hashes; those that are stored follow each other
  std::optional<uint64_t> parent;  // kStored: the hash of the block before them
  std::vector<int32_t> tokens;     // kStored: of all of the blocks
};

// The third part of a message. `block_size`: tokens of a block.
std::string encode_cache_events(double seconds, std::span<const CacheEvent> events, int64_t block_size);
// How many of the first events go into one message: subscribers take so many at most, and so many bytes. At least one.
size_t cache_events_of_message(std::span<const CacheEvent> events);

// Opens the endpoints: an Error where that cannot be done. `block_size`: tokens of a page.
std::shared_ptr<engine::CacheObserver> publish_cache_events(const CacheEventsOptions& options, int64_t block_size);

}  // namespace fourfold::serve
