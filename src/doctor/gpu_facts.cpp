// GPUs as the system sees them, without opening the driver.
#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <sstream>
#include <string>
#include <system_error>
#include <vector>

#include "base/check.h"
#include "doctor/child.h"
#include "doctor/collect.h"
#include "jit/nvrtc.h"

namespace fourfold::doctor {
namespace {

namespace fs = std::filesystem;

std::string text_of(const fs::path& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

std::vector<std::string> split(std::string_view line, char by) {
  std::vector<std::string> parts;
  for (size_t begin = 0; begin <= line.size();) {
    const size_t end = std::min(line.find(by, begin), line.size());
    std::string part(line.substr(begin, end - begin));
    while (!part.empty() && (part.back() == ' ' || part.back() == '\r')) part.pop_back();
    part.erase(0, part.find_first_not_of(' ') == std::string::npos ? part.size() : part.find_first_not_of(' '));
    parts.push_back(std::move(part));
    begin = end + 1;
  }
  return parts;
}

// NVIDIA's display devices, and the kind of the IOMMU group of each: "identity" passes addresses through, "DMA" and
// "DMA-FQ" translate them.
Json pci_facts(const fs::path& root) {
  Json devices = Json::array();
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(root / "sys/bus/pci/devices", ignored)) {
    if (text_of(entry.path() / "vendor") != "0x10de" || !text_of(entry.path() / "class").starts_with("0x03")) continue;
    const std::string group = text_of(entry.path() / "iommu_group/type");
    devices.push_back(
        {{"address", entry.path().filename().string()}, {"iommu", group.empty() ? Json(nullptr) : Json(group)}});
  }
  return devices;
}

Json xid_facts(std::chrono::milliseconds limit) {
  const ChildResult log = run_program({"dmesg"}, limit);
  if (!log.ok) return nullptr;
  Json numbers = Json::array();
  constexpr std::string_view kMark = "NVRM: Xid (";
  for (size_t at = log.output.find(kMark); at != std::string::npos; at = log.output.find(kMark, at + 1)) {
    const size_t number = log.output.find("): ", at);
    if (number == std::string::npos) break;
    numbers.push_back(std::strtol(log.output.c_str() + number + 3, nullptr, 10));
  }
  return numbers;
}

}  // namespace

const char* const kSmiFields =
    "index,name,pci.bus_id,driver_version,compute_cap,memory.total,memory.used,pcie.link.gen.current,pcie.link.gen.max,"
    "pcie.link.width.current,pcie.link.width.max,clocks.sm,clocks.max.sm,power.limit,power.default_limit,temperature."
    "gpu,"
    "clocks_throttle_reasons.active,ecc.errors.uncorrected.volatile.total";

Json parse_nvidia_smi(std::string_view csv) {
  const std::vector<std::string> fields = split(kSmiFields, ',');
  Json devices = Json::array();
  for (const std::string& line : split(csv, '\n')) {
    const std::vector<std::string> values = split(line, ',');
    if (values.size() != fields.size()) continue;  // an empty line, or a message
    Json device = Json::object();
    for (size_t i = 0; i < fields.size(); ++i) {
      std::string name = fields[i];
      std::replace(name.begin(), name.end(), '.', '_');
      const std::string& value = values[i];
      char* end = nullptr;
      const double number = std::strtod(value.c_str(), &end);
      const bool word = name == "name" || name == "driver_version" || name == "compute_cap" || name == "pci_bus_id";
      if (word) {
        device[name] = value;
      } else if (value.starts_with("0x")) {
        device[name] = std::strtoull(value.c_str(), nullptr, 16);
      } else {
        device[name] = !value.empty() && *end == '\0' ? Json(number) : Json(nullptr);  // "[N/A]", "[Not Supported]"
      }
    }
    devices.push_back(std::move(device));
  }
  return devices;
}

Json gpu_facts(const fs::path& root, std::chrono::milliseconds limit) {
  Json out = Json::object();
  out["pci"] = pci_facts(root);
  out["kernel_command_line"] = text_of(root / "proc/cmdline").find("iommu=pt") != std::string::npos ? "iommu=pt" : "";
  std::error_code ignored;
  out["driver_file"] = fs::exists(root / "dev/nvidiactl", ignored) || fs::exists(root / "dev/dxg", ignored);
  const ChildResult smi =
      run_program({"nvidia-smi", fmt::format("--query-gpu={}", kSmiFields), "--format=csv,noheader,nounits"}, limit);
  out["nvidia_smi"] = smi.ok ? parse_nvidia_smi(smi.output) : Json({{"failure", smi.failure}});
  out["xid"] = out["pci"].empty() ? Json(nullptr) : xid_facts(limit);
  out["nvrtc"] = child_facts(
      [] {
        std::string why;
        const jit::Nvrtc* nvrtc = jit::Nvrtc::find(&why);
        if (nvrtc == nullptr) return Json({{"failure", why}});
        Json archs = Json::array();
        for (const char* arch : {"sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120a", "sm_121a"}) {
          if (nvrtc->supports(arch)) archs.push_back(arch);
        }
        return Json({{"major", nvrtc->major()}, {"minor", nvrtc->minor()}, {"archs", std::move(archs)}});
      },
      limit);
  return out;
}

}  // namespace fourfold::doctor
