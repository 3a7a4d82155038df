#include "model/draft_head.h"

#include <algorithm>
#include <bit>
#include <charconv>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/env.h"
#include "base/math.h"
#include "base/threads.h"
#include "model/shard.h"
#include "nvfp4/number.h"
#include "nvfp4/quantize.h"

namespace fourfold::model {
namespace {

constexpr int64_t kBlockRows = 64;  // that a thread takes at a time

struct Copy {
  std::unique_ptr<uint8_t[]> codes, scales;
};

// The largest of these numbers' bits without the sign: those of the largest magnitude, or of a NaN where there is one.
template <typename Bits>
Bits largest_bits(const void* numbers, int64_t count) {
  constexpr auto kMagnitude = static_cast<Bits>(std::numeric_limits<Bits>::max());  // Bits is signed
  Bits largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    Bits bits;
    std::memcpy(&bits, static_cast<const char*>(numbers) + i * static_cast<int64_t>(sizeof(Bits)), sizeof(Bits));
    largest = std::max(largest, static_cast<Bits>(bits & kMagnitude));
  }
  return largest;
}

// The largest magnitude of rows [begin, end), or a NaN.
float largest_of(const ops::MatrixSource& m, int64_t begin, int64_t end) {
  const int64_t first = begin * m.columns, count = (end - begin) * m.columns;
  const auto* data = static_cast<const char*>(m.data);
  switch (m.format) {
    case ops::Format::kBf16:
      return nvfp4::bf16_to_float(static_cast<uint16_t>(largest_bits<int16_t>(data + first * 2, count)));
    case ops::Format::kF16:
      return nvfp4::f16_to_float(static_cast<uint16_t>(largest_bits<int16_t>(data + first * 2, count)));
    default:
      return std::bit_cast<float>(largest_bits<int32_t>(data + first * 4, count));
  }
}

struct Wanted {
  bool copy = true;  // in NVFP4
  std::optional<int64_t> rows;
};

Wanted wanted_head() {
  const auto text = env("FOURFOLD_DRAFT_HEAD");
  if (!text || *text == "nvfp4") return {};
  const size_t colon = text->find(':');
  const std::string format = text->substr(0, colon);
  Wanted wanted = {format != "stored", std::nullopt};
  bool good = format == "stored" || format == "nvfp4";
  if (colon != std::string::npos) {
    int64_t rows = 0;
    const char* const end = text->data() + text->size();
    const auto [stop, error] = std::from_chars(text->data() + colon + 1, end, rows);
    good = good && error == std::errc() && stop == end && rows > 0;
    wanted.rows = rows;
  }
  if (!good)
    fail("FOURFOLD_DRAFT_HEAD is '{}', wanted nvfp4 or stored, or one with a number of tokens: nvfp4:131072", *text);
  return wanted;
}

// Whole rows of blocks of scales.
constexpr int64_t kShortlistUnit = 128;

std::optional<ops::MatrixSource> nvfp4_copy_of(const ops::MatrixSource& head, int threads) {
  const bool wide =
      head.format == ops::Format::kF32 || head.format == ops::Format::kBf16 || head.format == ops::Format::kF16;
  if (!wide || head.columns % nvfp4::kBlock != 0) return std::nullopt;
  ops::MatrixSource copy;
  copy.name = head.name + " (for drafts)";
  copy.format = ops::Format::kNvfp4;
  copy.rows = head.rows;
  copy.columns = head.columns;
  if (head.data == nullptr) return copy;

  const auto columns = static_cast<size_t>(head.columns);
  ThreadPool pool(threads);
  std::vector<float> largest(static_cast<size_t>(ceil_div(head.rows, kBlockRows)));
  pool.parallel_for(head.rows, kBlockRows, [&](int64_t begin, int64_t end) {
    largest[static_cast<size_t>(begin / kBlockRows)] = largest_of(head, begin, end);
  });
  float all = 0;
  for (const float one : largest) {
    if (!std::isfinite(one)) return std::nullopt;
    all = std::max(all, one);
  }
  copy.tensor_scale = nvfp4::tensor_scale_for(all);

  const size_t code_bytes = columns / 2, scale_bytes = columns / nvfp4::kBlock;
  auto memory = std::make_shared<Copy>();
  memory->codes = std::make_unique_for_overwrite<uint8_t[]>(static_cast<size_t>(head.rows) * code_bytes);
  memory->scales = std::make_unique_for_overwrite<uint8_t[]>(static_cast<size_t>(head.rows) * scale_bytes);
  pool.parallel_for(head.rows, kBlockRows, [&](int64_t begin, int64_t end) {
    std::vector<float> row(columns);
    for (int64_t r = begin; r < end; ++r) {
      const auto at = static_cast<size_t>(r);
      ops::dequantize(head, r, row.data());
      nvfp4::quantize_row(row, copy.tensor_scale, std::span(memory->codes.get() + at * code_bytes, code_bytes),
                          std::span(memory->scales.get() + at * scale_bytes, scale_bytes));
    }
  });
  copy.data = memory->codes.get();
  copy.block_scales = memory->scales.get();
  copy.owner = std::move(memory);
  return copy;
}

}  // namespace

std::optional<ops::MatrixSource> draft_head_of(const ops::MatrixSource& head, int threads) {
  const Wanted wanted = wanted_head();
  const int64_t rows = wanted.rows ? round_up(std::min(*wanted.rows, head.rows), kShortlistUnit) : head.rows;
  if (rows >= head.rows) return wanted.copy ? nvfp4_copy_of(head, threads) : std::nullopt;
  ops::MatrixSource list = take_rows(head, {0, rows, rows});
  if (std::optional<ops::MatrixSource> copy = wanted.copy ? nvfp4_copy_of(list, threads) : std::nullopt) return copy;
  list.name = head.name + " (for drafts)";
  return list;
}

}  // namespace fourfold::model
