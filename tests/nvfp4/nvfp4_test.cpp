// The number formats: exhaustive over every code (and every pair of codes), the rounding rules at and beside every tie,
// and the properties of the quantiser. Expected values are computed from the definition of a format in long double, not
// by the code under test.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>
#include <vector>

#include "base/check.h"
#include "base/property.h"
#include "base/random.h"
#include "nvfp4/layout.h"
#include "nvfp4/number.h"
#include "nvfp4/quantize.h"

namespace fourfold::nvfp4 {
namespace {

// A binary floating-point format with subnormals, by its definition.
long double decode(unsigned code, int exponent_bits, int mantissa_bits, int bias) {
  const unsigned sign = code >> (exponent_bits + mantissa_bits) & 1u;
  const int exponent = static_cast<int>(code >> mantissa_bits & ((1u << exponent_bits) - 1u));
  const unsigned mantissa = code & ((1u << mantissa_bits) - 1u);
  const long double fraction = std::ldexp(static_cast<long double>(mantissa), -mantissa_bits);
  const long double magnitude =
      exponent == 0 ? std::ldexp(fraction, 1 - bias) : std::ldexp(1.0L + fraction, exponent - bias);
  return sign != 0 ? -magnitude : magnitude;
}

// The code of the nearest value, ties to the even code; saturating. `codes` positive codes 0..codes-1 are finite.
unsigned nearest(long double x, unsigned codes, int exponent_bits, int mantissa_bits, int bias) {
  const long double magnitude = std::fabs(x);
  unsigned best = 0;
  for (unsigned code = 1; code < codes; ++code) {
    const long double before = std::fabs(magnitude - decode(best, exponent_bits, mantissa_bits, bias));
    const long double now = std::fabs(magnitude - decode(code, exponent_bits, mantissa_bits, bias));
    if (now < before || (now == before && code % 2 == 0)) best = code;
  }
  return best | (std::signbit(x) ? 1u << (exponent_bits + mantissa_bits) : 0u);
}

TEST(Number, EveryE2m1CodeDecodesByDefinitionAndRoundTrips) {
  for (unsigned code = 0; code < 16; ++code) {
    const float value = e2m1_to_float(static_cast<u8>(code));
    EXPECT_EQ(value, static_cast<float>(decode(code, 2, 1, 1))) << code;
    EXPECT_EQ(std::signbit(value), code >= 8);
    EXPECT_EQ(e2m1_doubled(static_cast<u8>(code)), static_cast<int>(2 * value));
    EXPECT_EQ(float_to_e2m1(value), code);
  }
}

TEST(Number, EveryE4m3CodeDecodesByDefinitionAndRoundTrips) {
  for (unsigned code = 0; code < 256; ++code) {
    const float value = e4m3_to_float(static_cast<u8>(code));
    if ((code & 0x7f) == 0x7f) {
      EXPECT_TRUE(std::isnan(value));
      EXPECT_TRUE(e4m3_is_nan(static_cast<u8>(code)));
      EXPECT_TRUE(e4m3_is_nan(float_to_e4m3(value)));
      continue;
    }
    EXPECT_FALSE(e4m3_is_nan(static_cast<u8>(code)));
    EXPECT_EQ(value, static_cast<float>(decode(code, 4, 3, 7))) << code;
    EXPECT_EQ(float_to_e4m3(value), code);
  }
}

TEST(Number, AllPairsOfCodesAreExactInBf16F16AndFp32) {
  for (unsigned scale = 0; scale < 256; ++scale) {
    if (e4m3_is_nan(static_cast<u8>(scale))) continue;
    for (unsigned code = 0; code < 16; ++code) {
      const long double exact = decode(code, 2, 1, 1) * decode(scale, 4, 3, 7);
      const float product = nvfp4_product(static_cast<u8>(code), static_cast<u8>(scale));
      EXPECT_EQ(static_cast<long double>(product), exact);
      EXPECT_EQ(bf16_to_float(float_to_bf16(product)), product);
      EXPECT_EQ(f16_to_float(float_to_f16(product)), product);
    }
  }
}

TEST(Number, EveryF16CodeRoundTrips) {
  for (unsigned code = 0; code < 65536; ++code) {
    const float value = f16_to_float(static_cast<u16>(code));
    if ((code & 0x7c00) == 0x7c00) {
      EXPECT_FALSE(is_finite(value));
      if ((code & 0x3ff) != 0) {
        EXPECT_TRUE(is_nan(f16_to_float(float_to_f16(value))));
        continue;
      }
    } else {
      ASSERT_EQ(value, static_cast<float>(decode(code, 5, 10, 15))) << code;
    }
    ASSERT_EQ(float_to_f16(value), code);
  }
}

TEST(Number, EveryBf16CodeRoundTrips) {
  for (unsigned code = 0; code < 65536; ++code) {
    const float value = bf16_to_float(static_cast<u16>(code));
    if (is_nan(value)) {
      EXPECT_TRUE(is_nan(bf16_to_float(float_to_bf16(value))));
    } else {
      ASSERT_EQ(float_to_bf16(value), code);
    }
  }
}

// At each midpoint between neighbours, and one fp32 step to either side of it.
template <typename Encode>
void check_rounding(Encode encode, unsigned codes, int exponent_bits, int mantissa_bits, int bias) {
  for (unsigned code = 0; code + 1 < codes; ++code) {
    const auto low = static_cast<float>(decode(code, exponent_bits, mantissa_bits, bias));
    const auto high = static_cast<float>(decode(code + 1, exponent_bits, mantissa_bits, bias));
    const float middle = low + (high - low) / 2;
    for (float x : {middle, std::nextafter(middle, low), std::nextafter(middle, high)}) {
      for (float signed_x : {x, -x}) {
        ASSERT_EQ(encode(signed_x), nearest(signed_x, codes, exponent_bits, mantissa_bits, bias)) << signed_x;
      }
    }
  }
}

TEST(Number, RoundingAtEveryTie) {
  check_rounding([](float x) { return float_to_e2m1(x); }, 8, 2, 1, 1);
  check_rounding([](float x) { return float_to_e4m3(x); }, 0x7f, 4, 3, 7);
  for (float x : {0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.0f}) {
    const float rounded = e2m1_to_float(float_to_e2m1(x));
    const float wanted = x == 0.25f   ? 0.0f
                         : x == 0.75f ? 1.0f
                         : x == 1.25f ? 1.0f
                         : x == 1.75f ? 2.0f
                         : x == 2.5f  ? 2.0f
                                      : 4.0f;
    EXPECT_EQ(rounded, wanted) << x;
  }
}

TEST(Number, F16AndBf16RoundToNearestEven) {
  Random random(7);
  for (int i = 0; i < 300000; ++i) {
    const float x = float_of(static_cast<u32>(random.next()));
    if (!is_finite(x)) continue;
    const float bf = bf16_to_float(float_to_bf16(x));
    const u16 code = float_to_bf16(x);
    if (is_finite(bf)) {
      // Neither neighbour is nearer; a tie goes to the even code.
      for (int step : {-1, 1}) {
        const float other = bf16_to_float(static_cast<u16>(code + step));
        if (!is_finite(other) || std::signbit(other) != std::signbit(bf)) continue;
        const long double mine = std::fabs(static_cast<long double>(x) - bf);
        const long double theirs = std::fabs(static_cast<long double>(x) - other);
        ASSERT_TRUE(mine < theirs || (mine == theirs && code % 2 == 0)) << x;
      }
    }
    const float small =
        std::ldexp(x, -static_cast<int>(std::ilogb(x == 0 ? 1 : x)) + static_cast<int>(random.below(42)) - 26);
    const u16 half = float_to_f16(small);
    const float back = f16_to_float(half);
    if (!is_finite(back)) continue;
    for (int step : {-1, 1}) {
      const float other = f16_to_float(static_cast<u16>(half + step));
      if (!is_finite(other) || std::signbit(other) != std::signbit(back)) continue;
      const long double mine = std::fabs(static_cast<long double>(small) - back);
      const long double theirs = std::fabs(static_cast<long double>(small) - other);
      ASSERT_TRUE(mine < theirs || (mine == theirs && half % 2 == 0)) << small;
    }
  }
}

TEST(Number, SaturationAndSpecials) {
  const float infinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(float_to_e2m1(infinity), 7);
  EXPECT_EQ(float_to_e2m1(-infinity), 15);
  EXPECT_EQ(float_to_e2m1(std::nanf("")), 0);
  EXPECT_EQ(float_to_e4m3(infinity), 0x7e);
  EXPECT_EQ(float_to_e4m3(-1e30f), 0xfe);
  EXPECT_EQ(float_to_e4m3(465.0f), 0x7e) << "saturates instead of rounding up to the NaN code";
  EXPECT_EQ(float_to_f16(65520.0f), 0x7c00);
  EXPECT_EQ(float_to_f16(65519.0f), 0x7bff);
}

// The vector of the model specification (section 8): two blocks, modelopt form.
TEST(Quantize, SpecificationVector) {
  std::vector<float> row;
  for (float x :
       {0.25f, -0.75f, 1.25f, -1.75f, 2.5f, -3.5f, 5.0f, 6.0f, -6.0f, 0.0f, 0.5f, 1.0f, -3.0f, 4.0f, -0.3f, 2.6f}) {
    row.push_back(0.875f * x);
  }
  for (int i = -8; i < 8; ++i) row.push_back(0.013f * static_cast<float>(i));
  const float tensor_scale = tensor_scale_for(largest_magnitude(row));
  EXPECT_EQ(tensor_scale, 0.001953125f);
  std::vector<uint8_t> codes(16), scales(2);
  quantize_row(row, tensor_scale, ScaleSearch::kMax, codes, scales);
  EXPECT_EQ(scales, (std::vector<uint8_t>{0x7e, 0x51}));
  EXPECT_EQ(codes, (std::vector<uint8_t>{0xa0, 0xc2, 0xe4, 0x76, 0x0f, 0x21, 0x6d, 0x59,  //
                                         0xff, 0xee, 0xcd, 0x9b, 0x10, 0x43, 0x65, 0x76}));
  std::vector<float> decoded(32);
  dequantize_row(codes, scales, tensor_scale, decoded);
  const std::vector<float> first{0,      -.875f, .875f,  -1.75f, 1.75f,   -3.5f, 3.5f,    5.25f,
                                 -5.25f, 0,      .4375f, .875f,  -2.625f, 3.5f,  -.4375f, 2.625f};
  const std::vector<float> second{-6, -6, -4, -4, -3, -2, -1.5f, -.5f, 0, .5f, 1.5f, 2, 3, 4, 4, 6};
  for (int i = 0; i < 16; ++i) {
    EXPECT_EQ(decoded[i], first[i]);
    EXPECT_EQ(decoded[16 + i], second[i] * 9.0f / 512.0f);
  }
}

std::vector<float> random_row(Random& random, int blocks) {
  std::vector<float> row(static_cast<size_t>(blocks) * kBlock);
  for (int block = 0; block < blocks; ++block) {
    // Magnitudes over many octaves, all-zero blocks and lone outliers.
    const double scale = std::exp2(random.uniform(-20, 10));
    const uint64_t kind = random.below(8);
    for (int i = 0; i < kBlock; ++i) {
      double x = random.normal() * scale;
      if (kind == 0) x = 0;
      if (kind == 1 && i != 3) x = 0;
      row[static_cast<size_t>(block * kBlock + i)] = static_cast<float>(x);
    }
  }
  return row;
}

FOURFOLD_PROPERTY(Quantize, PropertiesOfRandomRows) {
  const int blocks = 1 + static_cast<int>(random.below(8));
  const std::vector<float> row = random_row(random, blocks);
  const float tensor_scale = tensor_scale_for(largest_magnitude(row));
  std::vector<uint8_t> codes(row.size() / 2), scales(row.size() / 16), best_codes(codes), best_scales(scales);
  std::vector<float> decoded(row.size());
  const double plain = quantize_row(row, tensor_scale, ScaleSearch::kMax, codes, scales);
  const double searched = quantize_row(row, tensor_scale, ScaleSearch::kSquaredError, best_codes, best_scales);
  ASSERT_TRUE(searched <= plain);
  for (uint8_t scale : best_scales) ASSERT_TRUE(scale >= 1 && scale <= 0x7e);
  dequantize_row(codes, scales, tensor_scale, decoded);
  double error = 0, energy = 0;
  for (size_t i = 0; i < row.size(); ++i) {
    ASSERT_TRUE(is_finite(decoded[i]));
    energy += std::pow(static_cast<double>(row[i]), 2);
    error += std::pow(static_cast<double>(row[i]) - static_cast<double>(decoded[i]), 2);
  }
  // The reported error counts each product before it is rounded to fp32, hence the small slack.
  ASSERT_TRUE(std::fabs(error - plain) <= 1e-5 * plain + 1e-9 * energy);
  // A quantised row is a fixed point: quantising it again under the same tensor scale changes no value.
  std::vector<float> again(row.size());
  quantize_row(decoded, tensor_scale, ScaleSearch::kSquaredError, codes, scales);
  dequantize_row(codes, scales, tensor_scale, again);
  for (size_t i = 0; i < row.size(); ++i)
    ASSERT_TRUE(std::fabs(again[i] - decoded[i]) <= 1e-6f * std::fabs(decoded[i]));
}

TEST(Quantize, ScaleSearchIsTheBestOfAllScales) {
  Random random(3);
  for (int trial = 0; trial < 200; ++trial) {
    std::vector<float> block(kBlock);
    for (float& x : block) x = static_cast<float>(random.normal());
    const float tensor_scale = 1.0f / 64.0f;
    std::vector<uint8_t> codes(8), scales(1);
    const double found = quantize_row(block, tensor_scale, ScaleSearch::kSquaredError, codes, scales);
    double best = 1e30;
    for (unsigned code = 1; code < 0x7f; ++code) {
      const float scale = e4m3_to_float(static_cast<u8>(code)) * tensor_scale;
      double error = 0;
      for (float x : block) {
        error +=
            std::pow(static_cast<double>(x) - e2m1_to_float(float_to_e2m1(x / scale)) * static_cast<double>(scale), 2);
      }
      best = std::min(best, error);
    }
    EXPECT_LE(found, best * 1.0000001);
  }
}

// Small block scales are whole multiples of 2^-9: half of 15 is none, and so a block of halves, ones, one and a halves
// and twos of 15 x 2^-9 is exact under that scale only, ten codes above the one that puts its maximum on 6.
TEST(Quantize, ScaleSearchReachesTheScaleThatIsExact) {
  std::vector<uint8_t> codes(8), scales(1);
  Random random(12);
  const auto search = [&](const std::vector<float>& block) {
    return quantize_row(block, 1.0f, ScaleSearch::kSquaredError, codes, scales);
  };
  for (const auto& steps : {std::vector<float>{0.5f, 1.0f, 1.5f, 2.0f}, std::vector<float>{0.5f, 1.0f, 1.5f}}) {
    for (const float unit : {9.0f, 11.0f, 13.0f, 15.0f}) {
      std::vector<float> block(16);
      for (size_t i = 0; i < 16; ++i) {
        block[i] = steps[i % steps.size()] * unit * 0x1p-9f * (random.below(2) == 0 ? 1.0f : -1.0f);
      }
      EXPECT_EQ(search(block), 0.0) << unit << " of " << steps.size();
      EXPECT_EQ(scales[0], float_to_e4m3(unit * 0x1p-9f));
    }
  }
  // Random blocks there: no scale at all does better.
  for (int trial = 0; trial < 3000; ++trial) {
    std::vector<float> block(16);
    const uint64_t most = 2 + random.below(120);
    for (float& value : block)
      value = (static_cast<float>(random.below(2 * most)) - static_cast<float>(most)) * 0x1p-10f;
    const double found = search(block);
    for (int code = 1; code <= 0x7e; ++code) {
      const float scale = e4m3_to_float(static_cast<uint8_t>(code));
      double error = 0;
      for (const float value : block) {
        const float near = e2m1_to_float(float_to_e2m1(std::clamp(value / scale, -6.0f, 6.0f))) * scale;
        error += (static_cast<double>(value) - near) * (static_cast<double>(value) - near);
      }
      ASSERT_LE(found, error * (1 + 1e-6)) << "trial " << trial << ", scale code " << code;
    }
  }
}

TEST(Quantize, DegenerateTensors) {
  std::vector<float> zero(32, 0.0f);
  std::vector<uint8_t> codes(16), scales(2);
  EXPECT_EQ(tensor_scale_for(0.0f), 1.0f);
  EXPECT_EQ(quantize_row(zero, 1.0f, ScaleSearch::kSquaredError, codes, scales), 0.0);
  EXPECT_EQ(e4m3_to_float(scales[0]), 1.0f);
  // A "dead" expert: rows of about 1e-23 decode to finite numbers.
  std::vector<float> tiny(32, 1e-23f);
  const float tensor_scale = tensor_scale_for(largest_magnitude(tiny));
  quantize_row(tiny, tensor_scale, ScaleSearch::kMax, codes, scales);
  std::vector<float> decoded(32);
  dequantize_row(codes, scales, tensor_scale, decoded);
  for (float x : decoded) EXPECT_NEAR(x, 1e-23f, 1e-25f);
  tiny[5] = std::nanf("");
  try {
    largest_magnitude(tiny);
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("element 5"), std::string::npos);
  }
}

TEST(Quantize, ActivationsFollowTheRule) {
  Random random(11);
  const std::vector<float> row = random_row(random, 16);
  for (float global_scale : {1.0f, 448.0f * 6.0f / 20000.0f, 1e-6f}) {
    std::vector<uint8_t> codes(row.size() / 2), scales(row.size() / 16);
    quantize_activations(row, global_scale, codes, scales);
    for (size_t i = 0; i < row.size(); ++i) {
      float largest = 0;
      for (size_t j = i / 16 * 16; j < i / 16 * 16 + 16; ++j) largest = std::max(largest, std::fabs(row[j]));
      const u8 scale = float_to_e4m3(std::min(global_scale * largest / 6.0f, 448.0f));
      ASSERT_EQ(scales[i / 16], scale);
      const u8 code = (codes[i / 2] >> (i % 2 * 4)) & 15;
      if (scale == 0) {
        ASSERT_EQ(code, 0);
      } else {
        ASSERT_EQ(code, float_to_e2m1(std::clamp(row[i] * global_scale / e4m3_to_float(scale), -6.0f, 6.0f)));
      }
    }
  }
}

TEST(Layout, InterleavedOffsetsAreABijectionAndRoundTrip) {
  for (const auto& [rows, columns] :
       std::vector<std::pair<int64_t, int64_t>>{{128, 4}, {1, 1}, {129, 5}, {256, 16}, {37, 9}}) {
    std::set<long long> seen;
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t column = 0; column < columns; ++column) {
        const long long offset = interleaved_offset(row, column, columns);
        ASSERT_GE(offset, 0);
        ASSERT_LT(offset, interleaved_bytes(rows, columns));
        ASSERT_TRUE(seen.insert(offset).second);
      }
    }
    std::vector<uint8_t> scales(static_cast<size_t>(rows * columns));
    Random random(static_cast<uint64_t>(rows * 1000 + columns));
    for (uint8_t& scale : scales) scale = static_cast<uint8_t>(random.below(256));
    EXPECT_EQ(deinterleave_scales(interleave_scales(scales, rows, columns), rows, columns), scales);
  }
  // The documented places of one atom: K = 64 is exactly one atom for 128 rows.
  EXPECT_EQ(interleaved_bytes(128, 4), 512);
  EXPECT_EQ(interleaved_offset(0, 1, 4), 1);
  EXPECT_EQ(interleaved_offset(1, 0, 4), 16);
  EXPECT_EQ(interleaved_offset(32, 0, 4), 4);
  EXPECT_EQ(interleaved_offset(96, 3, 4), 15);
  EXPECT_EQ(interleaved_offset(0, 4, 8), 512);
  EXPECT_EQ(interleaved_offset(128, 0, 8), 1024);
}

static_assert(e2m1_to_float(7) == 6.0f && e4m3_to_float(0x7e) == 448.0f && float_to_e2m1(2.4f) == 4);
static_assert(float_to_bf16(1.0f) == 0x3f80 && f16_to_float(0x3c00) == 1.0f);

}  // namespace
}  // namespace fourfold::nvfp4
