// What a card can do at most, measured in the same run as whatever is held against it.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "cuda/device/loader.h"

namespace fourfold::measure {

struct Ceilings {
  double read_tbs = 0;       // a plain read of 4 GB
  double matrix_tflops = 0;  // a bare loop of matrix instructions on random data, bf16, sustained for about 50 ms
  std::string matrix_instruction;
};
Ceilings measure_ceilings(cuda::KernelLoader& loader);

// Copies from page-locked host memory to the device, GB/s: the median of some of 64 MB, one after the other.
double upload_gbs(const cuda::Device& device);

// The kernels that measure them, and that fill memory with data to measure with.
plan::KernelSource ceilings_source(std::string_view arch);
struct BenchKernels {
  cuda::Kernel fill_codes, fill_scales, fill_rows, read_all, matrix_mma, matrix_wgmma;
  explicit BenchKernels(cuda::KernelLoader& loader);
};

double median(std::vector<double> values);

// Microseconds on the device between the beginning and the end of what `enqueue` puts on the stream.
template <typename F>
double timed(const cuda::Stream& stream, const cuda::Event& start, const cuda::Event& stop, F&& enqueue) {
  start.record(stream);
  enqueue();
  stop.record(stream);
  return cuda::Event::microseconds(start, stop);
}

}  // namespace fourfold::measure
