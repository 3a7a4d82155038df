// What /proc, /sys and the environment say of processor, memory and system.
#include <sched.h>

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <fstream>
#include <set>
#include <sstream>
#include <string>
#include <system_error>

#include "base/check.h"
#include "base/threads.h"
#include "cpu/host/isa.h"
#include "doctor/collect.h"

namespace fourfold::doctor {
namespace {

namespace fs = std::filesystem;

std::string first_line(const fs::path& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  while (!line.empty() && std::isspace(static_cast<unsigned char>(line.back()))) line.pop_back();
  return line;
}

Json number_in(const fs::path& path) {
  const std::string text = first_line(path);
  char* end = nullptr;
  const long long value = std::strtoll(text.c_str(), &end, 10);
  return text.empty() || *end != '\0' ? Json(nullptr) : Json(value);
}

// "[always] madvise never": the word in brackets.
Json chosen_in(const fs::path& path) {
  const std::string text = first_line(path);
  const size_t begin = text.find('['), end = text.find(']');
  if (begin != std::string::npos && end != std::string::npos) return text.substr(begin + 1, end - begin - 1);
  return text.empty() ? Json(nullptr) : Json(text);
}

Json cpu_facts(const fs::path& root) {
  Json out = Json::object();
  std::ifstream file(root / "proc/cpuinfo");
  std::set<std::string> cores;
  std::set<std::string> flags;
  int64_t logical = 0;
  std::string package = "0", core;
  for (std::string line; std::getline(file, line);) {
    const size_t colon = line.find(':');
    if (colon == std::string::npos) continue;
    std::string name = line.substr(0, colon);
    while (!name.empty() && std::isspace(static_cast<unsigned char>(name.back()))) name.pop_back();
    const std::string value = colon + 2 <= line.size() ? line.substr(colon + 2) : "";
    if (name == "processor") ++logical;
    if (name == "model name" && !out.contains("model")) out["model"] = value;
    if (name == "physical id") package = value;
    if (name == "core id") cores.insert(package + ":" + value);
    if ((name == "flags" || name == "Features") && flags.empty()) {
      std::istringstream words(value);
      for (std::string word; words >> word;) flags.insert(word);
    }
  }
  out["logical"] = logical;
  out["cores"] = cores.empty() ? Json(nullptr) : Json(cores.size());
  Json known = Json::array();
  for (const char* flag :
       {"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "avx_vnni", "amx_tile", "amx_int8",
        "amx_bf16", "asimd", "asimddp", "i8mm", "sve", "bf16", "hypervisor"}) {
    if (flags.count(flag) > 0) known.push_back(flag);
  }
  out["flags"] = std::move(known);
  out["governor"] = chosen_in(root / "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor");
  out["frequency_driver"] = chosen_in(root / "sys/devices/system/cpu/cpu0/cpufreq/scaling_driver");
  int64_t nodes = 0;
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(root / "sys/devices/system/node", ignored)) {
    const std::string name = entry.path().filename().string();
    if (!name.starts_with("node") || name.size() < 5 || !std::isdigit(static_cast<unsigned char>(name[4]))) continue;
    // A GPU whose memory is the processor's, too (GH200), has nodes without processors.
    const fs::path processors = entry.path() / "cpulist";
    nodes += fs::exists(processors, ignored) && first_line(processors).empty() ? 0 : 1;
  }
  out["numa_nodes"] = nodes == 0 ? Json(nullptr) : Json(nodes);
  return out;
}

// The control group of this process (version 2, or the one that a container sees as its root), or version 1's.
Json cgroup_quota(const fs::path& root) {
  std::istringstream two(first_line(root / "sys/fs/cgroup/cpu.max"));
  std::string quota;
  double period = 0;
  if (two >> quota >> period && period > 0) {
    return quota == "max" ? Json(nullptr) : Json(std::strtod(quota.c_str(), nullptr) / period);
  }
  const Json one = number_in(root / "sys/fs/cgroup/cpu/cpu.cfs_quota_us");
  const Json length = number_in(root / "sys/fs/cgroup/cpu/cpu.cfs_period_us");
  if (!one.is_number() || !length.is_number() || one.get<double>() <= 0 || length.get<double>() <= 0) return nullptr;
  return one.get<double>() / length.get<double>();
}

Json memory_facts(const fs::path& root) {
  Json out = Json::object();
  std::ifstream file(root / "proc/meminfo");
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string name;
    int64_t kilobytes = 0;
    if (!(words >> name >> kilobytes)) continue;
    if (name == "MemTotal:") out["total_bytes"] = kilobytes << 10;
    if (name == "MemAvailable:") out["available_bytes"] = kilobytes << 10;
    if (name == "SwapTotal:") out["swap_bytes"] = kilobytes << 10;
    if (name == "HugePages_Total:") out["huge_pages"] = kilobytes;
  }
  const Json two = number_in(root / "sys/fs/cgroup/memory.max");
  const Json one = number_in(root / "sys/fs/cgroup/memory/memory.limit_in_bytes");
  const Json& limit = two.is_null() ? one : two;
  // Version 1 says "no limit" with a number beyond all memory.
  out["limit_bytes"] = limit.is_number() && limit.get<double>() < 9e18 ? limit : Json(nullptr);
  out["transparent_huge_pages"] = chosen_in(root / "sys/kernel/mm/transparent_hugepage/enabled");
  return out;
}

}  // namespace

Json host_facts(const fs::path& root) {
  Json out = Json::object();
  out["cpu"] = cpu_facts(root);
  out["cpu"]["quota_cpus"] = cgroup_quota(root);
  cpu_set_t set;
  CPU_ZERO(&set);
  out["cpu"]["allowed"] = ::sched_getaffinity(0, sizeof set, &set) == 0 ? Json(CPU_COUNT(&set)) : Json(nullptr);
  Json isas = Json::array();
  for (const cpu::Isa isa : cpu::supported_isas()) isas.push_back(cpu::isa_name(isa));
  out["cpu"]["backends"] = std::move(isas);
  out["memory"] = memory_facts(root);
  const std::string kernel = first_line(root / "proc/sys/kernel/osrelease");
  std::string lower = kernel;
  std::transform(lower.begin(), lower.end(), lower.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  std::error_code ignored;
  const bool container = fs::exists(root / ".dockerenv", ignored) || fs::exists(root / "run/.containerenv", ignored);
  out["system"] = {
      {"kernel", kernel}, {"wsl2", lower.find("microsoft") != std::string::npos}, {"container", container}};
  return out;
}

Json environment_facts() {
  Json out = Json::object();
  // FOURFOLD_API_KEY and names of places are nobody's business.
  for (const char* name :
       {"FOURFOLD_DEVICE", "FOURFOLD_THREADS", "FOURFOLD_ISA", "FOURFOLD_ALLOW_REFERENCE", "OMP_NUM_THREADS",
        "OMP_PROC_BIND", "MKL_NUM_THREADS", "CUDA_LAUNCH_BLOCKING", "CUDA_VISIBLE_DEVICES",
        "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_FORCE_PTX_JIT", "NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", "NCCL_IB_DISABLE",
        "NCCL_SHM_DISABLE", "NCCL_DEBUG", "LD_PRELOAD"}) {
    if (const char* value = std::getenv(name); value != nullptr) out[name] = printable(value, 200);
  }
  return out;
}

}  // namespace fourfold::doctor
