#include <algorithm>
#include <cmath>
#include <map>
#include <optional>

#include "base/check.h"
#include "doctor/finding.h"
#include "plan/arch.h"

namespace fourfold::doctor {
namespace {

// GB/s of a PCIe link in one direction: gigatransfers of a lane, 8 bits a byte, behind the coding of 1 to 2 and of 3
// on.
double link_gb_per_s(double generation, double width) {
  const double transfers[] = {2.5 * 0.8, 5 * 0.8, 8 * 0.985, 16 * 0.985, 32 * 0.985, 64 * 0.985};
  const auto index = static_cast<size_t>(std::clamp(generation, 1.0, 6.0)) - 1;
  return transfers[index] * width / 8;
}

const plan::Arch* arch_row(const std::string& name) {
  const auto* row = std::find_if(std::begin(plan::kArchs), std::end(plan::kArchs),
                                 [&](const plan::Arch& one) { return one.name == name; });
  return row == std::end(plan::kArchs) ? nullptr : row;
}

// What hardware says against its clock, by bit (nvml.h, nvmlClocksEventReasons): idle and what an application set are
// no complaints.
std::string throttle_words(uint64_t bits) {
  static constexpr std::pair<uint64_t, const char*> kReasons[] = {{0x4, "power limit"},
                                                                  {0x8, "hardware slowdown"},
                                                                  {0x20, "temperature (software)"},
                                                                  {0x40, "temperature (hardware)"},
                                                                  {0x80, "external power brake"}};
  std::string words;
  for (const auto& [bit, word] : kReasons) {
    if ((bits & bit) != 0) words += (words.empty() ? "" : ", ") + std::string(word);
  }
  return words;
}

class Judge {
 public:
  explicit Judge(const Facts& facts)
      : gpu_(facts.at("gpu")),
        probe_(facts.at("probes").at("gpu")),
        kernels_(facts.at("probes").at("kernels")),
        wsl2_(facts.at("system").flag("wsl2").value_or(false)) {}

  std::vector<Finding> run() {
    if (gpu_.json().is_null() && probe_.json().is_null()) return {};
    presence();
    nvrtc();
    for (const Facts& device : probe_.list("devices")) driver_device(device);
    for (const Facts& device : gpu_.list("nvidia_smi")) managed_device(device);
    xid();
    peers();
    kernels();
    return std::move(out_);
  }

 private:
  void add(std::string id, Level level, std::string evidence, std::string consequence = "", std::string fix = "") {
    out_.push_back({std::move(id), level, std::move(evidence), std::move(consequence), std::move(fix)});
  }

  bool has_devices() const { return !probe_.list("devices").empty() || !gpu_.list("nvidia_smi").empty(); }

  void presence() {
    const bool on_bus = !gpu_.list("pci").empty() || gpu_.flag("driver_file").value_or(false);
    if (const auto failure = probe_.text("failure")) {
      add("gpu.probe", Level::kError, *failure, "the driver hangs or fails, and so would a model on the GPU",
          "look at dmesg, reload the driver or restart the machine");
    } else if (const auto none = probe_.text("none"); none && on_bus) {
      add("gpu.driver", Level::kError, *none, "there is a GPU, and no driver that can use it",
          "install NVIDIA's driver; in a container, start it with the GPU");
    } else if (none || !has_devices()) {
      add("gpu.none", Level::kGood, "no GPU: models run on the CPU");
    }
  }

  // Self-tests, where somebody asked for them.
  void kernels() {
    if (const auto failure = kernels_.text("failure")) {
      add("gpu.kernels", Level::kWarning, fmt::format("kernels could not be tested: {}", *failure),
          "nobody knows whether they are right here", "`fourfold warm` for this card first, or more --probe-seconds");
    }
    const auto count = kernels_.number("kernels");
    if (!count) return;
    const std::vector<Facts> wrong = kernels_.list("wrong");
    const std::string device = kernels_.text("device").value_or("the GPU");
    if (wrong.empty())
      add("gpu.kernels", Level::kGood, fmt::format("{}: {:.0f} kernels tested, all right", device, *count));
    for (const Facts& one : wrong) {
      add("gpu.kernels", Level::kError,
          fmt::format("{}: {}: {}", device, one.text("kernel").value_or("a kernel"),
                      one.text("reason").value_or("wrong")),
          "a model on this GPU that is started with --no-self-test says wrong things",
          "a model that starts puts others in their place, or refuses to; report it");
    }
  }

