#include "cpu/gemm/packed.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstring>

#include "base/check.h"
#include "base/math.h"
#include "cpu/memory/stored_matrix.h"

namespace fourfold::cpu::gemm {
namespace {

Kind kind_of(ops::Format format) {
  switch (format) {
    case ops::Format::kF32:
      return Kind::kF32;
    case ops::Format::kBf16:
      return Kind::kBf16;
    case ops::Format::kF16:
      return Kind::kF16;
    case ops::Format::kFp8:
      return Kind::kFp8;
    case ops::Format::kNvfp4:
      return Kind::kNvfp4;
  }
  return Kind::kF32;
}

int64_t columns_in_word(Kind kind) {
  switch (kind) {
    case Kind::kF32:
      return 1;
    case Kind::kBf16:
    case Kind::kF16:
      return 2;
    case Kind::kFp8:
      return 4;
    case Kind::kNvfp4:
      return 8;
  }
  return 1;
}

// Bytes of `columns` elements of a row.
int64_t row_bytes(Kind kind, int64_t columns) {
  switch (kind) {
    case Kind::kF32:
      return columns * 4;
    case Kind::kBf16:
    case Kind::kF16:
      return columns * 2;
    case Kind::kFp8:
      return columns;
    case Kind::kNvfp4:
      return columns / 2;
  }
  return 0;
}

// Nibbles 0 1 2 3 4 5 6 7 of a word to the order 0 2 4 6 1 3 5 7.
uint32_t sort_nibbles(uint32_t w) {
  const auto squeeze = [](uint32_t v) {  // the low nibbles of four bytes to 16 bits
    v &= 0x0f0f0f0fu;
    v = (v | v >> 4) & 0x00ff00ffu;
    return (v | v >> 8) & 0xffffu;
  };
  return squeeze(w) | squeeze(w >> 4) << 16;
}

#if defined(__SSE2__)
__m128i sort_nibbles(__m128i w) {
  const auto squeeze = [](__m128i v) {
    v = _mm_and_si128(v, _mm_set1_epi32(0x0f0f0f0f));
    v = _mm_and_si128(_mm_or_si128(v, _mm_srli_epi32(v, 4)), _mm_set1_epi32(0x00ff00ff));
    return _mm_or_si128(v, _mm_srli_epi32(v, 8));
  };
  return _mm_or_si128(_mm_and_si128(squeeze(w), _mm_set1_epi32(0xffff)),
                      _mm_slli_epi32(squeeze(_mm_srli_epi32(w, 4)), 16));
}

// The low halves of four words, then the high halves.
__m128i split_halves(__m128i w) {
  constexpr int kEvenFirst = 0b11'01'10'00;
  return _mm_shuffle_epi32(_mm_shufflehi_epi16(_mm_shufflelo_epi16(w, kEvenFirst), kEvenFirst), kEvenFirst);
}
#endif

// What is done to words on the way.
enum class Words {
  kPlain,
  kCodes,   // e2m1 codes are sorted
  kHalves,  // the low halves of the words of 16 rows come first, then the high halves
};

// Writes rows (each `bytes` long, `stride` apart) as words [ceil(bytes / 4), 16] with the row in the lane.
template <Words kWords>
void transpose_words(const uint8_t* in, int64_t stride, int64_t rows, int64_t bytes, uint8_t* out) {
  constexpr bool kCodes = kWords == Words::kCodes;
  constexpr bool kHalves = kWords == Words::kHalves;
  constexpr int64_t kHalfBytes = kPanelRows * 2;
  int64_t w = 0;
#if defined(__SSE2__)
  const int64_t step = kCodes ? 8 : 16;
  if (rows == kPanelRows) {
    // A cache line of each row at a time: rows a power of two apart share few cache sets.
    for (; (w + step) * 4 <= bytes; w += step) {
      for (int64_t r = 0; r < kPanelRows; r += 4) {
        const uint8_t* from = in + r * stride + w * 4;
        for (int64_t i = 0; i < step; i += 4) {
          const auto load = [&](int64_t row) {
            const __m128i v = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + row * stride + i * 4));
            return _mm_castsi128_ps(kCodes ? sort_nibbles(v) : v);
          };
          __m128 a = load(0), b = load(1), c = load(2), d = load(3);
          _MM_TRANSPOSE4_PS(a, b, c, d);
          const auto store = [&](int64_t word, __m128 four) {
            uint8_t* to = out + (w + i + word) * kPanelRows * 4;
            if constexpr (kHalves) {
              const __m128i halves = split_halves(_mm_castps_si128(four));
              _mm_storel_epi64(reinterpret_cast<__m128i*>(to + r * 2), halves);
              _mm_storel_epi64(reinterpret_cast<__m128i*>(to + kHalfBytes + r * 2), _mm_srli_si128(halves, 8));
            } else {
              _mm_store_ps(reinterpret_cast<float*>(to + r * 4), four);
            }
          };
          store(0, a);
          store(1, b);
          store(2, c);
          store(3, d);
        }
      }
    }
  }
#endif
  for (; w * 4 < bytes; ++w) {
    const auto n = static_cast<size_t>(std::min<int64_t>(4, bytes - w * 4));
    for (int64_t r = 0; r < rows; ++r) {
      uint32_t word = 0;
      std::memcpy(&word, in + r * stride + w * 4, n);
      if (kCodes) word = sort_nibbles(word);
      if constexpr (kHalves) {
        const uint16_t halves[2] = {static_cast<uint16_t>(word), static_cast<uint16_t>(word >> 16)};
        std::memcpy(out + w * kPanelRows * 4 + r * 2, &halves[0], 2);
        std::memcpy(out + w * kPanelRows * 4 + kHalfBytes + r * 2, &halves[1], 2);
      } else {
        std::memcpy(out + (w * kPanelRows + r) * 4, &word, 4);
      }
    }
  }
}

