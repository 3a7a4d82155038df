#include "cuda/backend/rank_choice.h"

#include <algorithm>

#include "base/check.h"
#include "cuda/backend/sources.h"

namespace fourfold::cuda {

namespace {

// More are done so many at a time, so that bins and reports need no more memory than this.
constexpr int64_t kDrawnAtOnce = 64;

template <typename T>
Buffer room(const Device& device, int64_t count) {
  return {device, static_cast<uint64_t>(count) * sizeof(T), "choices of tokens by rank"};
}

}  // namespace

RankChoice::RankChoice(const Device& device, const Stream& stream, const std::vector<Kernel>& kernels, int64_t rank,
                       int64_t ranks, int64_t rows, int64_t vocabulary)
    : stream_(stream),
      kernels_(kernels),
      rank_(static_cast<int>(rank)),
      ranks_(static_cast<int>(ranks)),
      splits_(step::rank_splits(static_cast<int>(vocabulary), ranks_)),
      parts_(room<step::SamplePart>(device, rows * ranks * splits_)),
      draws_(room<step::RankDraw>(device, rows)) {
  FF_ASSERT(ranks_ * splits_ <= step::kSampleThreads);
  const int64_t drawn = std::min(rows, kDrawnAtOnce);
  bins_ = room<step::RankBins>(device, drawn * ranks);
  shares_ = room<step::SampleShare>(device, drawn * ranks * splits_);
  taken_ = room<step::RankTaken>(device, drawn * ranks);
  reports_ = room<step::RankReport>(device, drawn * ranks * splits_);
  bins_.fill(stream, 0);
}

std::vector<int64_t> RankChoice::exchanged() const {
  return {splits_ * step::kWordsOfPart, step::kWordsOfBins, step::kWordsOfTaken, splits_ * step::kWordsOfReport};
}

void RankChoice::share(const Buffer& buffer, int64_t rows, int64_t words, const Exchange& exchange) const {
  ops::Tensor all;
  all.data = buffer.as<void>();
  all.dtype = ops::DType::kF32;
  all.rows = rows;
  all.cols = all.stride = ranks_ * words;
  exchange(all.slice_cols(rank_ * words, (rank_ + 1) * words), all);
}

void RankChoice::choose(const step::SampleArgs& args, int64_t first, int64_t columns, const Rows& rows,
                        const Exchange& exchange, Overlap overlap) const {
  const auto count = static_cast<unsigned>(args.rows), splits = static_cast<unsigned>(splits_);
  step::RankSampleArgs mine = {};
  mine.logits = args.logits;
  mine.stride = args.stride;
  mine.first = static_cast<int>(first);
  mine.last = static_cast<int>(first + columns);
  mine.samples = args.samples;
  mine.biases = args.biases;
  mine.banned = args.banned;
  mine.masks = args.masks;
  mine.mask_words = args.mask_words;
  mine.counts = args.counts;
  mine.counts_stride = args.counts_stride;
  mine.drafts = args.drafts;
  mine.rank = rank_;
  mine.ranks = ranks_;
  mine.splits = splits_;
  mine.parts = parts_.as<step::SamplePart>();
  mine.tokens = args.tokens;
  mine.told = args.told;
  mine.draws = draws_.as<step::RankDraw>();
  mine.bins = bins_.as<step::RankBins>();
  mine.shares = shares_.as<step::SampleShare>();
  mine.taken = taken_.as<step::RankTaken>();
  mine.reports = reports_.as<step::RankReport>();
  mine.logprob_tokens = args.logprob_tokens;
  mine.logprobs = args.logprobs;
  launch(stream_, kernels_[kSampleOwnColumns], {splits, count}, overlap, mine);
  share(parts_, args.rows, splits_ * step::kWordsOfPart, exchange);
  launch(stream_, kernels_[kSampleJoin], {count}, overlap, mine);
  for (size_t at = 0; at < rows.drawn.size(); at += kDrawnAtOnce) {
    const size_t some = std::min<size_t>(kDrawnAtOnce, rows.drawn.size() - at);
    draw(mine, {rows.samples, rows.drawn.subspan(at, some), rows.drawn_there + at, {}, nullptr}, exchange, overlap);
  }
  for (size_t at = 0; at < rows.reported.size(); at += kDrawnAtOnce) {
    const size_t some = std::min<size_t>(kDrawnAtOnce, rows.reported.size() - at);
    report(mine, {rows.samples, {}, nullptr, rows.reported.subspan(at, some), rows.reported_there + at}, exchange,
           overlap);
  }
}

void RankChoice::report(step::RankSampleArgs mine, const Rows& rows, const Exchange& exchange, Overlap overlap) const {
  const auto count = static_cast<unsigned>(rows.reported.size());
  mine.reported = rows.reported_there;
  launch(stream_, kernels_[kSampleReport], {static_cast<unsigned>(splits_), count}, overlap, mine);
  share(reports_, count, splits_ * step::kWordsOfReport, exchange);
  launch(stream_, kernels_[kSampleTell], {count}, overlap, mine);
}

void RankChoice::draw(step::RankSampleArgs mine, const Rows& rows, const Exchange& exchange, Overlap overlap) const {
  const auto count = static_cast<int64_t>(rows.drawn.size());
  const Grid each = {static_cast<unsigned>(count)}, all = {static_cast<unsigned>(splits_), each.x};
  const auto some = [&](auto&& wants) {
    return std::any_of(rows.drawn.begin(), rows.drawn.end(),
                       [&](int row) { return wants(rows.samples[static_cast<size_t>(row)]); });
  };
  const bool searched[] = {some([](const step::SampleRow& s) { return s.top_k > 0 && s.top_k < s.defined; }),
                           some([](const step::SampleRow& s) { return s.top_p < 1.0f; })};
  mine.drawn = rows.drawn_there;
  for (mine.by_mass = 0; mine.by_mass < 2; ++mine.by_mass) {
    if (!searched[mine.by_mass]) continue;
    for (mine.shift = 24; mine.shift >= 0; mine.shift -= 8) {
      launch(stream_, kernels_[kSampleBins], all, overlap, mine);
      share(bins_, count, step::kWordsOfBins, exchange);
      launch(stream_, kernels_[kSampleSettle], each, overlap, mine);
    }
  }
  launch(stream_, kernels_[kSampleShares], all, overlap, mine);
  share(shares_, count, splits_ * step::kWordsOfPart, exchange);
  launch(stream_, kernels_[kSampleTake], all, overlap, mine);
  share(taken_, count, step::kWordsOfTaken, exchange);
  launch(stream_, kernels_[kSampleEnd], each, overlap, mine);
}

}  // namespace fourfold::cuda
