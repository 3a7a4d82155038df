// Choosing tokens from logits of which each rank has columns of its own, without bringing them together
// (kernels/step/sample_ranks.cuh): launches, and what ranks tell each other between them.
#pragma once

#include <functional>
#include <span>
#include <vector>

#include "cuda/device/device.h"
#include "kernels/step/sample_ranks_args.h"
#include "ops/tensor.h"

namespace fourfold::cuda {

class RankChoice {
 public:
  // Brings the other ranks' columns of `all`, rows of words; `part`: this rank's, where they are in `all`.
  using Exchange = std::function<void(const ops::Tensor& part, const ops::Tensor& all)>;

  // `kernels`: of rank_sample_source(); `rows` of a step's logits at most, `vocabulary` columns on all ranks together.
  RankChoice(const Device& device, const Stream& stream, const std::vector<Kernel>& kernels, int64_t rank,
             int64_t ranks, int64_t rows, int64_t vocabulary);

  // How many words ranks exchange, of one rank's columns of a row, each time another kind of things.
  std::vector<int64_t> exchanged() const;

  // What a step's rows ask for: the host's copy of SampleArgs::samples, which of them have a temperature, and which
  // ask for log-probabilities, here and on the card.
  struct Rows {
    std::span<const step::SampleRow> samples;
    std::span<const int> drawn;
    const int* drawn_there;
    std::span<const int> reported;
    const int* reported_there;
  };
  // As sample_tokens: args.tokens and log-probabilities of rows of whose logits this rank has
  // `columns` from `first` on; these may be adjusted in place. Rows that ask for log-probabilities have no biases,
  // banned tokens, masks or penalties.
  void choose(const step::SampleArgs& args, int64_t first, int64_t columns, const Rows& rows, const Exchange& exchange,
              Overlap overlap) const;

 private:
  void draw(step::RankSampleArgs mine, const Rows& rows, const Exchange& exchange, Overlap overlap) const;
  void report(step::RankSampleArgs mine, const Rows& rows, const Exchange& exchange, Overlap overlap) const;
  void share(const Buffer& buffer, int64_t rows, int64_t words, const Exchange& exchange) const;

  const Stream& stream_;
  const std::vector<Kernel>& kernels_;
  const int rank_, ranks_, splits_;
  Buffer parts_;    // [rows][ranks][splits] of step::SamplePart
  Buffer draws_;    // [rows] of step::RankDraw
  Buffer bins_;     // [kDrawnAtOnce][ranks] of step::RankBins
  Buffer shares_;   // [kDrawnAtOnce][ranks][splits] of step::SampleShare
  Buffer taken_;    // [kDrawnAtOnce][ranks] of step::RankTaken
  Buffer reports_;  // [kDrawnAtOnce][ranks][splits] of step::RankReport
};

}  // namespace fourfold::cuda
