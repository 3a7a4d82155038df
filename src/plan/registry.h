// Which kernel families exist, and on which architectures. A plan that names a family without a kernel says so: the
// planner ranks it, marks it "planned, kernel not built yet", and the launcher never sees it.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "plan/smem.h"

namespace fourfold::plan {

struct Candidate;
struct MoeProblem;

struct FamilyRow {
  Family family;
  std::string_view arch;
  // The device source that holds the kernels, relative to src/, and empty while there is none.
  std::string_view source;
  bool implemented() const { return !source.empty(); }
};

// One row for each (family, architecture) whose instructions exist there.
std::span<const FamilyRow> families();
const FamilyRow* find_family(Family family, std::string_view arch);  // null: the architecture cannot run it

// Why the existing kernels of a family do not take this candidate; empty when they do. The place where a kernel that
// covers a part of the candidate space says which part.
std::string kernel_refuses(const MoeProblem& problem, Pass pass, const Candidate& candidate, std::string_view arch);

std::string_view to_string(Family family);
std::string_view to_string(Pass pass);
std::string_view to_string(Epilogue epilogue);
std::string_view region_name(RegionId id, const TileConfig& tile);

}  // namespace fourfold::plan