// e4m3 magnitudes as the bytes of layout.h: five bits of exponent, no subnormals.
constexpr std::array<uint8_t, 128> kScaleCodes = [] {
  std::array<uint8_t, 128> codes{};
  for (int code = 1; code < 128; ++code) {
    int exponent = (code >> 3) - 7;
    int mantissa = code & 7;
    if (code < 8) {  // mantissa x 2^-9
      exponent = -6;
      while (mantissa < 8) {
        mantissa *= 2;
        --exponent;
      }
      mantissa &= 7;
    }
    codes[static_cast<size_t>(code)] = static_cast<uint8_t>((exponent + 22) << 3 | mantissa);
  }
  return codes;
}();

void check_no_nan(const ops::MatrixSource& source, const uint8_t* bytes, int64_t row, int64_t n, const char* what) {
  uint8_t largest = 0;
  for (int64_t i = 0; i < n; ++i) largest = std::max(largest, static_cast<uint8_t>(bytes[i] & 0x7f));
  if (largest != 0x7f) return;
  for (int64_t i = 0; i < n; ++i) {
    if ((bytes[i] & 0x7f) == 0x7f) {
      fail("{}: {} [{}, {}] is NaN (e4m3 code {:#04x}), wanted a number", printable(source.name), what, row, i,
           bytes[i]);
    }
  }
}

}  // namespace

Panel PackedPart::panel(int64_t i) const {
  Panel panel;
  panel.words = data + i * stride;
  panel.ahead = panel.words + stride;
  panel.row_scales = row_scales.data() + i * row_scale_step;
  panel.row_scale_stride = panels * row_scale_step;
  panel.segment = segment;
  panel.columns = columns;
  panel.kind = kind;
  return panel;
}

int PackedPart::pair(int64_t first, int64_t end, Panel* out) const {
  const int count = first + 1 < end ? kGemvPanels : 1;
  for (int p = 0; p < count; ++p) {
    out[p] = panel(first + p);
    out[p].ahead = out[p].words + kGemvPanels * stride;
  }
  return count;
}

