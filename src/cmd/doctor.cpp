// fourfold doctor: what is wrong with this machine, and what to do about it.
#include <fmt/format.h>

#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "base/check.h"
#include "base/file.h"
#include "base/interrupt.h"
#include "base/json.h"
#include "cmd/arguments.h"
#include "cmd/commands.h"
#include "cmd/kernel_list.h"
#include "cuda/backend/backend.h"
#include "doctor/child.h"
#include "doctor/collect.h"
#include "doctor/finding.h"
#include "jit/store.h"

namespace fourfold::cmd {
namespace {

struct Options {
  std::string directory, facts, bundle;
  int64_t limit = 20;
  int threads = 0;
  bool json = false, no_probes = false, kernels = false;
};

void print(const std::vector<doctor::Finding>& findings) {
  for (const doctor::Finding& one : findings) {
    fmt::print("{:<8} {:<22} {}\n", doctor::level_name(one.level), one.id, one.evidence);
    if (!one.consequence.empty()) fmt::print("{:<8} {:<22}   so: {}\n", "", "", one.consequence);
    if (!one.fix.empty()) fmt::print("{:<8} {:<22}   fix: {}\n", "", "", one.fix);
  }
}

void run(const Options& options) {
  install_interrupt_handler();
  Json facts;
  if (!options.facts.empty()) {
    const Json file = parse_json(read_file(options.facts, 64u << 20), options.facts);
    if (!file.is_object()) fail("{}: {}, wanted an object", printable(options.facts, 200), json_kind(file));
    facts = file.contains("facts") ? file["facts"] : file;  // a bundle, or the facts alone
  } else {
    doctor::CollectOptions collect;
    if (!options.directory.empty()) {
      if (!directory_exists(options.directory)) fail("doctor: {} is no directory", printable(options.directory, 200));
      collect.model = options.directory;
    }
    collect.threads = options.threads;
    collect.probes = !options.no_probes;
    collect.probe_limit = std::chrono::seconds(options.limit);
    facts = doctor::collect(collect);
    if (options.kernels) {
      // Of the model, or of one that most others are like.
      facts["probes"]["kernels"] = doctor::child_facts(
          [&]() -> Json {
            const bool any = options.directory.empty();
            return ModelKernels(cuda::card_memory(0).info, any ? "35B-A3B" : options.directory, any ? "A" : "")
                .test(0, jit::default_store_directory());
          },
          collect.probe_limit);
    }
  }
  const std::vector<doctor::Finding> findings = doctor::judge(facts);
  const int status = doctor::exit_status(findings);
  const Json out = {{"fourfold", FOURFOLD_VERSION},
                    {"status", status},
                    {"findings", doctor::findings_json(findings)},
                    {"facts", std::move(facts)}};
  const std::string text = out.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
  if (!options.bundle.empty()) write_file_atomically(options.bundle, text);
  if (options.json) {
    fmt::print("{}", text);
  } else {
    print(findings);
  }
  if (status != 0) throw ExitStatus{status};
}

}  // namespace

void add_doctor(Command& app) {
  const auto options = std::make_shared<Options>();
  Command command =
      app.add_command("doctor",
                      "Look at processor, memory, GPUs and a model, measure them shortly, and say what is wrong\n\n"
                      "  fourfold doctor                       this machine\n"
                      "  fourfold doctor DIR                   and whether this checkpoint is whole and fits\n"
                      "  fourfold doctor --bundle report.json  everything in one file, to show to somebody\n\n"
                      "Exit status: 0 nothing to do, 1 warnings, 2 errors.");
  command.add_option("dir", options->directory, "Checkpoint directory");
  command.add_flag("--json", options->json, "Print facts and findings as one JSON object");
  command.add_option("--bundle", options->bundle,
                     "Also write that object to a file. It has no keys, names or prompts in it");
  command.add_option("--facts", options->facts, "Judge the facts of a bundle instead of this machine");
  command.add_flag("--no-probes", options->no_probes, "Measure nothing");
  command.add_flag("--kernels", options->kernels,
                   "Also test every kernel that the model (without one: a 35B-A3B) runs on the first GPU; what the "
                   "store lacks is compiled within --probe-seconds");
  command.add_option("--probe-seconds", options->limit, "A probe that takes longer is killed")
      .range(1, 3600)
      .show_default();
  command.add_option("--threads", options->threads, "Of the CPU's probes (default: as models run)").range(0, 1024);
  command.exclude("--facts", "--bundle");
  command.exclude("--kernels", "--no-probes");
  command.exclude("--kernels", "--facts");
  command.callback([options] { run(*options); });
}

}  // namespace fourfold::cmd
