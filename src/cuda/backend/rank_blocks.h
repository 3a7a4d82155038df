// Blocks of bytes from every rank to every rank where cards do not reach each other's memory: by NCCL, or through host
// memory.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "cuda/backend/memory.h"
#include "ranks/group.h"

namespace fourfold::cuda {

class RankBlocks {
 public:
  virtual ~RankBlocks() = default;
  RankBlocks() = default;
  RankBlocks(const RankBlocks&) = delete;
  RankBlocks& operator=(const RankBlocks&) = delete;

  // On every rank, with the same number of bytes, a multiple of 16: to[r] = rank r's `from`, on the rank's stream, in
  // front of what is put there next. What stands before it on the stream has ended first.
  virtual void all_gather(DeviceAddress from, DeviceAddress to, uint64_t bytes) = 0;
  // It can be recorded; otherwise the host takes part.
  virtual bool records() const = 0;
  // "NCCL 2.27.3", "host memory"
  virtual std::string name() const = 0;
};

// On every rank of a group at once; ranks meet. Null on all where a rank has none or cannot join; *why is then the
// first one's cause.
std::unique_ptr<RankBlocks> make_nccl_blocks(const std::shared_ptr<Card>& card,
                                             const std::shared_ptr<ranks::Member>& member, std::string* why);
// `piece`: bytes that go at once.
std::unique_ptr<RankBlocks> make_host_blocks(const std::shared_ptr<Card>& card,
                                             const std::shared_ptr<ranks::Member>& member, uint64_t piece);

}  // namespace fourfold::cuda
