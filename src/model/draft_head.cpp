#include "model/draft_head.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/env.h"
#include "base/threads.h"
#include "nvfp4/quantize.h"

namespace fourfold::model {
namespace {

constexpr int64_t kBlockRows = 64;  // that a thread takes at a time

struct Copy {
  std::vector<uint8_t> codes, scales;
};

float largest_of(std::span<const float> row) {
  float largest = 0;
  for (const float x : row) largest = std::fabs(x) > largest || std::isnan(x) ? std::fabs(x) : largest;
  return largest;
}

}  // namespace

std::optional<ops::MatrixSource> draft_head_of(const ops::MatrixSource& head) {
  if (const auto wanted = env("FOURFOLD_DRAFT_HEAD")) {
    if (*wanted == "stored") return std::nullopt;
    if (*wanted != "nvfp4") fail("FOURFOLD_DRAFT_HEAD is '{}', wanted nvfp4 or stored", *wanted);
  }
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
  ThreadPool pool(0);
  const auto for_rows = [&](auto each) {
    pool.parallel_for(head.rows, kBlockRows, [&](int64_t begin, int64_t end) {
      std::vector<float> row(columns);
      for (int64_t r = begin; r < end; ++r) {
        ops::dequantize(head, r, row.data());
        each(r, row);
      }
    });
  };
  std::vector<float> largest(static_cast<size_t>(head.rows));
  for_rows([&](int64_t r, std::span<const float> row) { largest[static_cast<size_t>(r)] = largest_of(row); });
  const float all = largest_of(largest);
  if (!std::isfinite(all)) return std::nullopt;
  copy.tensor_scale = nvfp4::tensor_scale_for(all);

  auto memory = std::make_shared<Copy>();
  memory->codes.resize(static_cast<size_t>(head.rows) * columns / 2);
  memory->scales.resize(static_cast<size_t>(head.rows) * columns / nvfp4::kBlock);
  for_rows([&](int64_t r, std::span<const float> row) {
    const auto at = static_cast<size_t>(r);
    nvfp4::quantize_row(row, copy.tensor_scale, std::span(memory->codes).subspan(at * columns / 2, columns / 2),
                        std::span(memory->scales).subspan(at * columns / nvfp4::kBlock, columns / nvfp4::kBlock));
  });
  copy.data = memory->codes.data();
  copy.block_scales = memory->scales.data();
  copy.owner = std::move(memory);
  return copy;
}

}  // namespace fourfold::model
