#include "plan/registry.h"

#include "plan/plan.h"

namespace fourfold::plan {
namespace {
constexpr std::string_view kStreamSource = "kernels/moe/stream_sm90.cuh";
constexpr std::string_view kMmaSyncSource = "kernels/moe/mma_sync.cuh";
constexpr std::string_view kFp4Source = "kernels/moe/fp4_sm120.cuh";

// A family gets its source here when its kernel compiles for that architecture and the launcher takes it; what ran on
// a card of that kind is in docs/cuda.md.
constexpr FamilyRow kFamilies[] = {
    {Family::kStreaming, "sm_90a", kStreamSource},
    {Family::kStreaming, "sm_100a", kStreamSource},
    {Family::kStreaming, "sm_120a", kStreamSource},
    {Family::kStreaming, "sm_121a", kStreamSource},
    {Family::kMmaSync, "sm_80", kMmaSyncSource},
    {Family::kMmaSync, "sm_89", kMmaSyncSource},
    {Family::kMmaSync, "sm_90a", kMmaSyncSource},
    {Family::kMmaSync, "sm_100a", kMmaSyncSource},
    {Family::kMmaSync, "sm_120a", kMmaSyncSource},
    {Family::kMmaSync, "sm_121a", kMmaSyncSource},
    {Family::kWgmma, "sm_90a", "kernels/moe/prefill_sm90.cuh"},
    {Family::kFp4, "sm_120a", kFp4Source},
    {Family::kFp4, "sm_121a", kFp4Source},
};
}  // namespace

std::span<const FamilyRow> families() { return kFamilies; }

const FamilyRow* find_family(Family family, std::string_view arch) {
  for (const FamilyRow& row : kFamilies) {
    if (row.family == family && row.arch == arch) return &row;
  }
  return nullptr;
}

std::string kernel_refuses(const MoeProblem& problem, Pass, const Candidate& candidate, std::string_view arch) {
  const TileConfig& t = candidate.tile;
  const FamilyRow* row = find_family(t.family, arch);
  if (row == nullptr || !row->implemented()) return "planned, kernel not built yet";
  if (problem.scale_vector() != 16) return "the kernels take NVFP4 scales (16 elements) only";
  // kernels/moe/route_sm90.cuh and the tables of inline routing.
  if (problem.all_experts() > 1024) return "the kernels sort over at most 1024 experts";
  if (t.inline_routes && problem.picks_per_token() > 16) return "inline routing takes at most 16 choices of a token";
  if (candidate.split_k > 1) return "the kernels do not split K over CTAs";
  if (t.family == Family::kWgmma) {
    // kernels/moe/prefill_tile.h: 256 weight rows, two compute warpgroups, stages of 64, tokens in steps of 16 up to
    // 176.
    if (t.operands * t.n != 256 || t.warps != 8 || t.k != 64 || candidate.ctas_per_sm != 1) {
      return "the kernel takes tiles of 256 weight rows x 64, 8 + 4 warps and one CTA per SM";
    }
    if (t.tokens % 16 != 0 || t.tokens > 176) return "the kernel takes tiles of 16 to 176 tokens in steps of 16";
    if (t.pass == Pass::kGateUp && t.operands == 1 && t.tokens > 160) {
      return "without a gate, ptxas serialises the multiplications of more than 160 tokens";
    }
  }
  return "";
}

std::string_view to_string(Family family) {
  switch (family) {
    case Family::kStreaming:
      return "streaming";
    case Family::kMmaSync:
      return "mma-sync";
    case Family::kWgmma:
      return "wgmma";
    case Family::kFp4:
      return "fp4";
  }
  return "?";
}

std::string_view to_string(Pass pass) { return pass == Pass::kGateUp ? "gate-up" : "down"; }

std::string_view to_string(Epilogue epilogue) {
  switch (epilogue) {
    case Epilogue::kDirect:
      return "direct";
    case Epilogue::kOverlay:
      return "overlay";
    case Epilogue::kDedicated:
      return "dedicated";
  }
  return "?";
}

std::string_view region_name(RegionId id, const TileConfig& tile) {
  const bool down = tile.pass == Pass::kDown;
  const bool two = tile.operands == 2;
  switch (id) {
    case RegionId::kWeights:
      return down ? "down: codes and scales" : two ? "gate, up: codes and scales" : "up: codes and scales";
    case RegionId::kActivations:
      return "activations";
    case RegionId::kActivationScales:
      return "activations: scales";
    case RegionId::kPartials:
      return "partial sums";
    case RegionId::kRoutes:
      return "routing tables";
    case RegionId::kOutput:
      return "output staging";
    case RegionId::kRows:
      return "row table";
    case RegionId::kBarriers:
      return "mbarriers";
    case RegionId::kCount:
      break;
  }
  return "?";
}

}  // namespace fourfold::plan
