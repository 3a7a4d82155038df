#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "doctor/finding.h"

namespace fourfold::doctor {
namespace {

class Judge {
 public:
  explicit Judge(const Facts& facts)
      : cpu_(facts.at("cpu")),
        memory_(facts.at("memory")),
        system_(facts.at("system")),
        environment_(facts.at("environment")),
        probes_(facts.at("probes")) {}

  std::vector<Finding> run() {
    isa();
    self_test();
    processors();
    governor();
    numa();
    bandwidth();
    huge_pages();
    system();
    environment();
    return std::move(out_);
  }

 private:
  void add(std::string id, Level level, std::string evidence, std::string consequence = "", std::string fix = "") {
    out_.push_back({std::move(id), level, std::move(evidence), std::move(consequence), std::move(fix)});
  }

  void isa() {
    const std::string name = cpu_.text("model").value_or("a processor without a name");
    std::string best;
    for (const Facts& one : cpu_.list("backends")) {
      if (one.json().is_string()) best = one.json().get<std::string>();
    }
    if (best.empty()) return;
    if (best == "reference") {
      add("cpu.isa", Level::kError,
          fmt::format("{} has none of the instruction sets that fast backends are made for", name),
          "models would run hundreds of times slower, and are refused",
          "use a processor with AVX2 or an arm64 one, or start with FOURFOLD_ALLOW_REFERENCE=1");
    } else if (best == "avx2") {
      add("cpu.isa", Level::kNote, fmt::format("{}: AVX2, without AVX-512", name),
          "decoding is bound by memory and hardly differs; prompts take about twice as long", "");
    } else {
      add("cpu.isa", Level::kGood, fmt::format("{}: {}", name, printable(best, 20)));
    }
  }

  void self_test() {
    const Facts probe = probes_.at("self_test");
    if (const auto failure = probe.text("failure")) {
      add("cpu.self-test", Level::kError, *failure, "the fastest backend computes wrongly or not at all here",
          "try a lower one with FOURFOLD_ISA, and report it with `fourfold doctor --bundle`");
    } else if (const auto backend = probe.text("backend")) {
      add("cpu.self-test", Level::kGood, *backend);
    }
  }

  void processors() {
    const auto allowed = cpu_.number("allowed"), logical = cpu_.number("logical"), cores = cpu_.number("cores");
    const auto quota = cpu_.number("quota_cpus");
    if (!allowed) return;
    if (quota && *quota + 0.01 < *allowed) {
      add("cpu.quota", Level::kWarning,
          fmt::format("{:.0f} processors may be used, the control group pays for {:.2f}", *allowed, *quota),
          "threads are stopped in the middle of a step while others wait for them",
          fmt::format("--threads {:.0f} (or FOURFOLD_THREADS), or a larger quota", std::max(1.0, std::floor(*quota))));
    }
    if (logical && *allowed < *logical) {
      add("cpu.affinity", Level::kNote, fmt::format("{:.0f} of {:.0f} processors may be used", *allowed, *logical),
          "the others stay idle", "taskset or the container's cpuset decides");
    }
    if (cores && logical && *logical > *cores && *allowed > *cores) {
      add("cpu.threads", Level::kNote, fmt::format("{:.0f} hardware threads on {:.0f} cores", *logical, *cores),
          "two threads of a core share its units: more threads than cores may be slower",
          fmt::format("compare --threads {:.0f} in `fourfold bench model`", *cores));
    } else if (!quota || *quota + 0.01 >= *allowed) {
      add("cpu.threads", Level::kGood, fmt::format("{:.0f} processors", *allowed));
    }
  }

  void governor() {
    const auto governor = cpu_.text("governor"), driver = cpu_.text("frequency_driver");
    if (!governor) return;
    // Drivers that choose the clock themselves call their normal way "powersave".
    const bool active =
        driver && (driver->find("pstate") != std::string::npos || driver->find("epp") != std::string::npos);
    if (*governor == "powersave" && !active) {
      add("cpu.governor", Level::kWarning, fmt::format("governor {}, driver {}", *governor, driver.value_or("unknown")),
          "the processor stays at its lowest clock", "cpupower frequency-set -g performance");
    } else {
      add("cpu.governor", Level::kGood, fmt::format("governor {}", *governor));
    }
  }

