// The kernels that prepare an expert layer's data (prepare.cuh, and the quantisation of fp4_sm120.cuh), on the host
// executor against plain host code. All but the last run alone on a stream, between launches that do not overlap, and
// synchronise nothing: the tests pin that, so that whoever adds synchronisation also adds a chain to mutation_test.cpp.
// The wait of moe_quantize is mutated there.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>

#include "kernels/expert_layer.h"
#include "kernels/moe/fp4_layout.h"
#include "nvfp4/quantize.h"

namespace fourfold::moe {
namespace {

using executor::Device;
using executor::Options;
using executor::schedules;

constexpr int kThreads = 128;

void launch_alone(Device& device, const char* name, executor::Index3 grid, const std::function<void()>& body) {
  device.launch({name, grid, kThreads, 0, false}, body);
  EXPECT_TRUE(device.seen().empty()) << name << " synchronises, or shuffles";
}

// Matrices of some experts in one buffer, rows with a gap behind their columns, experts with one behind their rows.
struct Source {
  int experts, rows, k;
  long long code_stride, scale_stride, code_expert, scale_expert;
  std::vector<unsigned char> codes, scales;

  Source(int experts_, int rows_, int k_, unsigned seed)
      : experts(experts_),
        rows(rows_),
        k(k_),
        code_stride(k / 2 + 24),
        scale_stride(k / 16 + 3),
        code_expert(rows * code_stride + 40),
        scale_expert(rows * scale_stride + 5),
        // What lies between must not be looked at: codes 0xf, NaN scales.
        codes(static_cast<size_t>(experts * code_expert), 0xff),
        scales(static_cast<size_t>(experts * scale_expert), 0x7f) {
    std::mt19937 rng(seed);
    for (int e = 0; e < experts; ++e) {
      for (int r = 0; r < rows; ++r) {
        for (int i = 0; i < k / 2; ++i) {
          codes[static_cast<size_t>(e * code_expert + r * code_stride + i)] = static_cast<unsigned char>(rng());
        }
        for (int i = 0; i < k / 16; ++i) scale(e, r, i) = static_cast<unsigned char>(rng() % 127 | (rng() % 16 << 7));
      }
    }
  }
  unsigned char& scale(int e, int r, int i) {
    return scales[static_cast<size_t>(e * scale_expert + r * scale_stride + i)];
  }
  SourceMatrix at(const unsigned char* c, const unsigned char* s) const { return {c, s, code_stride, scale_stride}; }
};

struct Repacked {
  std::vector<unsigned char> bytes;
  int bad;
};

Repacked repack_on_device(const Options& options, const Source& first, const Source& second, bool paired, unsigned grid,
                          int first_expert = 0) {
  Device device(options);
  RepackArgs args{};
  args.first = first.at(device.constant(first.codes, "codes"), device.constant(first.scales, "scales"));
  args.second =
      paired ? second.at(device.constant(second.codes, "codes of up"), device.constant(second.scales, "scales of up"))
             : args.first;
  args.code_expert_stride = first.code_expert;
  args.scale_expert_stride = first.scale_expert;
  args.experts = first.experts;
  args.first_expert = first_expert;
  args.paired = paired ? 1 : 0;
  args.row_tiles = first.rows / (paired ? 8 : 16);
  args.k = first.k;
  args.units = (first.k + kUnitK - 1) / kUnitK;
  const size_t bytes = static_cast<size_t>(args.experts * args.row_tiles * args.units) * kUnitBytes;
  args.out = device.alloc<unsigned char>(bytes, "units");
  args.bad = device.alloc<int>(1, "bad");
  *args.bad = -1;
  launch_alone(device, "repack", {grid}, [&] { repack_kernel(args); });
  return {{args.out, args.out + bytes}, *args.bad};
}

Repacked repack_on_host(const Source& first, const Source& second, bool paired) {
  Repacked out{{}, -1};
  alignas(4) unsigned char unit[kUnitBytes];
  for (int e = 0; e < first.experts; ++e) {
    const auto matrix = [&](const Source& s) {
      return s.at(s.codes.data() + e * s.code_expert, s.scales.data() + e * s.scale_expert);
    };
    for (int row = 0; row < first.rows; row += paired ? 8 : 16) {
      for (int u = 0; u * kUnitK < first.k; ++u) {
        if (!repack_unit(matrix(first), row, matrix(paired ? second : first), paired ? row : row + 8, u, unit,
                         (first.k - u * kUnitK) / kBlockK)) {
          out.bad = e;
        }
        out.bytes.insert(out.bytes.end(), unit, unit + kUnitBytes);
      }
    }
  }
  return out;
}

TEST(Prepare, RepackedUnitsAreThoseOfTheHost) {
  unsigned seed = 0;
  // Experts, rows, columns; the last unit of a row whole or not.
  for (const auto& [experts, rows, k] : {std::tuple{1, 16, 64}, {3, 32, 128}, {5, 48, 80}, {2, 16, 336}, {7, 64, 16}}) {
    const Source gate(experts, rows, k, ++seed), up(experts, rows, k, ++seed);
    for (const bool paired : {true, false}) {
      const Repacked want = repack_on_host(gate, up, paired);
      ASSERT_EQ(want.bad, -1);
      for (const unsigned grid : {1u, 3u, 100u}) {
        for (const Options& o : schedules(1, ++seed)) {
          const Repacked got = repack_on_device(o, gate, up, paired, grid);
          EXPECT_EQ(got.bytes, want.bytes) << rows << "x" << k << ", grid " << grid;
          EXPECT_EQ(got.bad, -1);
        }
      }
    }
  }
}

TEST(Prepare, RepackNamesTheLastExpertWithANanScale) {
  Source gate(6, 16, 128, 1), up(6, 16, 128, 2);
  up.scale(1, 3, 7) = 0x7f;
  gate.scale(4, 15, 0) = 0xff;
  for (const Options& o : schedules(3)) {
    EXPECT_EQ(repack_on_device(o, gate, up, true, 2).bad, 4);
    EXPECT_EQ(repack_on_device(o, gate, up, true, 2, 100).bad, 104);
    EXPECT_EQ(repack_on_device(o, up, up, false, 2).bad, 1);
  }
}

TEST(Prepare, RepackOffsetsBeyond32Bits) {
  const Source one(1, 16, 64, 3);
  const long long stride = (1ll << 32) + 64;
  Device device{Options{}};
  const auto spread = [&](const std::vector<unsigned char>& bytes, const char* name) {
    auto* p = static_cast<unsigned char*>(device.reserve(static_cast<size_t>(3 * stride), name));
    for (int e = 0; e < 3; ++e) std::copy(bytes.begin(), bytes.end(), p + e * stride);
    p[2 * stride] ^= 0x10;
    device.make_constant(p);
    return p;
  };
  RepackArgs args{};
  args.first = args.second = one.at(spread(one.codes, "codes"), spread(one.scales, "scales"));
  args.code_expert_stride = args.scale_expert_stride = stride;
  args.experts = 3;
  args.row_tiles = args.units = 1;
  args.k = 64;
  args.out = device.alloc<unsigned char>(3 * kUnitBytes, "units");
  args.bad = device.alloc<int>(1, "bad");
  *args.bad = -1;
  launch_alone(device, "repack", {1}, [&] { repack_kernel(args); });
  EXPECT_TRUE(std::equal(args.out, args.out + kUnitBytes, args.out + kUnitBytes));
  EXPECT_FALSE(std::equal(args.out, args.out + kUnitBytes, args.out + 2 * kUnitBytes));
}

TEST(Prepare, RowsArePaddedWithZeros) {
  std::mt19937 rng(4);
  for (const auto& [rows, columns, padded, across] :
       {std::tuple{1, 16, 64, 1u}, {5, 272, 320, 1u}, {3, 2640, 2688, 3u}, {2, 64, 64, 1u}}) {
    std::vector<unsigned short> from(static_cast<size_t>(rows * columns));
    for (auto& v : from) v = static_cast<unsigned short>(rng());
    for (const Options& o : schedules(2)) {
      Device device(o);
      const auto* source = device.constant(from, "rows");
      auto* to = device.alloc<unsigned short>(static_cast<size_t>(rows * padded), "padded rows");
      launch_alone(device, "pad rows", {across, static_cast<unsigned>(rows)},
                   [&] { pad_rows_kernel(source, to, columns, padded); });
      for (int r = 0; r < rows; ++r) {
        for (int i = 0; i < padded; ++i) {
          ASSERT_EQ(to[r * padded + i], i < columns ? from[static_cast<size_t>(r * columns + i)] : 0) << r << " " << i;
        }
      }
    }
  }
}

TEST(Prepare, SharedChoicesAreAppended) {
  std::mt19937 rng(5);
  for (const auto& [tokens, top_k, slices] : {std::tuple{1, 1, 1}, {7, 8, 1}, {50, 10, 3}, {129, 3, 2}}) {
    std::vector<int> ids(static_cast<size_t>(tokens * top_k));
    std::vector<float> weights(ids.size()), gates(static_cast<size_t>(tokens));
    for (int& id : ids) id = static_cast<int>(rng() % 70) - 3;  // -1 and ids beyond the experts stay what they are
    for (float& w : weights) w = static_cast<float>(rng() % 1000);
    for (float& g : gates) g = -static_cast<float>(rng() % 1000);
    const int first = 64, width = top_k + slices;
    for (const Options& o : schedules(2)) {
      Device device(o);
      const auto* from = device.constant(ids, "ids");
      const auto *from_weights = device.constant(weights, "weights"), *from_gates = device.constant(gates, "gates");
      auto* to = device.alloc<int>(static_cast<size_t>(tokens * width), "all ids");
      auto* to_weights = device.alloc<float>(static_cast<size_t>(tokens * width), "all weights");
      launch_alone(device, "append shared", {static_cast<unsigned>((tokens * width + kThreads - 1) / kThreads)}, [&] {
        append_shared_kernel(from, from_weights, from_gates, tokens, top_k, first, slices, to, to_weights);
      });
      for (int t = 0; t < tokens; ++t) {
        for (int c = 0; c < width; ++c) {
          const size_t at = static_cast<size_t>(t * width + c), routed = static_cast<size_t>(t * top_k + c);
          EXPECT_EQ(to[at], c < top_k ? ids[routed] : first + c - top_k);
          EXPECT_EQ(to_weights[at], c < top_k ? weights[routed] : gates[static_cast<size_t>(t)]);
        }
      }
    }
  }
}

// Every rounding border is met sooner or later: values of all magnitudes under input scales far too large and too
// small.
TEST(Prepare, QuantisedRowsAreThoseOfTheHostBitByBit) {
  std::mt19937 rng(6);
  std::normal_distribution<float> normal;
  for (const auto& [tokens, columns, gap] : {std::tuple{1, 16, 0}, {6, 320, 16}, {9, 2128, 8}, {3, 4096, 0}}) {
    const int units = (columns + kUnitK - 1) / kUnitK, stride = columns + gap;
    for (const float scale : {4.0f / 2688, 1.0f, 1e-7f, 1.5e-38f, 3e37f}) {
      std::vector<unsigned short> rows(static_cast<size_t>(tokens * stride), 0x7fc0);
      for (int t = 0; t < tokens; ++t) {
        const float magnitude = std::ldexp(2688 * scale, -static_cast<int>(rng() % 24));
        for (int i = 0; i < columns; ++i) {
          float v = normal(rng) * (i / 16 % 5 == 3 ? 1e-3f : 1.0f) * magnitude;
          if (rng() % 97 == 0) v = i % 2 == 0 ? 0.0f : -0.0f;
          if (rng() % 301 == 0) v = std::numeric_limits<float>::quiet_NaN();
          if (t == 5 && rng() % 50 == 0) v = std::numeric_limits<float>::infinity();
          rows[static_cast<size_t>(t * stride + i)] = nvfp4::float_to_bf16(v);
        }
      }
      for (const Options& o : schedules(1, rng())) {
        Device device(o);
        const auto* from = device.constant(rows, "rows");
        const auto* input_scale = device.constant(std::vector<float>{scale}, "input scale");
        const long long code_stride = units * 32 + 16, scale_stride = units * 4 + 4;
        auto* codes = device.alloc<unsigned char>(static_cast<size_t>(tokens * code_stride), "codes");
        auto* scales = device.alloc<unsigned char>(static_cast<size_t>(tokens * scale_stride), "scales");
        const executor::Index3 grid{static_cast<unsigned>((4 * units + kThreads - 1) / kThreads),
                                    static_cast<unsigned>(tokens)};
        device.launch({"quantise", grid, kThreads}, [&] {
          quantize_kernel(from, stride, columns, units, input_scale, codes, code_stride, scales, scale_stride);
        });
        for (int t = 0; t < tokens; ++t) {
          std::vector<float> row(static_cast<size_t>(columns));
          for (int i = 0; i < columns; ++i) {
            const float v = nvfp4::bf16_to_float(rows[static_cast<size_t>(t * stride + i)]);
            row[static_cast<size_t>(i)] = std::isnan(v) ? 0.0f : v;
          }
          std::vector<std::uint8_t> want_codes(static_cast<size_t>(columns / 2)),
              want_scales(static_cast<size_t>(columns / 16));
          nvfp4::quantize_activations(row, 1.0f / scale, want_codes, want_scales);
          for (int i = 0; i < units * kUnitK; ++i) {
            const int block = i / 16, place = block / 4 * 4 + group_place(block % 4), nibble = k_nibble(i % 16);
            const unsigned char byte = codes[t * code_stride + place * 8 + (i & 4) + nibble / 2];
            const int got = byte >> (4 * (nibble % 2)) & 15;
            const int pair = i < columns ? want_codes[static_cast<size_t>(i / 2)] : 0;
            ASSERT_EQ(got, i % 2 != 0 ? pair >> 4 : pair & 15) << "token " << t << ", column " << i;
            ASSERT_EQ(scales[t * scale_stride + place], i < columns ? want_scales[static_cast<size_t>(block)] : 0);
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace fourfold::moe
