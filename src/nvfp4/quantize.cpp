#include "nvfp4/quantize.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "base/check.h"

namespace fourfold::nvfp4 {
namespace {

struct BlockCodes {
  std::array<uint8_t, kBlock> codes;
  double error;
};

// Without branches on the values, so that the compiler makes vector code of it: what float_to_e2m1 does by comparing
// with the midpoints one after the other is the number of midpoints below, and the magnitude is the sum of the steps.
template <bool kError>
BlockCodes encode_block(const float* block, uint8_t scale_code, float tensor_scale) {
  BlockCodes result;
  const float scale = e4m3_to_float(scale_code) * tensor_scale;
  if (!(scale > 0.0f)) {  // a product below the smallest denormal
    result = {};
    if constexpr (kError) {
      for (int i = 0; i < kBlock; ++i) result.error += static_cast<double>(block[i]) * static_cast<double>(block[i]);
    }
    return result;
  }
  [[maybe_unused]] std::array<double, kBlock> squares;
  std::array<int32_t, kBlock> codes;
  for (int i = 0; i < kBlock; ++i) {
    const float x = std::fabs(block[i]);
    const float y = x / scale;
    const int small = (y > 0.25f) + (y >= 0.75f) + (y > 1.25f) + (y >= 1.75f);
    const int medium = (y > 2.5f) + (y >= 3.5f);
    const int large = y > 5.0f;
    codes[i] = small + medium + large + static_cast<int>(bits_of(block[i]) >> 31) * 8;
    if constexpr (kError) {
      const float magnitude = static_cast<float>(small + 2 * medium + 4 * large) * 0.5f;
      const double difference = static_cast<double>(x) - static_cast<double>(magnitude) * static_cast<double>(scale);
      squares[i] = difference * difference;
    }
  }
  for (int i = 0; i < kBlock; ++i) result.codes[i] = static_cast<uint8_t>(codes[i]);
  result.error = 0.0;
  if constexpr (kError) {
    for (double square : squares) result.error += square;
  }
  return result;
}

}  // namespace

float tensor_scale_for(float largest) {
  const float scale = largest / (kE2m1Max * kE4m3Max);
  // A denormal or zero scale would lose the tensor: such values are far below what the model computes with.
  return scale >= 1.17549435e-38f ? scale : (largest > 0.0f ? 1.17549435e-38f : 1.0f);
}

float largest_magnitude(std::span<const float> values) {
  float largest = 0.0f;
  for (size_t i = 0; i < values.size(); ++i) {
    if (!is_finite(values[i])) fail("element {} is {}, wanted a finite number", i, values[i]);
    largest = std::max(largest, std::fabs(values[i]));
  }
  return largest;
}

uint8_t block_scale_for(float largest, float tensor_scale) {
  if (!(largest > 0.0f)) return float_to_e4m3(1.0f);
  return std::max<uint8_t>(float_to_e4m3(largest / tensor_scale / kE2m1Max), 1);
}

double quantize_row(std::span<const float> row, float tensor_scale, ScaleSearch search, std::span<uint8_t> codes,
                    std::span<uint8_t> scales) {
  FF_ASSERT(row.size() == scales.size() * kBlock && codes.size() * 2 == row.size());
  double total = 0.0;
  for (size_t block = 0; block < scales.size(); ++block) {
    const std::span<const float> values = row.subspan(block * kBlock, kBlock);
    float largest = 0.0f;
    for (float value : values) largest = std::max(largest, std::fabs(value));
    uint8_t scale_code = block_scale_for(largest, tensor_scale);
    BlockCodes best{};
    if (largest > 0.0f) {
      best = encode_block<true>(values.data(), scale_code, tensor_scale);
      if (search == ScaleSearch::kSquaredError) {
        // Positive e4m3 codes are ordered and 8 of them are an octave. A smaller scale clips the maximum to 6 but
        // resolves the rest better; a larger one puts it on 4, 3 or 2 where the others fit better.
        const int low = std::max(1, scale_code - 12);
        const int high = std::min(0x7e, scale_code + 16);
        for (int candidate = low; candidate <= high; ++candidate) {
          const BlockCodes attempt = encode_block<true>(values.data(), static_cast<uint8_t>(candidate), tensor_scale);
          if (attempt.error < best.error) {
            best = attempt;
            scale_code = static_cast<uint8_t>(candidate);
          }
        }
      }
    }
    scales[block] = scale_code;
    for (int i = 0; i < kBlock; i += 2) {
      codes[block * (kBlock / 2) + i / 2] = pack_e2m1(best.codes[i], best.codes[i + 1]);
    }
    total += best.error;
  }
  return total;
}

void quantize_row(std::span<const float> row, float tensor_scale, std::span<uint8_t> codes, std::span<uint8_t> scales) {
  FF_ASSERT(row.size() == scales.size() * kBlock && codes.size() * 2 == row.size());
  for (size_t block = 0; block < scales.size(); ++block) {
    const float* values = row.data() + block * kBlock;
    float largest = 0.0f;
    for (int i = 0; i < kBlock; ++i) largest = std::max(largest, std::fabs(values[i]));
    scales[block] = block_scale_for(largest, tensor_scale);
    const BlockCodes encoded = largest > 0.0f ? encode_block<false>(values, scales[block], tensor_scale) : BlockCodes{};
    for (int i = 0; i < kBlock; i += 2) {
      codes[block * (kBlock / 2) + i / 2] = pack_e2m1(encoded.codes[i], encoded.codes[i + 1]);
    }
  }
}

void dequantize_row(std::span<const uint8_t> codes, std::span<const uint8_t> scales, float tensor_scale,
                    std::span<float> row) {
  FF_ASSERT(row.size() == scales.size() * kBlock && codes.size() * 2 == row.size());
  constexpr size_t kBytes = kBlock / 2;
  for (size_t block = 0; block < scales.size(); ++block) {
    const float scale = e4m3_to_float(scales[block]);
    float values[16];
    for (u8 code = 0; code < 16; ++code) values[code] = e2m1_to_float(code) * scale * tensor_scale;
    for (size_t i = block * kBytes; i < (block + 1) * kBytes; ++i) {
      row[2 * i] = values[codes[i] & 15];
      row[2 * i + 1] = values[codes[i] >> 4];
    }
  }
}

void quantize_activations(std::span<const float> row, float global_scale, std::span<uint8_t> codes,
                          std::span<uint8_t> scales) {
  FF_ASSERT(row.size() == scales.size() * kBlock && codes.size() * 2 == row.size());
  for (size_t block = 0; block < scales.size(); ++block) {
    const std::span<const float> values = row.subspan(block * kBlock, kBlock);
    float largest = 0.0f;
    for (float value : values) largest = std::max(largest, std::fabs(value));
    scales[block] = float_to_e4m3(std::min(global_scale * largest / kE2m1Max, kE4m3Max));
    const float scale = e4m3_to_float(scales[block]);
    for (int i = 0; i < kBlock; i += 2) {
      const auto code = [&](float value) {
        return scale > 0.0f ? float_to_e2m1(std::clamp(value * global_scale / scale, -kE2m1Max, kE2m1Max)) : u8{0};
      };
      codes[block * (kBlock / 2) + i / 2] = pack_e2m1(code(values[i]), code(values[i + 1]));
    }
  }
}

std::vector<uint8_t> interleave_scales(std::span<const uint8_t> scales, int64_t rows, int64_t columns) {
  FF_ASSERT(scales.size() == static_cast<size_t>(rows * columns));
  std::vector<uint8_t> out(static_cast<size_t>(interleaved_bytes(rows, columns)));
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t column = 0; column < columns; ++column) {
      out[static_cast<size_t>(interleaved_offset(row, column, columns))] =
          scales[static_cast<size_t>(row * columns + column)];
    }
  }
  return out;
}

std::vector<uint8_t> deinterleave_scales(std::span<const uint8_t> interleaved, int64_t rows, int64_t columns) {
  FF_ASSERT(interleaved.size() == static_cast<size_t>(interleaved_bytes(rows, columns)));
  std::vector<uint8_t> out(static_cast<size_t>(rows * columns));
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t column = 0; column < columns; ++column) {
      out[static_cast<size_t>(row * columns + column)] =
          interleaved[static_cast<size_t>(interleaved_offset(row, column, columns))];
    }
  }
  return out;
}

}  // namespace fourfold::nvfp4
