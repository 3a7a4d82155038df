#include "model/draft_head.h"

#include <algorithm>
#include <charconv>
#include <cmath>
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

std::optional<ops::MatrixSource> nvfp4_copy_of(const ops::MatrixSource& head) {
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

}  // namespace

std::optional<ops::MatrixSource> draft_head_of(const ops::MatrixSource& head) {
  const Wanted wanted = wanted_head();
  const int64_t rows = wanted.rows ? round_up(std::min(*wanted.rows, head.rows), kShortlistUnit) : head.rows;
  if (rows >= head.rows) return wanted.copy ? nvfp4_copy_of(head) : std::nullopt;
  ops::MatrixSource list = take_rows(head, {0, rows, rows});
  if (std::optional<ops::MatrixSource> copy = wanted.copy ? nvfp4_copy_of(list) : std::nullopt) return copy;
  list.name = head.name + " (for drafts)";
  return list;
}

}  // namespace fourfold::model
