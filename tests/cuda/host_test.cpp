// What can be tested without a GPU.
#include <fstream>
#include <set>

#include "base/check.h"
#include "base/file.h"
#include "base/temporary_directory.h"
#include "cuda/backend/sources.h"
#include "cuda/moe/sources.h"
#include "cuda/moe/tuned.h"
#include "jit/nvrtc.h"
#include "measure/layer_bench.h"
#include "testing.h"

namespace fourfold::cuda {
namespace {

jit::DeviceInfo info(const char* name, int major, int minor, int sms) {
  jit::DeviceInfo d;
  d.name = name;
  d.major = major;
  d.minor = minor;
  d.sms = sms;
  d.l2_bytes = 50 << 20;
  d.clock_ghz = 1.5;
  d.memory_tbs = 2.0;
  return d;
}

// A stack of one matrix, as far as the choice of a kernel looks at it.
gemm::Matrix matrix_of(gemm::Weights format, int outputs, int columns) {
  gemm::Matrix m = {};
  m.count = 1;
  m.tiles = (outputs + 15) / 16;
  m.columns = columns;
  m.units = columns / 64;
  m.parts[0].format = format;
  m.parts[0].rows = outputs;
  return m;
}

// Where many CTAs share an item's columns and have few units each, half the sums; up to 64 rows have a kernel of their
// own.
TEST(WideProducts, TilesFollowItemsAndWhatASplitCosts) {
  const Target hopper = plan::find_arch("sm_90a");
  const auto entry = [&](gemm::Weights format, int outputs, int columns, int64_t rows) {
    return wide_entry(hopper, 1 << static_cast<int>(format), rows, matrix_of(format, outputs, columns), 132);
  };
  using enum gemm::Weights;
  for (const int rows : {64, 65, 256}) EXPECT_EQ(entry(kBf16, 257, 2048, rows), kMiddle) << rows;
  for (const int rows : {257, 512, 2048}) EXPECT_EQ(entry(kBf16, 257, 2048, rows), kWideFew) << rows;
  EXPECT_EQ(entry(kBf16, 257, 2048, 8192), kWideMany);
  for (const int rows : {64, 128, 256}) EXPECT_EQ(entry(kFp8, 2048, 4096, rows), kMiddle) << rows;
  EXPECT_EQ(entry(kFp8, 12352, 2048, 64), kMiddle);     // 12 units for a CTA
  EXPECT_EQ(entry(kFp8, 12352, 2048, 128), kWideFew);   // 98 items of 64 rows of x, each for an SM
  EXPECT_EQ(entry(kFp8, 2048, 4096, 512), kWideMany);   // four CTAs
  EXPECT_EQ(entry(kFp8, 12288, 2048, 256), kWideMany);  // columns are not shared out
  EXPECT_EQ(entry(kBf16, 3072, 8192, 128), kWideFew);   // eleven CTAs for an item of 128 rows, five of 64
  EXPECT_EQ(entry(kBf16, 3072, 8192, 256), kWideMany);
  EXPECT_EQ(entry(kBf16, 248320, 2048, 64), kWideFew);  // a head
  for (const int rows : {9, 32}) EXPECT_EQ(entry(kNvfp4, 248320, 2048, rows), kWideLeast) << rows;
}

TEST(WideProducts, SharesOfUnitsEndWithItemsWhereThatIsFaster) {
  const Target hopper = plan::find_arch("sm_90a");
  const auto share = [&](gemm::Weights format, int outputs, int columns, int64_t rows) {
    return middle_share(hopper, 1 << static_cast<int>(format), rows, matrix_of(format, outputs, columns), 132);
  };
  using enum gemm::Weights;
  EXPECT_EQ(share(kFp8, 12352, 2048, 64), 16);  // of 32, where equal shares have 12
  EXPECT_EQ(share(kBf16, 2048, 3072, 192), 12);
  EXPECT_EQ(share(kBf16, 3072, 1024, 128), 4);     // equal ones are quarters already
  EXPECT_EQ(share(kNvfp4, 3072, 13 * 64, 64), 4);  // no other number of units divides 13
}

TEST(WideProducts, ClustersAreTakenWhereTheyHaveRoom) {
  const Target hopper = plan::find_arch("sm_90a");
  const auto clusters = [&](gemm::Weights format, int outputs, int columns, int64_t rows) {
    return by_clusters(hopper, 1 << static_cast<int>(format), rows, matrix_of(format, outputs, columns), 132);
  };
  using enum gemm::Weights;
  EXPECT_TRUE(clusters(kFp8, 2048, 4096, 64));
  EXPECT_TRUE(clusters(kBf16, 3072, 8192, 64));   // two CTAs on an SM
  EXPECT_FALSE(clusters(kFp8, 2048, 4096, 128));  // not of more rows of x
  EXPECT_TRUE(clusters(kBf16, 257, 3072, 192));   // but for a router
  EXPECT_FALSE(clusters(kBf16, 5120, 6144, 64));  // no room
}

// As measured (docs/kernels/products.md, "9 to 16 rows"), but for what differs little.
TEST(FewProducts, NineToSixteenRowsGoTheFasterWay) {
  const Target hopper = plan::find_arch("sm_90a");
  const auto few = [&](gemm::Weights format, int outputs, int columns, int64_t rows) {
    const RowsWay way = rows_way(hopper, 1 << static_cast<int>(format), outputs, columns);
    return by_few(hopper, way, matrix_of(format, outputs, columns), rows, 132);
  };
  using enum gemm::Weights;
  for (const int rows : {1, 8, 9, 16}) {
    EXPECT_TRUE(few(kFp8, 12352, 2048, rows)) << rows;
    EXPECT_TRUE(few(kBf16, 12352, 2048, rows)) << rows;
    EXPECT_TRUE(few(kBf16, 20608, 3072, rows)) << rows;  // of gemm_wide on 81 of 132 SMs
    EXPECT_TRUE(few(kBf16, 2048, 512, rows)) << rows;    // short rows
    EXPECT_EQ(few(kNvfp4, 248320, 2048, rows), rows <= 8);
    EXPECT_EQ(few(kBf16, 3072, 8192, rows), rows <= 8);  // 16 rows of x have no room
  }
  for (const int rows : {11, 12}) {
    EXPECT_EQ(few(kFp8, 2048, 4096, rows), rows < 12);  // clusters
    EXPECT_EQ(few(kBf16, 257, 2048, rows), rows < 12);
  }
  for (const int rows : {17, 64}) EXPECT_FALSE(few(kFp8, 12352, 2048, rows)) << rows;
}

// Panels of x for every row tile cost more than the second CTA of an SM brings.
TEST(FewProducts, LaunchesHaveFewerCtasWhereAllOfXFitsOnlyThen) {
  const Target hopper = plan::find_arch("sm_90a");
  const auto ctas = [&](gemm::Weights format, int outputs, int columns, int rows) {
    const RowsWay way = rows_way(hopper, 1 << static_cast<int>(format), outputs, columns);
    const gemm::RowsTile tile = rows_tile(way, rows > 8 ? kRows16 : kRows8);
    const int units = gemm::units_of(columns), found = rows_ctas(hopper, tile, units, rows);
    const bool whole = gemm::panel_units(tile, units, rows, shared_of(hopper, found)) == units;
    EXPECT_EQ(whole, all_at_once(hopper, way, units, rows));
    EXPECT_GE(tile.ctas, found);
    return whole ? found : 0;
  };
  using enum gemm::Weights;
  for (const int rows : {1, 2, 4, 6}) EXPECT_EQ(ctas(kBf16, 12352, 2048, rows), 2) << rows;
  for (const int rows : {7, 8, 9, 16}) EXPECT_EQ(ctas(kBf16, 12352, 2048, rows), 1) << rows;
  for (const int rows : {1, 3}) EXPECT_EQ(ctas(kBf16, 20608, 4096, rows), 2) << rows;
  for (const int rows : {4, 8}) EXPECT_EQ(ctas(kBf16, 20608, 4096, rows), 1) << rows;
  EXPECT_EQ(ctas(kBf16, 3072, 8192, 2), 2);
  EXPECT_EQ(ctas(kBf16, 3072, 8192, 8), 1);
  EXPECT_EQ(ctas(kNvfp4, 5120, 17408, 1), 2);
  EXPECT_EQ(ctas(kNvfp4, 5120, 17408, 4), 1);
  EXPECT_EQ(ctas(kNvfp4, 5120, 17408, 5), 0);  // in panels
  EXPECT_EQ(ctas(kFp8, 12352, 2048, 8), 1);
}

// A router goes with a product that has a CTA for each row tile.
TEST(FewProducts, ARouterNeedsACtaForEachRowTile) {
  const plan::Arch& hopper = plan::find_arch("sm_90a");
  const gemm::RowsTile two = {1, 1, 8, 1, 3, 2, 0, false, false, 2};
  EXPECT_TRUE(routes_at_once(hopper, two, 64, 1, 256, 132));
  EXPECT_FALSE(routes_at_once(hopper, two, 64, 1, 265, 132));
  EXPECT_TRUE(routes_at_once(hopper, two, 64, 3, 256, 132));
  EXPECT_FALSE(routes_at_once(hopper, two, 64, 4, 256, 132));  // one CTA to an SM
  EXPECT_TRUE(routes_at_once(hopper, two, 64, 4, 128, 132));
  EXPECT_FALSE(routes_at_once(hopper, two, 1024, 8, 128, 132));  // x has no room
}

TEST(GpuRow, CardsOfTheTableAreFoundByTheirNames) {
  EXPECT_EQ(gpu_row_of(info("NVIDIA H200", 9, 0, 132)).name, "h200");
  EXPECT_EQ(gpu_row_of(info("NVIDIA H100 80GB HBM3", 9, 0, 132)).name, "h100");
  EXPECT_EQ(gpu_row_of(info("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 12, 0, 188)).name, "rtx-pro-6000");
  EXPECT_EQ(gpu_row_of(info("NVIDIA GeForce RTX 5070 Ti", 12, 0, 70)).name, "rtx-5070-ti");
  EXPECT_EQ(gpu_row_of(info("NVIDIA GeForce RTX 5090", 12, 0, 170)).name, "rtx-5090");
}

TEST(GpuRow, OthersAreDescribedByWhatTheDriverSays) {
  // A longer number, or one that ends like a known one, is another card.
  EXPECT_EQ(gpu_row_of(info("NVIDIA GeForce RTX 50901", 12, 0, 170)).name, "this card");
  EXPECT_EQ(gpu_row_of(info("NVIDIA GeForce RTX 15090", 12, 0, 170)).name, "this card");
  // Fewer multiprocessors than the row's card, an unknown name, and a name that only contains a known one.
  for (const char* name : {"NVIDIA H100 PCIe", "NVIDIA X1", "NVIDIA GH200 480GB"}) {
    const plan::Gpu gpu = gpu_row_of(info(name, 9, 0, 114));
    EXPECT_EQ(gpu.sms, 114) << name;
    EXPECT_EQ(gpu.arch, "sm_90a");
    EXPECT_DOUBLE_EQ(gpu.read_tbs, 2.0);
    EXPECT_DOUBLE_EQ(gpu.clock_ghz, 1.5);
    EXPECT_EQ(gpu.bf16_tflops, 0) << "the rate that was measured on another card";
  }
  EXPECT_THROW(gpu_row_of(info("NVIDIA GeForce GTX 1080", 6, 1, 20)), Error);
}

// Answers are kept, and both of these are "this card".
TEST(GpuRow, CardsThatNobodyHasListedHaveKernelsOfTheirOwn) {
  const plan::Gpu hopper = gpu_row_of(info("NVIDIA X1", 9, 0, 100)), ampere = gpu_row_of(info("NVIDIA X2", 8, 0, 100));
  ASSERT_EQ(hopper.name, ampere.name);
  const plan::moe::Problem p = problem_of(8, 2, 256, 256);
  std::set<std::string> names[2];
  for (const plan::Gpu* gpu : {&hopper, &ampere}) {
    for (const plan::KernelSource& source : layer_sources(p, *gpu, {}, 8)) names[gpu == &ampere].insert(source.name);
  }
  EXPECT_NE(names[0], names[1]);
}

TEST(DeviceMemory, OnePoolIsCountedAsTheProcessorCountsIt) {
  const DeviceMemory driver{40, 128};  // the driver's count leaves out pages of files
  const auto free = [&](jit::HostMemory kind, int64_t available) {
    const DeviceMemory found = memory_of_device(kind, driver, {available, "the machine"});
    EXPECT_EQ(found.total, 128u);
    return found.free;
  };
  EXPECT_EQ(free(jit::HostMemory::kOnePool, 110), 110u);
  EXPECT_EQ(free(jit::HostMemory::kOnePool, 20), 20u);  // a control group's limit, which the driver does not know
  EXPECT_EQ(free(jit::HostMemory::kOnePool, 500), 128u);
  EXPECT_EQ(free(jit::HostMemory::kOnePool, -1), 40u);
  EXPECT_EQ(free(jit::HostMemory::kCoherent, 110), 40u);
  EXPECT_EQ(free(jit::HostMemory::kApart, 110), 40u);
}

TEST(Deadline, AWaitEndsWithTheAnswerOrWithTheDeadline) {
  int asked = 0;
  const auto after = [&](int times, int answer) {
    asked = 0;
    return [&asked, times, answer] { return ++asked < times ? jit::kNotReady : answer; };
  };
  EXPECT_EQ(wait_until_ready(after(1, 0), std::chrono::milliseconds(0)), 0);
  EXPECT_EQ(wait_until_ready(after(5000, 0), kDeviceDeadline), 0);
  EXPECT_EQ(asked, 5000);
  EXPECT_EQ(wait_until_ready(after(3, 719), kDeviceDeadline), 719);  // a launch that failed
  const auto start = std::chrono::steady_clock::now();
  EXPECT_EQ(wait_until_ready([] { return jit::kNotReady; }, std::chrono::milliseconds(30)), jit::kNotReady);
  EXPECT_GE(std::chrono::steady_clock::now() - start, std::chrono::milliseconds(30));
}

TEST(SharedExpert, SlicesCutRowsOfGateAndUpAndColumnsOfDown) {
  plan::moe::Problem p = problem_of(4, 2, 64, 32);
  p.shared = plan::moe::SharedExpert::kNvfp4;
  p.shared_intermediate = 96;
  ASSERT_EQ(p.shared_slices(), 3);
  EXPECT_EQ(p.all_experts(), 7);
  EXPECT_EQ(p.picks_per_token(), 5);
  plan::moe::Problem wide = p;
  wide.intermediate = 96;
  const RandomExperts shared(wide, 1, 5);
  const ExpertMatrices& whole = shared.experts[0];
  const auto slices = shared_slices(whole, 3, p);
  ASSERT_EQ(slices.size(), 3u);
  const auto gate = dequantised(whole.gate, 96, 64), down = dequantised(whole.down, 64, 96);
  for (int64_t s = 0; s < 3; ++s) {
    const auto part = dequantised(slices[static_cast<size_t>(s)].gate, 32, 64);
    EXPECT_TRUE(std::equal(part.begin(), part.end(), gate.begin() + s * 32 * 64));
    const auto columns = dequantised(slices[static_cast<size_t>(s)].down, 64, 32);
    for (int64_t r = 0; r < 64; ++r) {
      EXPECT_TRUE(std::equal(columns.begin() + r * 32, columns.begin() + (r + 1) * 32, down.begin() + r * 96 + s * 32));
    }
  }
  // Widths that do not divide, or another format: no slices, the planner counts its bytes apart.
  p.shared_intermediate = 80;
  EXPECT_EQ(p.shared_slices(), 0);
  p.shared_intermediate = 96;
  p.shared = plan::moe::SharedExpert::kBf16;
  EXPECT_EQ(p.shared_slices(), 0);
}

TEST(Reference, AgreesWithDoublePrecisionOnASmallLayer) {
  const plan::moe::Problem p = problem_of(5, 2, 64, 48);
  const RandomExperts host(p, 5, 3);
  const Batch batch(p, 6, Pattern::kDuplicates, 8);
  const auto got = reference_layer(p, host.experts, batch.x, batch.ids, batch.weights, {0, 1, 2, 3, 4, 5});
  for (int64_t t = 0; t < 6; ++t) {
    for (int64_t r = 0; r < 64; ++r) {
      double want = 0, magnitude = 0;
      for (int64_t k = 0; k < 2; ++k) {
        const auto at = static_cast<size_t>(t * 2 + k);
        const ExpertMatrices& e = host.experts[static_cast<size_t>(batch.ids[at])];
        const auto weight = [](const Nvfp4Matrix& m, int64_t row, int64_t i) {
          const uint8_t pair = m.codes[row * m.code_stride + i / 2];
          return static_cast<double>(nvfp4::e2m1_to_float(i % 2 != 0 ? pair >> 4 : pair & 15)) *
                 nvfp4::e4m3_to_float(m.scales[row * m.scale_stride + i / 16]);
        };
        for (int64_t j = 0; j < 48; ++j) {
          double g = 0, u = 0;
          for (int64_t i = 0; i < 64; ++i) {
            const double v = nvfp4::bf16_to_float(batch.x[static_cast<size_t>(t * 64 + i)]);
            g += weight(e.gate, j, i) * v;
            u += weight(e.up, j, i) * v;
          }
          g *= e.gate.tensor_scale;
          u *= e.up.tensor_scale;
          const double term =
              g / (1 + std::exp(-g)) * u * weight(e.down, r, j) * e.down.tensor_scale * batch.weights[at];
          want += term;
          magnitude += std::fabs(term);
        }
      }
      EXPECT_NEAR(got[static_cast<size_t>(t * 64 + r)], want, 5e-3 * magnitude);
    }
  }
}

class Tuned : public testing::Test {
 protected:
  const TemporaryDirectory temporary_;
  const std::filesystem::path& directory_ = temporary_.path();
};

TEST_F(Tuned, TablesComeBackAsTheyWereSaved) {
  const std::string identity = tuned_identity("NVIDIA H200", 13000, plan::moe::find_shape("35B-A3B"));
  EXPECT_FALSE(TunedTable::load(directory_, identity).has_value());
  TunedTable table(identity);
  table.set(1, {"up a", "down b", 9.5, "bf16"});
  table.set(64, {"up c", "down d", 108, "nvfp4"});
  table.save(directory_);
  const auto loaded = TunedTable::load(directory_, identity);
  ASSERT_TRUE(loaded.has_value());
  EXPECT_EQ(loaded->size(), 2u);
  EXPECT_EQ(loaded->find(64)->down, "down d");
  EXPECT_EQ(loaded->find(1)->microseconds, 9.5);
  EXPECT_EQ(loaded->find(1)->activations, "bf16");
  EXPECT_EQ(loaded->find(64)->activations, "nvfp4");
  EXPECT_EQ(loaded->find(2), nullptr);
}

TEST_F(Tuned, AnotherCardDriverOrShapeHasATableOfItsOwn) {
  const plan::moe::Problem p = plan::moe::find_shape("35B-A3B");
  plan::moe::Problem shared = p;
  shared.shared = plan::moe::SharedExpert::kNvfp4;
  const std::string base = tuned_identity("NVIDIA H200", 13000, p);
  EXPECT_NE(base, tuned_identity("NVIDIA H100", 13000, p));
  EXPECT_NE(base, tuned_identity("NVIDIA H200", 12080, p));
  EXPECT_NE(base, tuned_identity("NVIDIA H200", 13000, plan::moe::find_shape("122B-A10B")));
  EXPECT_NE(base, tuned_identity("NVIDIA H200", 13000, shared));
  plan::moe::Problem ungated = p;
  ungated.activation = plan::moe::Activation::kRelu2;
  EXPECT_NE(base, tuned_identity("NVIDIA H200", 13000, ungated));
  for (const auto format : {plan::moe::ActivationFormat::kNvfp4, plan::moe::ActivationFormat::kAuto}) {
    EXPECT_NE(base, tuned_identity("NVIDIA H200", 13000, with_activations(p, format)));
  }
}

TEST_F(Tuned, ATableUnderAnothersNameIsIgnored) {
  const plan::moe::Problem p = plan::moe::find_shape("35B-A3B");
  const std::string mine = tuned_identity("NVIDIA H200", 13000, p), other = tuned_identity("NVIDIA H100", 13000, p);
  TunedTable table(mine), others(other);
  table.set(1, {"up a", "down b", 9.5, "bf16"});
  others.set(1, {"up c", "down d", 9.5, "bf16"});
  table.save(directory_);
  others.save(directory_);
  std::filesystem::copy_file(others.path(), table.path(), std::filesystem::copy_options::overwrite_existing);
  testing::internal::CaptureStderr();
  EXPECT_FALSE(TunedTable::load(directory_, mine).has_value());
  EXPECT_NE(testing::internal::GetCapturedStderr().find("was measured on something else"), std::string::npos);
}

TEST_F(Tuned, DamagedFilesAreIgnoredWithAWarning) {
  const std::string identity = tuned_identity("NVIDIA H200", 13000, plan::moe::find_shape("35B-A3B"));
  TunedTable table(identity);
  table.set(1, {"up a", "down b", 9.5, "bf16"});
  table.save(directory_);
  const std::string content = read_file(table.path());
  for (size_t i = 0; i < content.size() - 1; i += 7) {
    std::string damaged = content;
    damaged[i] = static_cast<char>(damaged[i] ^ 0x11);
    write_file_atomically(table.path(), damaged);
    testing::internal::CaptureStderr();
    EXPECT_FALSE(TunedTable::load(directory_, identity).has_value()) << i;
    EXPECT_NE(testing::internal::GetCapturedStderr().find("the plans are used instead"), std::string::npos);
  }
  for (const size_t size : {size_t{0}, size_t{10}, content.size() / 2}) {
    write_file_atomically(table.path(), content.substr(0, size));
    testing::internal::CaptureStderr();
    EXPECT_FALSE(TunedTable::load(directory_, identity).has_value()) << size;
    testing::internal::GetCapturedStderr();
  }
}

TEST(Plans, TheTunersChoiceReplacesThePlans) {
  plan::moe::Problem p = plan::moe::find_shape("35B-A3B");
  p.tokens = 512;
  plan::moe::LayerPlan layer = plan::moe::plan_layer(p, plan::find_gpu("h200"), {.only_implemented = true});
  const plan::moe::Ranked* other_up = nullptr;
  const plan::moe::Ranked* other_down = nullptr;
  for (const auto& up : layer.gate_up.ranked) {
    if (up.candidate.tile.tokens == layer.gate_up.chosen.candidate.tile.tokens) continue;
    for (const auto& down : layer.down.ranked) {
      if (plan::moe::compatible(up.candidate.tile, down.candidate.tile)) other_up = &up, other_down = &down;
    }
    if (other_down != nullptr) break;
  }
  ASSERT_NE(other_down, nullptr);
  const std::string up = to_string(other_up->candidate), down = to_string(other_down->candidate);
  const std::string planned = to_string(layer.down.chosen.candidate);
  const double before = layer.predicted_us;
  EXPECT_FALSE(plan::moe::choose_by_name(&layer, up, planned)) << "tiles that cut the tokens in different ways";
  EXPECT_FALSE(plan::moe::choose_by_name(&layer, up, "no such tile"));
  EXPECT_EQ(layer.predicted_us, before);
  EXPECT_TRUE(plan::moe::choose_by_name(&layer, up, down));
  EXPECT_EQ(to_string(layer.gate_up.chosen.candidate), up);
  EXPECT_GE(layer.predicted_us, before);
}

TEST(Plans, DisabledCandidatesAreLeftOut) {
  plan::moe::Problem p = plan::moe::find_shape("35B-A3B");
  p.tokens = 64;
  const plan::Gpu& gpu = plan::find_gpu("h200");
  const auto first = plan::moe::plan_layer(p, gpu, {.only_implemented = true});
  const std::string banned = to_string(first.gate_up.chosen.candidate);
  const auto second = plan::moe::plan_layer(
      p, gpu, {.only_implemented = true, .usable = [&](plan::moe::Pass pass, const plan::moe::Candidate& c) {
                 return pass != plan::moe::Pass::kGateUp || to_string(c) != banned;
               }});
  EXPECT_NE(to_string(second.gate_up.chosen.candidate), banned);
  EXPECT_GE(second.predicted_us, first.predicted_us);
}

TEST(Ceilings, CompileForEveryArchitecture) {
  std::string why;
  if (jit::Nvrtc::find(&why) == nullptr) GTEST_SKIP() << "no NVRTC on this machine" << why;
  for (const plan::Arch& arch : plan::kArchs) {
    const auto result = jit::Nvrtc::get().compile(
        request_of(measure::ceilings_source(arch.name), {std::string(arch.name), {}}).compile);
    for (const jit::KernelUse& use : jit::read_cubin(result.cubin, "ceilings")) {
      EXPECT_EQ(use.stack_bytes, 0) << arch.name << " " << use.name;
    }
    EXPECT_EQ(result.lowered.size(), arch.wgmma ? 6u : 5u);
  }
}

TEST(Routing, ChoicesAreDistinctAndSkewedAsAsked) {
  const plan::moe::Problem p = problem_of(256, 8, 64, 64);
  for (const measure::RoutingPattern pattern :
       {measure::RoutingPattern::kUniform, measure::RoutingPattern::kPowerLaw}) {
    const auto ids = measure::make_routing(p, 1000, pattern, 3);
    ASSERT_EQ(ids.size(), 8000u);
    std::vector<int> rows(256);
    for (size_t t = 0; t < 1000; ++t) {
      std::set<int> distinct(ids.begin() + static_cast<std::ptrdiff_t>(8 * t),
                             ids.begin() + static_cast<std::ptrdiff_t>(8 * t + 8));
      EXPECT_EQ(distinct.size(), 8u);
      for (const int id : distinct) ++rows[static_cast<size_t>(id)];
    }
    const int busiest = *std::max_element(rows.begin(), rows.end());
    if (pattern == measure::RoutingPattern::kUniform) {
      EXPECT_LT(busiest, 70);
    } else {
      EXPECT_GT(busiest, 500);
    }
  }
  // As many choices as experts, most of them rare: it ends.
  EXPECT_EQ(measure::make_routing(problem_of(16, 16, 64, 64), 10, measure::RoutingPattern::kPowerLaw, 1).size(), 160u);
  EXPECT_THROW(measure::parse_routing("fair"), Error);
}

TEST(NoGpu, IsOneClearError) {
  std::string why;
  if (jit::Driver::find(&why) != nullptr) GTEST_SKIP() << "this machine has a GPU";
  try {
    const Device device;
    FAIL() << "there is no device";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("no CUDA device can be used"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace fourfold::cuda
