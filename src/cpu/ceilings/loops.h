// The measured loops, one source per instruction set. Each returns a value that depends on all its work.
#pragma once

#include <cstdint>

namespace fourfold::cpu::ceilings {

// Multiply-adds with enough independent accumulators to fill the pipes, operands in registers.
inline constexpr int64_t kFlopsPerRoundAvx2 = 12 * 8 * 2;
inline constexpr int64_t kFlopsPerRoundAvx512 = 24 * 16 * 2;
inline constexpr int64_t kFlopsPerRoundBf16 = 24 * 32 * 2;
inline constexpr int64_t kFlopsPerRoundAmx = 4 * 16 * 16 * 32 * 2;
inline constexpr int64_t kFlopsPerRoundNeon = 12 * 8 * 2;
inline constexpr int64_t kFlopsPerRoundMmla = 24 * 16 * 2;
float fma_avx2(int64_t rounds);
float fma_avx512(int64_t rounds);
float dot_bf16_avx512(int64_t rounds);
float dot_bf16_amx(int64_t rounds);
float fma_neon(int64_t rounds);
float dot_bf16_mmla(int64_t rounds);

// Reads all of [data, data + bytes); bytes is a multiple of 512.
float read_plain(const void* data, int64_t bytes);
float read_avx2(const void* data, int64_t bytes);
float read_avx512(const void* data, int64_t bytes);
float read_neon(const void* data, int64_t bytes);

// The same as kReadStreams streams, a quarter of the bytes each, with every line fetched into L2 and from there into
// L1, as the matrix kernels do it.
inline constexpr int kReadStreams = 4;
inline constexpr int64_t kReadNear = 1152;
inline constexpr int64_t kReadFar = 3456;
float read_ahead_avx2(const void* data, int64_t bytes);
float read_ahead_avx512(const void* data, int64_t bytes);
float read_ahead_neon(const void* data, int64_t bytes);

}  // namespace fourfold::cpu::ceilings
