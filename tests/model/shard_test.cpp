// Parts of matrices are the numbers of the whole ones, in every format, at any edge; and the parts of a model are all
// of it.
#include "model/shard.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/check.h"
#include "base/random.h"
#include "model/random_weights.h"
#include "model/shared_source.h"
#include "nvfp4/number.h"
#include "small_config.h"

namespace fourfold::model {
namespace {

using ops::Format;
using ops::MatrixSource;

// A matrix with memory of its own: random codes that are numbers.
struct Stored {
  std::vector<uint8_t> data, scales;
  std::vector<float> grid;
  MatrixSource source;

  Stored(Format format, int64_t rows, int64_t columns, int64_t scale_rows = 0, int64_t scale_columns = 0) {
    Random random(7);
    source.name = "m";
    source.format = format;
    source.rows = rows;
    source.columns = columns;
    const int64_t half_bytes = format == Format::kNvfp4 ? 1
                               : format == Format::kFp8 ? 2
                               : format == Format::kF32 ? 8
                                                        : 4;
    data.resize(static_cast<size_t>(rows * columns * half_bytes / 2));
    for (size_t i = 0; i < data.size(); ++i)
      data[i] = static_cast<uint8_t>(random.below(format == Format::kFp8 ? 120 : 250));
    if (format == Format::kBf16 || format == Format::kF16 || format == Format::kF32) {
      // No exponent of infinity: the highest byte of an element.
      const auto step = static_cast<size_t>(half_bytes / 2);
      for (size_t i = step - 1; i < data.size(); i += step) data[i] &= 0x3f;
    }
    source.data = data.data();
    if (format == Format::kNvfp4) {
      scales.resize(static_cast<size_t>(rows * columns / 16));
      for (uint8_t& scale : scales) scale = static_cast<uint8_t>(random.below(0x7f));
      source.block_scales = scales.data();
      source.tensor_scale = 0.25f;
    } else if (format == Format::kFp8) {
      source.scale_rows = scale_rows;
      source.scale_columns = scale_columns;
      grid.resize(
          static_cast<size_t>((rows + scale_rows - 1) / scale_rows * ((columns + scale_columns - 1) / scale_columns)));
      for (float& scale : grid) scale = 1.0f + static_cast<float>(random.below(100));
      source.grid_scales = grid.data();
    }
  }
};

std::vector<float> values(const MatrixSource& source) {
  std::vector<float> all(static_cast<size_t>(source.rows * source.columns));
  for (int64_t r = 0; r < source.rows; ++r) ops::dequantize(source, r, all.data() + r * source.columns);
  return all;
}

void expect_part(const Stored& whole, const Part& rows, const Part& columns) {
  SCOPED_TRACE(testing::Message() << ops::format_name(whole.source.format) << " rows " << rows.begin << "-" << rows.end
                                  << "+" << rows.size << " columns " << columns.begin << "-" << columns.end << "+"
                                  << columns.size);
  const MatrixSource part = take_columns(take_rows(whole.source, rows), columns);
  ASSERT_EQ(part.rows, rows.size);
  ASSERT_EQ(part.columns, columns.size);
  const std::vector<float> from = values(whole.source), to = values(part);
  const MatrixSource view = take_columns(take_rows(whole.source, rows), columns, true);
  EXPECT_EQ(values(view), to);
  const bool narrow = columns.count() == columns.size && columns.size < whole.source.columns;
  EXPECT_EQ(view.row_pitch(), narrow ? whole.source.columns : columns.size);
  if (narrow && rows.count() == rows.size) {
    const auto* at = static_cast<const uint8_t*>(view.data);
    EXPECT_TRUE(at >= whole.data.data() && at < whole.data.data() + whole.data.size()) << "a view is no copy";
  }
  for (int64_t r = 0; r < part.rows; ++r) {
    for (int64_t c = 0; c < part.columns; ++c) {
      const bool inside = r < rows.count() && c < columns.count();
      const float wanted =
          inside ? from[static_cast<size_t>((rows.begin + r) * whole.source.columns + columns.begin + c)] : 0.0f;
      ASSERT_EQ(to[static_cast<size_t>(r * part.columns + c)], wanted) << r << ", " << c;
    }
  }
}

TEST(Shard, PartsOfMatricesAreTheirNumbers) {
  const std::vector<Stored> matrices = [] {
    std::vector<Stored> all;
    all.emplace_back(Format::kNvfp4, 80, 96);
    all.emplace_back(Format::kBf16, 80, 96);
    all.emplace_back(Format::kF16, 80, 96);
    all.emplace_back(Format::kF32, 80, 96);
    all.emplace_back(Format::kFp8, 80, 96, 32, 32);  // blocks; the last row of them is not full
    all.emplace_back(Format::kFp8, 80, 96, 1, 96);   // per channel
    all.emplace_back(Format::kFp8, 80, 96, 80, 96);  // one scale
    return all;
  }();
  const Part all_rows{0, 80, 80}, all_columns{0, 96, 96};
  for (const Stored& matrix : matrices) {
    // stored.source points into the vector's elements, which moved with them
    ASSERT_EQ(matrix.source.data, matrix.data.data());
    for (const Part& rows :
         {all_rows, Part{0, 40, 40}, Part{40, 80, 40}, Part{27, 54, 27}, Part{64, 80, 48}, Part{80, 80, 16}}) {
      for (const Part& columns : {all_columns, Part{0, 48, 48}, Part{48, 96, 48}, Part{64, 96, 64}, Part{96, 96, 16}}) {
        expect_part(matrix, rows, columns);
      }
    }
  }
  // Whole matrices, and rows of them, are no copies.
  const MatrixSource& source = matrices[0].source;
  EXPECT_EQ(take_rows(source, all_rows).data, source.data);
  EXPECT_EQ(take_columns(source, all_columns).data, source.data);
  EXPECT_EQ(take_rows(source, {16, 48, 32}).data, matrices[0].data.data() + 16 * 48);
}

TEST(Shard, ColumnsOfNvfp4AreWholeBlocks) {
  const Stored matrix(Format::kNvfp4, 4, 64);
  try {
    take_columns(matrix.source, {8, 40, 32});
    FAIL();
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "m: a rank's columns are 8 to 40, wanted whole NVFP4 blocks of 16");
  }
}

TEST(Shard, PartsOfARangeAreAllOfIt) {
  for (const int64_t ranks : {1, 2, 3, 4, 7}) {
    for (const int64_t count : {7, 16, 48, 97, 100, 512}) {
      for (const int64_t unit : {1, 16}) {
        int64_t at = 0;
        for (int64_t rank = 0; rank < ranks; ++rank) {
          const Part part = share_of(count, unit, rank, ranks);
          EXPECT_EQ(part.begin, at);
          EXPECT_GT(part.count(), 0) << count << " over " << ranks;
          EXPECT_EQ(part.size, part.count());
          at = part.end;
        }
        EXPECT_EQ(at, count);
      }
      int64_t at = 0;
      for (int64_t rank = 0; rank < ranks; ++rank) {
        const Part part = width_of(count, rank, ranks, {});
        EXPECT_EQ(part.begin, at);
        EXPECT_EQ(part.size, width_of(count, 0, ranks, {}).size);
        EXPECT_TRUE(ranks == 1 || part.size % 16 == 0);
        at = part.end;
      }
      EXPECT_EQ(at, count);
    }
  }
  EXPECT_EQ(heads_of(8, 3, 4).begin, 6);
  EXPECT_EQ(heads_of(8, 3, 4).size, 2);
  for (int64_t rank = 0; rank < 8; ++rank) {  // two heads on eight ranks
    EXPECT_EQ(heads_of(2, rank, 8).begin, rank / 4);
    EXPECT_EQ(heads_of(2, rank, 8).size, 1);
  }
}

// Blocks of FP8 scales are cut into whole units of 64 columns, which a GPU's kernels want, wherever the edges lie.
TEST(Shard, ScalesOfBlocksAreCutWhereKernelsTakeThem) {
  for (const int64_t width : {512, 768, 800, 416, 96}) {
    const Stored down(Format::kFp8, 128, width, 128, 128);
    const std::vector<float> whole = values(down.source);
    for (const int64_t ranks : {2, 3, 4, 6, 8}) {
      int64_t at = 0;
      for (int64_t rank = 0; rank < ranks; ++rank) {
        const Part part = width_of(width, rank, ranks, down.source);
        EXPECT_EQ(part.begin, at);
        at = part.end;
        const MatrixSource taken = take_columns(down.source, part);
        if (width > 128) {
          EXPECT_TRUE(taken.scale_columns >= taken.columns || taken.scale_columns % 64 == 0)
              << width << " on " << ranks << ": " << taken.scale_columns;
        }
        const std::vector<float> found = values(taken);
        for (int64_t r = 0; r < taken.rows; ++r) {
          for (int64_t c = 0; c < part.count(); ++c) {
            ASSERT_EQ(found[static_cast<size_t>(r * taken.columns + c)],
                      whole[static_cast<size_t>(r * width + part.begin + c)]);
          }
        }
      }
      EXPECT_EQ(at, width);
    }
  }
  const Stored channels(Format::kFp8, 128, 512, 1, 512);
  EXPECT_EQ(width_of(512, 0, 3, channels.source).size, 176);
}

TEST(Shard, WhatDoesNotDivideIsNamed) {
  const auto message = [](const ModelConfig& config, int64_t ranks, bool by_expert = false) {
    try {
      check_shard(config, ranks, by_expert);
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  const ModelConfig moe = small_config(false), dense = small_config(true);
  EXPECT_EQ(message(moe, 2), "");
  EXPECT_EQ(message(moe, 3), "--tensor-parallel-size 3: it does not divide the 4 attention heads");
  EXPECT_EQ(message(moe, 4), "--tensor-parallel-size 4: it does not divide the 6 value heads of the delta net");
  EXPECT_EQ(message(moe, 65), "--tensor-parallel-size 65: wanted 1 to 64 ranks");
  EXPECT_EQ(message(dense, 2, true), "--enable-expert-parallel: the model has no experts to share out");
  ModelConfig odd = moe;
  odd.kv_heads = 4;
  odd.heads = 12;
  EXPECT_EQ(message(odd, 6),
            "--tensor-parallel-size 6: wanted a number that divides the 4 key and value heads, or a multiple of them");
  odd = moe;
  odd.experts = 1;
  EXPECT_EQ(message(odd, 2, true), "--enable-expert-parallel: 1 experts for 2 ranks, wanted one each at least");
}

// Counts what is asked of it.
class CountingSource final : public WeightSource {
 public:
  explicit CountingSource(std::unique_ptr<WeightSource> source) : source_(std::move(source)) {}
  const ModelConfig& config() const override { return source_->config(); }
  ops::MatrixSource matrix(std::string_view module, int64_t rows, int64_t columns) override {
    ++matrices;
    return source_->matrix(module, rows, columns);
  }
  std::vector<float> vector(std::string_view name, int64_t count) override {
    ++vectors;
    return source_->vector(name, count);
  }
  void release(const ops::MatrixSource& matrix) override {
    ++released;
    source_->release(matrix);
  }
  void finish() override { ++finished; }
  int matrices = 0, vectors = 0, released = 0, finished = 0;

 private:
  std::unique_ptr<WeightSource> source_;
};

TEST(SharedSource, EachMatrixIsAskedForOnceAndReleasedByTheLast) {
  CountingSource source(make_random_weights(small_config(true), 5));
  SharedSource shared(source, 3);
  std::vector<std::unique_ptr<WeightSource>> readers;
  for (int64_t rank = 0; rank < 3; ++rank) readers.push_back(shared.reader(rank));
  std::vector<ops::MatrixSource> taken;
  for (const auto& reader : readers) taken.push_back(reader->matrix("embed_tokens", 97, 64));
  for (const auto& reader : readers) EXPECT_EQ(reader->vector("norm", 64).size(), 64u);
  EXPECT_EQ(source.matrices, 1);
  EXPECT_EQ(source.vectors, 1);
  EXPECT_EQ(taken[0].data, taken[2].data);
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(source.released, 0);
    readers[i]->release(taken[i]);
  }
  EXPECT_EQ(source.released, 1);
  for (const auto& reader : readers) {
    EXPECT_EQ(source.finished, 0);
    reader->finish();
  }
  EXPECT_EQ(source.finished, 1);
}

// A rank that runs ahead waits for the others, and not for one that has failed.
TEST(SharedSource, ARankAheadWaits) {
  CountingSource source(make_random_weights(small_config(true), 5));
  SharedSource shared(source, 2, 0);
  const auto ahead = shared.reader(0), behind = shared.reader(1);
  ahead->release(ahead->matrix("embed_tokens", 97, 64));
  const auto next = [&] { ahead->release(ahead->matrix("lm_head", 97, 64)); };
  std::thread waiting(next);
  behind->release(behind->matrix("embed_tokens", 97, 64));
  waiting.join();
  EXPECT_EQ(source.matrices, 2);
  std::string cause;
  waiting = std::thread([&] {
    try {
      ahead->matrix("mtp.fc", 64, 128);
    } catch (const Error& error) {
      cause = error.what();
    }
  });
  shared.stop();
  waiting.join();
  EXPECT_EQ(cause, "loading stopped: another rank has failed");
  EXPECT_EQ(source.matrices, 2);
}

}  // namespace
}  // namespace fourfold::model
