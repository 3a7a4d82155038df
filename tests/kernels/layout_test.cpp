// The stored weight layout, followed on the host exactly as a lane of the kernels reads it.
#include "kernels/moe/layout.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "kernels/moe/tables.h"
#include "nvfp4/number.h"

namespace fourfold::moe {
namespace {

struct Matrix {
  int rows, k;
  std::vector<unsigned char> codes, scales;
  SourceMatrix source() const { return {codes.data(), scales.data(), k / 2, k / 16}; }
  float at(int row, int i) const {
    const unsigned char pair = codes[static_cast<size_t>(row * (k / 2) + i / 2)];
    return nvfp4::nvfp4_product(static_cast<unsigned char>(i % 2 != 0 ? pair >> 4 : pair & 15),
                                scales[static_cast<size_t>(row * (k / 16) + i / 16)]);
  }
};

Matrix random_matrix(int rows, int k, unsigned seed) {
  std::mt19937 rng(seed);
  Matrix m{rows, k, std::vector<unsigned char>(static_cast<size_t>(rows * k / 2)),
           std::vector<unsigned char>(static_cast<size_t>(rows * k / 16))};
  for (auto& c : m.codes) c = static_cast<unsigned char>(rng());
  for (auto& s : m.scales) s = static_cast<unsigned char>(rng() % 127 + (rng() % 8 == 0 ? 128 : 0));
  return m;
}

// The value of tile row r, column i of a unit, through fragment registers and bf16 multiplication.
float unit_value(const std::vector<unsigned char>& unit, int r, int i) {
  const unsigned* words = reinterpret_cast<const unsigned*>(unit.data());
  const int j = i / 16;
  const int l = i % 8 / 2;
  const int g = r % 8;
  const int reg = r / 8 + 2 * (i % 16 / 8);
  const unsigned pair = unpack_codes(words[(g * 4 + l) * 4 + j], reg);
  const unsigned scale = unpack_scales(words[kUnitCodeBytes / 4 + g * 2 + j / 2], j % 2);
  const float code = nvfp4::bf16_to_float(static_cast<nvfp4::u16>(i % 2 != 0 ? pair >> 16 : pair & 0xffff));
  const float factor = nvfp4::bf16_to_float(static_cast<nvfp4::u16>(r >= 8 ? scale >> 16 : scale & 0xffff));
  const float product = code * factor;
  // exact in bf16: the kernels' multiplication rounds nothing
  EXPECT_EQ(nvfp4::bf16_to_float(nvfp4::float_to_bf16(product)), product);
  return product * kEpilogueScale;
}

TEST(MoeLayout, CodeWordsRoundTrip) {
  std::mt19937 rng(1);
  for (int n = 0; n < 20000; ++n) {
    unsigned char codes[8];
    for (auto& c : codes) c = rng() & 15;
    const unsigned w = pack_codes(codes);
    for (int i = 0; i < 4; ++i) {
      ASSERT_EQ(unpack_codes(w, i), spread_code(codes[i]) | (spread_code(codes[4 + i]) << 16));
    }
  }
}

TEST(MoeLayout, SpreadCodesAreTheValuesTimesTwoToTheMinus126) {
  for (unsigned c = 0; c < 16; ++c) {
    EXPECT_EQ(nvfp4::bf16_to_float(static_cast<nvfp4::u16>(spread_code(c))),
              nvfp4::e2m1_to_float(static_cast<unsigned char>(c)) * 0x1p-126f);
  }
}

TEST(MoeLayout, EveryScaleIsExact) {
  for (unsigned s = 1; s < 0x7f; ++s) {
    const unsigned b = pack_scale(s);
    const float want = nvfp4::e4m3_to_float(static_cast<unsigned char>(s)) * 0x1p106f;
    for (int at = 0; at < 4; ++at) {
      const unsigned other = pack_scale(0x7e - s + 1);
      const unsigned w =
          pack_scale_word(at == 0 ? b : other, at == 1 ? b : other, at == 2 ? b : other, at == 3 ? b : other);
      const unsigned pair = unpack_scales(w, at / 2);
      EXPECT_EQ(nvfp4::bf16_to_float(static_cast<nvfp4::u16>(at % 2 != 0 ? pair >> 16 : pair & 0xffff)), want) << s;
    }
  }
}

TEST(MoeLayout, RepackedUnitsHoldTheMatrix) {
  const Matrix gate = random_matrix(16, 192, 2);
  const Matrix up = random_matrix(16, 192, 3);
  std::vector<unsigned char> unit(kUnitBytes);
  for (int tile = 0; tile < 2; ++tile) {
    for (int u = 0; u < 3; ++u) {
      ASSERT_TRUE(repack_unit(gate.source(), tile * 8, up.source(), tile * 8, u, unit.data()));
      for (int r = 0; r < 16; ++r) {
        for (int i = 0; i < 64; ++i) {
          const Matrix& m = r < 8 ? gate : up;
          ASSERT_EQ(unit_value(unit, r, i), m.at(tile * 8 + r % 8, u * 64 + i)) << r << " " << i;
        }
      }
    }
  }
  const Matrix down = random_matrix(16, 64, 4);
  ASSERT_TRUE(repack_unit(down.source(), 0, down.source(), 8, 0, unit.data()));
  for (int r = 0; r < 16; ++r) {
    for (int i = 0; i < 64; ++i) ASSERT_EQ(unit_value(unit, r, i), down.at(r, i));
  }
}

TEST(MoeLayout, ANanScaleIsReported) {
  Matrix m = random_matrix(16, 64, 5);
  std::vector<unsigned char> unit(kUnitBytes);
  ASSERT_TRUE(repack_unit(m.source(), 0, m.source(), 8, 0, unit.data()));
  m.scales[37] = 0x7f;
  EXPECT_FALSE(repack_unit(m.source(), 0, m.source(), 8, 0, unit.data()));
}

TEST(MoeLayout, FourAndAHalfBitsPerWeight) {
  EXPECT_EQ(packed_bytes(2048, 4096), 2048ull * 4096 * 9 / 16);
  EXPECT_EQ(gate_row(13), 21);
  EXPECT_EQ(up_row(13), 29);
}

// The places of a block of 16 are a permutation of it, two neighbours side by side, and words 2l, 2l + 1 hold what lane
// l of a fragment takes.
TEST(MoeLayout, RowsBetweenOneTokensKernels) {
  for (int i = 0; i < 64; ++i) EXPECT_EQ(one_place(i) / 16, i / 16);
  for (int l = 0; l < 4; ++l) {
    EXPECT_EQ(one_place(16 + 2 * l), 16 + 4 * l);
    EXPECT_EQ(one_place(16 + 2 * l + 1), 16 + 4 * l + 1);
    EXPECT_EQ(one_place(16 + 2 * l + 8), 16 + 4 * l + 2);
    EXPECT_EQ(one_place(16 + 2 * l + 9), 16 + 4 * l + 3);
  }
}

}  // namespace
}  // namespace fourfold::moe