bool PackedPart::fits(const KernelTable& kernels) const {
  if ((kernels.gemm_kinds & kind_bit(kind)) == 0) return false;
  return kernels.gemm_kinds == kAllKinds || segment == columns || segment % kColumnAlign == 0;
}

PackedPart plan_part(const ops::MatrixSource& source, int64_t first_row) {
  check_source(source);
  PackedPart part;
  part.kind = kind_of(source.format);
  part.first_row = first_row;
  part.rows = source.rows;
  part.columns = source.columns;
  part.panels = ceil_div(source.rows, kPanelRows);
  part.input_scale = source.input_scale;
  part.segment = source.columns;
  if (part.kind == Kind::kFp8 && source.scale_columns < source.columns && source.scale_columns % kStepColumns != 0) {
    fail("{}: FP8 scales for blocks of {} columns, wanted a multiple of {} or whole rows", printable(source.name),
         source.scale_columns, kStepColumns);
  }
  const int64_t words = ceil_div(source.columns, columns_in_word(part.kind));
  part.panel_bytes = words * kPanelRows * 4;
  if (part.kind == Kind::kNvfp4) {
    part.panel_bytes += ceil_div(source.columns, int64_t{kGroupColumns}) * kGroupScales;
    part.row_scales.assign(kPanelRows, source.tensor_scale);
  } else if (part.kind == Kind::kFp8) {
    const int64_t segments = ceil_div(source.columns, source.scale_columns);
    if (segments == 1 && source.scale_rows >= source.rows) {
      part.row_scales.assign(kPanelRows, source.grid_scales[0] * 256.0f);
    } else {
      part.row_scale_step = kPanelRows;
      part.row_scales.assign(static_cast<size_t>(segments * part.panels * kPanelRows), 0.0f);
      for (int64_t s = 0; s < segments; ++s) {
        for (int64_t r = 0; r < source.rows; ++r) {
          part.row_scales[static_cast<size_t>(s * part.panels * kPanelRows + r)] =
              source.grid_scales[r / source.scale_rows * segments + s] * 256.0f;
        }
      }
      if (segments > 1) part.segment = source.scale_columns;
    }
  } else {
    part.row_scales.assign(kPanelRows, 1.0f);
  }
  part.panel_bytes = round_up(part.panel_bytes, kPanelAlign);
  part.stride = part.panel_bytes;
  return part;
}

void pack_panels(const ops::MatrixSource& source, const PackedPart& part, uint8_t* data, int64_t begin, int64_t end) {
  const bool fp8 = part.kind == Kind::kFp8;
  const int64_t stride = row_bytes(part.kind, part.columns);
  for (int64_t p = begin; p < end; ++p) {
    const int64_t row = p * kPanelRows;
    const int64_t rows = part.rows_of(p);
    const uint8_t* in = static_cast<const uint8_t*>(source.data) + row * stride;
    uint8_t* out = data + p * part.stride;
    if (fp8) {
      for (int64_t r = 0; r < rows; ++r) check_no_nan(source, in + r * stride, row + r, part.columns, "element");
      transpose_words<Words::kHalves>(in, stride, rows, stride, out);
      continue;
    }
    if (part.kind != Kind::kNvfp4) {
      transpose_words<Words::kPlain>(in, stride, rows, stride, out);
      continue;
    }

    const int64_t blocks = part.columns / kBlockColumns;
    const uint8_t* scales = source.block_scales + row * blocks;
    uint8_t sign = 0;
    uint8_t largest = 0;
    for (int64_t i = 0; i < rows * blocks; ++i) {
      sign |= scales[i];
      largest = std::max(largest, static_cast<uint8_t>(scales[i] & 0x7f));
    }
    if (largest == 0x7f) {
      for (int64_t r = 0; r < rows; ++r) check_no_nan(source, scales + r * blocks, row + r, blocks, "block scale");
    }
    for (int64_t first = 0; first < blocks; first += 4) {
      uint8_t* group = out + first / 4 * kGroupBytes;
      const int64_t n = std::min<int64_t>(4, blocks - first);
      transpose_words<Words::kCodes>(in + first * 8, stride, rows, n * 8, group + kGroupScales);
      if (n == 4) {
        for (int64_t r = 0; r < rows; ++r) {
          uint32_t four = 0;
          std::memcpy(&four, scales + r * blocks + first, 4);
          group[r] = kScaleCodes[four & 0x7f];
          group[kPanelRows + r] = kScaleCodes[four >> 8 & 0x7f];
          group[2 * kPanelRows + r] = kScaleCodes[four >> 16 & 0x7f];
          group[3 * kPanelRows + r] = kScaleCodes[four >> 24 & 0x7f];
        }
      } else {
        for (int64_t r = 0; r < rows; ++r) {
          for (int64_t b = 0; b < n; ++b)
            group[b * kPanelRows + r] = kScaleCodes[scales[r * blocks + first + b] & 0x7f];
        }
      }
    }
    if ((sign & 0x80) == 0) continue;
    for (int64_t b = 0; b < blocks; ++b) {  // -s x w = s x -w
      uint8_t* words = out + b / 4 * kGroupBytes + kGroupScales + b % 4 * 128;
      for (int64_t r = 0; r < rows; ++r) {
        if ((scales[r * blocks + b] & 0x80) == 0) continue;
        for (int64_t i = 0; i < 8; ++i) words[(i / 4 * kPanelRows + r) * 4 + i % 4] ^= 0x88;
      }
    }
  }
}

