#include "cuda/backend/rank_blocks.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <utility>
#include <vector>

#include "base/check.h"
#include "jit/nccl.h"

namespace fourfold::cuda {
namespace {

constexpr std::chrono::minutes kPreparation{3};

class NcclBlocks : public RankBlocks {
 public:
  NcclBlocks(const jit::Nccl& nccl, std::shared_ptr<Card> card, std::shared_ptr<ranks::Member> member,
             const jit::Nccl::Functions::UniqueId& id)
      : nccl_(nccl), card_(std::move(card)), member_(std::move(member)) {
    nccl_.check(nccl_.call().init_rank(&communicator_, static_cast<int>(member_->ranks()), id,
                                       static_cast<int>(member_->rank())),
                "ncclCommInitRank");
  }
  // Graphs that its calls are recorded in have gone: both calls wait for that. So it stays where the card is lost, on
  // which no graph is destroyed. Where a rank did not come to a sum, this one's kernel waits for it until the
  // communicator is given up.
  ~NcclBlocks() override {
    if (communicator_ == nullptr || card_->device.lost()) return;
    member_->group().failed() ? nccl_.call().abort(communicator_) : nccl_.call().destroy(communicator_);
  }

  void all_gather(DeviceAddress from, DeviceAddress to, uint64_t bytes) override {
    nccl_.check(
        nccl_.call().all_gather(device_pointer<const void>(from), device_pointer<void>(to), static_cast<size_t>(bytes),
                                jit::Nccl::Functions::kBytes, communicator_, card_->stream.handle()),
        "ncclAllGather");
    card_->stream.launched("ncclAllGather");
  }
  bool records() const override { return nccl_.records(); }
  std::string name() const override { return "NCCL " + nccl_.version(); }

 private:
  const jit::Nccl& nccl_;
  const std::shared_ptr<Card> card_;
  const std::shared_ptr<ranks::Member> member_;
  void* communicator_ = nullptr;
};

// Page-locked memory that other ranks copy from: it goes with the last of them.
struct Piece {
  std::shared_ptr<Card> card;
  PinnedBuffer memory;
};

// Two pieces a rank in turns: a rank writes into one again when all have come to the meeting between, for which they
// have waited for their streams.
class HostBlocks : public RankBlocks {
 public:
  HostBlocks(std::shared_ptr<Card> card, std::shared_ptr<ranks::Member> member, uint64_t piece)
      : card_(std::move(card)), member_(std::move(member)), piece_(piece) {
    for (auto& of_ranks : pieces_) {
      auto mine = std::make_shared<Piece>();
      mine->card = card_;
      mine->memory = PinnedBuffer(card_->device, piece_, "parts of sums");
      of_ranks = member_->meet_with(std::move(mine), kPreparation);
    }
  }

  void all_gather(DeviceAddress from, DeviceAddress to, uint64_t bytes) override {
    const jit::Driver::Functions& call = card_->device.driver().call();
    for (uint64_t at = 0; at < bytes; at += piece_, turn_ ^= 1) {
      const uint64_t size = std::min(piece_, bytes - at);
      const std::vector<std::shared_ptr<Piece>>& all = pieces_[turn_];
      PinnedBuffer& mine = all[static_cast<size_t>(member_->rank())]->memory;
      card_->device.check(call.copy_to_host(mine.data(), from + at, size, card_->stream.handle()),
                          "copy of a sum's part to the host");
      card_->stream.synchronize();
      member_->meet({});
      member_->part();
      for (size_t rank = 0; rank < all.size(); ++rank) {
        card_->device.check(
            call.copy_to_device(to + rank * bytes + at, all[rank]->memory.data(), size, card_->stream.handle()),
            "copy of a sum's part from the host");
      }
    }
  }
  bool records() const override { return false; }
  std::string name() const override { return "host memory"; }

 private:
  const std::shared_ptr<Card> card_;
  const std::shared_ptr<ranks::Member> member_;
  const uint64_t piece_;
  std::array<std::vector<std::shared_ptr<Piece>>, 2> pieces_;
  size_t turn_ = 0;
};

}  // namespace

std::unique_ptr<RankBlocks> make_nccl_blocks(const std::shared_ptr<Card>& card,
                                             const std::shared_ptr<ranks::Member>& member, std::string* why) {
  struct Hello {
    jit::Nccl::Functions::UniqueId id;
    std::string why;
  };
  Hello hello = {};
  std::string tried;
  const jit::Nccl* nccl = jit::Nccl::find(&tried);
  if (nccl == nullptr) hello.why = fmt::format("no NCCL: {}", tried);
  if (nccl != nullptr && member->rank() == 0) {
    if (const int result = nccl->call().get_unique_id(&hello.id); result != 0) {
      hello.why = fmt::format("ncclGetUniqueId: {}", nccl->call().error_string(result));
    }
  }
  const std::vector<Hello> all = member->meet_with(hello, kPreparation);
  std::unique_ptr<RankBlocks> blocks;
  std::string wrong;
  for (const Hello& each : all) {
    if (wrong.empty()) wrong = each.why;
  }
  if (wrong.empty()) {
    try {
      blocks = std::make_unique<NcclBlocks>(*nccl, card, member, all[0].id);
    } catch (const Error& error) {
      wrong = error.what();
    }
    card->device.make_current();
  }
  for (const std::string& each : member->meet_with(wrong, kPreparation)) {
    if (each.empty()) continue;
    *why = each;
    return nullptr;
  }
  return blocks;
}

std::unique_ptr<RankBlocks> make_host_blocks(const std::shared_ptr<Card>& card,
                                             const std::shared_ptr<ranks::Member>& member, uint64_t piece) {
  return std::make_unique<HostBlocks>(card, member, piece);
}

}  // namespace fourfold::cuda
