#include "plan/registry.h"

#include "plan/plan.h"

namespace fourfold::plan {
namespace {
// A family gets its source here when its kernel is compiled, launched and tested for that architecture.
constexpr FamilyRow kFamilies[] = {
    {Family::kStreaming, "sm_90a", ""},  {Family::kStreaming, "sm_100a", ""}, {Family::kStreaming, "sm_120a", ""},
    {Family::kStreaming, "sm_121a", ""}, {Family::kMmaSync, "sm_80", ""},     {Family::kMmaSync, "sm_89", ""},
    {Family::kMmaSync, "sm_90a", ""},    {Family::kMmaSync, "sm_100a", ""},   {Family::kMmaSync, "sm_120a", ""},
    {Family::kMmaSync, "sm_121a", ""},   {Family::kWgmma, "sm_90a", ""},      {Family::kFp4, "sm_120a", ""},
    {Family::kFp4, "sm_121a", ""},
};
}  // namespace

std::span<const FamilyRow> families() { return kFamilies; }

const FamilyRow* find_family(Family family, std::string_view arch) {
  for (const FamilyRow& row : kFamilies) {
    if (row.family == family && row.arch == arch) return &row;
  }
  return nullptr;
}

std::string kernel_refuses(const MoeProblem&, Pass, const Candidate& candidate, std::string_view arch) {
  const FamilyRow* row = find_family(candidate.tile.family, arch);
  if (row == nullptr || !row->implemented()) return "planned, kernel not built yet";
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
    case RegionId::kWeights0:
      if (packed(tile)) {
        return down ? "down: codes and scales" : two ? "gate, up: codes and scales" : "up: codes and scales";
      }
      return down ? "down: codes" : two ? "gate: codes" : "up: codes";
    case RegionId::kWeights1:
      return "up: codes";
    case RegionId::kScales0:
      return down ? "down: scales" : two ? "gate: scales" : "up: scales";
    case RegionId::kScales1:
      return "up: scales";
    case RegionId::kActivations:
      return "activations";
    case RegionId::kActivationScales:
      return "activations: scales";
    case RegionId::kPartials:
      return "partial sums";
    case RegionId::kZeroRow:
      return "row of zeros";
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
