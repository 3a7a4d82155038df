// Recorded machines, and one sound machine with one thing wrong at a time.
#include <gtest/gtest.h>

#include <map>

#include "base/file.h"
#include "doctor/finding.h"

namespace fourfold::doctor {
namespace {

Json machines() { return parse_json_file(FOURFOLD_SOURCE_DIR "/tests/doctor/machines.json")["machines"]; }

std::map<std::string, std::string> complaints(const std::vector<Finding>& findings) {
  std::map<std::string, std::string> out;
  for (const Finding& one : findings) {
    EXPECT_FALSE(one.evidence.empty()) << one.id;
    if (one.level == Level::kGood) continue;
    EXPECT_FALSE(one.consequence.empty()) << one.id;
    EXPECT_TRUE(one.level == Level::kNote || !one.fix.empty()) << one.id;
    EXPECT_EQ(one.fix.find('\n'), std::string::npos) << one.id;
    out[one.id] = level_name(one.level);
  }
  return out;
}

TEST(Judge, KnowsTheRecordedMachines) {
  const Json all = machines();
  ASSERT_GE(all.size(), 5u);
  for (const Json& machine : all) {
    const std::vector<Finding> findings = judge(machine["facts"]);
    EXPECT_EQ(complaints(findings), (machine["findings"].get<std::map<std::string, std::string>>())) << machine["name"];
    EXPECT_EQ(exit_status(findings), machine["status"].get<int>()) << machine["name"];
    EXPECT_EQ(findings_json(findings).size(), findings.size());
  }
}

// A machine with two cards that nothing is wrong with.
Json sound() {
  return Json::parse(R"({
    "cpu": {"model": "c", "logical": 8, "cores": 8, "allowed": 8, "quota_cpus": null, "governor": "schedutil",
            "frequency_driver": "acpi-cpufreq", "numa_nodes": 1, "backends": ["reference", "avx2", "avx512"]},
    "memory": {"available_bytes": 64000000000, "limit_bytes": null, "transparent_huge_pages": "always"},
    "system": {"kernel": "6.1", "wsl2": false}, "environment": {},
    "gpu": {"pci": [{"address": "a", "iommu": "identity"}, {"address": "b", "iommu": "identity"}], "driver_file": true, "xid": [],
            "nvrtc": {"major": 13, "minor": 0, "archs": ["sm_90a"]},
            "nvidia_smi": [{"index": 0, "name": "NVIDIA H100", "memory_total": 81559, "memory_used": 0, "pcie_link_gen_max": 5,
                            "pcie_link_width_current": 16, "pcie_link_width_max": 16, "power_limit": 700,
                            "power_default_limit": 700, "clocks_throttle_reasons_active": 1,
                            "ecc_errors_uncorrected_volatile_total": 0}]},
    "model": {"architecture": "x", "weight_bytes": 20000000000, "kv_bytes_per_token": 20000, "state_bytes_per_sequence": 100000,
              "bytes_per_token": 2000000000, "max_positions": 262144, "problems": []},
    "probes": {"self_test": {"backend": "b"}, "cpu": {"threads": 8, "read_gb_per_s": 40},
               "gpu": {"driver_cuda": 13000,
                       "devices": [{"name": "NVIDIA H100", "arch": "sm_90a", "smem_per_block": 232448, "datasheet_gb_per_s": 3350,
                                    "copy_gb_per_s": 2800, "host_to_device_gb_per_s": 55, "memory_free": 84000000000}],
                       "peers": [{"from": 0, "to": 1, "direct": true, "wrong_bytes": 0}]}}})");
}

TEST(Judge, OneThingWrongIsOneComplaint) {
  EXPECT_EQ(complaints(judge(sound())), (std::map<std::string, std::string>{}));
  const struct {
    const char *patch, *id, *level;  // the patch replaces what it names (RFC 7386)
  } kCases[] = {
      {R"({"cpu":{"backends":["reference"]}})", "cpu.isa", "error"},
      {R"({"cpu":{"backends":["reference","avx2"]}})", "cpu.isa", "note"},
      {R"({"probes":{"self_test":{"failure":"x"}}})", "cpu.self-test", "error"},
      {R"({"cpu":{"quota_cpus":2.5}})", "cpu.quota", "warning"},
      {R"({"cpu":{"allowed":4}})", "cpu.affinity", "note"},
      {R"({"cpu":{"cores":4}})", "cpu.threads", "note"},
      {R"({"cpu":{"governor":"powersave"}})", "cpu.governor", "warning"},
      {R"({"cpu":{"numa_nodes":2}})", "cpu.numa", "warning"},
      {R"({"probes":{"cpu":{"failure":"took longer"}}})", "cpu.bandwidth", "warning"},
      {R"({"probes":{"cpu":{"read_gb_per_s":3}}})", "cpu.bandwidth", "warning"},
      {R"({"memory":{"transparent_huge_pages":"never"}})", "memory.huge-pages", "note"},
      {R"({"system":{"wsl2":true}})", "system.wsl2", "note"},
      {R"({"environment":{"CUDA_LAUNCH_BLOCKING":"1"}})", "environment.CUDA_LAUNCH_BLOCKING", "warning"},
      {R"({"environment":{"FOURFOLD_ISA":"reference"}})", "environment.FOURFOLD_ISA", "warning"},
      {R"({"environment":{"FOURFOLD_ALLOW_REFERENCE":"1"}})", "environment.FOURFOLD_ALLOW_REFERENCE", "warning"},
      {R"({"environment":{"LD_PRELOAD":"a.so"}})", "environment.LD_PRELOAD", "warning"},
      {R"({"environment":{"OMP_NUM_THREADS":"1"}})", "environment.OMP_NUM_THREADS", "note"},
      {R"({"environment":{"NCCL_P2P_DISABLE":"1"}})", "environment.NCCL_P2P_DISABLE", "note"},
      {R"({"probes":{"gpu":{"failure":"took longer than 20000 ms and was killed"}}})", "gpu.probe", "error"},
      {R"({"probes":{"gpu":{"none":"no driver","devices":[],"peers":[]}}})", "gpu.driver", "error"},
      {R"({"probes":{"kernels":{"failure":"took longer"}}})", "gpu.kernels", "warning"},
      {R"({"probes":{"kernels":{"kernels":9,"wrong":[{"kernel":"k","reason":"r"}]}}})", "gpu.kernels", "error"},
      {R"({"gpu":{"nvrtc":{"failure":"x"}}})", "gpu.nvrtc", "warning"},
      {R"({"probes":{"gpu":{"driver_cuda":12080}}})", "gpu.driver-version", "error"},
      {R"({"gpu":{"nvrtc":{"archs":["sm_80"]}}})", "gpu.nvrtc-arch", "warning"},
      {R"({"probes":{"gpu":{"devices":[{"name":"K80","arch":"sm_37"}]}}})", "gpu.capability", "warning"},
      {R"({"probes":{"gpu":{"devices":[{"name":"H","arch":"sm_90a","smem_per_block":101376}]}}})", "gpu.shared-memory",
       "error"},
      {R"({"probes":{"gpu":{"devices":[{"name":"H","arch":"sm_90a","copy_gb_per_s":900,"datasheet_gb_per_s":3350}]}}})",
       "gpu.bandwidth", "warning"},
      {R"({"probes":{"gpu":{"devices":[{"name":"NVIDIA RTX PRO 6000 Blackwell","arch":"sm_120a","copy_gb_per_s":500}]}},
           "gpu":{"nvrtc":{"archs":["sm_120a"]}}})",
       "gpu.bandwidth", "warning"},
      {R"({"gpu":{"nvidia_smi":[{"name":"g","pcie_link_width_current":4,"pcie_link_width_max":16}]}})",
       "gpu.pcie-width", "warning"},
      {R"({"gpu":{"nvidia_smi":[{"name":"g","power_limit":300,"power_default_limit":600}]}})", "gpu.power", "note"},
      {R"({"gpu":{"nvidia_smi":[{"name":"g","clocks_throttle_reasons_active":64}]}})", "gpu.throttle", "warning"},
      {R"({"gpu":{"nvidia_smi":[{"name":"g","ecc_errors_uncorrected_volatile_total":2}]}})", "gpu.ecc", "error"},
      {R"({"gpu":{"nvidia_smi":[{"name":"g","memory_used":40000,"memory_total":80000}]}})", "gpu.processes", "warning"},
      {R"({"gpu":{"xid":[79]}})", "gpu.xid", "warning"},
      {R"({"gpu":{"pci":[{"iommu":"DMA-FQ"},{"iommu":"identity"}]}})", "gpu.iommu", "note"},
      {R"({"gpu":{"pci":[{"iommu":"DMA-FQ"},{"iommu":"identity"}]},"probes":{"gpu":{"peers":[]}}})", "gpu.iommu",
       "warning"},
      {R"({"probes":{"gpu":{"peers":[{"from":0,"to":1,"direct":false}]}}})", "gpu.peer-access", "warning"},
      {R"({"probes":{"gpu":{"peers":[{"from":0,"to":1,"wrong_bytes":1}]}}})", "gpu.peer-copy", "error"},
      {R"({"model":{"problems":["a tensor is missing"]}})", "model.problem", "error"},
      {R"({"model":{"failure":"x"}})", "model.unreadable", "error"},
      {R"({"model":{"max_positions":20000000}})", "model.context", "note"},
      {R"({"memory":{"limit_bytes":1000000000}})", "model.memory", "warning"},
  };
  for (const auto& one : kCases) {
    Json facts = sound();
    facts.merge_patch(Json::parse(one.patch));
    EXPECT_EQ(complaints(judge(facts)), (std::map<std::string, std::string>{{one.id, one.level}})) << one.patch;
  }
}

