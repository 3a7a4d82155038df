#include "jit/kernels.h"

#include <algorithm>

#include "base/check.h"
#include "jit/sources.h"

namespace fourfold::jit {
namespace {

// Template arguments of the tile as the device headers of each family declare it.
std::string tile_type(const plan::KernelSpec& spec) {
  const plan::TileConfig& t = spec.candidate.tile;
  const char* gate_up = spec.pass == plan::Pass::kGateUp ? "true" : "false";
  const int row_tiles = t.operands * t.n / 16;
  switch (t.family) {
    case plan::Family::kStreaming: {
      const int row_warps = t.warps / t.k_warps;
      return fmt::format("StreamTileOf<{}, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}>", gate_up,
                         t.inline_routes ? "true" : "false", row_tiles / row_warps, row_warps, t.stage_warps,
                         t.k_warps / t.stage_warps, t.tokens / 8, t.token_rows, t.k / 64, t.stages,
                         spec.candidate.ctas_per_sm);
    }
    case plan::Family::kWgmma:
      return fmt::format("PrefillTileOf<{}, {}, {}>", gate_up, t.tokens, t.stages);
    case plan::Family::kMmaSync:
    case plan::Family::kFp4:
      break;
  }
  fail("{}: no device source instantiates this family", to_string(t.family));
}

CompileRequest compile_request(std::string name, std::string text, std::string_view arch, std::string expression) {
  CompileRequest request;
  request.sources = with_embedded(std::move(name), std::move(text));
  request.arch = arch;
  request.flags = {"--device-as-default-execution-space"};
  request.expressions = {std::move(expression)};
  return request;
}

}  // namespace

std::optional<KernelRequest> request_of(const plan::KernelSpec& spec, std::string_view arch) {
  const plan::TileConfig& t = spec.candidate.tile;
  const plan::FamilyRow* row = plan::find_family(t.family, arch);
  if (row == nullptr || !row->implemented()) return std::nullopt;
  const bool wgmma = t.family == plan::Family::kWgmma;
  const std::string type = tile_type(spec);
  // The planned total is asserted against the map that the kernel itself uses.
  const std::string text = fmt::format(
      "#include \"{0}\"\n#include \"plan/smem.h\"\n"
      "using PlannedTile = fourfold::moe::{1};\n"
      "static_assert(fourfold::moe::{2}(PlannedTile::value).total == {3},\n"
      "              \"the kernel's shared memory is not what was planned\");\n"
      "static_assert(fourfold::plan::make_smem_map({4}).total == {3}, \"host and device ledgers differ\");\n",
      row->source, type, wgmma ? "prefill_map" : "stream_map", plan::make_smem_map(t).total, to_source(t));
  return KernelRequest{spec.name, compile_request(spec.name, text, arch,
                                                  wgmma ? "fourfold::moe::moe_prefill<PlannedTile>"
                                                        : "fourfold::moe::moe_stream<PlannedTile>")};
}

std::vector<KernelRequest> requests_of(const plan::MoeProblem& problem, const plan::Gpu& gpu) {
  std::vector<KernelRequest> requests;
  const bool any = std::any_of(plan::families().begin(), plan::families().end(),
                               [&](const plan::FamilyRow& row) { return row.arch == gpu.arch && row.implemented(); });
  if (!any) fail("{}: no kernel is built for {} yet; fourfold plan shows what is planned", gpu.title, gpu.arch);
  for (const plan::KernelSpec& spec : plan::kernels_of(problem, gpu, {.only_implemented = true})) {
    if (auto request = request_of(spec, gpu.arch)) requests.push_back(std::move(*request));
  }
  // Beside them: the routing and combining kernels, wherever their source is part of this binary.
  const plan::Arch& arch = plan::arch_of(gpu);
  for (const EmbeddedSource& source : embedded_sources()) {
    if (source.name != "kernels/moe/route_sm90.cuh" || !arch.bulk_copy) continue;
    CompileRequest request =
        compile_request("route", fmt::format("#include \"{}\"\n", source.name), gpu.arch, "fourfold::moe::moe_route");
    for (const char* kernel : {"moe_route_count", "moe_route_scatter", "moe_combine"}) {
      request.expressions.push_back(fmt::format("fourfold::moe::{}", kernel));
    }
    requests.push_back({"route", std::move(request)});
  }
  return requests;
}

}  // namespace fourfold::jit
