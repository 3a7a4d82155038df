// Proof that the executor bites. Every synchronising call of every kernel is mutated in turn, by the wrappers (the
// kernels' sources stay as they are), and the layer must then fail under schedules under which it passes unmutated.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <functional>
#include <map>

#include "kernels/expert_layer.h"

namespace fourfold::moe {
namespace {

using executor::Mutation;
using executor::Op;
using executor::Options;
using Kind = executor::Mutation::Kind;

struct Chain {
  const char* title;
  ExpertKernel up, down;
  int tokens;
  int intermediate = 128;
  Pattern pattern = Pattern::kDistinct;
};

ExpertKernel named(const std::vector<ExpertKernel>& list, const std::string& name) {
  for (const ExpertKernel& k : list) {
    if (k.name == name) return k;
  }
  throw std::logic_error("no kernel " + name);
}

std::vector<Chain> chains() {
  const std::vector<ExpertKernel> stream = stream_kernels();
  const std::vector<ExpertKernel> prefill = prefill_kernels();
  const std::vector<ExpertKernel> async = async_kernels();
  return {
      {"one", named(stream, "gate-up one-token 8x8x512 s4 w4+2 kw2x2 x1 swap"),
       named(stream, "down one-token 8x16x512 s4 w8+1 kw2x4 x1 swap"), 1, 32,
       Pattern::kHoles},  // so that CTAs begin at different choices, and have more than two items
      {"few", named(stream, "gate-up few-tokens 8x8x512 s4 w8+3 kw2x4 rows8 x1 swap of 1088"),
       named(stream, "down few-tokens 8x32x512 s6 w8+4 kw2x4 rows2 x1 swap"), 7, 32, Pattern::kOneExpert},
      {"few, alone", named(stream, "gate-up few-tokens 8x16x512 s4 w8+3 kw2x4 rows8 x1 swap of 3072"),
       named(stream, "down few-tokens 8x32x256 s4 w8+5 kw4x2 rows2 x1 swap"), 3, 128, Pattern::kDuplicates},
      {"few, nobody", named(stream, "gate-up few-tokens 8x8x512 s4 w8+3 kw2x4 rows8 x1 swap of 1088"),
       named(stream, "down few-tokens 8x32x512 s6 w8+4 kw2x4 rows2 x1 swap"), 2, 32, Pattern::kNobody},
      {"sorted", named(stream, "gate-up streaming 24x32x128 s2 w4+4 kw2x1 x1 swap"),
       named(stream, "down streaming 24x64x128 s2 w4+4 kw2x1 x1 swap"), 14},
      {"wide", named(stream, "gate-up streaming 24x256x128 s3 w16+4 x1 swap"),
       named(stream, "down streaming 24x512x256 s2 w16+4 x1 swap"), 14},
      {"wgmma", named(prefill, "gate-up wgmma 32x128x64 s3 w8+4 x1 swap"),
       named(prefill, "down wgmma 32x256x64 s3 w8+4 x1 swap"), 14},
      {"mma", named(async, "gate-up mma-sync 16x64x64 s2 w4 x2 swap"),
       named(async, "down mma-sync 16x64x64 s3 w4 x2 swap"), 14},
      {"fp4", named(async, "gate-up fp4 16x64x64 s2 w4 x2 swap"), named(async, "down fp4 16x64x64 s2 w4 x2 swap"), 14},
  };
}

// The line of the kernel's source that a site is on.
std::string source_line(const std::string& file, int line) {
  std::ifstream in(FOURFOLD_SOURCE_DIR "/src/kernels/moe/" + file);
  std::string text;
  for (int i = 0; i < line && std::getline(in, text); ++i) {
  }
  return text.substr(std::min(text.find_first_not_of(' '), text.size()));
}

// Calls that may go without harm, because something else gives the same order; each with its reason.
struct Redundant {
  Op op;
  const char* file;
  const char* text;  // of the source line
  const char* reason;
};
constexpr Redundant kRedundant[] = {
    {Op::kGridWait, "stream_sm90.cuh", "if (!T::gate_up && args.ready == 0) grid_dependency_wait();",
     "down's consumers touch no result of gate-up but through the stages, whose producers wait"},
    {Op::kGridWait, "stream_sm90.cuh", "if (!T::gate_up && args.ready != 0) grid_dependency_wait();",
     "flags order what down reads; this one is for kernels further on, which wait for down's end only"},
    {Op::kGridWait, "route_sm90.cuh", "if (last) ptx::grid_dependency_wait();  // for kernels further on",
     "flags order the rows that are added up; this one is for kernels further on, which wait for the sum's end only"},
    {Op::kBarrierWait, "stream_sm90.cuh", "mbarrier_wait(stored, stored_phase);", "orders what another kernel reads"},
    {Op::kSyncWarp, "one_sm90.cuh", "__syncwarp();  // the factors are there",
     "the executor lets the shuffles before their use order them too; on a card shuffles need not"},
    {Op::kFence, "unsorted.cuh", "__threadfence();",
     "what other CTAs have read of the turn is in their registers, behind a barrier; the executor records no reads"},
    {Op::kAsyncCopyWait, "async_gemm.cuh", "async_copy_wait<0>();",
     "the groups that are left at the end are empty: nothing is loaded beyond the last item"},
};

bool is_redundant(const Mutation& m) {
  const std::string text = source_line(m.file, m.line);
  return std::any_of(std::begin(kRedundant), std::end(kRedundant),
                     [&](const Redundant& r) { return m.op == r.op && m.file == r.file && text == r.text; });
}

std::vector<Mutation> mutations_of(const std::set<executor::SeenSite>& seen) {
  std::vector<Mutation> all;
  for (const auto& [op, file, line] : seen) {
    switch (op) {
      case Op::kShuffle:
      case Op::kMatrixLoad:
      case Op::kMatrixStore:
      case Op::kWgmma:
        break;  // results, not order: the comparison with the reference covers them
      case Op::kMma:
        all.push_back({Kind::kStale, op, file, line, 0});
        break;
      case Op::kAsyncCopyWait:
      case Op::kWgmmaWait:
        all.push_back({Kind::kWeaken, op, file, line, 0});
        [[fallthrough]];
      default:
        all.push_back({Kind::kDrop, op, file, line, 0});
    }
  }
  // A stage is given back right after the wait for it, before it is read.
  for (const auto& [op, file, line] : seen) {
    if (op != Op::kBarrierWait || source_line(file, line).find("full(") == std::string::npos) continue;
    all.push_back({Kind::kEarly, Op::kBarrierArrive, file, 0, line});
  }
  return all;
}

// Something that runs kernels: empty, or what went wrong.
using Check = std::function<std::string(const Options&, std::set<executor::SeenSite>* seen)>;

struct Verdicts {
  std::map<std::string, std::string> what;  // by mutation: what caught it, empty: nothing
  std::map<std::string, Mutation> mutations;

