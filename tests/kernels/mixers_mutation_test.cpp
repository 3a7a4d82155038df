// Proof that the executor bites: every synchronising call of the kernels of the mixers is dropped in turn (waits for
// groups are also weakened by one), and the result must be wrong, or a rule broken.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <functional>
#include <map>

#include "kernels/mixer_runs.h"

namespace fourfold::mixers {
namespace {

using executor::Mutation;
using executor::Op;
using executor::Options;
using Kind = executor::Mutation::Kind;

std::string source_line(const std::string& file, int line) {
  for (const char* folder : {"gdn/", "attn/"}) {
    std::ifstream in(std::string(FOURFOLD_SOURCE_DIR "/src/kernels/") + folder + file);
    if (!in) continue;
    std::string text;
    for (int i = 0; i < line && std::getline(in, text); ++i) {
    }
    return text.substr(std::min(text.find_first_not_of(' '), text.size()));
  }
  return "";
}

// Calls that may go without harm, each with its reason.
struct Redundant {
  const char* file;
  const char* text;  // of the source line
  const char* reason;
};
constexpr Redundant kRedundant[] = {
    {"any", "ptx::grid_dependency_wait();  // who waits for this kernel's end relies on the one before it",
     "for kernels further on"},
    {"any", "__syncwarp();  // announced before anything lands",
     "a phase ends with its arrival: bytes may come before they are announced"},
    {"any", "__syncwarp();  // or the lane that brings goes on by itself, and the others after it", "for speed alone"},
    {"prefill_sm90.cuh",
     "__syncwarp();  // every lane has seen the stage free before it can be filled and given back again",
     "the one behind the announcement orders the lanes, too"},
    {"narrow.cuh", "__syncwarp();  // what was read is free", "the one behind the announcement orders the lanes, too"},
    {"decode.cuh", "if constexpr (!T.bulk) ptx::async_copy_wait<0>();",
     "the groups that are left at the end are empty: nothing is loaded beyond the last stage"},
    {"prefill_mma.cuh", "ptx::async_copy_wait<0>();",
     "the groups that are left at the end are empty: nothing is loaded beyond the last stage"},
};

bool is_redundant(const Mutation& m) {
  const std::string text = source_line(m.file, m.line);
  return std::any_of(std::begin(kRedundant), std::end(kRedundant), [&](const Redundant& r) {
    return text == r.text && (std::string(r.file) == "any" || m.file == r.file);
  });
}

std::vector<Mutation> mutations_of(const SeenSites& seen) {
  std::vector<Mutation> all;
  for (const auto& [op, file, line] : seen) {
    switch (op) {
      case Op::kShuffle:
      case Op::kMatrixLoad:
      case Op::kMatrixStore:
      case Op::kMma:
      case Op::kWgmma:
        break;  // results, not order: the comparison covers them
      case Op::kAsyncCopyWait:
      case Op::kWgmmaWait:
        all.push_back({Kind::kWeaken, op, file, line, 0});
        [[fallthrough]];
      default:
        all.push_back({Kind::kDrop, op, file, line, 0});
    }
  }
  return all;
}

using Check = std::function<std::string(const Options&, SeenSites*)>;

// Checks that share sources are judged together: a call may matter in one of them only.
void expect_caught(const std::vector<Check>& checks, size_t at_least) {
  if (!executor::Device::checks_plain_accesses()) GTEST_SKIP() << "half of the order is not seen in sanitizer builds";
  std::map<std::string, Mutation> mutations;
  std::map<std::string, bool> caught;
  // Sites are those of the first schedules, one with each way of delivery; a schedule counts that passes unmutated. A
  // call that is known to be redundant is tried a few times, not hunted.
  constexpr size_t kSites = 3, kTries = 3;
  const std::vector<Options> schedules = executor::schedules(9);
  for (const Check& check : checks) {
    SeenSites sites;
    size_t passed = 0;
    const auto pass = [&](size_t count, SeenSites* seen) {
      for (; passed < count; ++passed) {
        SeenSites own;
        ASSERT_EQ(check(schedules[passed], &own), "");
        if (seen != nullptr) seen->merge(own);
      }
    };
    pass(kSites, &sites);
    for (const Mutation& m : mutations_of(sites)) {
      mutations[m.text()] = m;
      bool& known = caught[m.text()];
      const size_t tries = is_redundant(m) ? kTries : schedules.size();
      for (size_t i = 0; i < tries && !known; ++i) {
        pass(i + 1, nullptr);
        if (testing::Test::HasFatalFailure()) return;
        Options o = schedules[i];
        o.mutation = m;
        known = !check(o, nullptr).empty();
      }
    }
  }
  for (const auto& [name, m] : mutations) {
    if (is_redundant(m)) {
      EXPECT_FALSE(caught[name]) << name << " is listed as redundant and is not";
    } else {
      EXPECT_TRUE(caught[name]) << name << ": " << source_line(m.file, m.line);
    }
  }
  testing::Test::RecordProperty("mutants", static_cast<int>(mutations.size()));
  EXPECT_GE(mutations.size(), at_least);
}

template <typename Kernels>
auto named(const Kernels& kernels, const std::string& name) {
  for (const auto& kernel : kernels) {
    if (kernel.name == name) return kernel;
  }
  throw std::logic_error("no kernel " + name);
}

TEST(MixerMutations, OfTheRecurrenceAreCaught) {
  const gdn::DeltaShape shape{1, 2, 16, 48};
  const DeltaProblem p = make_delta(shape, false, {{3, 9, 0, {1, -1, 0}}, {0, 0, 0, {}}}, 2, 3);
  const DeltaProblem alone = make_delta(shape, false, {{1, 9, 0, {0}}, {0, 0, 0, {}}}, 1, 4);
  const auto check = [](const char* name, const DeltaProblem& problem) {
    return [&problem, kernel = named(recurrent_kernels(), name)](const Options& o, SeenSites* seen) {
      return run_recurrent(kernel, problem, o, seen);
    };
  };
  // In clusters, and with a state and inputs that are written where they were read.
  const gdn::DeltaShape wide{1, 2, 16, 64};
  const DeltaProblem split = make_delta(wide, false, {{3, 9, 0, {1, -1, 0}}, {0, 0, 0, {}}}, 2, 5);
  const DeltaProblem split_alone = make_delta(wide, false, {{1, 9, 0, {0}}, {0, 0, 0, {}}}, 1, 6);
  // With updates where the state that is made of them goes.
  const DeltaProblem put_off = make_delta(wide, true, {{3, 9, 0, {1, 2, 0}}}, 3, 7);
  expect_caught(
      {check("recurrent {16, 48, 4, 4, 1, 0}", p), check("recurrent {16, 48, 1, 4, 1, 0}", alone),
       check("recurrent {16, 64, 4, 4, 1, 0, 2}", split), check("recurrent {16, 64, 1, 2, 1, 0, 2}", split_alone),
       [&, kernel = named(recurrent_kernels(), "recurrent {16, 64, 5, 4, 1, 1, 2, 1}")](
           const Options& o, SeenSites* seen) { return run_updates(kernel, put_off, 1, true, o, seen); }},
      13);
}

TEST(MixerMutations, OfTheChunksAreCaught) {
  std::vector<Check> checks;
  const DeltaProblem bf16 = make_delta({1, 3, 16, 48}, false, {{70, 9, 0, {0}}, {0, 0, 0, {}}}, 1, 3, true);
  const DeltaProblem fp32 = make_delta({1, 2, 48, 64}, true, {{100, 9, 0, {0}}}, 1, 4, true);
  checks.push_back([&, kernel = named(chunk_kernels(), "chunk {16, 48, 64, 16, 0, 1, 0}")](
                       const Options& o, SeenSites* seen) { return run_chunks(kernel, bf16, o, 4e-3, 5e-5, seen); });
  checks.push_back([&, kernel = named(chunk_kernels(), "chunk {48, 64, 32, 32, 1, 1, 1}")](
                       const Options& o, SeenSites* seen) { return run_chunks(kernel, fp32, o, 4e-3, 5e-5, seen); });
  expect_caught(checks, 12);
}

TEST(MixerMutations, OfTheChunksOnHopperAreCaught) {
  // A single chunk of three heads, of which two are prepared at a time, and more chunks than stages.
  const ChunkKernel kernel = named(chunk_kernels(), "chunk {128, 64, 64, 64, 0, 1, 0, 1}");
  std::vector<Check> checks;
  const DeltaProblem problems[] = {make_delta({1, 3, 128, 64}, false, {{2, 9, 0, {0}}}, 1, 5, true),
                                   make_delta({1, 1, 128, 64}, false, {{3 * 64 + 5, 9, 0, {0}}}, 1, 5, true)};
  for (const DeltaProblem& p : problems) {
    const bool beside = p.sequences[0].count > 64;
    checks.push_back(
        [&, beside](const Options& o, SeenSites* seen) { return run_chunks(kernel, p, o, 4e-3, 5e-5, seen, beside); });
  }
  expect_caught(checks, 40);
}

TEST(MixerMutations, OfAttentionForFewRowsAreCaught) {
  std::vector<Check> checks;
  const AttentionProblem bf16 = make_attention({4, 2, 64, true}, 0, 16, false, {{2, 300, 0, {}}, {0, 0, 0, {}}}, 3);
  const AttentionProblem fp8 = make_attention({4, 2, 64, true}, 32, 16, true, {{2, 300, 0, {}}}, 4);
  checks.push_back([&, kernel = named(decode_kernels(), "decode {64, 0, 2, 1, 1, 1, 2, 0, 1, 1}")](
                       const Options& o, SeenSites* seen) { return run_decode(kernel, bf16, o, 6e-3, seen).error; });
  checks.push_back([&, kernel = named(decode_kernels(), "decode {64, 32, 1, 2, 2, 1, 2, 1, 0, 1}")](
                       const Options& o, SeenSites* seen) { return run_decode(kernel, fp8, o, 6e-3, seen).error; });
  // So many splits that two warps add up a block.
  const AttentionProblem many = make_attention({4, 2, 64, true}, 32, 16, true, {{2, 1100, 0, {}}}, 5);
  checks.push_back([&, kernel = named(narrow_kernels(), "narrow {64, 32, 4, 2, 2, 1}")](
                       const Options& o, SeenSites* seen) { return run_narrow(kernel, many, o, 6e-3, seen).error; });
  expect_caught(checks, 20);
}

TEST(MixerMutations, OfAttentionForManyRowsAreCaught) {
  std::vector<Check> checks;
  const AttentionProblem a = make_attention({3, 1, 64, true}, 32, 16, false, {{50, 30, 0, {}}, {7, 190, 0, {}}}, 3);
  const AttentionProblem b = make_attention({2, 1, 64, true}, 0, 16, false, {{40, 70, 0, {}}}, 4);
  checks.push_back([&, kernel = named(prefill_kernels(), "prefill {64, 32, 8, 64, 2, 0, 1}")](
                       const Options& o, SeenSites* seen) { return run_prefill(kernel, a, o, 6e-3, seen); });
  checks.push_back([&, kernel = named(prefill_kernels(), "prefill {64, 0, 4, 32, 2, 0, 0}")](
                       const Options& o, SeenSites* seen) { return run_prefill(kernel, b, o, 6e-3, seen); });
  expect_caught(checks, 16);
}

}  // namespace
}  // namespace fourfold::mixers
