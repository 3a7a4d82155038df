// What caches the processors of a process have, as Linux describes them.
#include "cpu/ceilings.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "base/temporary_directory.h"

namespace fourfold::cpu {
namespace {

void add_cache(const std::filesystem::path& root, int processor, int index, int level, const char* type,
               const char* size, const char* shared) {
  const auto folder = root / fmt::format("sys/devices/system/cpu/cpu{}/cache/index{}", processor, index);
  std::filesystem::create_directories(folder);
  std::ofstream(folder / "level") << level << '\n';
  std::ofstream(folder / "type") << type << '\n';
  std::ofstream(folder / "size") << size << '\n';
  std::ofstream(folder / "shared_cpu_list") << shared << '\n';
}

// Two groups of cores with a cache each, and a processor without a third level.
TEST(Caches, ThoseOfTheProcessorsCountOnce) {
  const TemporaryDirectory directory;
  const std::filesystem::path& root = directory.path();
  for (int processor = 0; processor < 4; ++processor) {
    add_cache(root, processor, 0, 1, "Data", "48K", fmt::format("{}", processor).c_str());
    add_cache(root, processor, 1, 1, "Instruction", "64K", fmt::format("{}", processor).c_str());
    add_cache(root, processor, 2, 2, "Unified", "1024K", fmt::format("{}", processor).c_str());
    add_cache(root, processor, 3, 3, "Unified", "32768K", processor < 2 ? "0-1" : "2-3");
  }
  add_cache(root, 9, 0, 2, "Unified", "512K", "9");
  const auto bytes = [&](const std::vector<int>& processors) {
    return last_level_cache_bytes(processors, root.string() + "/");
  };
  EXPECT_EQ(bytes({0}), 32ll << 20);
  EXPECT_EQ(bytes({0, 1}), 32ll << 20);
  EXPECT_EQ(bytes({1, 2, 3}), 64ll << 20);
  EXPECT_EQ(bytes({9}), 512ll << 10);
  EXPECT_EQ(bytes({9, 0}), 32ll << 20);
  EXPECT_EQ(bytes({7}), 0);
}

}  // namespace
}  // namespace fourfold::cpu