  // Sites are those of the first schedules, one with each way of delivery; a schedule counts that passes unmutated.
  // A call that is known to be redundant is tried a few times, not hunted.
  void add(const std::string& title, int schedules, const Check& check) {
    constexpr size_t kSites = 3, kTries = 3;
    std::set<executor::SeenSite> seen;
    const std::vector<Options> all = executor::schedules(schedules);
    size_t passed = 0;
    const auto pass = [&](size_t count) {
      for (; passed < count; ++passed) ASSERT_EQ(check(all[passed], &seen), "") << title;
    };
    pass(kSites);
    const std::set<executor::SeenSite> sites = seen;
    for (const Mutation& m : mutations_of(sites)) {
      std::string& caught = what[m.text()];
      mutations[m.text()] = m;
      const size_t tries = is_redundant(m) ? kTries : all.size();
      for (size_t i = 0; i < tries && caught.empty(); ++i) {
        pass(i + 1);
        if (testing::Test::HasFatalFailure()) return;
        Options o = all[i];
        o.mutation = m;
        caught = check(o, nullptr);
      }
    }
  }
  void expect_all_caught() const {
    testing::Test::RecordProperty("mutants", static_cast<int>(what.size()));
    for (const auto& [name, caught] : what) {
      const Mutation& m = mutations.at(name);
      if (is_redundant(m)) {
        EXPECT_EQ(caught, "") << name << " is listed as redundant and is not";
      } else {
        EXPECT_NE(caught, "") << name << ": " << source_line(m.file, m.line);
      }
    }
  }
};

// Chains that share sources are judged together, those first that have what matters nowhere else: a call may matter in
// one of them only.
void expect_caught(const std::vector<std::string>& titles, size_t at_least) {
  if (!executor::Device::checks_plain_accesses()) GTEST_SKIP() << "half of the order is not seen in sanitizer builds";
  Verdicts verdicts;
  const std::vector<Chain> all = chains();
  for (const std::string& title : titles) {
    const Chain& c = *std::find_if(all.begin(), all.end(), [&](const Chain& chain) { return chain.title == title; });
    const LayerShape shape{10, 8, 320, c.intermediate};
    const LayerWeights weights = make_weights(shape, 1);
    const LayerInput input = make_input(shape, c.tokens, c.pattern, 5);
    const std::vector<float> want = reference(weights, input, c.up.fp4());
    verdicts.add(c.title, 18, [&](const Options& o, std::set<executor::SeenSite>* seen) -> std::string {
      try {
        LayerRun run = run_layer(weights, input, c.up, c.down, o);
        if (seen != nullptr) seen->merge(run.seen);
        return compare(input, want, run.out, tolerance_of(c.up));
      } catch (const executor::Violation& v) {
        return v.what();
      }
    });
  }
  verdicts.expect_all_caught();
  EXPECT_GE(verdicts.what.size(), at_least);
}

TEST(Mutations, OfTheStreamingKernelsAreCaught) { expect_caught({"one", "sorted", "wide"}, 25); }
TEST(Mutations, OfTheKernelsForFewTokensAreCaught) { expect_caught({"few, nobody", "few, alone", "few"}, 15); }
TEST(Mutations, OfTheWgmmaKernelsAreCaught) { expect_caught({"wgmma"}, 25); }
TEST(Mutations, OfTheMmaSyncAndFp4KernelsAreCaught) { expect_caught({"mma", "fp4"}, 15); }

TEST(Mutations, OfTheRoutingAreCaught) {
  if (!executor::Device::checks_plain_accesses()) GTEST_SKIP() << "half of the order is not seen in sanitizer builds";
  Verdicts verdicts;
  for (const int tokens : {300, 1100}) {
    const LayerShape shape{40, 8, 16, 16};
    const LayerInput input = make_input(shape, tokens, Pattern::kHoles, 3);
    verdicts.add("route", 45, [&](const Options& o, std::set<executor::SeenSite>* seen) {
      return check_route(shape, input, 24, o, seen);
    });
  }
  verdicts.expect_all_caught();
  EXPECT_GE(verdicts.what.size(), 15u);
}

}  // namespace
}  // namespace fourfold::moe
