#include "jit/kernels.h"

#include <algorithm>

#include "base/check.h"
#include "jit/sources.h"

namespace fourfold::jit {
namespace {

using plan::KernelSpec;

std::string gate_up(const KernelSpec& spec) { return spec.pass == plan::Pass::kGateUp ? "true" : "false"; }

// The last argument of a gate-up tile: squared ReLU instead of SwiGLU, one operand instead of two.
std::string ungated(const KernelSpec& spec) {
  return spec.pass == plan::Pass::kGateUp && spec.candidate.tile.operands == 1 ? "true" : "false";
}

std::string stream_tile(const KernelSpec& spec) {
  const plan::TileConfig& t = spec.candidate.tile;
  const int row_tiles = t.operands * t.n / 16, row_warps = t.warps / t.k_warps;
  return fmt::format("StreamTileOf<{}, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}>", gate_up(spec),
                     t.inline_routes ? "true" : "false", row_tiles / row_warps, row_warps, t.stage_warps,
                     t.k_warps / t.stage_warps, t.tokens / 8, t.token_rows, t.k / 64, t.stages,
                     spec.candidate.ctas_per_sm, ungated(spec), t.resident_k / 64);
}

std::string prefill_tile(const KernelSpec& spec) {
  const plan::TileConfig& t = spec.candidate.tile;
  return fmt::format("PrefillTileOf<{}, {}, {}, {}>", gate_up(spec), t.tokens, t.stages, ungated(spec));
}

std::string async_tile(const KernelSpec& spec) {
  const plan::TileConfig& t = spec.candidate.tile;
  return fmt::format("AsyncTileOf<fourfold::plan::Family({}), {}, {}, {}, {}, {}, {}, {}, {}>",
                     static_cast<int>(t.family), gate_up(spec), t.operands, t.tokens, t.n, t.k, t.stages, t.warps,
                     spec.candidate.ctas_per_sm);
}

// How the device headers of a family name a tile, its map of shared memory and its kernel, all in fourfold::moe.
// Every kernel takes one GemmArgs, the FP4 kernels one Fp4Args (kernels/moe/tables.h).
struct FamilySource {
  plan::Family family;
  std::string (*tile)(const KernelSpec& spec);
  const char* map;     // constexpr function from Tile::value to a structure with a member `total`
  const char* kernel;  // template over the tile
  // Without sorting, for one token and for few: other templates, in headers of their own.
  struct Inline {
    const char* kernel;
    const char* source;
  };
  Inline one = {}, few = {};
  Inline of(const plan::TileConfig& t) const { return plan::few_tokens(t) ? few : one; }
};
constexpr FamilySource kFamilySources[] = {
    {plan::Family::kStreaming,
     stream_tile,
     "stream_map",
     "moe_stream",
     {"moe_one", "kernels/moe/one_sm90.cuh"},
     {"moe_few", "kernels/moe/few_sm90.cuh"}},
    {plan::Family::kWgmma, prefill_tile, "prefill_map", "moe_prefill"},
    {plan::Family::kMmaSync, async_tile, "make_smem_map", "moe_mma_sync"},
    {plan::Family::kFp4, async_tile, "make_smem_map", "moe_fp4"},
};

const FamilySource& source_of(plan::Family family) {
  for (const FamilySource& row : kFamilySources) {
    if (row.family == family) return row;
  }
  fail("{}: no device source instantiates this family", to_string(family));
}

}  // namespace

KernelRequest make_request(std::string name, std::string text, std::string_view arch,
                           std::vector<std::string> expressions, const std::vector<std::string>& definitions) {
  CompileRequest request;
  request.sources = with_embedded(name, std::move(text));
  request.arch = arch;
  request.flags = {"--device-as-default-execution-space"};
  for (const std::string& definition : definitions) request.flags.push_back("-D" + definition);
  request.expressions = std::move(expressions);
  return {std::move(name), std::move(request)};
}

std::string kernel_expression(const plan::KernelSpec& spec) {
  const FamilySource& source = source_of(spec.candidate.tile.family);
  const plan::TileConfig& t = spec.candidate.tile;
  return fmt::format("fourfold::moe::{}<PlannedTile>", t.inline_routes ? source.of(t).kernel : source.kernel);
}

std::optional<KernelRequest> request_of(const plan::KernelSpec& spec, std::string_view arch,
                                        const CompileOptions& options) {
  const plan::TileConfig& t = spec.candidate.tile;
  const plan::FamilyRow* row = plan::find_family(t.family, arch);
  if (row == nullptr || !row->implemented()) return std::nullopt;
  const FamilySource& source = source_of(t.family);
  // The planned total is asserted against the map that the kernel itself uses.
  const std::string text = fmt::format(
      "#include \"{0}\"\n#include \"plan/smem.h\"\n"
      "using PlannedTile = fourfold::moe::{1};\n"
      "static_assert(fourfold::moe::{2}(PlannedTile::value).total == {3},\n"
      "              \"the kernel's shared memory is not what was planned\");\n"
      "static_assert(fourfold::plan::make_smem_map({4}).total == {3}, \"host and device ledgers differ\");\n",
      t.inline_routes ? std::string_view(source.of(t).source) : row->source, source.tile(spec), source.map,
      plan::make_smem_map(t).total, to_source(t));
  const std::string_view target = options.arch.empty() ? arch : std::string_view(options.arch);
  return make_request(spec.name, text, target, {kernel_expression(spec)}, options.definitions);
}

KernelRequest route_request(std::string_view arch) {
  return make_request("route", "#include \"kernels/moe/route_sm90.cuh\"\n", arch,
                      {"fourfold::moe::moe_route", "fourfold::moe::moe_route_count", "fourfold::moe::moe_route_scatter",
                       "fourfold::moe::moe_combine", "fourfold::moe::moe_combine_beside", "fourfold::moe::moe_gather",
                       "fourfold::moe::moe_combine_packed"});
}

KernelRequest quantize_request(std::string_view arch, const CompileOptions& options) {
  const std::string_view target = options.arch.empty() ? arch : std::string_view(options.arch);
  return make_request("quantize", "#include \"kernels/moe/fp4_sm120.cuh\"\n", target, {"fourfold::moe::moe_quantize"},
                      options.definitions);
}

KernelRequest prepare_request(std::string_view arch) {
  return make_request("prepare", "#include \"kernels/moe/prepare.cuh\"\n", arch,
                      {"fourfold::moe::moe_repack", "fourfold::moe::moe_pad_rows", "fourfold::moe::moe_append_shared"});
}

std::vector<KernelRequest> requests_of(const plan::MoeProblem& problem, const plan::Gpu& gpu,
                                       const std::set<std::string>& refused) {
  std::vector<KernelRequest> requests;
  const bool any = std::any_of(plan::families().begin(), plan::families().end(),
                               [&](const plan::FamilyRow& row) { return row.arch == gpu.arch && row.implemented(); });
  if (!any) fail("{}: no kernel is built for {} yet; fourfold plan shows what is planned", gpu.title, gpu.arch);
  const auto usable = [&](plan::Pass pass, const plan::Candidate& c) {
    return refused.empty() || !refused.contains(plan::spec_of(problem, pass, c).name);
  };
  for (const plan::KernelSpec& spec : plan::kernels_of(problem, gpu, {.only_implemented = true, .usable = usable})) {
    if (auto request = request_of(spec, gpu.arch)) requests.push_back(std::move(*request));
  }
  if (problem.allows(plan::ActivationFormat::kNvfp4) && plan::find_family(plan::Family::kFp4, gpu.arch) != nullptr) {
    requests.push_back(quantize_request(gpu.arch));
  }
  requests.push_back(route_request(gpu.arch));
  requests.push_back(prepare_request(gpu.arch));
  return requests;
}

std::vector<BuiltKernel> build_all(KernelStore& store, const plan::MoeProblem& problem, const plan::Gpu& gpu,
                                   const BuildOptions& options) {
  std::set<std::string> refused;
  for (;;) {
    std::vector<BuiltKernel> built = build(store, requests_of(problem, gpu, refused), options);
    bool all = true;
    for (const BuiltKernel& kernel : built) {
      const std::string why = refusal_of(kernel.entry);
      if (why.empty() || !refused.insert(kernel.name).second) continue;
      fmt::print(stderr, "fourfold: warning: kernel {} is refused: {}; the next one is used\n", kernel.name, why);
      all = false;
    }
    if (all) return built;
  }
}

}  // namespace fourfold::jit
