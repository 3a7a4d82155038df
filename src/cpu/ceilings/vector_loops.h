// The loops of an instruction set over its vocabulary; simd/avx2.h says why all of it is unnamed.
#pragma once

#include <cstdint>

#include "cpu/ceilings/loops.h"

namespace fourfold::cpu::ceilings {
namespace {

// kSums independent sums fill the pipes.
template <class V, int kSums>
inline float fma_loop(int64_t rounds) {
  typename V::F sums[kSums];
  for (int i = 0; i < kSums; ++i) sums[i] = V::set(static_cast<float>(i));
  typename V::F x = V::set(0.9999f);
  typename V::F y = V::set(1e-4f);
  for (int64_t round = 0; round < rounds; ++round) {
    V::opaque(x);  // keeps the loop from being folded
    V::opaque(y);
#pragma GCC unroll 32
    for (int i = 0; i < kSums; ++i) sums[i] = V::fma(sums[i], x, y);
  }
  typename V::F all = sums[0];
  for (int i = 1; i < kSums; ++i) all = V::add(all, sums[i]);
  return V::sum(all);
}

template <class V>
inline float read_loop(const void* data, int64_t bytes) {
  constexpr int kBytes = sizeof(typename V::I);
  constexpr int kSums = 8;
  const auto* p = static_cast<const char*>(data);
  typename V::I sums[kSums] = {};
  for (int64_t i = 0; i < bytes; i += 512) {
#pragma GCC unroll 16
    for (int j = 0; j < 512 / kBytes; ++j) {
      sums[j % kSums] = V::bit_xor(sums[j % kSums], V::load_words(p + i + kBytes * j));
    }
  }
  for (int j = 1; j < kSums; ++j) sums[0] = V::bit_xor(sums[0], sums[j]);
  return static_cast<float>(V::first_word(sums[0]));
}

template <class V>
inline float read_ahead_loop(const void* data, int64_t bytes) {
  constexpr int kLine = 64;
  constexpr int kBytes = sizeof(typename V::I);
  constexpr int kParts = kLine / kBytes;
  const auto* p = static_cast<const char*>(data);
  const int64_t stream = bytes / kReadStreams;
  typename V::I sums[kReadStreams][kParts] = {};
  for (int64_t i = 0; i < stream; i += 2 * kLine) {
#pragma GCC unroll 4
    for (int s = 0; s < kReadStreams; ++s) {
      const char* at = p + s * stream + i;
#pragma GCC unroll 2
      for (int j = 0; j < 2 * kLine; j += kLine) {
        __builtin_prefetch(at + j + kReadNear, 0, 3);
        __builtin_prefetch(at + j + kReadFar, 0, 2);
#pragma GCC unroll 2
        for (int part = 0; part < kParts; ++part) {
          sums[s][part] = V::bit_xor(sums[s][part], V::load_words(at + j + part * kBytes));
        }
      }
    }
  }
  typename V::I all = {};
  for (const auto& of_stream : sums) {
    for (const typename V::I& sum : of_stream) all = V::bit_xor(all, sum);
  }
  return static_cast<float>(V::first_word(all));
}

}  // namespace
}  // namespace fourfold::cpu::ceilings