  void nvrtc() {
    if (!has_devices()) return;
    const Facts nvrtc = gpu_.at("nvrtc");
    if (nvrtc.text("failure")) {
      add("gpu.nvrtc", Level::kWarning, "no NVRTC was found", "kernels cannot be compiled here, only taken from a pack",
          "./fourfold get-nvrtc, or a pack of `fourfold warm`");
      return;
    }
    const auto major = nvrtc.number("major"), driver = probe_.number("driver_cuda");
    if (major && driver && *major > std::floor(*driver / 1000)) {
      add("gpu.driver-version", Level::kError,
          fmt::format("NVRTC {:.0f}, a driver for CUDA {:.0f}.{:.0f}", *major, std::floor(*driver / 1000),
                      std::fmod(*driver, 1000) / 10),
          "the driver does not load what a newer compiler makes", "install a newer driver, or an older NVRTC");
    }
  }

  void driver_device(const Facts& device) {
    const std::string name = device.text("name").value_or("a GPU"), arch = device.text("arch").value_or("");
    const plan::Arch* row = arch_row(arch);
    if (row == nullptr) {
      add("gpu.capability", Level::kWarning, fmt::format("{} is {}", name, arch),
          "there are no kernels for this architecture", "run on the CPU: --device cpu");
      return;
    }
    add("gpu.capability", Level::kGood, fmt::format("{}: {}, kernels for it are built", name, arch));
    const std::vector<Facts> known = gpu_.at("nvrtc").list("archs");
    const bool compiled =
        known.empty() || std::any_of(known.begin(), known.end(), [&](const Facts& one) { return one.json() == arch; });
    if (!compiled) {
      add("gpu.nvrtc-arch", Level::kWarning, fmt::format("this NVRTC does not know {}", arch),
          "kernels for this card cannot be compiled here", "./fourfold get-nvrtc");
    }
    const auto shared = device.number("smem_per_block");
    if (shared && *shared < static_cast<double>(row->smem_per_block)) {
      add("gpu.shared-memory", Level::kError,
          fmt::format("{}: {:.0f} bytes of shared memory for a block, the plans for {} may take {}", name, *shared,
                      arch, row->smem_per_block),
          "kernels that were planned do not start", "report it with `fourfold doctor --bundle`; run with --device cpu");
    } else if (shared) {
      add("gpu.shared-memory", Level::kGood, fmt::format("{}: {:.0f} bytes for a block, as planned", name, *shared));
    }
    if (const auto memory = device.text("host_memory")) {
      add("gpu.memory", Level::kGood,
          fmt::format("{}: {}{}", name, printable(*memory, 80),
                      shares_host_memory(device) ? "; weights and caches are there once, beside everything else" : ""));
    }
    const auto copied = device.number("copy_gb_per_s");
    // By the driver's clock and bus width, or by the card's row where the driver tells nothing.
    double datasheet = device.number("datasheet_gb_per_s").value_or(0);
    for (const plan::Gpu& gpu : plan::kGpus) {
      if (datasheet == 0 && gpu.arch == arch &&
          name.find(gpu.title.substr(0, gpu.title.find(" ("))) != std::string::npos) {
        datasheet = 1e3 * gpu.read_tbs;
      }
    }
    if (copied && datasheet > 0) {
      const std::string evidence = fmt::format("{}: {:.0f} GB/s copied of {:.0f}", name, *copied, datasheet);
      if (*copied < 0.6 * datasheet) {
        add("gpu.bandwidth", Level::kWarning, evidence, "decoding is bound by memory, and slower by as much",
            "look for other processes, the memory clock and ECC");
      } else {
        add("gpu.bandwidth", Level::kGood, evidence);
      }
    }
  }

