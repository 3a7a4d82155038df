#include "plan/arch.h"

#include <algorithm>
#include <iterator>
#include <string>

#include "base/check.h"

namespace fourfold::plan {
namespace {
template <typename Row>
std::string names(std::span<const Row> rows) {
  std::string list;
  for (const Row& row : rows) list += (list.empty() ? "" : ", ") + std::string(row.name);
  return list;
}
}  // namespace

const Arch& find_arch(std::string_view name) {
  for (const Arch& arch : kArchs) {
    if (arch.name == name) return arch;
  }
  fail("architecture '{}' is not known; wanted one of {}", printable(name), names<Arch>(kArchs));
}

bool knows_arch(std::string_view name) {
  return std::any_of(std::begin(kArchs), std::end(kArchs), [&](const Arch& arch) { return arch.name == name; });
}

const Gpu& find_gpu(std::string_view name) {
  for (const Gpu& gpu : kGpus) {
    if (gpu.name == name) return gpu;
  }
  fail("GPU '{}' is not known; wanted one of {} (or --arch {})", printable(name), names<Gpu>(kGpus),
       names<Arch>(kArchs));
}

const Gpu& representative_gpu(const Arch& arch) {
  const Gpu* best = nullptr;
  for (const Gpu& gpu : kGpus) {
    if (gpu.arch == arch.name && (best == nullptr || gpu.read_tbs * gpu.sms > best->read_tbs * best->sms)) best = &gpu;
  }
  FF_ASSERT(best != nullptr);
  return *best;
}

const Arch& arch_of(const Gpu& gpu) { return find_arch(gpu.arch); }

double reachable_reads(const Gpu& gpu) {
  return gpu.read_source == Source::kMeasured ? gpu.read_tbs : gpu.read_tbs * kReachableReads;
}

double reachable_bf16(const Gpu& gpu, bool wgmma, bool sustained) {
  const int rate = wgmma ? gpu.wgmma_bf16 : gpu.mma_bf16;
  const double ghz = sustained ? gpu.sustained_ghz : gpu.clock_ghz;
  double fraction = kReachableMatrix;
  if (gpu.bf16_tflops > 0) {
    // The measured rate is of the faster instruction; the other one is taken in proportion.
    const int fast = gpu.wgmma_bf16 > 0 ? gpu.wgmma_bf16 : gpu.mma_bf16;
    return (sustained ? gpu.bf16_sustained_tflops : gpu.bf16_tflops) * rate / fast;
  }
  return rate * gpu.sms * ghz * 1e-3 * fraction;
}

double reachable_fp4(const Gpu& gpu, bool sustained) {
  // 1,897 of 2,010 TFLOP/s when fed from shared memory (published measurement, RTX 5090).
  return gpu.mma_fp4 * gpu.sms * (sustained ? gpu.sustained_ghz : gpu.clock_ghz) * 1e-3 * 0.94;
}

}  // namespace fourfold::plan
