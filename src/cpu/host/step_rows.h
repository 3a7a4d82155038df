// Which rows of a step go through which kernels.
//
// A row's result must not depend on the rows beside it, so the choice depends on its own sequence alone: sequences that
// contribute up to kFewRows rows (decode, verification of drafts, short prompts) go one way, longer ones (chunks of
// prompts) another, in the same step.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "ops/batch.h"

namespace fourfold::cpu {

inline constexpr int64_t kFewRows = 16;

using Rows = std::span<const int32_t>;  // indices of rows, ascending

struct RowWays {
  std::vector<int32_t> few;   // of sequences with at most kFewRows of the tensor's rows
  std::vector<int32_t> many;  // of longer ones
  std::vector<int32_t> none;  // padding

  void clear();
  void reserve(int64_t rows);
  void append(int64_t first, int64_t count, int64_t of_sequence);
};

class StepRows {
 public:
  void begin_step(const ops::Batch& batch);
  // Of logits that are not the batch's.
  void begin_logits(std::span<const ops::LogitRows> sequences);
  void reserve(int64_t rows);
  // The ways of a tensor with so many rows: those of the batch, or its logit rows, or else of a sequence of its own.
  const RowWays& of(int64_t rows);

 private:
  int64_t rows_ = 0;
  int64_t logit_rows_ = 0;
  RowWays batch_, logits_, other_;
};

}  // namespace fourfold::cpu