  void managed_device(const Facts& device) {
    const std::string name = device.text("name").value_or("a GPU");
    const auto generation = device.number("pcie_link_gen_max"), width = device.number("pcie_link_width_current"),
               widest = device.number("pcie_link_width_max");
    if (width && widest && *width < *widest) {
      add("gpu.pcie-width", Level::kWarning, fmt::format("{}: {:.0f} of {:.0f} PCIe lanes", name, *width, *widest),
          "loading and copies between GPUs take longer by as much", "another slot, or reseat the card or its riser");
    }
    const size_t index = static_cast<size_t>(std::max(0.0, device.number("index").value_or(0)));
    const std::vector<Facts> probed = probe_.list("devices");
    if (generation && width && index < probed.size()) {
      const auto measured = probed[index].number("host_to_device_gb_per_s");
      const double link = link_gb_per_s(*generation, *width);
      if (measured && *measured < 0.5 * link) {
        add("gpu.pcie-speed", Level::kWarning,
            fmt::format("{}: {:.1f} GB/s to the card over a link for {:.1f}", name, *measured, link),
            "loading a model takes longer by as much",
            "look at the link's generation under load, and at the BIOS' PCIe settings");
      }
    }
    const auto limit = device.number("power_limit"), power = device.number("power_default_limit");
    if (limit && power && *limit < *power) {
      add("gpu.power", Level::kNote, fmt::format("{}: limited to {:.0f} of {:.0f} W", name, *limit, *power),
          "prompts take longer; decoding hardly changes", "nvidia-smi -pl, if that was not meant");
    }
    const double bits = device.number("clocks_throttle_reasons_active").value_or(0);
    if (const std::string words = bits > 0 ? throttle_words(static_cast<uint64_t>(bits)) : ""; !words.empty()) {
      add("gpu.throttle", Level::kWarning,
          fmt::format("{}: clock held down by {}, {:.0f} degrees", name, words,
                      device.number("temperature_gpu").value_or(0)),
          "figures are those of a slower card", "cooling, power supply, or the power limit");
    }
    const auto errors = device.number("ecc_errors_uncorrected_volatile_total");
    if (errors && *errors > 0) {
      add("gpu.ecc", Level::kError, fmt::format("{}: {:.0f} memory errors that ECC could not correct", name, *errors),
          "weights or answers may be wrong", "restart the machine; if they come again, replace the card");
    }
    const auto used = device.number("memory_used"), total = device.number("memory_total");
    if (used && total && *total > 0 && *used > 0.05 * *total) {
      add("gpu.processes", Level::kWarning,
          fmt::format("{}: {:.0f} of {:.0f} MiB are in use already", name, *used, *total),
          "less room for weights and caches, and other work on the card", "nvidia-smi shows whose it is");
    }
  }

  void xid() {
    const Json& numbers = gpu_.at("xid").json();
    if (!numbers.is_array() || numbers.empty()) return;
    add("gpu.xid", Level::kWarning,
        fmt::format("{} Xid messages of the driver since the start, the last {}", numbers.size(),
                    printable(numbers.back().dump(), 20)),
        "a GPU or a program on it has failed", "look the number up in NVIDIA's list of Xid errors");
  }

  // GB/s of the narrower of two devices' PCIe links, where both are known.
  std::optional<double> slot_gb_per_s(const Facts& peer) const {
    const std::vector<Facts> managed = gpu_.list("nvidia_smi");
    std::optional<double> least;
    for (const char* end : {"from", "to"}) {
      const double index = peer.number(end).value_or(-1);
      const auto device =
          std::find_if(managed.begin(), managed.end(), [&](const Facts& one) { return one.number("index") == index; });
      if (device == managed.end()) return std::nullopt;
      const auto generation = device->number("pcie_link_gen_max"), width = device->number("pcie_link_width_current");
      if (!generation || !width) return std::nullopt;
      const double link = link_gb_per_s(*generation, *width);
      least = least ? std::min(*least, link) : link;
    }
    return least;
  }

