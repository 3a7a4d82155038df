#include "measure/ceilings.h"

#include <algorithm>

#include "base/check.h"
#include "cuda/backend/memory.h"

namespace fourfold::measure {

using namespace cuda;

plan::KernelSource ceilings_source(std::string_view arch) {
  plan::KernelSource source = {"ceilings",
                               "#include \"kernels/bench/ceilings.cuh\"\n",
                               {{"fourfold::bench::fill_codes", 256},
                                {"fourfold::bench::fill_scales", 256},
                                {"fourfold::bench::fill_rows", 256},
                                {"fourfold::bench::read_all", 512},
                                {"fourfold::bench::matrix_mma", 256}}};
  if (plan::find_arch(arch).wgmma) source.entries.push_back({"fourfold::bench::matrix_wgmma", 384, 128 * 128});
  return source;
}

BenchKernels::BenchKernels(KernelLoader& loader) {
  const auto kernels = loader.load(ceilings_source(loader.device().info().arch()));
  fill_codes = kernels[0];
  fill_scales = kernels[1];
  fill_rows = kernels[2];
  read_all = kernels[3];
  matrix_mma = kernels[4];
  if (kernels.size() > 5) matrix_wgmma = kernels[5];
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

Ceilings measure_ceilings(KernelLoader& loader) {
  const Device& device = loader.device();
  const BenchKernels kernels(loader);
  const Stream stream(device);
  const Event start(device), stop(device);
  const auto sms = static_cast<unsigned>(device.info().sms);
  Ceilings ceilings;
  Buffer sink(device, 16, "ceilings");
  {
    const uint64_t bytes = std::min<uint64_t>(4ull << 30, device.memory().free / 2) / 4096 * 4096;
    const Buffer data(device, bytes, "memory to measure reads with");
    launch(stream, kernels.fill_codes, {sms * 8, 1}, Overlap::kNone, data.address(), uint64_t{bytes / 4}, uint64_t{5});
    std::vector<double> rates;
    for (int i = 0; i < 11; ++i) {
      const double us = timed(stream, start, stop, [&] {
        launch(stream, kernels.read_all, {sms * 4, 1}, Overlap::kNone, data.address(), uint64_t{bytes / 16},
               sink.address());
      });
      if (i >= 2) rates.push_back(static_cast<double>(bytes) / us * 1e-6);
    }
    ceilings.read_tbs = median(rates);
  }
  const bool wgmma = kernels.matrix_wgmma.function != nullptr;
  const Kernel& matrix = wgmma ? kernels.matrix_wgmma : kernels.matrix_mma;
  const unsigned grid = wgmma ? sms : sms * 4;
  // flops of a CTA and round
  const double each = wgmma ? 3 * 4.0 * 2 * 64 * 128 * 16 : 8 * 8.0 * 4096;
  int rounds = 1000;
  const auto run = [&] {
    return timed(stream, start, stop, [&] {
      launch(stream, matrix, {grid, 1}, Overlap::kNone, rounds, sink.address());
    });
  };
  run();
  rounds = static_cast<int>(std::clamp(rounds * 10e3 / run(), 100.0, 1e8));  // 10 ms
  std::vector<double> rates;
  for (int i = 0; i < 7; ++i) {
    const double us = run();
    if (i >= 2) rates.push_back(each * rounds * grid / us * 1e-6);
  }
  ceilings.matrix_tflops = median(rates);
  ceilings.matrix_instruction = wgmma ? "wgmma m64n128k16" : "mma.sync m16n8k16";
  return ceilings;
}

double upload_gbs(const Device& device) {
  constexpr uint64_t kBytes = uint64_t{64} << 20;
  const PinnedBuffer host(device, kBytes, "memory to measure copies with");
  Buffer to(device, kBytes, "memory to measure copies with");
  const Stream stream(device);
  const Event start(device), stop(device);
  std::fill_n(host.data(), kBytes, static_cast<uint8_t>(1));
  std::vector<double> rates;
  for (int i = 0; i < 9; ++i) {
    const double us = timed(stream, start, stop, [&] {
      for (int copy = 0; copy < 4; ++copy) to.upload(stream, host.data(), kBytes);
    });
    if (i > 0) rates.push_back(4.0 * kBytes / us * 1e-3);
  }
  return median(rates);
}

}  // namespace fourfold::measure
