// GPUs as the planner sees them: one row per architecture (limits and features that code is compiled for) and one row
// per card (how many units, how fast). A new card is a row; a new architecture is a row and, where its instructions are
// new, a header in kernels/ptx/.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

namespace fourfold::plan {

// Limits: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability". Matrix rates in docs/plan.md.
struct Arch {
  std::string_view name;     // as the compiler is told: "sm_90a"
  int64_t smem_per_block;    // bytes, opt-in maximum of dynamic shared memory
  int64_t smem_per_sm;       // bytes
  int64_t smem_reserved;     // bytes the system takes from smem_per_sm for each resident block
  int registers_per_sm;      // 32-bit registers
  int max_registers;         // per thread
  int register_granularity;  // registers are handed out per warp in units of this many
  int warps_per_sm;
  int blocks_per_sm;
  int issue_per_clock;     // warp instructions per SM and clock
  int smem_bytes_per_clk;  // shared-memory bandwidth per SM
  int l2_bytes_per_clk;    // L2 to SM with all SMs at it (H100 published: 5.5 to 7 TB/s over 132 SMs)
  bool cp_async;           // asynchronous 16-byte copies to shared memory
  bool bulk_copy;          // bulk and tensor copies with mbarriers (TMA)
  bool wgmma;
  bool fp4_mma;  // warp-level block-scaled mma.m16n8k64 on e2m1
  bool fp8_mma;
};

inline constexpr Arch kArchs[] = {
    {.name = "sm_80",
     .smem_per_block = 166912,
     .smem_per_sm = 167936,
     .smem_reserved = 1024,
     .registers_per_sm = 65536,
     .max_registers = 255,
     .register_granularity = 256,
     .warps_per_sm = 64,
     .blocks_per_sm = 32,
     .issue_per_clock = 4,
     .smem_bytes_per_clk = 128,
     .l2_bytes_per_clk = 28,
     .cp_async = true,
     .bulk_copy = false,
     .wgmma = false,
     .fp4_mma = false,
     .fp8_mma = false},
    {.name = "sm_89",
     .smem_per_block = 101376,
     .smem_per_sm = 102400,
     .smem_reserved = 1024,
     .registers_per_sm = 65536,
     .max_registers = 255,
     .register_granularity = 256,
     .warps_per_sm = 48,
     .blocks_per_sm = 24,
     .issue_per_clock = 4,
     .smem_bytes_per_clk = 128,
     .l2_bytes_per_clk = 28,
     .cp_async = true,
     .bulk_copy = false,
     .wgmma = false,
     .fp4_mma = false,
     .fp8_mma = true},
    {.name = "sm_90a",
     .smem_per_block = 232448,
     .smem_per_sm = 233472,
     .smem_reserved = 1024,
     .registers_per_sm = 65536,
     .max_registers = 255,
     .register_granularity = 256,
     .warps_per_sm = 64,
     .blocks_per_sm = 32,
     .issue_per_clock = 4,
     .smem_bytes_per_clk = 128,
     .l2_bytes_per_clk = 28,
     .cp_async = true,
     .bulk_copy = true,
     .wgmma = true,
     .fp4_mma = false,
     .fp8_mma = true},
    {.name = "sm_100a",
     .smem_per_block = 232448,
     .smem_per_sm = 233472,
     .smem_reserved = 1024,
     .registers_per_sm = 65536,
     .max_registers = 255,
     .register_granularity = 256,
     .warps_per_sm = 64,
     .blocks_per_sm = 32,
     .issue_per_clock = 4,
     .smem_bytes_per_clk = 128,
     .l2_bytes_per_clk = 28,
     .cp_async = true,
     .bulk_copy = true,
     .wgmma = false,
     .fp4_mma = false,
     .fp8_mma = true},
    {.name = "sm_120a",
     .smem_per_block = 101376,
     .smem_per_sm = 102400,
     .smem_reserved = 1024,
     .registers_per_sm = 65536,
     .max_registers = 255,
     .register_granularity = 256,
     .warps_per_sm = 48,
     .blocks_per_sm = 24,
     .issue_per_clock = 4,
     .smem_bytes_per_clk = 128,
     .l2_bytes_per_clk = 28,
     .cp_async = true,
     .bulk_copy = true,
     .wgmma = false,
     .fp4_mma = true,
     .fp8_mma = true},
    {.name = "sm_121a",
     .smem_per_block = 101376,
     .smem_per_sm = 102400,
     .smem_reserved = 1024,
     .registers_per_sm = 65536,
     .max_registers = 255,
     .register_granularity = 256,
     .warps_per_sm = 48,
     .blocks_per_sm = 24,
     .issue_per_clock = 4,
     .smem_bytes_per_clk = 128,
     .l2_bytes_per_clk = 28,
     .cp_async = true,
     .bulk_copy = true,
     .wgmma = false,
     .fp4_mma = true,
     .fp8_mma = true},
};

// Where a card's figures come from. The cost model takes a measured figure as it is and a datasheet figure times
// kReachable (what streaming reads and large matrix products reach on cards that were measured).
enum class Source { kMeasured, kDatasheet };

inline constexpr double kReachableReads = 0.93;   // of the datasheet's bandwidth; H200 measured: 4.55 / 4.8 = 0.95
inline constexpr double kReachableMatrix = 0.80;  // of units x clock; H200 measured: 785 / 1070 = 0.73

struct Gpu {
  std::string_view name;   // as --gpu takes it
  std::string_view title;  // as people write it
  std::string_view arch;
  int sms;
  double clock_ghz;      // boost
  double sustained_ghz;  // under a long matrix load at the power limit; equal to clock_ghz where nobody measured
  double read_tbs;       // memory bandwidth
  Source read_source;
  double l2_mb;
  // Matrix rates in flops per SM and clock with fp32 accumulation: mma.sync on bf16, wgmma on bf16 (0 = none),
  // block-scaled FP4 (0 = none).
  int mma_bf16;
  int wgmma_bf16;
  int mma_fp4;
  // Measured dense bf16 TFLOP/s, cool and at the power limit; 0 = not measured.
  double bf16_tflops, bf16_sustained_tflops;
  double graph_node_us;  // an empty node of a graph
  Source node_source;
  double latency_us;  // one dependent read from memory under load

