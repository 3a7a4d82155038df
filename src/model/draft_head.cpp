#include "model/draft_head.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/env.h"
#include "base/math.h"
#include "base/threads.h"
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

}  // namespace

std::optional<ops::MatrixSource> draft_head_of(const ops::MatrixSource& head, int threads) {
  const std::string kept = env("FOURFOLD_DRAFT_HEAD").value_or("nvfp4");
  if (kept != "nvfp4" && kept != "stored") fail("FOURFOLD_DRAFT_HEAD is '{}', wanted nvfp4 or stored", kept);
  if (kept == "stored") return std::nullopt;
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

}  // namespace fourfold::model
