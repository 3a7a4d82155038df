// What subscribers get, byte by byte: the form of vLLM's events.
#include "serve/cache_events.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace fourfold::serve {
namespace {

using Kind = CacheEvent::Kind;

std::string text(const char* word) {  // a short text in MessagePack
  const std::string bytes = word;
  return static_cast<char>(0xA0 + bytes.size()) + bytes;
}

const std::string kNil = "\xC0";

TEST(CacheEvents, AreMapsInAnArray) {
  const std::vector<CacheEvent> events = {
      {Kind::kStored, {0xFFEEDDCCBBAA9988, 5}, std::nullopt, {1, 200, 70'000, 3}},
      {Kind::kStored, {6}, 5, {7, 8}},
      {Kind::kRemoved, {5, 6}, std::nullopt, {}},
      {Kind::kCleared, {}, std::nullopt, {}},
  };
  std::string wanted;
  wanted += "\x93";                                       // an array of three
  wanted += std::string("\xCB\x3F\xF8\0\0\0\0\0\0", 9);   // 1.5
  wanted += "\x94";                                       // four events
  wanted += "\x88" + text("type") + text("BlockStored");  // a map of eight
  wanted += text("block_hashes") + "\x92" + "\xCF\xFF\xEE\xDD\xCC\xBB\xAA\x99\x88" + "\x05";
  wanted += text("parent_block_hash") + kNil;
  wanted += text("token_ids") + "\x94\x01" + "\xCC\xC8" + std::string("\xCE\x00\x01\x11\x70", 5) + "\x03";
  wanted +=
      text("block_size") + "\x02" + text("lora_id") + kNil + text("medium") + text("GPU") + text("lora_name") + kNil;
  wanted += "\x88" + text("type") + text("BlockStored") + text("block_hashes") + "\x91\x06";
  wanted += text("parent_block_hash") + "\x05" + text("token_ids") + "\x92\x07\x08";
  wanted +=
      text("block_size") + "\x02" + text("lora_id") + kNil + text("medium") + text("GPU") + text("lora_name") + kNil;
  wanted += "\x83" + text("type") + text("BlockRemoved") + text("block_hashes") + "\x92\x05\x06" + text("medium") +
            text("GPU");
  wanted += "\x81" + text("type") + text("AllBlocksCleared");
  wanted += std::string(1, '\0');  // the rank
  EXPECT_EQ(encode_cache_events(1.5, events, 2), wanted);
  EXPECT_EQ(encode_cache_events(1.5, {}, 2), wanted.substr(0, 10) + std::string("\x90\0", 2));
}

TEST(CacheEvents, FillMessagesThatSubscribersTake) {
  const CacheEvent removed{Kind::kRemoved, {1}, std::nullopt, {}};
  const CacheEvent stored{Kind::kStored, {1}, std::nullopt, std::vector<int32_t>(300'000, 1)};
  const CacheEvent huge{Kind::kStored, {1}, std::nullopt, std::vector<int32_t>(2'000'000, 1)};
  EXPECT_EQ(cache_events_of_message(std::vector<CacheEvent>(10, removed)), 10u);
  EXPECT_EQ(cache_events_of_message(std::vector<CacheEvent>(5'000, removed)), 1'024u);
  EXPECT_EQ(cache_events_of_message(std::vector<CacheEvent>{stored, stored, removed}), 1u);
  EXPECT_EQ(cache_events_of_message(std::vector<CacheEvent>{removed, stored, stored}), 2u);
  EXPECT_EQ(cache_events_of_message(std::vector<CacheEvent>{huge, removed}), 1u);
}

}  // namespace
}  // namespace fourfold::serve
