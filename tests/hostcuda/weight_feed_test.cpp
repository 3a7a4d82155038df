// Weights on their way to the device: parcels of every kind, in small blocks, against what the host packs itself.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <fstream>
#include <memory>

#include "base/check.h"
#include "base/file.h"
#include "base/random.h"
#include "cuda/backend/memory.h"
#include "hostcuda/testing.h"
#include "kernels/random_weights.h"

namespace fourfold::hostcuda {
namespace {

using cuda::WeightFeed;

std::vector<uint8_t> random_bytes(uint64_t seed, size_t count) {
  Random random(seed);
  std::vector<uint8_t> bytes(count);
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random.next());
  return bytes;
}

template <typename F>
std::string error_of(F&& f) {
  try {
    f();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

// On a card with memory of its own, and where it shares the host's.
class HostWeights : public testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    if (!executor::Device::checks_plain_accesses()) GTEST_SKIP() << "sanitizers see the kernels' accesses here";
    HostCard card;
    card.one_pool = GetParam();
    install(card);
  }
};
INSTANTIATE_TEST_SUITE_P(Memory, HostWeights, testing::Bool(),
                         [](const auto& tested) { return tested.param ? "OnePool" : "Apart"; });

// Parcels of many sizes from mapped files, from memory with an owner and from memory without one, rows that lie apart
// among them. The blocks come round many times.
TEST_P(HostWeights, EveryParcelArrives) {
  {
    const TemporaryDirectory folder;
    const std::vector<uint8_t> in_file = random_bytes(1, 300000);
    std::ofstream(folder.path() / "file", std::ios::binary)
        .write(reinterpret_cast<const char*>(in_file.data()), static_cast<std::streamsize>(in_file.size()));
    const cuda::Device device;
    const cuda::Stream stream(device);
    std::vector<uint8_t> want;
    cuda::Buffer buffer(device, 1 << 20, "weights");
    WeightFeed feed(device, 3, 16384);
    {
      const MappedFile mapped(folder.path() / "file");
      Random random(2);
      for (int i = 0; i < 200; ++i) {
        const uint64_t rows = 1 + random.below(4), each = 1 + random.below(1000), stride = each + random.below(50);
        auto owned = std::make_shared<std::vector<uint8_t>>(random_bytes(static_cast<uint64_t>(i) + 10, rows * stride));
        std::vector<uint8_t> borrowed = *owned;
        WeightFeed::Piece piece = {.bytes = each, .rows = static_cast<int64_t>(rows), .stride = stride};
        if (i % 5 == 0) {
          piece.from = borrowed.data();
        } else if (i % 5 < 3) {
          piece.from = owned->data();
          piece.owner = owned;
        } else {
          piece.from = mapped.bytes().data() + random.below(in_file.size() - rows * stride);
        }
        std::vector<uint8_t> parcel;
        for (uint64_t row = 0; row < rows; ++row) {
          const auto* from = static_cast<const uint8_t*>(piece.from) + row * stride;
          parcel.insert(parcel.end(), from, from + each);
        }
        feed.add(rows * each, {piece}, WeightFeed::copy_to(buffer.address() + want.size(), rows * each));
        want.insert(want.end(), parcel.begin(), parcel.end());
        std::fill(borrowed.begin(), borrowed.end(), uint8_t{0});
      }
    }  // the mapping goes before everything has been read
    feed.finish();
    std::vector<uint8_t> got(want.size());
    buffer.download(stream, got.data(), got.size());
    stream.synchronize();
    EXPECT_EQ(got, want);
    // In one pool there are no blocks on the device beside those that were read into.
    EXPECT_EQ(peak_bytes() < buffer.bytes() + WeightFeed::kStatusBytes + WeightFeed::kBlocks * 16384, GetParam());
  }
  EXPECT_EQ(live(), Live{});
}

TEST_P(HostWeights, AFileThatEndsEarlyIsAnErrorAndNothingIsLeft) {
  {
    const TemporaryDirectory folder;
    const std::vector<uint8_t> bytes = random_bytes(1, 40000);
    std::ofstream(folder.path() / "file", std::ios::binary)
        .write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
    const cuda::Device device;
    cuda::Buffer buffer(device, 40000, "weights");
    const MappedFile mapped(folder.path() / "file");
    std::filesystem::resize_file(folder.path() / "file", 20000);
    WeightFeed feed(device, 2, 16384);
    const std::string error = error_of([&] {
      for (uint64_t at = 0; at < 40000; at += 10000) {
        feed.add(10000, {{.from = mapped.bytes().data() + at, .bytes = 10000}},
                 WeightFeed::copy_to(buffer.address() + at, 10000));
      }
      feed.finish();
    });
    EXPECT_NE(error.find("it ends at byte 20000"), std::string::npos) << error;
    EXPECT_NE(error_of([&] { feed.finish(); }), "") << "the error is forgotten";
  }
  EXPECT_EQ(live(), Live{});
}

// The caller is far ahead with what lies in files, and not with what is kept in memory for it.
TEST_P(HostWeights, WhatWaitsIsALimitedAmountOfMemory) {
  {
    const TemporaryDirectory folder;
    const std::vector<uint8_t> bytes = random_bytes(1, 10000);
    std::ofstream(folder.path() / "file", std::ios::binary)
        .write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
    const cuda::Device device;
    cuda::Buffer buffer(device, 10000, "weights");
    const MappedFile mapped(folder.path() / "file");
    WeightFeed feed(device, 2, 10240);
    std::atomic<int> there{0}, most{0};
    for (int i = 0; i < 300; ++i) {
      const auto mine = std::make_shared<std::vector<uint8_t>>(bytes);
      // Counts those that are kept: taken back when the last owner is gone.
      const std::shared_ptr<const void> owner(mine->data(), [mine, &there](const void*) { --there; });
      most = std::max(most.load(), ++there);
      feed.add(10000, {{.from = mine->data(), .bytes = 10000, .owner = owner}},
               WeightFeed::copy_to(buffer.address(), 10000));
      for (int more = 0; more < 3; ++more) {
        feed.add(10000, {{.from = mapped.bytes().data(), .bytes = 10000}},
                 WeightFeed::copy_to(buffer.address(), 10000));
      }
    }
    feed.finish();
    EXPECT_EQ(there, 0);
    EXPECT_LE(most, 12 + 1 + static_cast<int>(WeightFeed::kReadAtOnce) + 1);
    EXPECT_GE(device.load_times().blocks, 1200);
  }
  EXPECT_EQ(live(), Live{});
}

// The first blocks are on their way before the last ones have memory.
TEST_P(HostWeights, MemoryThatIsNotThereIsAnError) {
  for (int64_t nth = 1; nth <= static_cast<int64_t>(WeightFeed::kBlocks); ++nth) {
    {
      const cuda::Device device;
      cuda::Buffer buffer(device, 1000, "weights");
      fail_call(Call::kHostAllocate, nth, kOutOfMemory);
      WeightFeed feed(device, 2, 16384);
      const std::vector<uint8_t> bytes = random_bytes(1, 1000);
      const std::string error = error_of([&] {
        feed.add(1000, {{.from = bytes.data(), .bytes = 1000}}, WeightFeed::copy_to(buffer.address(), 1000));
        feed.finish();
      });
      EXPECT_NE(error.find("weights on their way: 16384 bytes of page-locked memory"), std::string::npos) << error;
    }
    EXPECT_EQ(live(), Live{});
  }
}

// A stack of all formats, cut into many parcels, has the bytes that the host packs.
TEST_P(HostWeights, StacksAreRepackedAsOnTheHost) {
  {
    const auto card = std::make_shared<cuda::Card>(0, kernel_store());
    card->loading_block = 40000;
    card->loading_threads = 2;
    const std::vector<ops::MatrixSource> parts = {
        gemm::random_matrix(gemm::Kind::kFp8Block, 150, 336, 1), gemm::random_matrix(gemm::Kind::kNvfp4, 260, 336, 2),
        gemm::random_matrix(gemm::Kind::kBf16, 33, 336, 3), gemm::random_matrix(gemm::Kind::kFp8Row, 300, 336, 4),
        gemm::random_matrix(gemm::Kind::kF32, 17, 336, 5)};
    const cuda::Stack stack(card, parts);
    card->settle_weights();
    const cuda::PackedMatrix want = cuda::pack_stack(parts);
    std::vector<uint8_t> got(want.bytes.size());
    const cuda::PackedMatrix placed = cuda::place_stack(parts);
    ASSERT_EQ(placed.size, want.bytes.size());
    EXPECT_TRUE(placed.bytes.empty());
    const auto address = static_cast<cuda::DeviceAddress>(reinterpret_cast<uintptr_t>(stack.matrix().parts[0].weights) -
                                                          want.parts[0].weights);
    card->device.check(
        card->device.driver().call().copy_to_host(got.data(), address, got.size(), card->stream.handle()), "copy");
    card->stream.synchronize();
    for (size_t i = 0; i < want.parts.size(); ++i) {
      const cuda::PackedMatrix::Part& part = want.parts[i];
      const auto at = static_cast<int64_t>(part.weights);
      const auto units = static_cast<int64_t>(gemm::packed_bytes(part.format, part.tiles, 336));
      EXPECT_TRUE(std::equal(want.bytes.begin() + at, want.bytes.begin() + at + units, got.begin() + at)) << i;
      const std::vector<uint8_t> factors = cuda::stack_factors(placed, part, parts[i]);
      EXPECT_TRUE(std::equal(factors.begin(), factors.end(), got.begin() + static_cast<int64_t>(part.factors))) << i;
    }
  }
  EXPECT_EQ(live(), Live{});
}

// Columns of wider matrices, whose rows lie apart in a file, have the bytes of a copy of them.
TEST_P(HostWeights, ColumnsOfAFileAreRepackedAsACopyOfThem) {
  {
    const auto card = std::make_shared<cuda::Card>(0, kernel_store());
    card->loading_block = 30000;
    card->loading_threads = 2;
    constexpr int64_t kRows = 130, kColumns = 336, kWide = 60000, kFirst = 1024;
    const TemporaryDirectory folder;
    const auto halves = static_cast<size_t>(kRows * kWide * 2), codes = static_cast<size_t>(kRows * kWide / 2);
    std::vector<uint8_t> bytes = random_bytes(1, halves + codes + codes / 8);
    for (size_t i = 1; i < halves; i += 2) bytes[i] &= 0xbf;  // bf16 that are numbers
    for (size_t i = halves + codes; i < bytes.size(); ++i) bytes[i] &= 0x3f;
    std::ofstream(folder.path() / "file", std::ios::binary)
        .write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
    const MappedFile mapped(folder.path() / "file");
    const auto* file = reinterpret_cast<const uint8_t*>(mapped.bytes().data());
    std::vector<ops::MatrixSource> views(2), copies;
    views[0].format = ops::Format::kBf16;
    views[0].data = file + kFirst * 2;
    views[1].format = ops::Format::kNvfp4;
    views[1].data = file + halves + kFirst / 2;
    views[1].block_scales = file + halves + codes + kFirst / 16;
    std::vector<std::vector<uint8_t>> kept;
    const auto copy = [&](const void* from, int64_t row, int64_t pitch) {
      std::vector<uint8_t>& to = kept.emplace_back();
      for (int64_t r = 0; r < kRows; ++r) {
        const auto* at = static_cast<const uint8_t*>(from) + r * pitch;
        to.insert(to.end(), at, at + row);
      }
      return to.data();
    };
    for (ops::MatrixSource& view : views) {
      view.rows = kRows;
      view.columns = kColumns;
      ops::MatrixSource& other = copies.emplace_back(view);
      view.pitch = kWide;
      const bool half = view.format == ops::Format::kBf16;
      other.data = copy(view.data, half ? kColumns * 2 : kColumns / 2, half ? kWide * 2 : kWide / 2);
      if (!half) other.block_scales = copy(view.block_scales, kColumns / 16, kWide / 16);
    }
    const cuda::Stack stack(card, views);
    card->settle_weights();
    const cuda::PackedMatrix want = cuda::pack_stack(copies);
    for (size_t i = 0; i < want.parts.size(); ++i) {
      const cuda::PackedMatrix::Part& part = want.parts[i];
      std::vector<uint8_t> got(static_cast<size_t>(gemm::packed_bytes(part.format, part.tiles, kColumns)));
      card->device.check(
          card->device.driver().call().copy_to_host(
              got.data(),
              static_cast<cuda::DeviceAddress>(reinterpret_cast<uintptr_t>(stack.matrix().parts[i].weights)),
              got.size(), card->stream.handle()),
          "copy");
      card->stream.synchronize();
      EXPECT_TRUE(std::equal(got.begin(), got.end(), want.bytes.begin() + static_cast<int64_t>(part.weights))) << i;
    }
  }
  EXPECT_EQ(live(), Live{});
}

// Two ranks' halves of the same rows, and a feed for each: the rows are read once, and each has its columns.
TEST_P(HostWeights, ColumnsThatRanksShareAreReadOnce) {
  {
    constexpr uint64_t kRows = 3000, kRow = 600;
    const TemporaryDirectory folder;
    const std::vector<uint8_t> bytes = random_bytes(1, kRows * kRow);
    std::ofstream(folder.path() / "file", std::ios::binary)
        .write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
    const MappedFile mapped(folder.path() / "file");
    const cuda::Device device;
    const cuda::Stream stream(device);
    const auto reads = std::make_shared<SharedReads>();
    for (const uint64_t ranks : {2, 3}) {
      const uint64_t each = kRow / ranks;
      const int64_t before = reads->reads();
      std::vector<std::vector<uint8_t>> got(ranks, std::vector<uint8_t>(kRows * each));
      std::vector<cuda::Buffer> buffers;
      std::vector<std::unique_ptr<WeightFeed>> feeds;
      for (uint64_t rank = 0; rank < ranks; ++rank) {
        buffers.emplace_back(device, kRows * each, "weights");
        feeds.push_back(std::make_unique<WeightFeed>(device, 2, uint64_t{4} << 20));
        feeds.back()->add(kRows * each,
                          {{.from = mapped.bytes().data() + rank * each,
                            .bytes = each,
                            .rows = kRows,
                            .stride = kRow,
                            .lead = rank * each,
                            .reads = reads}},
                          WeightFeed::copy_to(buffers.back().address(), kRows * each));
      }
      for (uint64_t rank = 0; rank < ranks; ++rank) {
        feeds[rank]->finish();
        buffers[rank].download(stream, got[rank].data(), got[rank].size());
        stream.synchronize();
        std::vector<uint8_t> want;
        for (uint64_t row = 0; row < kRows; ++row) {
          const auto at = bytes.begin() + static_cast<int64_t>(row * kRow + rank * each);
          want.insert(want.end(), at, at + static_cast<int64_t>(each));
        }
        EXPECT_EQ(got[rank], want) << rank;
      }
      EXPECT_EQ(reads->reads() - before, 2);  // of a megabyte
    }
  }
  EXPECT_EQ(live(), Live{});
}

TEST_P(HostWeights, ABlockScaleThatIsNoneIsNamed) {
  for (const uint8_t bad : {0x7f, 0xff, 0x80}) {
    const auto card = std::make_shared<cuda::Card>(0, kernel_store());
    card->loading_block = 20000;
    const TemporaryDirectory folder;
    {
      std::ofstream file(folder.path() / "file", std::ios::binary);
      for (int i = 0; i < 200 * 128; ++i) file.put(0x11);
      for (int i = 0; i < 200 * 16; ++i) file.put(i == 190 * 16 + 3 ? static_cast<char>(bad) : 0x38);
    }
    const MappedFile mapped(folder.path() / "file");
    ops::MatrixSource m;
    m.name = "layers.3.some_proj";
    m.format = ops::Format::kNvfp4;
    m.rows = 200;
    m.columns = 256;
    m.data = mapped.bytes().data();
    m.block_scales = reinterpret_cast<const uint8_t*>(mapped.bytes().data()) + 200 * 128;
    const cuda::Stack stack(card, std::span(&m, 1));
    EXPECT_EQ(error_of([&] { card->settle_weights(); }),
              "layers.3.some_proj: a block scale is NaN or negative, wanted numbers from 0 to 448");
  }
}

TEST_P(HostWeights, ANanWeightIsNamedWithItsRows) {
  const auto card = std::make_shared<cuda::Card>(0, kernel_store());
  card->loading_block = 20000;
  std::vector<uint8_t> codes(200 * 128, 0x11);
  codes[130 * 128 + 5] = 0x7f;
  const float one = 1;
  ops::MatrixSource m;
  m.name = "layers.3.some_proj";
  m.format = ops::Format::kFp8;
  m.rows = m.scale_rows = 200;
  m.columns = m.scale_columns = 128;
  m.data = codes.data();
  m.grid_scales = &one;
  const cuda::Stack stack(card, std::span(&m, 1));
  EXPECT_EQ(error_of([&] { card->settle_weights(); }), "layers.3.some_proj: a weight in row 128 to 143 is NaN");
}

}  // namespace
}  // namespace fourfold::hostcuda
