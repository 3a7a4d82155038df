// The order in which the FP4 multiplication takes stored weights, and the one in which activations are stored for it.
#include "kernels/moe/fp4_layout.h"

#include <gtest/gtest.h>

#include <array>
#include <random>
#include <set>
#include <vector>

#include "nvfp4/number.h"

namespace fourfold::moe {
namespace {

TEST(Fp4Layout, PlacesArePermutations) {
  std::set<int> ks, groups;
  for (int h = 0; h < 2; ++h) {
    for (int n = 0; n < 8; ++n) {
      const int k = nibble_k(h, n);
      EXPECT_TRUE(ks.insert(k).second) << k;
      EXPECT_EQ(k >> 2 & 1, h) << "the word of k is bit 2 of k";
      EXPECT_EQ(k_nibble(k), n) << k;
    }
  }
  EXPECT_EQ(ks.size(), 16u);
  EXPECT_EQ(*ks.rbegin(), 15);
  for (int j = 0; j < 4; ++j) {
    EXPECT_TRUE(groups.insert(group_place(j)).second);
    EXPECT_EQ(group_place(group_place(j)), j);
  }
}

// A whole unit: what each lane makes of stored words is what the instruction's fragment definition asks for.
TEST(Fp4Layout, FragmentsOfAStoredUnitAreTheMatrix) {
  std::mt19937 random(5);
  for (int round = 0; round < 50; ++round) {
    std::vector<unsigned char> codes(16 * 32), scales(16 * 4);
    for (unsigned char& c : codes) c = static_cast<unsigned char>(random());
    for (unsigned char& s : scales) s = static_cast<unsigned char>(1 + random() % 126);
    const SourceMatrix matrix{codes.data(), scales.data(), 32, 4};
    alignas(4) std::array<unsigned char, kUnitBytes> packed;
    ASSERT_TRUE(repack_unit(matrix, 0, matrix, 8, 0, packed.data()));
    const unsigned* words = reinterpret_cast<const unsigned*>(packed.data());
    const auto code_of = [&](int row, int k) { return codes[row * 32 + k / 2] >> (4 * (k % 2)) & 15; };
    for (int lane = 0; lane < 32; ++lane) {
      const int g = lane / 4, l = lane % 4, h = l & 1, q = l >> 1;
      const int at = (4 * g + 2 * h) * 4 + 2 * q;  // fp4_sm120.cuh: codes_at, in words
      unsigned a[4];
      fp4_registers(words[at], words[at + 4], &a[0], &a[1]);
      fp4_registers(words[at + 1], words[at + 5], &a[2], &a[3]);
      for (int i = 0; i < 4; ++i) {
        const int row = g + 8 * (i & 1);
        for (int n = 0; n < 8; ++n) {
          const int place = (8 * l + 32 * (i >> 1) + n) / 16;  // the instruction's group
          const int k = 16 * group_place(place) + nibble_k(h, n);
          ASSERT_EQ(a[i] >> (4 * n) & 15u, static_cast<unsigned>(code_of(row, k))) << lane << " " << i << " " << n;
        }
      }
      for (const bool upper : {false, true}) {
        const unsigned* stored = words + kUnitCodeBytes / 4 + g * 2;
        const unsigned got = fp4_scales(fp4_stored_scales(stored[0], stored[1], upper));
        for (int place = 0; place < 4; ++place) {
          ASSERT_EQ(got >> (8 * place) & 255u, scales[(g + (upper ? 8 : 0)) * 4 + group_place(place)]);
        }
      }
    }
  }
}

TEST(Fp4Layout, EveryScaleSurvives) {
  for (unsigned e4m3 = 1; e4m3 < 127; ++e4m3) {
    for (int i = 0; i < 4; ++i) {  // beside ordinary ones, and beside each other
      const unsigned others = 0x40404040u & ~(255u << (8 * i));
      const unsigned stored = pack_scale(e4m3) << (8 * i) | others;
      EXPECT_EQ(fp4_scales(stored), e4m3 << (8 * i) | (0x30303030u & ~(255u << (8 * i))));
      EXPECT_EQ(fp4_scales(pack_scale(e4m3) * 0x01010101u), e4m3 * 0x01010101u);
      EXPECT_EQ(fp4_scales_normal(stored), e4m3 >= 8) << e4m3;
    }
  }
  // Blocks whose scale was zero are stored as 0, with codes 0: any finite scale will do.
  EXPECT_FALSE(nvfp4::e4m3_is_nan(static_cast<nvfp4::u8>(fp4_scales(0) & 255u)));
}

}  // namespace
}  // namespace fourfold::moe
