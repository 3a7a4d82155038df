// A batch as the mixers' kernels see it: which rows of which sequences one launch takes.
//
// The kernels take up to 16 rows of a sequence. Sequences of one row are a launch, those of 2 to 16 rows another one,
// and each longer one is taken 16 rows at a time, in order: so what is computed for a sequence depends on its own rows
// only. The chunked delta rule takes longer ones whole.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "cuda/backend/memory.h"
#include "kernels/gdn/chunk_tile.h"
#include "kernels/sequences.h"
#include "ops/batch.h"

namespace fourfold::cuda {

struct StepTables {
  struct Round {
    int first = 0, places = 0;  // in the tables
    int page_row = 0;           // of the first place; a place each
    int most_rows = 0;          // of a place
    int longest = 0;            // positions of a sequence, its rows included
    int live = 0;               // index of the number of places
    bool follows = false;       // on another one of the same sequence
    bool part = false;          // of a sequence longer than 16 rows
  };
  struct Chunked {
    int first = 0, places = 0, live = 0;
    int chunks = 0;
  };

  // page_size: 0 where there is no cache. `chunk`: tokens of a chunk of the delta rule, 0 without its kernels.
  void build(const ops::Batch& batch, int64_t page_size, int chunk, Uploads& uploads);

  std::vector<Round> rounds;
  Chunked chunked;   // places 0: all of the delta rule is in the rounds
  int64_t rows = 0;  // of sequences
  int page_stride = 1;

  // On the device.
  DeviceAddress tokens = 0, lives = 0, sequences = 0, state_out = 0, pages = 0;
  DeviceAddress chunk_places = 0, first_chunk = 0, chunk_state_out = 0;

 private:
  void add_round(std::span<const ops::Sequence> batch, const std::vector<int>& members);
  int add_pages(const ops::Sequence& sequence);

  std::vector<int> singles_, few_, many_;
  std::vector<SequenceRows> places_;
  std::vector<int> slots_, pages_, lives_, chunk_slots_, first_chunks_;
  std::vector<gdn::ChunkPlace> chunks_;
};

}  // namespace fourfold::cuda
