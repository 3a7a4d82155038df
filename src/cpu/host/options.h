// What a caller may choose of a CPU backend.
#pragma once

#include <memory>
#include <optional>

#include "cpu/host/isa.h"
#include "ranks/group.h"

namespace fourfold::cpu {

struct CpuOptions {
  std::optional<Isa> isa;  // unset: FOURFOLD_ISA, or the best one; an Error when the processor lacks it
  int threads = 0;         // 0: ThreadPool::default_threads()
  // A slower backend may replace one that fails its self-test, or that this processor lacks (FOURFOLD_ALLOW_REFERENCE).
  // Otherwise, with no `isa` asked for, that is an Error.
  bool allow_reference = false;
  std::shared_ptr<ranks::Member> member;  // the rank that the backend computes for; null: the only one
  int64_t check_sums = 0;                 // not 0: steps from one comparison of the ranks' sums to the next
  bool nvfp4_activations = false;  // W4A4 numerics: inputs of matrices with an input scale are quantised to NVFP4
  int64_t row_bucket = 1;          // HostStepParts::row_bucket
  // Where loops begin a second round; smaller in tests, which reach it.
  int64_t moe_pass_entries = 8192;                       // rows x top_k of one pass: bounds the experts' outputs
  int64_t attention_partial_floats = int64_t{16} << 20;  // partial results of splits that run in parallel
};

}  // namespace fourfold::cpu