// What links do is said where nothing is wrong with them, and a slow one is named.
TEST(Judge, LinksAreReportedAsMeasured) {
  Json facts = sound();
  Json& smi = facts["gpu"]["nvidia_smi"];
  smi.push_back(smi[0]);
  smi[1]["index"] = 1;
  Json& peers = facts["probes"]["gpu"]["peers"];
  peers = Json::parse(R"([{"from":0,"to":1,"direct":true,"link":"PCIe","gb_per_s":50,"wrong_bytes":0},
                          {"from":1,"to":0,"direct":true,"link":"PCIe","gb_per_s":48,"wrong_bytes":0}])");
  const auto evidence = [&](const char* id) -> std::string {
    for (const Finding& finding : judge(facts)) {
      if (finding.id == id) return finding.evidence;
    }
    return "";
  };
  EXPECT_EQ(evidence("gpu.links"), "2 ways between GPUs: direct copies, every byte arrived; PCIe, 48 to 50 GB/s");
  EXPECT_EQ(complaints(judge(facts)), (std::map<std::string, std::string>{}));
  peers[1]["gb_per_s"] = 12;
  EXPECT_EQ(complaints(judge(facts)), (std::map<std::string, std::string>{{"gpu.peer-speed", "warning"}}));
  EXPECT_EQ(evidence("gpu.peer-speed"), "from GPU 1 to 0: 12.0 GB/s over links for 63.0");
  EXPECT_EQ(evidence("gpu.links"), "");
  // NVLink has nothing to do with the slots.
  peers[0]["link"] = peers[1]["link"] = "NVLink";
  EXPECT_EQ(complaints(judge(facts)), (std::map<std::string, std::string>{}));
}

