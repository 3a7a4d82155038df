// A rank of a model whose ranks are cards (docs/ranks.md): the memory that the ranks have for each other, and what they
// do together, as launches on the rank's stream. Over peer memory nothing waits for the host within a step, and
// everything can be recorded. Where peer memory does not work NCCL takes its place, without it the host.
//
// All ranks call the same in the same order. What is not planned for (prepare()) meets the other ranks on the host
// first, because memory that is allocated or freed, and kernels that are loaded, wait for kernels that run; planned
// steps do none of it.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cpu/step/host_stepper.h"
#include "cuda/backend/backend.h"
#include "cuda/backend/memory.h"
#include "cuda/backend/rank_blocks.h"
#include "kernels/comm/reduce_args.h"
#include "ops/tensor.h"
#include "ranks/group.h"

namespace fourfold::cuda {

class CardRanks {
 public:
  CardRanks(std::shared_ptr<Card> card, const CudaOptions& options);
  // The stream has been waited for. Another rank's memory may go with this one, and its context be current afterwards.
  ~CardRanks();
  CardRanks(const CardRanks&) = delete;
  CardRanks& operator=(const CardRanks&) = delete;

  int64_t count() const { return member_->ranks(); }
  int64_t rank() const { return member_->rank(); }
  // "rank 0 of 2, sums over peer memory (words, two-shot from 2 MB)"
  std::string description() const;
  // Others are on this card, or it is not known yet.
  bool shares_card() const { return devices_.empty() || shared_card_; }
  // What it launches can be recorded; otherwise the host takes part in sums.
  bool records() const { return records_; }

  // For a stepper of each rank, which they all make: rank 0's.
  std::shared_ptr<cpu::StepOrder> order();
  // Before what is not planned is launched: all ranks are here.
  void meet();
  // There is memory for sums of rows of so many columns, and ranks have seen that they reach each other's, or that what
  // takes its place works; rank 0 warns of that. Waits for the stream. An Error where a way that was asked for fails.
  // True: it is elsewhere than before, and what was recorded is of no use.
  bool prepare(int64_t columns);
  // Of which column of `out` columns each rank's part begins, and `out`; the first time for these numbers ranks meet.
  const std::vector<int>& columns_of(int64_t part, int64_t out);

  // Whether a sum takes a share of this rank's part, after prepare().
  bool takes_share(int64_t rows, int64_t columns) const {
    const SumWay way = way_of_rows(rows, columns);
    return way == SumWay::kWords || way == SumWay::kTwoShot;
  }
  // Whether one takes what experts left as rows of groups as this rank's part.
  bool takes_groups(int64_t rows, int64_t columns, ops::Residual left) const {
    return way_of_rows(rows, columns) == SumWay::kTwoShot && left == ops::Residual::kForSums && columns % 16 == 0;
  }
  // The least that a sum moves of each column in a card's own memory.
  double column_bytes(int64_t rows, int64_t columns) const;
  // ops::Backend::reduce_add_rms_norm, gather_columns. A share in `args` is of this rank's part; so is `sum`, where
  // there is one, in place of the delta.
  void reduce(const norm::NormArgs& args, const moe::RowSum& sum, int64_t rows, ops::Residual left, Overlap overlap);
  // ops::Backend::all_reduce: whether there is one, and args.out = the ranks' args.delta added up.
  bool reduces_alone(int64_t rows, int64_t columns) const;
  void reduce_alone(const norm::NormArgs& args, int64_t rows, Overlap overlap);
  // Sums of few rows with a router of so many columns behind them: whether there may be some, asked when a model is
  // loaded; whether these are, after prepare(); and the sums, with a CTA for each row.
  bool may_route(int64_t columns, int64_t router_columns) const;
  bool routes(int64_t rows, int64_t columns, int64_t router_columns) const;
  void reduce_routed(const gemm::RoutedArgs& args, int64_t rows, Overlap overlap);
  void gather(const ops::Tensor& part, const ops::Tensor& out, Overlap overlap);
  // Of rows of fp32 on the card; the stream is waited for.
  uint64_t checksum(const ops::Tensor& sum, int64_t rows);
  // The stream was waited for: an Error where a rank did not come.
  void check() const;

 private:
  struct Memory;
  struct Introduction;

  void allocate(int64_t columns);
  // Why ranks do not reach each other's memory, the same on all; empty: they do.
  std::string unreachable();
  // What is wrong with the memory of others as this rank reaches it and they reach this one's; empty: nothing.
  std::string found_wrong();
  // Opens NCCL, or says why not: the same on all ranks.
  std::string open_nccl();
  // Peer memory does not work.
  void fall_back(const std::string& why);
  void go_through_host(const std::string& why);
  std::string card_of(int64_t rank) const;  // "GPU 1 (NVIDIA H200)"
  SumWay way_of(int64_t bytes) const { return replaced_ ? *replaced_ : table_.way(count(), bytes); }
  SumWay way_of_rows(int64_t rows, int64_t columns) const { return way_of(rows * columns * 2); }
  void load_gathered();
  uint64_t gathered_bytes() const;
  void bring(RankBlocks* blocks, DeviceAddress from, uint64_t bytes);
  void reduce_gathered(RankBlocks* blocks, const norm::NormArgs& args, int64_t rows);
  void gather_blocks(RankBlocks* blocks, const ops::Tensor& part, const ops::Tensor& out,
                     const std::vector<int>& first);
  void copy_columns(const void* from, int64_t from_stride, void* to, int64_t to_stride, int64_t words, int64_t rows);
  comm::Peers peers() const;
  unsigned grid(int64_t items, int ctas_of_sm) const;
  bool a_cta_each(SumWay way, int64_t rows, int64_t columns) const;

  std::shared_ptr<Card> card_;
  std::shared_ptr<ranks::Member> member_;
  const int device_;
  const uint64_t exchange_bytes_;
  const SumTable table_;
  const bool over_peers_;  // of the table's ways any
  const std::chrono::nanoseconds patience_;
  std::vector<std::shared_ptr<Memory>> memory_;  // of all ranks, in order; empty before prepare()
  comm::Exchange exchange_ = {};
  bool shared_card_ = false;
  int sms_ = 0;          // of the smallest card
  cuda::Buffer counts_;  // Peers::uses, absent
  PinnedBuffer report_;
  std::map<std::pair<int64_t, int64_t>, std::vector<int>> columns_;
  std::vector<int> devices_;  // of the ranks
  std::vector<std::string> names_;
  std::optional<SumWay> replaced_;           // the table's ways: peer memory does not work
  std::unique_ptr<RankBlocks> nccl_, host_;  // where they are used
  bool records_ = true;
  std::vector<Kernel> kernels_;   // reduce_source()
  std::vector<Kernel> two_shot_;  // where the table has it
  std::vector<Kernel> gathered_;  // with nccl_ or host_
  std::vector<Kernel> checksum_;  // where sums are checked
  cuda::Buffer checksum_place_;
  PinnedBuffer checksum_found_;
};

}  // namespace fourfold::cuda
