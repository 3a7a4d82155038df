#include <immintrin.h>

#include "cpu/ceilings/loops.h"

namespace fourfold::cpu::ceilings {
namespace {

// The operand of ldtilecfg: palette 1, eight tiles of 16 rows x 64 bytes.
struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t bytes_per_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

}  // namespace

// Four accumulators, two by two operands, as a matrix product would use the eight tiles.
float dot_bf16_amx(int64_t rounds) {
  const TileConfig config;
  asm volatile("ldtilecfg %0" ::"m"(config));  // GCC's intrinsic says that it reads eight bytes
  alignas(64) static const uint16_t ones[16 * 32] = {0x3f80};
  _tile_loadd(4, ones, 64);
  _tile_loadd(5, ones, 64);
  _tile_loadd(6, ones, 64);
  _tile_loadd(7, ones, 64);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t round = 0; round < rounds; ++round) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  alignas(64) float result[16 * 16];
  float sum = 0;
  _tile_stored(0, result, 64);
  sum += result[0];
  _tile_stored(1, result, 64);
  sum += result[0];
  _tile_stored(2, result, 64);
  sum += result[0];
  _tile_stored(3, result, 64);
  sum += result[0];
  _tile_release();
  return sum;
}

}  // namespace fourfold::cpu::ceilings