TEST(Judge, AModelThatFitsNowhereIsAnError) {
  Json facts = sound();
  facts["model"]["weight_bytes"] = 900'000'000'000;
  const auto found = complaints(judge(facts));
  EXPECT_EQ(found.at("model.fits"), "error");
}

// Facts of a file may be anything: each value replaced by each kind of another must not end in an exception.
TEST(Judge, NothingIsConcludedFromWhatIsNoFact) {
  EXPECT_EQ(exit_status(judge(Json::object())), 0);
  EXPECT_EQ(exit_status(judge(Json::array())), 0);
  for (const Json& machine : machines()) {
    const Json flat = machine["facts"].flatten();
    for (const auto& [path, value] : flat.items()) {
      for (const Json& other :
           {Json(nullptr), Json(-1e300), Json("x"), Json::array({1, "y"}), Json::object(), Json(true)}) {
        Json facts = machine["facts"];
        facts[Json::json_pointer(path)] = other;
        EXPECT_NO_THROW(judge(facts)) << path << other;
      }
    }
    for (const auto& [name, value] : machine["facts"].items()) {
      Json facts = machine["facts"];
      facts.erase(name);
      EXPECT_NO_THROW(judge(facts)) << name;
    }
  }
}

}  // namespace
}  // namespace fourfold::doctor
