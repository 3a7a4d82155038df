// A checksum against accidents: truncated files, flipped bits, blocks that a crash left empty. Not against forgery.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace fourfold {

// Of all bytes and their number. Two texts of one length that differ within a single 8-byte word never have the same.
uint64_t checksum(std::span<const std::byte> bytes);

}  // namespace fourfold
