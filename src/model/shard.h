// Which part of a model one rank holds (docs/ranks.md has the whole picture).
//
// Heads of attention and of the delta net, the width of experts and MLPs and the vocabulary of the head are split; a
// rank has the rows of a projection into them and the columns of the projection out of them, so that a layer's result
// is the sum of what the ranks make of it. Everything else (norms, routers, the embedding, the MTP head's projection)
// each rank has whole.
#pragma once

#include <cstdint>
#include <memory>

#include "model/config.h"
#include "ops/tensor.h"
#include "ranks/group.h"

namespace fourfold::model {

struct Shard {
  std::shared_ptr<ranks::Member> member;  // null: the model is whole
  // Each rank has a share of the experts, whole, instead of a share of each expert's width.
  bool by_expert = false;

  int64_t rank() const { return member == nullptr ? 0 : member->rank(); }
  int64_t ranks() const { return member == nullptr ? 1 : member->ranks(); }
};

// An Error where a model cannot be split so: it names what does not divide.
void check_shard(const ModelConfig& config, int64_t ranks, bool by_expert);

// [begin, end) of what is split, and with zeros behind it up to `size`: every rank has the same size where it matters
// to its kernels.
struct Part {
  int64_t begin = 0, end = 0;
  int64_t size = 0;

  int64_t count() const { return end - begin; }
};

// Shares as equal as can be, of whole units of so many as long as there are enough of them; nothing is padded.
Part share_of(int64_t count, int64_t unit, int64_t rank, int64_t ranks);
// The rank's heads. Fewer heads than ranks: each is held by several.
Part heads_of(int64_t heads, int64_t rank, int64_t ranks);
// Of the width of an expert or MLP: equal sizes, multiples of NVFP4's block, also with one rank; where `down`, the
// projection back from it, has FP8 scales for blocks of columns, of what such blocks may be cut into for a GPU's
// kernels, 64 columns.
Part width_of(int64_t width, int64_t rank, int64_t ranks, const ops::MatrixSource& down);

// Rows [begin, end) of a matrix, and zeros below them. A view where nothing has to be added or moved.
ops::MatrixSource take_rows(const ops::MatrixSource& source, const Part& part);
// The same of its columns: a copy, unless that is all of them. NVFP4: whole blocks, or an Error. `view`: no copy where
// nothing has to be added; then rows are further apart than they are long (MatrixSource::pitch).
ops::MatrixSource take_columns(const ops::MatrixSource& source, const Part& part, bool view = false);

}  // namespace fourfold::model