WeightMemory::Block WeightMemory::allocate(int64_t bytes) {
  constexpr int64_t kMapping = int64_t{64} << 20;
  const int64_t needed = round_up(bytes, int64_t{kPanelAlign});
  if (needed > kMapping / 2) {
    auto owner = std::make_shared<HostBuffer>(needed);
    auto* data = static_cast<uint8_t*>(owner->data());
    return {std::move(owner), data};
  }
  if (mapping_ == nullptr || mapping_->bytes() - used_ < needed) {
    mapping_ = std::make_shared<HostBuffer>(kMapping);  // pages are taken as they are written
    used_ = 0;
  }
  used_ += needed;
  return {mapping_, static_cast<uint8_t*>(mapping_->data()) + used_ - needed};
}

PackedMatrix::PackedMatrix(std::span<const ops::MatrixSource> parts, WeightMemory& memory, ThreadPool& pool) {
  FF_ASSERT(!parts.empty());
  columns_ = parts[0].columns;
  std::vector<int64_t> offsets;
  int64_t total = 0;
  for (const ops::MatrixSource& source : parts) {
    if (source.columns != columns_) {
      fail("{}: {} columns, wanted {} as in {}", printable(source.name), source.columns, columns_,
           printable(parts[0].name));
    }
    parts_.push_back(plan_part(source, rows_));
    const PackedPart& part = parts_.back();
    offsets.push_back(total);
    total += part.panels * part.stride;
    rows_ += part.rows;
    panels_ += part.panels;
    if (part.row_scale_step != 0) bytes_ += static_cast<int64_t>(part.row_scales.size()) * 4;
  }
  bytes_ += total;
  memory_ = memory.allocate(total);
  uint8_t* base = memory_.data;
  for (size_t i = 0; i < parts.size(); ++i) {
    PackedPart& part = parts_[i];
    uint8_t* data = base + offsets[i];
    part.data = data;
    const int64_t grain = std::max<int64_t>(1, (256 << 10) / part.stride);
    pool.parallel_for(part.panels, grain,
                      [&](int64_t begin, int64_t end) { pack_panels(parts[i], part, data, begin, end); });
  }
}

