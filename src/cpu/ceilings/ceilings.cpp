#include "cpu/ceilings.h"

#include <fmt/format.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <fstream>
#include <limits>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/interrupt.h"
#include "base/math.h"
#include "base/threads.h"
#include "cpu/ceilings/loops.h"
#include "cpu/memory/host_buffer.h"

namespace fourfold::cpu {
namespace ceilings {

float read_plain(const void* data, int64_t bytes) {
  const auto* words = static_cast<const uint64_t*>(data);
  uint64_t sums[8] = {};
  for (int64_t i = 0; i < bytes / 8; i += 8) {
    for (int64_t j = 0; j < 8; ++j) sums[j] ^= words[i + j];
  }
  uint64_t result = 0;
  for (const uint64_t sum : sums) result ^= sum;
  return static_cast<float>(result);
}

}  // namespace ceilings

namespace {

using Clock = std::chrono::steady_clock;
using Loop = float (*)(int64_t);

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// A value the compiler cannot prove unused.
std::atomic<float> sink{0};

template <typename F>
double time_region(ThreadPool& pool, F&& fn) {
  throw_if_interrupted();
  const auto start = Clock::now();
  pool.run([&](int thread) { sink.store(fn(thread), std::memory_order_relaxed); });
  return seconds_since(start);
}

// flop/s of all threads: the median of seven runs of about 10 ms. The first runs also bring the clock up.
double arithmetic_rate(ThreadPool& pool, Loop loop, int64_t flops_per_round) {
  int64_t rounds = 4096;
  while (time_region(pool, [&](int) { return loop(rounds); }) < 0.01 && rounds < (int64_t{1} << 40)) rounds *= 2;
  std::vector<double> rates;
  for (int i = 0; i < 7; ++i) {
    const double seconds = time_region(pool, [&](int) { return loop(rounds); });
    rates.push_back(static_cast<double>(rounds * flops_per_round) * pool.size() / seconds);
  }
  return median(rates);
}

int64_t available_memory() {
  return static_cast<int64_t>(::sysconf(_SC_AVPHYS_PAGES)) * static_cast<int64_t>(::sysconf(_SC_PAGESIZE));
}

}  // namespace

std::span<const ReadLoop> read_loops(Isa isa) {
#if defined(__x86_64__)
  static constexpr ReadLoop kAvx512[] = {ceilings::read_avx512, ceilings::read_ahead_avx512};
  static constexpr ReadLoop kAvx2[] = {ceilings::read_avx2, ceilings::read_ahead_avx2};
  if (isa == Isa::kAvx512 || isa == Isa::kAmx) return kAvx512;
  if (isa == Isa::kAvx2) return kAvx2;
#elif defined(__aarch64__)
  static constexpr ReadLoop kNeon[] = {ceilings::read_neon, ceilings::read_ahead_neon};
  if (isa != Isa::kReference) return kNeon;
#endif
  (void)isa;
  static constexpr ReadLoop kPlain[] = {ceilings::read_plain};
  return kPlain;
}

long long last_level_cache_bytes(const std::vector<int>& processors, const std::string& root) {
  std::map<std::string, long long> caches;  // of the highest level, by the processors that share one
  int highest = 0;
  for (const int processor : processors) {
    for (int index = 0;; ++index) {
      const std::string cache = fmt::format("{}sys/devices/system/cpu/cpu{}/cache/index{}/", root, processor, index);
      int level = 0;
      long long kib = 0;
      std::string type, unit, shared;
      if (!(std::ifstream(cache + "level") >> level)) break;
      std::ifstream(cache + "type") >> type;
      // "32768K"; the kernel writes no other unit
      if (type == "Instruction" || !(std::ifstream(cache + "size") >> kib >> unit) || unit != "K") continue;
      std::ifstream(cache + "shared_cpu_list") >> shared;
      if (level < highest) continue;
      if (level > highest) caches.clear();
      highest = level;
      caches[shared.empty() ? std::to_string(processor) : shared] = kib << 10;
    }
  }
  long long bytes = 0;
  for (const auto& [processors_of, size] : caches) bytes += size;
  return bytes;
}

long long last_level_cache_bytes() {
  std::vector<int> processors;
  cpu_set_t set;
  const bool known = ::sched_getaffinity(0, sizeof set, &set) == 0;
  for (int i = 0; known && i < CPU_SETSIZE; ++i) {
    if (CPU_ISSET(i, &set)) processors.push_back(i);
  }
  long long bytes = last_level_cache_bytes(processors, "/");
  if (bytes <= 0) bytes = ::sysconf(_SC_LEVEL3_CACHE_SIZE);
  if (bytes <= 0) bytes = ::sysconf(_SC_LEVEL2_CACHE_SIZE);
  return std::max(bytes, 0ll);
}

double Ceilings::peak(Isa isa) const {
  switch (isa) {
    case Isa::kReference:
      return std::max(fma_avx2, fma_neon);
    case Isa::kAvx2:
      return fma_avx2;
    case Isa::kAvx512:
      return std::max({fma_avx2, fma_avx512, bf16_avx512});
    case Isa::kAmx:
      return std::max({fma_avx2, fma_avx512, bf16_avx512, bf16_amx});
    case Isa::kNeon:
    case Isa::kDotprod:
      return fma_neon;
    case Isa::kMmla:
      return std::max(fma_neon, bf16_mmla);
  }
  return 0;
}

double Ceilings::peak_bf16(Isa isa) const {
  if (isa == Isa::kAmx) return std::max(bf16_avx512, bf16_amx);
  if (isa == Isa::kMmla) return bf16_mmla;
  return isa == Isa::kAvx512 ? bf16_avx512 : 0;
}

namespace {

bool measures(Isa isa, Isa wanted) {
  // The reference is compared with what plain AVX2 or NEON could do, where the processor has it.
  const bool least = wanted == Isa::kAvx2 || wanted == Isa::kNeon;
  if (wanted > isa && !(isa == Isa::kReference && least)) return false;
  const std::vector<Isa> supported = supported_isas();
  return std::find(supported.begin(), supported.end(), wanted) != supported.end();
}

std::span<const ReadLoop> widest_read_loops(Isa isa) {
  Isa widest = Isa::kReference;
  for (const Isa each : supported_isas()) {
    if (measures(isa, each)) widest = each;
  }
  return read_loops(widest);
}

constexpr int64_t kReadUnit = 4096;  // a thread's pieces are whole units

}  // namespace

struct CeilingMeter::State {
  Isa isa;
  ThreadPool pool;
  std::span<const ReadLoop> loops;
  int64_t piece = 0;  // bytes of a thread
  HostBuffer buffer;
  int64_t next = 0;  // offset in every piece of what was read longest ago

