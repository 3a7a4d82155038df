// The kernels of the mixers on the host executor, against plain double arithmetic: shapes, sequences and schedules that
// break such kernels.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include "kernels/mixer_runs.h"

namespace fourfold::mixers {
namespace {

using executor::Options;
using executor::schedules;

TEST(DeltaRecurrent, MatchesTokenByTokenForEveryTile) {
  unsigned seed = 0;
  for (const RecurrentKernel& kernel : recurrent_kernels()) {
    const gdn::RecurrentTile& t = kernel.tile;
    const bool large = t.key_dim * t.value_dim > 8000;
    for (const int ratio : large ? std::vector<int>{2} : std::vector<int>{1, 3}) {
      const gdn::DeltaShape shape{large ? 1 : 2, (large ? 1 : 2) * ratio, t.key_dim, t.value_dim};
      // In place, to another slot, a fresh one over a slot of NaN, an unused place, and drafts of which not every
      // state is kept; one of them overwrites the slot that was read.
      std::vector<int> drafts;
      for (int i = 0; i < t.rows; ++i) drafts.push_back(i == 1 ? -1 : i == 2 ? 4 : 8 + i);
      const DeltaProblem p = make_delta(
          shape, t.float32,
          {{1, 7, 0, {0}}, {1, 3, 1, {2}}, {1, 0, 3, {3}}, {0, 0, 0, {}}, {t.rows, 100, 4, drafts}, {t.rows, 0, 5, {}}},
          8 + t.rows, ++seed);
      for (const Options& o : schedules(large ? 1 : 3, seed)) {
        EXPECT_EQ(run_recurrent(kernel, p, o), "") << kernel.name << " ratio " << ratio;
      }
    }
  }
}

TEST(DeltaRecurrent, StatesThatArePutOffHaveTheSameBits) {
  unsigned seed = 90;
  int tiles = 0;
  for (const RecurrentKernel& kernel : recurrent_kernels()) {
    const gdn::RecurrentTile& t = kernel.tile;
    if (!t.updates || t.rows == 1) continue;
    ++tiles;
    const bool large = t.key_dim * t.value_dim > 8000;
    const gdn::DeltaShape shape{1, large ? 1 : 2, t.key_dim, t.value_dim};
    const int most = gdn::most_updates(t.key_dim);
    for (int accepted = 0; accepted <= most; ++accepted) {
      if (large && accepted != 1 && accepted != most) continue;
      // Two sequences, which read one of their own slots, the first behind a fresh one.
      std::vector<int> slots, others;
      for (int i = 0; i <= most; ++i) slots.push_back(i), others.push_back(2 * most + 1 - i);
      const DeltaProblem p =
          make_delta(shape, t.float32, {{most + 1, 100, 1, slots}, {most + 1, 0, 0, others}}, 2 * most + 2, ++seed);
      for (const Options& o : schedules(large ? 1 : 2, seed)) {
        for (const bool made : {false, true}) {
          EXPECT_EQ(run_updates(kernel, p, accepted, made, o), "") << kernel.name << ", accepted " << accepted;
        }
      }
    }
  }
  EXPECT_EQ(tiles, 4);
}

TEST(DeltaChunks, MatchTokenByTokenForEveryTile) {
  unsigned seed = 40;
  for (const ChunkKernel& kernel : chunk_kernels()) {
    const gdn::ChunkTile& t = kernel.tile;
    const bool large = t.value_dim > 100;
    const gdn::DeltaShape shape{large ? 1 : 2, large ? 1 : 4, t.key_dim, t.value_dim};
    // In place over several chunks, a whole one, a fresh one over a slot of NaN, an unused place, fewer than the taps,
    // and one whose state nobody wants.
    const std::vector<SequencePlan> plan = large ? std::vector<SequencePlan>{{t.chunk + 7, 5, 0, {0}}, {3, 0, 3, {1}}}
                                                 : std::vector<SequencePlan>{{2 * t.chunk + 7, 5, 0, {0}},
                                                                             {t.chunk, 9, 1, {2}},
                                                                             {t.chunk - 1, 0, 3, {3}},
                                                                             {0, 0, 0, {}},
                                                                             {2, 4, 4, {4}},
                                                                             {3, 0, 5, {-1}}};
    const DeltaProblem p = make_delta(shape, t.float32, plan, 6, ++seed, true);
    for (const Options& o : schedules(1, seed)) {
      EXPECT_EQ(run_chunks(kernel, p, o, 4e-3, 5e-5), "") << kernel.name;
      if (t.wgmma) {
        EXPECT_EQ(run_chunks(kernel, p, o, 4e-3, 5e-5, nullptr, true), "") << kernel.name << " beside";
      }
    }
  }
}

TEST(DeltaChunks, AreScannedBesidePrepareWhereThatIsFaster) {
  const gdn::ChunkTile tile{128, 128, 64, 64, false, true, false, true};
  const auto kept = [&](int heads, int sequences, int tokens, int sms) {
    return gdn::beside_sms(tile, {16, heads, 128, 128}, (tokens + 63) / 64 * sequences, sequences, tokens, sms);
  };
  EXPECT_EQ(kept(32, 1, 8192, 132), 68);
  EXPECT_EQ(kept(32, 1, 2048, 132), 68);
  EXPECT_EQ(kept(32, 1, 512, 132), 0) << "every SM prepares at the same time";
  EXPECT_EQ(kept(64, 1, 8192, 132), 0) << "four SMs are left";
  EXPECT_EQ(kept(32, 2, 4096, 132), 0);
  EXPECT_EQ(kept(32, 1, 8192, 64), 0);
  EXPECT_EQ(kept(32, 1, 8192, 0), 0) << "kernels do not start early";
  gdn::ChunkTile other = tile;
  other.wgmma = false;
  EXPECT_EQ(gdn::beside_sms(other, {16, 32, 128, 128}, 128, 1, 8192, 132), 0);
}

// bf16: queries and weights are rounded to 2^-9, outputs too. e4m3: queries and weights to 2^-12.
constexpr double kTolerance = 6e-3;

TEST(AttentionDecode, MatchesForEveryTile) {
  unsigned seed = 0;
  for (const DecodeKernel& kernel : decode_kernels()) {
    const attn::DecodeTile& t = kernel.tile;
    const bool large = t.head_dim > 128;
    for (const int group : {large ? 8 : 3, 16}) {
      if (large && group == 16 && t.row_tiles == 1) continue;
      const attn::AttentionShape shape{2 * group, 2, t.head_dim, group != 3};
      const int rows = group == 16 ? 2 : 5;
      // One row far into a context of two splits, a first token, nobody, drafts over a split's end and a page's.
      const AttentionProblem p = make_attention(
          shape, t.rotary_dim, large ? 64 : 16, t.fp8,
          {{1, large ? 150 : 300, 0, {}}, {1, 0, 0, {}}, {0, 0, 0, {}}, {rows, 126, 0, {}}, {rows - 1, 0, 0, {}}},
          ++seed, group != 3);
      for (const Options& o : schedules(1, seed)) {
        EXPECT_EQ(run_decode(kernel, p, o, kTolerance).error, "") << kernel.name << " group " << group;
      }
    }
  }
}

TEST(AttentionNarrow, MatchesForEveryTile) {
  unsigned seed = 40;
  for (const NarrowKernel& kernel : narrow_kernels()) {
    const attn::NarrowTile& t = kernel.tile;
    const bool large = t.head_dim > 128;
    // Two parts of a group with 12 heads, and all of one with 8 or 2.
    for (const int group : {8, 2, 12}) {
      const attn::AttentionShape shape{2 * group, 2, t.head_dim, group == 8};
      const int rows = std::max(1, 8 / group);
      // More blocks than a warp's ring has room for, or more to add up than there are splits, whose warps are teams; a
      // first token, nobody, rows over a split's end and a page's.
      const int longest = large ? (group == 8 && t.fp8 ? 2200 : 255) : group == 12 ? 255 : 8200;
      const AttentionProblem p = make_attention(
          shape, t.rotary_dim, large ? 64 : 16, t.fp8,
          {{rows, longest, 0, {}}, {1, 0, 0, {}}, {0, 0, 0, {}}, {rows, 128 - rows / 2, 0, {}}}, ++seed, group == 8);
      for (const Options& o : schedules(1, seed)) {
        EXPECT_EQ(run_narrow(kernel, p, o, kTolerance).error, "") << kernel.name << " group " << group;
      }
    }
  }
}

TEST(AttentionPrefill, MatchesForEveryTile) {
  unsigned seed = 70;
  for (const PrefillKernel& kernel : prefill_kernels()) {
    const attn::PrefillTile& t = kernel.tile;
    const bool large = t.head_dim > 128;
    const int group = large ? 8 : 3;
    const int kv_heads = large ? 1 : 2;
    const attn::AttentionShape shape{kv_heads * group, kv_heads, t.head_dim, true};
    // Behind a context, a first chunk of more than a block, an unused place, and a single row.
    const AttentionProblem p =
        make_attention(shape, t.rotary_dim, large ? 64 : 16, t.fp8,
                       {{5, 150, 0, {}}, {large ? 19 : 70, 0, 0, {}}, {0, 0, 0, {}}, {1, 64, 0, {}}}, ++seed);
    for (const Options& o : schedules(1, seed)) {
      EXPECT_EQ(run_prefill(kernel, p, o, kTolerance), "") << kernel.name;
      EXPECT_EQ(run_append(kernel, p, o), "") << kernel.name;
    }
  }
}

// Several splits of a CTA: the end of a context among them, a first token, whole shares; rows that meet in two rounds
// where a stage is small.
TEST(AttentionDecode, SplitsOneAfterTheOtherHaveTheSameBits) {
  int spanning = 0, rounds = 0;
  for (const DecodeKernel& kernel : decode_kernels()) {
    const attn::DecodeTile& t = kernel.tile;
    const attn::AttentionShape shape{24, 2, t.head_dim, true};
    if (attn::most_span(t, 700) < 4) continue;
    ++spanning;
    rounds = std::max(rounds, (shape.group() + t.rows_at_once() - 1) / t.rows_at_once());
    const AttentionProblem p =
        make_attention(shape, t.rotary_dim, 64, t.fp8, {{1, 645, 0, {}}, {1, 0, 0, {}}, {1, 255, 0, {}}}, 5, true);
    const CacheRun one = run_decode(kernel, p, {}, kTolerance);
    EXPECT_EQ(one.error, "") << kernel.name;
    for (const int span : {2, 4}) {
      for (const Options& o : schedules(1, 5)) {
        const CacheRun run = run_decode(kernel, p, o, kTolerance, nullptr, span);
        EXPECT_EQ(run.error, "") << kernel.name << ", " << span;
        EXPECT_EQ(run.out, one.out) << kernel.name << ", " << span;
      }
    }
  }
  EXPECT_GE(spanning, 2);
  EXPECT_EQ(rounds, 2);
}

TEST(AttentionDecode, DoesNotDependOnOtherSequences) {
  const DecodeKernel kernel = decode_kernels().back();
  const attn::AttentionShape shape{4, 2, kernel.tile.head_dim, true};
  const AttentionProblem alone = make_attention(shape, 0, 16, false, {{2, 200, 0, {}}}, 7);
  AttentionProblem beside = make_attention(shape, 0, 16, false, {{2, 200, 0, {}}, {1, 700, 0, {}}, {3, 5, 0, {}}}, 7);
  // The same norms, rows and keys as alone.
  beside.q_norm = alone.q_norm;
  beside.k_norm = alone.k_norm;
  for (int r = 0; r < 2; ++r)
    std::copy_n(alone.row_values.begin() + (1 + r) * alone.row_stride, alone.row_stride,
                beside.row_values.begin() + (1 + r) * beside.row_stride);
  for (int i = 0; i < alone.page_table_stride; ++i)
    std::copy_n(alone.cache.begin() + alone.pages[static_cast<size_t>(i)] * alone.page_bytes, alone.page_bytes,
                beside.cache.begin() + beside.pages[static_cast<size_t>(i)] * beside.page_bytes);
  const CacheRun a = run_decode(kernel, alone, {}, 1e9);
  const CacheRun b = run_decode(kernel, beside, {}, 1e9);
  ASSERT_FALSE(a.out.empty());
  ASSERT_FALSE(b.out.empty());
  for (size_t i = 0; i < static_cast<size_t>(2 * alone.out_stride); ++i) {
    ASSERT_EQ(a.out[static_cast<size_t>(alone.out_stride) + i], b.out[static_cast<size_t>(alone.out_stride) + i]);
  }
}

}  // namespace
}  // namespace fourfold::mixers
