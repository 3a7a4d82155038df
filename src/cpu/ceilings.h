// What this machine can do at most, measured: the figures that benchmarks divide by.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "cpu/host/isa.h"

namespace fourfold::cpu {

// All figures are totals of `threads` threads running at the same time. 0: not measured (the processor lacks it, or it
// is beyond the instruction set that was asked for).
struct Ceilings {
  int threads = 0;
  double read_bytes_per_second = 0;  // from memory, a buffer of 4 to 16 times the last-level cache, 512 MiB at least
  double fma_avx2 = 0;               // fp32 fused multiply-add, flop/s (a multiply-add is two)
  double fma_avx512 = 0;
  double bf16_avx512 = 0;  // vdpbf16ps
  double bf16_amx = 0;     // tdpbf16ps
  double fma_neon = 0;
  double bf16_mmla = 0;  // bfmmla

  // The highest arithmetic rate an instruction set offers to a kernel of fp32 or bf16 operands.
  double peak(Isa isa) const;
  // Of bf16 products alone; 0 when the instruction set has none.
  double peak_bf16(Isa isa) const;
  double read_per_core() const { return threads > 0 ? read_bytes_per_second / threads : 0; }
};

// Measures what `isa` includes; threads = 0: ThreadPool::default_threads(). Holds the buffer that is read.
class CeilingMeter {
 public:
  CeilingMeter(int threads, Isa isa);
  ~CeilingMeter();
  CeilingMeter(const CeilingMeter&) = delete;
  CeilingMeter& operator=(const CeilingMeter&) = delete;

  // All ceilings; about a second. Reads are the best of three medians of three short passes of each loop.
  Ceilings measure();
  // Seconds that reading `bytes` takes with the faster loop, of the memory that was read longest ago: each loop reads
  // its share of them. For reading in turns with what is measured against it: both then meet the same other work on the
  // machine. The threads are awake when the time begins.
  double read(int64_t bytes);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// Reads all of [data, data + bytes), a multiple of 512, with the widest loads of `isa`; the result depends on all of
// it. Which of the loops is the fastest depends on the processor and on what else it does.
using ReadLoop = float (*)(const void* data, int64_t bytes);
std::span<const ReadLoop> read_loops(Isa isa);

// The last-level caches of the processors that this process may run on, together, in bytes; 0 when unknown. Large
// processors have several, each for some of the cores, of which a process on few processors has one.
long long last_level_cache_bytes();
// The same of processors (numbers as Linux has them), where sys/devices/system/cpu of `root` tells; 0 where it does
// not.
long long last_level_cache_bytes(const std::vector<int>& processors, const std::string& root);
inline constexpr long long kUnknownCacheBytes = 32 << 20;  // what is taken for it where it is unknown

// Bytes per second that `threads` threads read from memory together, out of a buffer that is larger than the caches:
// good to a few percent. It takes some tenths of a second; nothing where getting the memory for it would take longer
// than `most_seconds`. Benchmarks use a CeilingMeter.
std::optional<double> quick_read_bandwidth(int threads, double most_seconds = 1);

}  // namespace fourfold::cpu