PackedMatrix::PackedMatrix(const PackedMatrix& of, int64_t rows)
    : parts_(of.parts_), rows_(rows), columns_(of.columns_), panels_(rows / kPanelRows), memory_(of.memory_) {
  FF_ASSERT(parts_.size() == 1 && rows > 0 && rows <= of.rows_ && rows % kPanelRows == 0);
  PackedPart& part = parts_[0];
  if (part.row_scale_step != 0) {  // segment by segment, each of all panels
    const int64_t all = of.panels_ * kPanelRows, left = panels_ * kPanelRows;
    const auto segments = static_cast<int64_t>(part.row_scales.size()) / all;
    for (int64_t s = 1; s < segments; ++s) {
      std::copy_n(part.row_scales.begin() + s * all, left, part.row_scales.begin() + s * left);
    }
    part.row_scales.resize(static_cast<size_t>(segments * left));
  }
  part.rows = rows_;
  part.panels = panels_;
  bytes_ = of.bytes_ / of.panels_ * panels_;
}

PackedExperts::PackedExperts(int64_t count, const std::function<ops::ExpertSource(int64_t)>& source,
                             const std::function<void(int64_t)>& done, WeightMemory& memory, ThreadPool& pool) {
  experts_.reserve(static_cast<size_t>(count));
  uint8_t* free = nullptr;  // `left` bytes of the last block
  int64_t left = 0;
  int64_t total = 0;
  for (int64_t e = 0; e < count; ++e) {
    const ops::ExpertSource from = source(e);
    PackedExpert expert{plan_part(from.gate, 0), plan_part(from.up, 0), plan_part(from.down, 0)};
    if (e == 0) {
      hidden_ = expert.gate.columns;
      intermediate_ = expert.gate.rows;
    }
    const auto check = [&](const ops::MatrixSource& matrix, int64_t rows, int64_t columns) {
      if (matrix.rows != rows || matrix.columns != columns) {
        fail("{}: {} x {}, wanted {} x {}", printable(matrix.name), matrix.rows, matrix.columns, rows, columns);
      }
    };
    check(from.gate, intermediate_, hidden_);
    check(from.up, intermediate_, hidden_);
    check(from.down, hidden_, intermediate_);

    const int64_t pair = expert.gate.panel_bytes + expert.up.panel_bytes;
    const int64_t gate_up_bytes = expert.gate.panels * pair;
    const int64_t bytes = gate_up_bytes + expert.down.panels * expert.down.stride;
    if (left < bytes) {  // normally once: all experts have the size of the first
      left = bytes * (count - e);
      memory_.push_back(memory.allocate(left));
      free = memory_.back().data;
    }
    uint8_t* base = free;
    free += bytes;
    left -= bytes;
    total += bytes;
    expert.gate.stride = expert.up.stride = pair;
    expert.gate.data = base;
    expert.up.data = base + expert.gate.panel_bytes;
    expert.down.data = base + gate_up_bytes;
    const struct {
      const ops::MatrixSource& source;
      const PackedPart& part;
      uint8_t* data;
    } jobs[3] = {{from.gate, expert.gate, base},
                 {from.up, expert.up, base + expert.gate.panel_bytes},
                 {from.down, expert.down, base + gate_up_bytes}};
    const int64_t n = 2 * expert.gate.panels + expert.down.panels;
    const int64_t grain = std::max<int64_t>(1, (256 << 10) * n / bytes);
    pool.parallel_for(n, grain, [&](int64_t begin, int64_t end) {
      int64_t first = 0;
      for (const auto& job : jobs) {
        const int64_t from_panel = std::max(begin - first, int64_t{0});
        const int64_t to_panel = std::min(end - first, job.part.panels);
        if (from_panel < to_panel) pack_panels(job.source, job.part, job.data, from_panel, to_panel);
        first += job.part.panels;
      }
    });
    for (const PackedPart* part : {&expert.gate, &expert.up, &expert.down}) {
      all_nvfp4_ = all_nvfp4_ && part->kind == Kind::kNvfp4;
    }
    experts_.push_back(std::move(expert));
    if (done) done(e);
  }
  bytes_per_expert_ = count > 0 ? ceil_div(total, count) : 0;
}

}  // namespace fourfold::cpu::gemm
