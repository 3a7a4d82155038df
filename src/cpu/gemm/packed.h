// Weight matrices in the packed form of layout.h: one resident copy, as large as the checkpoint's bytes apart from
// the padding of the last panel of each part.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "base/threads.h"
#include "cpu/gemm/layout.h"
#include "cpu/memory/host_buffer.h"
#include "ops/ops.h"

namespace fourfold::cpu::gemm {

// One checkpoint matrix in panels; does not own its memory.
struct PackedPart {
  Kind kind = Kind::kF32;
  int64_t first_row = 0;  // in the stack
  int64_t rows = 0;
  int64_t columns = 0;
  int64_t panels = 0;
  int64_t panel_bytes = 0;  // of one panel, a multiple of kPanelAlign
  int64_t stride = 0;       // from panel to panel; larger than panel_bytes when panels of two matrices alternate
  const uint8_t* data = nullptr;
  // Factors of rows: one group of 16 for all panels (row_scale_step 0) or [segments, panels x 16].
  std::vector<float> row_scales;
  int64_t row_scale_step = 0;
  int64_t segment = 0;
  float input_scale = 0.0f;  // 0: activations are never quantised

  Panel panel(int64_t i) const;
  // Fills out[0] with panel `first`, and out[1] with the next one if that is below `end`; how many. What they read next
  // is the pair behind them.
  int pair(int64_t first, int64_t end, Panel* out) const;
  // Whether a table's kernels for many tokens take it: those that do not take every kind want row scales to change at
  // multiples of kColumnAlign columns.
  bool fits(const KernelTable& kernels) const;
  int64_t rows_of(int64_t i) const { return i + 1 < panels ? kPanelRows : rows - i * kPanelRows; }
};

// Whether one kernel call can take panels of both as a pair.
inline bool pairable(const PackedPart& a, const PackedPart& b) { return a.kind == b.kind && a.segment == b.segment; }

// What packing `source` needs; data is still null. An Error for shapes or scales that cannot be.
PackedPart plan_part(const ops::MatrixSource& source, int64_t first_row);
// Fills panels [begin, end) at part.data (memory that is zero). An Error when a scale or an e4m3 element is NaN.
void pack_panels(const ops::MatrixSource& source, const PackedPart& part, uint8_t* data, int64_t begin, int64_t end);

// Memory of many matrices side by side in large mappings, so that small ones lie on huge pages, too: from pages of 4
// KiB a matrix of 1 MiB streams a quarter slower. A mapping lives as long as anything in it.
class WeightMemory {
 public:
  struct Block {
    std::shared_ptr<HostBuffer> owner;
    uint8_t* data = nullptr;
  };
  // `bytes` of zeros, aligned to kPanelAlign. An Error when the system has no memory.
  Block allocate(int64_t bytes);

 private:
  std::shared_ptr<HostBuffer> mapping_;
  int64_t used_ = 0;  // bytes of mapping_
};

class PackedMatrix : public ops::Matrix {
 public:
  PackedMatrix(std::span<const ops::MatrixSource> parts, WeightMemory& memory, ThreadPool& pool);
  // The first rows of one with one part, whole panels, in the same memory.
  PackedMatrix(const PackedMatrix& of, int64_t rows);
  int64_t rows() const override { return rows_; }
  int64_t columns() const override { return columns_; }
  int64_t bytes() const override { return bytes_; }

  const std::vector<PackedPart>& parts() const { return parts_; }
  int64_t panels() const { return panels_; }

 private:
  std::vector<PackedPart> parts_;
  int64_t rows_ = 0;
  int64_t columns_ = 0;
  int64_t panels_ = 0;
  int64_t bytes_ = 0;
  WeightMemory::Block memory_;
};

struct PackedExpert {
  PackedPart gate, up, down;  // panels of gate and up alternate in memory
};

class PackedExperts : public ops::Experts {
 public:
  PackedExperts(int64_t count, const std::function<ops::ExpertSource(int64_t)>& source,
                const std::function<void(int64_t)>& done, WeightMemory& memory, ThreadPool& pool);
  int64_t count() const override { return static_cast<int64_t>(experts_.size()); }
  int64_t hidden() const override { return hidden_; }
  int64_t intermediate() const override { return intermediate_; }
  int64_t bytes_per_expert() const override { return bytes_per_expert_; }
  const PackedExpert& operator[](int64_t i) const { return experts_[static_cast<size_t>(i)]; }
  bool all_nvfp4() const { return all_nvfp4_; }

 private:
  std::vector<PackedExpert> experts_;
  std::vector<WeightMemory::Block> memory_;
  int64_t hidden_ = 0;
  int64_t intermediate_ = 0;
  int64_t bytes_per_expert_ = 0;
  bool all_nvfp4_ = true;
};

}  // namespace fourfold::cpu::gemm
