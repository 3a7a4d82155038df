// Facts from files of /proc and /sys as machines have them, and from this machine.
#include "doctor/collect.h"

#include <gtest/gtest.h>

#include <fstream>

#include "base/temporary_directory.h"
#include "doctor/finding.h"

namespace fourfold::doctor {
namespace {

namespace fs = std::filesystem;

class Root : public testing::Test {
 protected:
  void write(const std::string& path, const std::string& text) const {
    fs::create_directories((root_ / path).parent_path());
    std::ofstream(root_ / path) << text;
  }
  const TemporaryDirectory directory_;
  const fs::path& root_ = directory_.path();
};

TEST_F(Root, HostsAreRead) {
  std::string cpuinfo;
  for (int i = 0; i < 4; ++i) {
    cpuinfo += "processor\t: " + std::to_string(i) +
               "\nmodel name\t: A Processor\nphysical id\t: 0\ncore id\t\t: " + std::to_string(i / 2) +
               "\nflags\t\t: fpu avx2 avx512f other\n\n";
  }
  write("proc/cpuinfo", cpuinfo);
  write("proc/meminfo", "MemTotal:       16000000 kB\nMemAvailable:   12000000 kB\nHugePages_Total:       3\n");
  write("proc/sys/kernel/osrelease", "5.15.0-microsoft-standard-WSL2\n");
  write("sys/fs/cgroup/cpu.max", "150000 100000\n");
  write("sys/fs/cgroup/memory.max", "1073741824\n");
  write("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n");
  write("sys/devices/system/cpu/cpu0/cpufreq/scaling_governor", "powersave\n");
  write("sys/devices/system/node/node0/x", "");
  write("sys/devices/system/node/node1/cpulist", "2-3\n");
  write("sys/devices/system/node/node2/cpulist", "\n");  // a GPU's memory
  write("sys/devices/system/node/possible", "0-1");
  const Json facts = host_facts(root_);
  EXPECT_EQ(facts["cpu"]["model"], "A Processor");
  EXPECT_EQ(facts["cpu"]["logical"], 4);
  EXPECT_EQ(facts["cpu"]["cores"], 2);
  EXPECT_EQ(facts["cpu"]["flags"], Json::parse(R"(["avx2", "avx512f"])"));
  EXPECT_EQ(facts["cpu"]["quota_cpus"], 1.5);
  EXPECT_EQ(facts["cpu"]["governor"], "powersave");
  EXPECT_EQ(facts["cpu"]["numa_nodes"], 2);
  EXPECT_EQ(facts["memory"]["total_bytes"], int64_t{16000000} << 10);
  EXPECT_EQ(facts["memory"]["available_bytes"], int64_t{12000000} << 10);
  EXPECT_EQ(facts["memory"]["limit_bytes"], 1073741824);
  EXPECT_EQ(facts["memory"]["transparent_huge_pages"], "madvise");
  EXPECT_EQ(facts["system"]["wsl2"], true);
}

TEST_F(Root, WithoutLimitsThereAreNone) {
  write("sys/fs/cgroup/cpu.max", "max 100000\n");
  write("sys/fs/cgroup/memory.max", "max\n");
  const Json facts = host_facts(root_);
  EXPECT_TRUE(facts["cpu"]["quota_cpus"].is_null());
  EXPECT_TRUE(facts["memory"]["limit_bytes"].is_null());
  fs::remove_all(root_ / "sys");
  write("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "50000\n");
  write("sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(host_facts(root_)["cpu"]["quota_cpus"], 0.5);
}

TEST_F(Root, GpusOnTheBusAreRead) {
  write("sys/bus/pci/devices/0000:01:00.0/vendor", "0x10de\n");
  write("sys/bus/pci/devices/0000:01:00.0/class", "0x030200\n");
  write("sys/bus/pci/devices/0000:01:00.0/iommu_group/type", "DMA-FQ\n");
  write("sys/bus/pci/devices/0000:02:00.0/vendor", "0x8086\n");
  write("sys/bus/pci/devices/0000:02:00.0/class", "0x030000\n");
  write("dev/nvidiactl", "");
  const Json facts = gpu_facts(root_, std::chrono::seconds(60));
  ASSERT_EQ(facts["pci"].size(), 1u);
  EXPECT_EQ(facts["pci"][0]["iommu"], "DMA-FQ");
  EXPECT_EQ(facts["driver_file"], true);
}

TEST(NvidiaSmi, IsRead) {
  const Json devices = parse_nvidia_smi(
      "0, NVIDIA H100 80GB HBM3, 00000000:19:00.0, 580.65.06, 9.0, 81559, 4, 5, 5, 16, 16, 345, 1980, 700.00, 700.00, "
      "31, "
      "0x0000000000000001, 0\n"
      "1, NVIDIA GB10, [N/A], 580.1, 12.1, [N/A], [N/A], 1, 1, 1, 1, 208, 3003, [N/A], [N/A], 40, 0x0000000000000044, "
      "[N/A]\n"
      "\nno devices were found\n");
  ASSERT_EQ(devices.size(), 2u);
  EXPECT_EQ(devices[0]["name"], "NVIDIA H100 80GB HBM3");
  EXPECT_EQ(devices[0]["memory_total"], 81559);
  EXPECT_EQ(devices[0]["pcie_link_width_max"], 16);
  EXPECT_EQ(devices[0]["power_limit"], 700);
  EXPECT_EQ(devices[1]["clocks_throttle_reasons_active"], 0x44);
  EXPECT_TRUE(devices[1]["memory_used"].is_null());
  EXPECT_TRUE(devices[1]["ecc_errors_uncorrected_volatile_total"].is_null());
}

TEST(Collect, ThisMachineHasFacts) {
  CollectOptions options;
  options.model = FOURFOLD_SOURCE_DIR "/models/demo";
  options.probes = false;
  const Json facts = collect(options);
  EXPECT_GE(facts["cpu"]["logical"].get<int>(), 1);
  EXPECT_GE(facts["cpu"]["allowed"].get<int>(), 1);
  EXPECT_GT(facts["memory"]["available_bytes"].get<int64_t>(), 1 << 20);
  EXPECT_EQ(facts["model"]["problems"], Json::array());
  EXPECT_EQ(facts["model"]["max_positions"], 4096);
  EXPECT_FALSE(judge(facts).empty());
}

}  // namespace
}  // namespace fourfold::doctor
