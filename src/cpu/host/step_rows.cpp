#include "cpu/host/step_rows.h"

namespace fourfold::cpu {

void RowWays::clear() {
  few.clear();
  many.clear();
  none.clear();
}

void RowWays::reserve(int64_t rows) {
  for (auto* list : {&few, &many, &none}) list->reserve(static_cast<size_t>(rows));
}

void RowWays::append(int64_t first, int64_t count, int64_t of_sequence) {
  std::vector<int32_t>& list = of_sequence <= kFewRows ? few : many;
  for (int64_t i = 0; i < count; ++i) list.push_back(static_cast<int32_t>(first + i));
}

void StepRows::reserve(int64_t rows) {
  for (RowWays* ways : {&batch_, &logits_, &other_}) ways->reserve(rows);
}

void StepRows::begin_step(const ops::Batch& batch) {
  rows_ = batch.size();
  logit_rows_ = static_cast<int64_t>(batch.logit_rows.size());
  batch_.clear();
  logits_.clear();
  size_t logit = 0;
  for (const ops::Sequence& sequence : batch.sequences) {
    batch_.append(sequence.first, sequence.count, sequence.count);
    const size_t from = logit;
    while (logit < batch.logit_rows.size() && batch.logit_rows[logit] < sequence.first + sequence.count) ++logit;
    const auto count = static_cast<int64_t>(logit - from);
    logits_.append(static_cast<int64_t>(from), count, count);
  }
  for (int64_t row = batch.rows(); row < rows_; ++row) batch_.none.push_back(static_cast<int32_t>(row));
  for (; logit < batch.logit_rows.size(); ++logit) logits_.none.push_back(static_cast<int32_t>(logit));
}

void StepRows::begin_logits(std::span<const ops::LogitRows> sequences) {
  logit_rows_ = 0;
  logits_.clear();
  for (const ops::LogitRows& sequence : sequences) {
    logits_.append(logit_rows_, sequence.rows, sequence.of);
    logit_rows_ += sequence.rows;
  }
}

const RowWays& StepRows::of(int64_t rows) {
  if (rows == rows_) return batch_;
  if (rows == logit_rows_) return logits_;
  other_.clear();
  other_.append(0, rows, rows);
  return other_;
}

}  // namespace fourfold::cpu
