// Runs the kernels of the mixers on the host executor. Each gives an empty string, or what went wrong.
#pragma once

#include <set>
#include <string>
#include <vector>

#include "executor/executor.h"
#include "kernels/mixer_kernels.h"
#include "kernels/mixer_problems.h"

namespace fourfold::mixers {

using SeenSites = std::set<executor::SeenSite>;

std::string run_recurrent(const RecurrentKernel& kernel, const DeltaProblem& p, const executor::Options& options,
                          SeenSites* seen = nullptr);
// Rows of a sequence that are verified, each with a slot, then as many that go on from row `accepted` of them: with
// states that are put off, and perhaps made in between, and with states for every row. The same bits, if all is well.
std::string run_updates(const RecurrentKernel& kernel, const DeltaProblem& p, int accepted, bool made,
                        const executor::Options& options, SeenSites* seen = nullptr);
// `beside`: with flags between prepare and scan.
std::string run_chunks(const ChunkKernel& kernel, const DeltaProblem& p, const executor::Options& options,
                       double tolerance, double state_tolerance, SeenSites* seen = nullptr, bool beside = false);
struct CacheRun {
  std::string error;
  std::vector<unsigned short> out;
};
// `span`: splits of a CTA.
CacheRun run_decode(const DecodeKernel& kernel, const AttentionProblem& p, const executor::Options& options,
                    double tolerance, SeenSites* seen = nullptr, int span = 1);
CacheRun run_narrow(const NarrowKernel& kernel, const AttentionProblem& p, const executor::Options& options,
                    double tolerance, SeenSites* seen = nullptr);
std::string run_prefill(const PrefillKernel& kernel, const AttentionProblem& p, const executor::Options& options,
                        double tolerance, SeenSites* seen = nullptr);
// Keys and values to the cache, and nothing else.
std::string run_append(const PrefillKernel& kernel, const AttentionProblem& p, const executor::Options& options);

}  // namespace fourfold::mixers