  void peers() {
    bool sound = true;
    int direct = 0, ways = 0;
    std::map<std::string, std::pair<double, double>> rates;  // by link: the slowest and the fastest
    for (const Facts& peer : probe_.list("peers")) {
      ++ways;
      const std::string pair =
          fmt::format("from GPU {:.0f} to {:.0f}", peer.number("from").value_or(-1), peer.number("to").value_or(-1));
      const auto measured = peer.number("gb_per_s");
      const std::string link = peer.flag("direct") == false ? "through the host" : peer.text("link").value_or("direct");
      if (measured) {
        const auto [at, first] = rates.try_emplace(link, *measured, *measured);
        if (!first) at->second = {std::min(at->second.first, *measured), std::max(at->second.second, *measured)};
      }
      if (const double bytes = peer.number("wrong_bytes").value_or(0); bytes > 0) {
        sound = false;
        add("gpu.peer-copy", Level::kError, fmt::format("{}: {:.0f} bytes of a copy arrived wrong", pair, bytes),
            "several GPUs compute nonsense together",
            "add iommu=pt to the kernel's command line (or turn the IOMMU and ACS off in the BIOS); until then "
            "NCCL_P2P_DISABLE=1");
        continue;
      }
      if (peer.flag("direct") == false) {
        sound = false;
        add("gpu.peer-access", wsl2_ ? Level::kNote : Level::kWarning, fmt::format("{}: no direct copies", pair),
            "no model can be split over the two (--tensor-parallel-size), whose kernels reach each other's memory",
            wsl2_ ? "Linux itself instead of WSL2" : "a driver that allows them; on some cards there is none");
        continue;
      }
      ++direct;
      const auto slot = link == "PCIe" ? slot_gb_per_s(peer) : std::nullopt;
      if (measured && slot && *measured < 0.5 * *slot) {
        sound = false;
        add("gpu.peer-speed", Level::kWarning,
            fmt::format("{}: {:.1f} GB/s over links for {:.1f}", pair, *measured, *slot),
            "sums between the ranks of a prompt take longer by as much",
            "look for a slower switch or bridge between the slots (nvidia-smi topo -m), the IOMMU and ACS");
      }
    }
    if (direct > 0 && direct == ways && sound) {
      std::string found;
      for (const auto& [link, range] : rates) {
        found += fmt::format("; {}, {:.0f}", link, range.first);
        if (range.second - range.first >= 1) found += fmt::format(" to {:.0f}", range.second);
        found += " GB/s";
      }
      add("gpu.links", Level::kGood,
          fmt::format("{} way{} between GPUs: direct copies, every byte arrived{}", ways, ways == 1 ? "" : "s", found));
    }
    bool translated = false;
    for (const Facts& device : gpu_.list("pci"))
      translated = translated || device.text("iommu").value_or("").starts_with("DMA");
    if (!translated || gpu_.list("pci").size() < 2) return;
    // What was measured counts for more than what is usual.
    if (direct > 0 && direct == ways && sound) {
      add("gpu.iommu", Level::kNote, "the IOMMU translates the GPUs' addresses; copies between them are whole and fast",
          "on many such machines they are not", "iommu=pt on the kernel's command line, if that changes");
    } else if (direct == ways) {
      add("gpu.iommu", Level::kWarning, "the IOMMU translates the GPUs' addresses",
          "copies between GPUs are slow or wrong on such machines", "add iommu=pt to the kernel's command line");
    }
  }

  const Facts gpu_, probe_, kernels_;
  const bool wsl2_;
  std::vector<Finding> out_;
};

}  // namespace

std::vector<Finding> judge_gpu(const Facts& facts) { return Judge(facts).run(); }

}  // namespace fourfold::doctor