  State(int threads, Isa which) : isa(which), pool(threads), loops(widest_read_loops(which)) {
    // 16 times the caches; where those are large, which on virtual machines are mostly others', less: a GB may take a
    // second or two until its pages are there. Of 4 times, read from one end to the other, caches keep little.
    const int64_t cache = last_level_cache_bytes();
    int64_t bytes = std::min(16 * cache, std::max(4 * cache, int64_t{2} << 30));
    bytes = std::max(bytes, int64_t{512} << 20);
    bytes = std::min(bytes, std::max<int64_t>(available_memory() / 4, int64_t{64} << 20));
    piece = std::max(bytes / pool.size() / kReadUnit, int64_t{1}) * kReadUnit;
    buffer = HostBuffer(piece * pool.size());
    // Each thread touches its own piece first, so that its pages lie close to it.
    time_region(pool, [&](int thread) {
      char* mine = data(thread);
      for (int64_t i = 0; i < piece && !interrupted(); i += 64) mine[i] = static_cast<char>(i >> 6);
      return 0.0f;
    });
  }
  char* data(int thread) { return static_cast<char*>(buffer.data()) + thread * piece; }
  // All threads read [begin, begin + bytes) of their pieces.
  double read(ReadLoop loop, int64_t begin, int64_t bytes) {
    return time_region(pool, [&](int thread) { return loop(data(thread) + begin, bytes); });
  }
};

CeilingMeter::CeilingMeter(int threads, Isa isa) : state_(std::make_unique<State>(threads, isa)) {}
CeilingMeter::~CeilingMeter() = default;

double CeilingMeter::read(int64_t bytes) {
  State& s = *state_;
  time_region(s.pool, [](int) { return 0.0f; });
  const auto loops = static_cast<int64_t>(s.loops.size());
  const int64_t share = ceil_div(ceil_div(bytes, s.pool.size() * loops), int64_t{512}) * 512;
  double best = std::numeric_limits<double>::infinity();
  for (const ReadLoop loop : s.loops) {
    double seconds = 0;
    for (int64_t left = share; left > 0;) {
      if (s.next == s.piece) s.next = 0;
      const int64_t n = std::min(left, s.piece - s.next);
      seconds += s.read(loop, s.next, n);
      s.next += n;
      left -= n;
    }
    best = std::min(best, seconds);
  }
  return best * static_cast<double>(loops);
}

Ceilings CeilingMeter::measure() {
  State& s = *state_;
  Ceilings result;
  result.threads = s.pool.size();
#if defined(__x86_64__)
  if (measures(s.isa, Isa::kAvx2)) {
    result.fma_avx2 = arithmetic_rate(s.pool, ceilings::fma_avx2, ceilings::kFlopsPerRoundAvx2);
  }
  if (measures(s.isa, Isa::kAvx512)) {
    result.fma_avx512 = arithmetic_rate(s.pool, ceilings::fma_avx512, ceilings::kFlopsPerRoundAvx512);
  }
  if (measures(s.isa, Isa::kAvx512) && has_avx512bf16()) {
    result.bf16_avx512 = arithmetic_rate(s.pool, ceilings::dot_bf16_avx512, ceilings::kFlopsPerRoundBf16);
  }
  if (measures(s.isa, Isa::kAmx)) {
    result.bf16_amx = arithmetic_rate(s.pool, ceilings::dot_bf16_amx, ceilings::kFlopsPerRoundAmx);
  }
#elif defined(__aarch64__)
  if (measures(s.isa, Isa::kNeon)) {
    result.fma_neon = arithmetic_rate(s.pool, ceilings::fma_neon, ceilings::kFlopsPerRoundNeon);
  }
  if (measures(s.isa, Isa::kMmla)) {
    result.bf16_mmla = arithmetic_rate(s.pool, ceilings::dot_bf16_mmla, ceilings::kFlopsPerRoundMmla);
  }
#endif
  for (int round = 0; round < 3; ++round) {
    for (const ReadLoop loop : s.loops) {
      std::vector<double> rates;
      for (int pass = 0; pass < 3; ++pass) {
        rates.push_back(static_cast<double>(s.piece * s.pool.size()) / s.read(loop, 0, s.piece));
      }
      result.read_bytes_per_second = std::max(result.read_bytes_per_second, median(rates));
    }
  }
  return result;
}

}  // namespace fourfold::cpu
