// Choosing a backend, and refusing what the machine cannot hold.
#include "cpu/backend.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <limits>
#include <string>

#include "base/check.h"
#include "base/temporary_directory.h"
#include "cpu/host/cpu_backend.h"
#include "cpu/memory/available.h"
#include "cpu/memory/host_buffer.h"

namespace {

using namespace fourfold;
using namespace fourfold::cpu;

double fails(ops::Backend&) { return std::numeric_limits<double>::infinity(); }

template <typename F>
std::string message(F&& fn) {
  try {
    fn();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

class Environment : public ::testing::Test {
 protected:
  void SetUp() override {
    ::unsetenv("FOURFOLD_ISA");
    ::unsetenv("FOURFOLD_ALLOW_REFERENCE");
  }
  void TearDown() override { SetUp(); }
};

using Choice = Environment;

TEST_F(Choice, AFailedSelfTestIsAnErrorUnlessASlowerBackendIsAllowed) {
  if (supported_isas().size() == 1) GTEST_SKIP() << "no fast instruction set";
  CpuOptions options;
  options.threads = 1;
  const std::string best = isa_name(best_isa());
  EXPECT_EQ(message([&] { make_backend(options, fails); }),
            "the " + best +
                " kernels fail their self-test on this processor (relative error inf, at most 2e-03 is "
                "accepted); FOURFOLD_ALLOW_REFERENCE=1 allows a slower backend");
  options.allow_reference = true;
  EXPECT_EQ(make_backend(options, fails)->description(), "cpu reference, 1 thread");
  options.allow_reference = false;
  ::setenv("FOURFOLD_ALLOW_REFERENCE", "1", 1);
  EXPECT_EQ(make_backend(options, fails)->description(), "cpu reference, 1 thread");
  // What was asked for by name is never replaced.
  options.isa = best_isa();
  EXPECT_NE(message([&] { make_backend(options, fails); }), "no error");
}

TEST_F(Choice, TheBestOneIsTakenAndNamesAreWhatRuns) {
  CpuOptions options;
  options.threads = 1;
  options.allow_reference = true;
  EXPECT_EQ(make_backend(options)->description(), std::string("cpu ") + isa_name(best_isa()) + ", 1 thread");
  for (const Isa isa : supported_isas()) EXPECT_EQ(parse_isa(isa_name(isa)), isa);
  EXPECT_EQ(message([] { parse_isa("avx512bf16"); }),
            "unknown instruction set 'avx512bf16', wanted one of " + family_isa_names());
  for (const Isa isa : family_isas()) {
    const std::vector<Isa> known = supported_isas();
    if (std::find(known.begin(), known.end(), isa) != known.end()) continue;
    options.isa = isa;
    EXPECT_EQ(message([&] { make_backend(options); }).find(std::string("this processor has no ") + isa_name(isa)), 0u);
  }
}

class Machine : public ::testing::Test {
 protected:
  void write(const std::string& path, const std::string& text) {
    const std::filesystem::path file = root_ / path;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << text;
  }
  AvailableMemory found() { return available_memory(root_.path().string() + "/"); }
  void SetUp() override {
    write("proc/meminfo", "MemTotal:       16000 kB\nMemFree: 10 kB\nMemAvailable:    8000 kB\n");
  }
  const TemporaryDirectory root_;
};

TEST_F(Machine, WithoutGroups) {
  EXPECT_EQ(found().bytes, 8000 * 1024);
  EXPECT_EQ(found().limit, "the machine");
}

TEST_F(Machine, TheTightestGroupCounts) {
  write("proc/self/cgroup", "0::/a/b\n");
  write("sys/fs/cgroup/a/b/memory.max", "max\n");
  write("sys/fs/cgroup/a/b/memory.current", "100\n");
  EXPECT_EQ(found().bytes, 8000 * 1024);
  write("sys/fs/cgroup/a/memory.max", "3000000\n");
  write("sys/fs/cgroup/a/memory.current", "1000000\n");
  EXPECT_EQ(found().bytes, 2000000);
  EXPECT_EQ(found().limit, "control group /a");
  write("sys/fs/cgroup/a/memory.stat", "anon 5\ninactive_file 400000\nactive_file 7\n");
  EXPECT_EQ(found().bytes, 2400000);
  write("sys/fs/cgroup/memory.max", "1000000\n");
  write("sys/fs/cgroup/memory.current", "1500000\n");
  EXPECT_EQ(found().bytes, 0);
  EXPECT_EQ(found().limit, "control group /");
}

TEST_F(Machine, VersionOne) {
  write("proc/self/cgroup", "7:cpu:/x\n4:cpuset,memory:/box\n");
  write("sys/fs/cgroup/memory/box/memory.limit_in_bytes", "5000000\n");
  write("sys/fs/cgroup/memory/box/memory.usage_in_bytes", "1000000\n");
  write("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  write("sys/fs/cgroup/memory/memory.usage_in_bytes", "1000000\n");
  EXPECT_EQ(found().bytes, 4000000);
}

TEST(Available, WhatIsWantedAndFoundIsSaid) {
  constexpr int64_t kGib = int64_t{1} << 30;
  const AvailableMemory available{8 * kGib, "the machine"};
  EXPECT_NO_THROW(check_available("cache", 8 * kGib, 0, available));
  EXPECT_EQ(message([&] { check_available("cache", 9 * kGib, 0, available); }),
            "cache: 9.00 GiB wanted, 8.00 GiB are available (the machine)");
  EXPECT_EQ(message([&] { check_available("cache", 6 * kGib, 3 * kGib, available); }),
            "cache: 6.00 GiB wanted, 8.00 GiB are available (the machine, 3.00 GiB of them promised to other caches)");
  EXPECT_NO_THROW(check_available("cache", 9 * kGib, 0, {}));
}

// More than any machine has, and more than there are addresses: an error of ours, no std::bad_alloc.
TEST(Available, MemoryThatIsNotThereIsAnError) {
  for (const int bits : {50, 60}) {
    try {
      const HostBuffer buffer(int64_t{1} << bits);
      FAIL() << "2^" << bits << " bytes were allocated";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("out of memory"), std::string::npos) << error.what();
    }
  }
}

TEST(Available, CachesThatDoNotFitAreRefusedByName) {
  CpuOptions options;
  options.threads = 1;
  options.isa = Isa::kReference;
  const auto backend = make_backend(options);
  const AvailableMemory available = available_memory();
  if (available.bytes < 0) GTEST_SKIP() << "this system does not say";
  ops::KvCacheShape shape{1, 1, 32, 0, 16};
  shape.pages = available.bytes / (2 * 16 * 32 * 4) + (1 << 20);
  const std::string found = message([&] { backend->make_kv_cache(shape); });
  EXPECT_EQ(found.find("key/value cache of " + std::to_string(shape.pages) + " pages of 16 positions: "), 0u) << found;
  // Two that fit one at a time.
  shape.pages = available.bytes * 6 / 10 / (2 * 16 * 32 * 4);
  auto first = backend->make_kv_cache(shape);
  EXPECT_NE(message([&] { backend->make_kv_cache(shape); }), "no error");
  first.reset();
  EXPECT_EQ(message([&] { backend->make_kv_cache(shape); }), "no error");
  ops::StateCacheShape states{1, 0, 1, 1, 128, 128, 4};
  states.slots = available.bytes / (128 * 128 * 4) + (1 << 16);
  EXPECT_EQ(message([&] { backend->make_state_cache(states); }).find("state cache of "), 0u);
}

// The model's figure for the memory of a token is the cache's.
TEST(Cache, ElementsAreAsWideAsTheBackendSays) {
  for (const Isa isa : supported_isas()) {
    CpuOptions options;
    options.threads = 1;
    options.isa = isa;
    const auto backend = make_backend(options);
    const auto cache = backend->make_kv_cache({2, 3, 64, 5, 16});
    EXPECT_EQ(cache->bytes(), 2 * 3 * 64 * 5 * 16 * 2 * backend->kv_element_bytes());
    EXPECT_EQ(backend->kv_element_bytes(), isa == Isa::kReference ? 4 : 2);
  }
}

}  // namespace
