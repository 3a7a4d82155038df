#include "model/shard.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/math.h"
#include "nvfp4/layout.h"

namespace fourfold::model {
namespace {

using ops::Format;
using ops::MatrixSource;

// What a slice owns beside what it is a slice of.
struct Owned {
  std::shared_ptr<const void> original;
  std::vector<uint32_t> data;  // aligned for all elements
  std::vector<uint8_t> block_scales;
  std::vector<float> grid;
};

std::shared_ptr<Owned> owner_of(const MatrixSource& source) {
  auto owned = std::make_shared<Owned>();
  owned->original = source.owner;
  return owned;
}

// Bytes of `columns` elements of a row.
int64_t element_bytes(Format format, int64_t columns) {
  switch (format) {
    case Format::kF32:
      return columns * 4;
    case Format::kBf16:
    case Format::kF16:
      return columns * 2;
    case Format::kFp8:
      return columns;
    case Format::kNvfp4:
      return columns / 2;
  }
  return 0;
}

// Copies `rows` rows of `bytes` bytes between matrices of other widths; what is not written stays zero.
void copy_rows(const void* from, int64_t from_stride, int64_t rows, int64_t bytes, void* to, int64_t to_stride) {
  for (int64_t r = 0; r < rows; ++r) {
    std::memcpy(static_cast<char*>(to) + r * to_stride, static_cast<const char*>(from) + r * from_stride,
                static_cast<size_t>(bytes));
  }
}

// The scales of FP8 elements that begin at (row, column) of another matrix, in the largest cells that fit both.
void move_grid(const MatrixSource& source, int64_t row, int64_t column, MatrixSource& slice, Owned& owned) {
  // What begins behind the end has padding alone.
  const bool one_row = source.scale_rows >= source.rows || row >= source.rows;
  const bool one_column = source.scale_columns >= source.columns || column >= source.columns;
  slice.scale_rows = one_row ? slice.rows : std::gcd(source.scale_rows, row);
  slice.scale_columns = one_column ? slice.columns : std::gcd(source.scale_columns, column);
  const int64_t rows = ceil_div(slice.rows, slice.scale_rows);
  const int64_t columns = ceil_div(slice.columns, slice.scale_columns);
  const int64_t from_rows = ceil_div(source.rows, source.scale_rows);
  const int64_t from_columns = ceil_div(source.columns, source.scale_columns);
  if (source.grid_scales == nullptr) return;  // shapes alone
  owned.grid.resize(static_cast<size_t>(rows * columns));
  for (int64_t r = 0; r < rows; ++r) {
    // Padding has the scales of the last cells: zero times anything usable is zero.
    const int64_t from_row = std::min((row + r * slice.scale_rows) / source.scale_rows, from_rows - 1);
    for (int64_t c = 0; c < columns; ++c) {
      const int64_t from_column = std::min((column + c * slice.scale_columns) / source.scale_columns, from_columns - 1);
      owned.grid[static_cast<size_t>(r * columns + c)] = source.grid_scales[from_row * from_columns + from_column];
    }
  }
  slice.grid_scales = owned.grid.data();
}

// rows x columns of `source` from (row, column) on, in a matrix of its own of at least that size.
MatrixSource copy_of(const MatrixSource& source, int64_t row, int64_t rows, int64_t column, int64_t columns,
                     int64_t to_rows, int64_t to_columns) {
  MatrixSource slice = source;
  slice.rows = to_rows;
  slice.columns = to_columns;
  auto owned = owner_of(source);
  if (source.data == nullptr) {  // shapes alone
    if (source.format == Format::kFp8) move_grid(source, row, column, slice, *owned);
    return slice;
  }
  const int64_t from_stride = element_bytes(source.format, source.columns);
  const int64_t to_stride = element_bytes(source.format, to_columns);
  owned->data.resize(static_cast<size_t>(ceil_div(to_rows * to_stride, 4)));
  copy_rows(static_cast<const char*>(source.data) + row * from_stride + element_bytes(source.format, column),
            from_stride, rows, element_bytes(source.format, columns), owned->data.data(), to_stride);
  slice.data = owned->data.data();
  if (source.format == Format::kNvfp4) {
    const int64_t from_blocks = source.columns / nvfp4::kBlock, to_blocks = to_columns / nvfp4::kBlock;
    owned->block_scales.resize(static_cast<size_t>(to_rows * to_blocks));
    copy_rows(source.block_scales + row * from_blocks + column / nvfp4::kBlock, from_blocks, rows,
              columns / nvfp4::kBlock, owned->block_scales.data(), to_blocks);
    slice.block_scales = owned->block_scales.data();
  } else if (source.format == Format::kFp8) {
    move_grid(source, row, column, slice, *owned);
  }
  slice.owner = std::move(owned);
  return slice;
}

}  // namespace

void check_shard(const ModelConfig& config, int64_t ranks, bool by_expert) {
  if (ranks < 1 || ranks > ranks::kMostRanks) {
    fail("--tensor-parallel-size {}: wanted 1 to {} ranks", ranks, ranks::kMostRanks);
  }
  if (by_expert && config.experts == 0) fail("--enable-expert-parallel: the model has no experts to share out");
  if (ranks == 1) return;
  const auto divides = [&](const char* what, int64_t heads) {
    if (heads % ranks != 0) fail("--tensor-parallel-size {}: it does not divide the {} {}", ranks, heads, what);
  };
  // Fewer key heads than ranks are held by several.
  const auto divides_or_repeats = [&](const char* what, int64_t heads) {
    if (ranks % heads == 0 || heads % ranks == 0) return;
    fail("--tensor-parallel-size {}: wanted a number that divides the {} {}, or a multiple of them", ranks, heads,
         what);
  };
  if (config.attention_layers() > 0 || config.mtp_layers > 0) {
    divides("attention heads", config.heads);
    divides_or_repeats("key and value heads", config.kv_heads);
  }
  if (config.delta_net_layers() > 0) {
    divides("value heads of the delta net", config.linear_value_heads);
    divides_or_repeats("key heads of the delta net", config.linear_key_heads);
  }
  if (by_expert && config.experts < ranks) {
    fail("--enable-expert-parallel: {} experts for {} ranks, wanted one each at least", config.experts, ranks);
  }
  if (config.vocabulary < ranks)
    fail("--tensor-parallel-size {}: more than the vocabulary of {}", ranks, config.vocabulary);
}

Part share_of(int64_t count, int64_t unit, int64_t rank, int64_t ranks) {
  const int64_t units = ceil_div(count, unit);
  const bool whole = units >= ranks;
  const auto at = [&](int64_t r) { return whole ? std::min(count, units * r / ranks * unit) : count * r / ranks; };
  return {at(rank), at(rank + 1), at(rank + 1) - at(rank)};
}

Part heads_of(int64_t heads, int64_t rank, int64_t ranks) {
  if (heads == 0 || heads >= ranks) return share_of(heads, 1, rank, ranks);
  const int64_t head = rank * heads / ranks;
  return {head, head + 1, 1};
}

Part width_of(int64_t width, int64_t rank, int64_t ranks, const MatrixSource& down) {
  constexpr int64_t kCell = 64;
  if (ranks == 1) return {0, width, round_up(width, nvfp4::kBlock)};
  const bool cells = down.format == Format::kFp8 && down.scale_columns < down.columns;
  const int64_t unit = cells ? std::max<int64_t>(std::gcd(kCell, down.scale_columns), nvfp4::kBlock) : nvfp4::kBlock;
  const int64_t size = round_up(ceil_div(width, ranks), unit);
  return {std::min(rank * size, width), std::min((rank + 1) * size, width), size};
}

MatrixSource take_rows(const MatrixSource& source, const Part& part) {
  FF_ASSERT(part.begin >= 0 && part.begin <= part.end && part.end <= source.rows && part.count() <= part.size);
  if (part.count() == source.rows && part.size == source.rows) return source;
  if (part.count() < part.size) {
    return copy_of(source, part.begin, part.count(), 0, source.columns, part.size, source.columns);
  }
  MatrixSource slice = source;
  slice.rows = part.size;
  if (source.data != nullptr) {
    slice.data = static_cast<const char*>(source.data) + part.begin * element_bytes(source.format, source.columns);
  }
  if (source.format == Format::kNvfp4 && source.data != nullptr) {
    slice.block_scales = source.block_scales + part.begin * (source.columns / nvfp4::kBlock);
  } else if (source.format == Format::kFp8) {
    auto owned = owner_of(source);
    move_grid(source, part.begin, 0, slice, *owned);
    slice.owner = std::move(owned);
  }
  return slice;
}

MatrixSource take_columns(const MatrixSource& source, const Part& part, bool view) {
  FF_ASSERT(part.begin >= 0 && part.begin <= part.end && part.end <= source.columns && part.count() <= part.size);
  if (part.count() == source.columns && part.size == source.columns) return source;
  if (source.format == Format::kNvfp4 &&
      (part.begin % nvfp4::kBlock != 0 || part.end % nvfp4::kBlock != 0 || part.size % nvfp4::kBlock != 0)) {
    fail("{}: a rank's columns are {} to {}, wanted whole NVFP4 blocks of {}", printable(source.name), part.begin,
         part.end, nvfp4::kBlock);
  }
  if (!view || part.count() < part.size || source.data == nullptr) {
    return copy_of(source, 0, source.rows, part.begin, part.count(), source.rows, part.size);
  }
  MatrixSource slice = source;
  slice.columns = part.size;
  slice.pitch = source.columns;
  slice.first_column = part.begin;
  slice.data = static_cast<const char*>(source.data) + element_bytes(source.format, part.begin);
  if (source.format == Format::kNvfp4) {
    slice.block_scales = source.block_scales + part.begin / nvfp4::kBlock;
  } else if (source.format == Format::kFp8) {
    auto owned = owner_of(source);
    move_grid(source, 0, part.begin, slice, *owned);
    slice.owner = std::move(owned);
  }
  return slice;
}

}  // namespace fourfold::model
