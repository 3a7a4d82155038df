// Attention of the fast instruction sets: tasks over (sequence, kv head, tile of tokens), and over splits of the keys
// when there are few tiles.
//
// The softmax of a row runs over splits of kKeySplit keys, each on its own, folded in order into the row's total. Both
// ways of sharing out the work do exactly that, so a token's result is the same to the last bit whether it is decoded
// alone, with others, or prefilled in chunks of any size, on any number of threads.
#include "cpu/attention/attention.h"

#include <algorithm>
#include <atomic>
#include <limits>

#include "base/check.h"
#include "base/math.h"

namespace fourfold::cpu {
namespace {

// Query rows (tokens x heads of one kv head) that a task holds: 64 rows of 256 floats, three times, stay in L2.
constexpr int64_t kTileRows = 64;

// Row state of a tile in one block of memory.
struct Rows {
  float* output;
  float* maximum;
  float* sum;
  static int64_t floats(int64_t rows, int64_t padded_dim) { return rows * (padded_dim + 2); }
  Rows(float* memory, int64_t rows, int64_t padded_dim)
      : output(memory), maximum(memory + rows * padded_dim), sum(maximum + rows) {}
  void clear(int64_t rows, int64_t padded_dim) const {
    std::fill_n(output, rows * padded_dim, 0.0f);
    std::fill_n(maximum, rows, -std::numeric_limits<float>::infinity());
    std::fill_n(sum, rows, 0.0f);
  }
};

constexpr int64_t score_floats_of(int64_t rows, int64_t padded_dim) { return rows * kKeyBlock + padded_dim; }

}  // namespace

void Attention::reserve(const ops::ReserveLimits& limits, const ops::KvCacheShape& shape) {
  // Up to kTileRows heads share a kv head; a model with more grows what is missing in its first step.
  const int64_t padded = round_up(shape.head_dim, 32);
  const int64_t threads = pool_.size();
  const int64_t row_floats = Rows::floats(kTileRows, padded);
  const int64_t tiles = 2 * threads;  // in the split form, at most
  const int64_t splits = ceil_div(std::max<int64_t>(limits.context, 1), kKeySplit);
  const int64_t partial = std::max(std::min(partial_floats_, splits * tiles * row_floats), tiles * row_floats);
  work_.reserve<float>(tiles * (kTileRows * padded + row_floats) +
                       threads * (score_floats_of(kTileRows, padded) + row_floats) + partial);
  tiles_.reserve(static_cast<size_t>(limits.rows * shape.kv_heads));
  last_keys_.resize(static_cast<size_t>(threads));
  for (std::vector<int64_t>& keys : last_keys_) keys.reserve(kTileRows);
}

void Attention::run(const ops::Batch& batch, const ops::AttentionParams& params, const ops::Tensor& q,
                    HostKvCache& cache, int64_t layer, const ops::Tensor& out) {
  FF_ASSERT(cache.type() == ops::DType::kF16);
  FF_ASSERT(out.rows == q.rows && out.cols == params.heads * params.head_dim);
  const AttentionKernels& kernels = kernels_;
  const int64_t dim = params.head_dim;
  const int64_t padded = cache.padded_dim();
  const int64_t group = params.heads / params.kv_heads;
  const int64_t q_stride = params.gated ? 2 * dim : dim;
  const int64_t tile_tokens = std::max<int64_t>(1, kTileRows / group);
  const int64_t max_rows = tile_tokens * group;

  std::vector<Tile>& tiles = tiles_;
  tiles.clear();
  int64_t most_splits = 0;
  for (const ops::Sequence& sequence : batch.sequences) {
    for (int64_t t = 0; t < sequence.count; t += tile_tokens) {
      for (int64_t h = 0; h < params.kv_heads; ++h) {
        tiles.push_back({&sequence, h, t, std::min<int64_t>(tile_tokens, sequence.count - t)});
        most_splits = std::max(most_splits, ceil_div(tiles.back().keys(), kKeySplit));
      }
    }
  }
  // Longest first, so that no long tile is left for the end.
  std::sort(tiles.begin(), tiles.end(), [](const Tile& a, const Tile& b) {
    if (a.keys() != b.keys()) return a.keys() > b.keys();
    return a.sequence != b.sequence ? a.sequence < b.sequence : a.kv_head < b.kv_head;
  });
  const auto count = static_cast<int64_t>(tiles.size());
  const int64_t row_floats = Rows::floats(max_rows, padded);
  const bool by_split = most_splits > 1 && count < 2 * pool_.size();
  const int64_t wave = std::clamp<int64_t>(partial_floats_ / std::max<int64_t>(1, count * row_floats), 1, most_splits);

  // Per tile in the split form, per thread otherwise: queries, totals. Then scores and one split's rows per thread, or
  // the partial results of a wave.
  const int64_t threads = pool_.size();
  const int64_t queries_floats = max_rows * padded;
  const int64_t score_floats = score_floats_of(max_rows, padded);
  const int64_t keepers = by_split ? count : threads;
  float* memory = work_.get<float>(keepers * (queries_floats + row_floats) + threads * (score_floats + row_floats) +
                                   (by_split ? wave * count * row_floats : 0));
  const auto queries_at = [&](int64_t i) { return memory + i * (queries_floats + row_floats); };
  const auto total_at = [&](int64_t i) { return queries_at(i) + queries_floats; };
  float* scores = memory + keepers * (queries_floats + row_floats);
  float* thread_rows = scores + threads * score_floats;
  float* partial = thread_rows + threads * row_floats;

  const auto load_queries = [&](const Tile& tile, float* queries) {
    for (int64_t r = 0; r < tile.tokens * group; ++r) {
      const float* from =
          q.f32(tile.sequence->first + tile.first_token + r / group) + (tile.kv_head * group + r % group) * q_stride;
      float* to = queries + r * padded;
      std::copy_n(from, dim, to);
      std::fill(to + dim, to + padded, 0.0f);
      kernels.scale(to, padded, params.scale, to);
    }
  };
  const int64_t page_size = cache.shape().page_size;
  // Keys of a split of a tile from position `first` on.
  const auto find_keys = [&](const Tile& tile, int64_t split, int64_t first, KeyBlock& to) {
    const int64_t end = std::min(tile.keys(), (split + 1) * kKeySplit);
    to.count = std::clamp<int64_t>(end - first, 0, kKeyBlock);
    for (int64_t j = 0; j < to.count; ++j) {
      const int64_t page = tile.sequence->pages[static_cast<size_t>((first + j) / page_size)];
      to.keys[j] = cache.keys<uint16_t>(layer, page, tile.kv_head) + (first + j) % page_size * padded;
      to.values[j] = to.keys[j] + cache.values_offset();
    }
  };
  // next_tile, next_split: what the thread will probably come to afterwards; null: nothing.
  const auto attend_split = [&](const Tile& tile, const float* queries, int64_t split, const Rows& rows, float* score,
                                const Tile* next_tile, int64_t next_split) {
    const int64_t row_count = tile.tokens * group;
    rows.clear(row_count, padded);
    std::vector<int64_t>& last = last_keys_[static_cast<size_t>(score - scores) / static_cast<size_t>(score_floats)];
    last.resize(static_cast<size_t>(max_rows));
    for (int64_t r = 0; r < row_count; ++r) {
      last[static_cast<size_t>(r)] = tile.sequence->position + tile.first_token + r / group;
    }
    const AttendRows work{row_count, padded, queries, last.data(), rows.output, rows.maximum, rows.sum};
    KeyBlock blocks[2];
    find_keys(tile, split, split * kKeySplit, blocks[0]);
    for (int64_t first = split * kKeySplit, i = 0; blocks[i].count > 0; first += kKeyBlock, i = 1 - i) {
      KeyBlock& next = blocks[1 - i];
      find_keys(tile, split, first + kKeyBlock, next);
      const bool ends = next.count == 0;
      if (ends && next_tile != nullptr) find_keys(*next_tile, next_split, next_split * kKeySplit, next);
      kernels.attend_block(work, first, blocks[i], next, score);
      if (ends) break;
    }
  };
  const auto finish = [&](const Tile& tile, const Rows& total, int64_t begin, int64_t end, float* padded_row) {
    for (int64_t r = begin; r < end; ++r) {
      const int64_t row = tile.sequence->first + tile.first_token + r / group;
      const int64_t head = tile.kv_head * group + r % group;
      kernels.scale(total.output + r * padded, padded, 1.0f / total.sum[r], padded_row);
      float* to = out.f32(row) + head * dim;
      std::copy_n(padded_row, dim, to);
      if (params.gated) kernels.gate(to, q.f32(row) + head * q_stride + dim, dim);
    }
  };
  const auto merge = [&](const Rows& from, const Rows& into, int64_t r) {
    kernels.merge_row(padded, from.output + r * padded, from.maximum[r], from.sum[r], into.output + r * padded,
                      into.maximum + r, into.sum + r);
  };
  last_keys_.resize(static_cast<size_t>(threads));

  if (!by_split) {
    std::atomic<int64_t> next{0};
    auto worker = [&](int thread) {
      float* score = scores + thread * score_floats;
      const Rows rows(thread_rows + thread * row_floats, max_rows, padded);
      const Rows total(total_at(thread), max_rows, padded);
      for (int64_t i = next.fetch_add(1); i < count; i = next.fetch_add(1)) {
        const Tile& tile = tiles[static_cast<size_t>(i)];
        load_queries(tile, queries_at(thread));
        total.clear(tile.tokens * group, padded);
        for (int64_t split = 0; split * kKeySplit < tile.keys(); ++split) {
          const bool more = (split + 1) * kKeySplit < tile.keys();
          attend_split(tile, queries_at(thread), split, rows, score, more ? &tile : nullptr, split + 1);
          for (int64_t r = 0; r < tile.tokens * group; ++r) merge(rows, total, r);
        }
        finish(tile, total, 0, tile.tokens * group, score);
      }
    };
    if (threads == 1 || count * most_splits * max_rows * padded < 20000) {
      worker(0);
    } else {
      pool_.share(worker);
    }
    return;
  }

  for (int64_t i = 0; i < count; ++i) {
    const Tile& tile = tiles[static_cast<size_t>(i)];
    load_queries(tile, queries_at(i));
    Rows(total_at(i), max_rows, padded).clear(tile.tokens * group, padded);
  }
  for (int64_t base = 0; base < most_splits; base += wave) {
    const int64_t splits = std::min(wave, most_splits - base);
    // Ranges, so that a thread reads one stream of pages and knows what comes next.
    pool_.parallel_ranges(count * splits, splits, [&](int thread, int64_t begin, int64_t end) {
      for (int64_t item = begin; item < end; ++item) {
        const int64_t i = item / splits;
        const int64_t split = base + item % splits;
        const Tile& tile = tiles[static_cast<size_t>(i)];
        if (split * kKeySplit >= tile.keys()) continue;
        const bool more = item + 1 < count * splits;
        attend_split(tile, queries_at(i), split, Rows(partial + item * row_floats, max_rows, padded),
                     scores + thread * score_floats, more ? &tiles[static_cast<size_t>((item + 1) / splits)] : nullptr,
                     base + (item + 1) % splits);
      }
    });
    const bool last = base + splits == most_splits;
    pool_.run([&](int thread) {
      float* padded_row = scores + thread * score_floats;
      for (int64_t item = thread; item < count * max_rows; item += threads) {
        const int64_t i = item / max_rows;
        const int64_t r = item % max_rows;
        const Tile& tile = tiles[static_cast<size_t>(i)];
        if (r >= tile.tokens * group) continue;
        const Rows total(total_at(i), max_rows, padded);
        for (int64_t s = 0; s < splits && (base + s) * kKeySplit < tile.keys(); ++s) {
          merge(Rows(partial + (i * splits + s) * row_floats, max_rows, padded), total, r);
        }
        if (last) finish(tile, total, r, r + 1, padded_row);
      }
    });
  }
}

}  // namespace fourfold::cpu
