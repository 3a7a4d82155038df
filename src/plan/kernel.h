// A kernel as its compiler and its launcher see it, whatever operation it belongs to: an operation's plan names its
// kernels in this form, and who compiles, loads and tests them knows nothing else.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace fourfold::plan {

// One entry point of a source.
struct KernelEntry {
  std::string expression;  // as C++ names it: "fourfold::moe::moe_stream<PlannedTile>"
  unsigned threads = 0;    // of a block
  int64_t smem_bytes = 0;  // dynamic shared memory that it is launched with, at least
  // Others run on its SM at the same time, of its own kernel or of other ones: it may be launched with more shared
  // memory than it uses, and its SMs are set up for as much as they can have.
  bool shares_sm = false;
};

// One translation unit over the embedded device sources, to be compiled for one architecture. Equal names are equal
// sources.
struct KernelSource {
  std::string name;  // for people; may stand in a file name
  std::string text;
  std::vector<KernelEntry> entries;
};

}  // namespace fourfold::plan
