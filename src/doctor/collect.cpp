#include "doctor/collect.h"

#include <functional>
#include <memory>

#include "base/check.h"
#include "base/threads.h"
#include "cpu/backend.h"
#include "cpu/ceilings.h"
#include "doctor/child.h"
#include "model/report.h"

namespace fourfold::doctor {
namespace {

// Null where getting the memory for it takes too long, as on some virtual machines.
Json cpu_probe(int threads) {
  constexpr double kMostSeconds = 5;
  const int used = threads > 0 ? threads : ThreadPool::default_threads();
  const auto read = cpu::quick_read_bandwidth(used, kMostSeconds);
  return {{"threads", used}, {"read_gb_per_s", read ? Json(*read / 1e9) : Json(nullptr)}};
}

// Making a backend runs its self-test.
Json self_test(int threads) {
  cpu::CpuOptions options;
  options.threads = threads;
  return {{"backend", cpu::make_backend(options)->description()}};
}

}  // namespace

Json model_facts(const std::filesystem::path& directory) {
  model::ReportOptions options;
  options.context = 1;
  const model::CheckpointReport report = model::inspect_checkpoint(directory, options);
  Json out = {{"directory", report.directory},
              {"architecture", report.architecture},
              {"weight_bytes", report.weight_bytes()},
              {"kv_bytes_per_token", report.kv_bytes_per_token},
              {"state_bytes_per_sequence", report.state_bytes_per_sequence},
              {"bytes_per_token", report.total.bytes_per_token},
              {"has_tokenizer", report.has_tokenizer},
              {"has_chat_template", report.has_chat_template},
              {"problems", report.problems},
              {"notes", report.notes}};
  if (report.config) out["max_positions"] = report.config->max_positions;
  return out;
}

Json collect(const CollectOptions& options) {
  Json out = host_facts("/");
  out["environment"] = environment_facts();
  out["gpu"] = gpu_facts("/", options.probe_limit);
  if (!options.model.empty()) {
    out["model"] = child_facts([&] { return model_facts(options.model); }, options.probe_limit);
  }
  if (!options.probes) return out;
  Json probes = Json::object();
  probes["self_test"] = child_facts([&] { return self_test(options.threads); }, options.probe_limit);
  probes["cpu"] = child_facts([&] { return cpu_probe(options.threads); }, options.probe_limit);
  probes["gpu"] = child_facts(gpu_probe, options.probe_limit);
  out["probes"] = std::move(probes);
  return out;
}

}  // namespace fourfold::doctor