  void numa() {
    const auto nodes = cpu_.number("numa_nodes");
    if (!nodes || *nodes < 2) return;
    add("cpu.numa", Level::kWarning, fmt::format("{:.0f} memory nodes", *nodes),
        "weights lie where the loading thread ran, and half of the reads or more cross the link between sockets",
        "numactl --interleave=all fourfold ..., or one process for each node");
  }

  void bandwidth() {
    const Facts probe = probes_.at("cpu");
    if (const auto failure = probe.text("failure")) {
      add("cpu.bandwidth", Level::kWarning, "not measured: " + *failure,
          "the machine is too busy, or has too little memory", "end what else runs, and start the doctor again");
      return;
    }
    const auto read = probe.number("read_gb_per_s"), threads = probe.number("threads");
    if (!read || !threads || *threads < 1) return;
    const std::string evidence = fmt::format("{:.1f} GB/s read by {:.0f} threads", *read, *threads);
    if (*read < 5) {
      add("cpu.bandwidth", Level::kWarning, evidence, "a 3 GB model decodes less than two tokens a second",
          "look for other work on the machine, one memory module where two fit, or a throttled virtual machine");
    } else {
      add("cpu.bandwidth", Level::kGood, evidence);
    }
  }

  void huge_pages() {
    const auto pages = memory_.text("transparent_huge_pages");
    if (!pages) return;
    if (*pages == "never") {
      add("memory.huge-pages", Level::kNote, "transparent huge pages: never",
          "reading many gigabytes of weights misses the TLB more often",
          "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled");
    } else {
      add("memory.huge-pages", Level::kGood, fmt::format("transparent huge pages: {}", *pages));
    }
  }

  void system() {
    if (system_.flag("wsl2").value_or(false)) {
      add("system.wsl2", Level::kNote, fmt::format("kernel {}: WSL2", system_.text("kernel").value_or("")),
          "the driver is Windows'; pinned memory is limited, GPUs cannot copy to each other, and memory is what "
          ".wslconfig gives",
          "set memory= in .wslconfig; use Linux itself for more than one GPU");
    }
  }

  void environment() {
    const auto warn_if = [&](const char* name, const char* bad, const char* consequence) {
      const auto value = environment_.text(name);
      if (!value || (bad != nullptr && *value != bad)) return;
      add("environment." + std::string(name), Level::kWarning, fmt::format("{}={}", name, *value), consequence,
          fmt::format("unset {}", name));
    };
    warn_if("CUDA_LAUNCH_BLOCKING", "1", "every kernel is waited for by itself: steps take several times as long");
    warn_if("CUDA_FORCE_PTX_JIT", "1", "stored kernels are ignored");
    warn_if("FOURFOLD_ISA", "reference", "models run on the slow reference");
    warn_if("FOURFOLD_ALLOW_REFERENCE", nullptr, "a backend that fails its self-test is replaced by a much slower one");
    warn_if("LD_PRELOAD", nullptr, "another library stands in front of the system's: figures are its figures");
    for (const char* name : {"OMP_NUM_THREADS", "MKL_NUM_THREADS"}) {
      if (const auto value = environment_.text(name)) {
        add("environment." + std::string(name), Level::kNote, fmt::format("{}={}", name, *value),
            "it changes nothing here: fourfold uses no OpenMP", "--threads or FOURFOLD_THREADS");
      }
    }
    for (const char* name : {"NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE"}) {
      const auto value = environment_.text(name);
      if (value && *value != "0") {
        add("environment." + std::string(name), Level::kNote, fmt::format("{}={}", name, *value),
            "programs with NCCL copy between GPUs in a slower way; fourfold does not use NCCL",
            fmt::format("unset {} unless peer copies are wrong here", name));
      }
    }
  }

  const Facts cpu_, memory_, system_, environment_, probes_;
  std::vector<Finding> out_;
};

}  // namespace

std::vector<Finding> judge_host(const Facts& facts) { return Judge(facts).run(); }

}  // namespace fourfold::doctor