  bool operator==(const Gpu&) const = default;
};

// H200 measured: pure reads 4.55 TB/s, bf16 8192^3 785 TFLOP/s cool and 680 sustained, graph node 0.55 us.
// mma.sync on Hopper reaches 62 % of wgmma (published micro-benchmarks of the architecture). GeForce cards halve the
// bf16 rate with fp32 accumulation. sm_120 FP4: 4096 flops per SM and clock, measured on an RTX 5090 by two projects.
inline constexpr Gpu kGpus[] = {
    {"a100", "A100 SXM 80 GB", "sm_80", 108, 1.41, 1.41, 2.039, Source::kDatasheet, 40, 2048, 0, 0, 0, 0, 0.8,
     Source::kDatasheet, 0.75},
    {"l40s", "L40S", "sm_89", 142, 2.52, 2.52, 0.864, Source::kDatasheet, 96, 1024, 0, 0, 0, 0, 0.7, Source::kDatasheet,
     0.80},
    {"rtx-4090", "GeForce RTX 4090", "sm_89", 128, 2.52, 2.52, 1.008, Source::kDatasheet, 72, 512, 0, 0, 0, 0, 0.7,
     Source::kDatasheet, 0.75},
    {"h100", "H100 SXM", "sm_90a", 132, 1.98, 1.70, 3.35, Source::kDatasheet, 50, 2540, 4096, 0, 0, 0, 0.55,
     Source::kDatasheet, 0.75},
    {"h200", "H200 SXM", "sm_90a", 132, 1.98, 1.70, 4.55, Source::kMeasured, 60, 2540, 4096, 0, 785, 680, 0.55,
     Source::kMeasured, 0.75},
    {"b200", "B200", "sm_100a", 148, 1.85, 1.85, 8.0, Source::kDatasheet, 126, 2048, 0, 0, 0, 0, 0.6,
     Source::kDatasheet, 0.85},
    {"rtx-pro-6000", "RTX PRO 6000 Blackwell", "sm_120a", 188, 2.60, 2.40, 1.792, Source::kDatasheet, 128, 1024, 0,
     4096, 0, 0, 0.7, Source::kDatasheet, 0.80},
    {"rtx-5090", "GeForce RTX 5090", "sm_120a", 170, 2.41, 2.41, 1.792, Source::kDatasheet, 96, 512, 0, 4096, 0, 0, 0.7,
     Source::kDatasheet, 0.80},
    {"rtx-5080", "GeForce RTX 5080", "sm_120a", 84, 2.62, 2.62, 0.960, Source::kDatasheet, 64, 512, 0, 4096, 0, 0, 0.7,
     Source::kDatasheet, 0.80},
    {"rtx-5070-ti", "GeForce RTX 5070 Ti", "sm_120a", 70, 2.45, 2.45, 0.896, Source::kDatasheet, 48, 512, 0, 4096, 0, 0,
     0.7, Source::kDatasheet, 0.80},
    {"dgx-spark", "DGX Spark (GB10)", "sm_121a", 48, 2.50, 2.50, 0.273, Source::kDatasheet, 24, 512, 0, 4096, 0, 0, 1.0,
     Source::kDatasheet, 0.90},
};

// By name; an Error that lists what is known otherwise.
const Arch& find_arch(std::string_view name);
bool knows_arch(std::string_view name);
const Gpu& find_gpu(std::string_view name);
// The card that stands for an architecture when only the architecture is given: the fastest one of the table.
const Gpu& representative_gpu(const Arch& arch);
const Arch& arch_of(const Gpu& gpu);

// What the model expects of a card, derived once: bytes per second and flops per second that kernels reach.
double reachable_reads(const Gpu& gpu);                             // TB/s
double reachable_bf16(const Gpu& gpu, bool wgmma, bool sustained);  // TFLOP/s
double reachable_fp4(const Gpu& gpu, bool sustained);               // TFLOP/s, 0 where there is no FP4 mma

}  // namespace fourfold::plan
