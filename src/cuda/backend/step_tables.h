// A batch as the mixers' kernels see it: which rows of which sequences one launch takes.
//
// Sequences of one row are a launch, those of 2 to 16 rows another one. Longer ones are taken whole, by the kernels for
// many rows; where these do not take their heads, or every row's state is kept, 16 rows at a time, in order. So what is
// computed for a sequence depends on its own rows only.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "cuda/backend/memory.h"
#include "kernels/attn/prefill_tile.h"
#include "kernels/gdn/chunk_tile.h"
#include "kernels/sequences.h"
#include "ops/batch.h"

namespace fourfold::cuda {

struct StepTables {
  static constexpr int kSlotStride = 16;  // of state_out: slots of a place
  struct Round {
    int first = 0, places = 0;  // in the tables
    int page_row = 0;           // of the first place; a place each
    int most_rows = 0;          // of a place
    int longest = 0;            // no sequence has more positions, its rows included
    int reached = 0;            // the longest one's positions
    int live = 0;               // index of the number of places
    bool follows = false;       // on another one of the same sequence
    bool part = false;          // of a sequence longer than 16 rows
  };
  // The sequences longer than 16 rows, whole.
  struct Whole {
    int first = 0, places = 0, live = 0;
    int page_row = 0;
    int most_rows = 0;  // of a place
    int chunks = 0;     // of the delta rule; 0: it is in the rounds
  };

  // Blocks of so many rows for attention over the whole sequences, a token being `group` of them; longest contexts
  // first.
  std::vector<attn::RowBlock> blocks(int block_rows, int group) const;

  // page_size: 0 where there is no cache. `chunk`: tokens of a chunk of the delta rule, 0 without its kernels.
  // `context`: positions of a sequence at most. Lengths that launches depend on are rounded up to a power of two, so
  // that steps of growing sequences are alike. put_off_rows: states of up to so many rows can be put off.
  // Returns what is to be copied.
  step::TableCopy build(const ops::Batch& batch, int64_t page_size, int64_t context, int chunk, int put_off_rows,
                        Uploads& uploads);
  // The place of a sequence whose only row is `row`.
  int place_of(int row) const;
  // The place of a sequence of the batch that has at most 16 rows.
  int place_of_sequence(int sequence) const;
  // All that launches depend on besides what is in the tables; empty where the batch has sequences of more than 16
  // rows, whose launches are few for the work they start.
  std::vector<int64_t> shape() const;

  // The sequences longer than 16 rows: rows and positions.
  std::span<const SequenceRows> long_sequences() const {
    return std::span(places_).subspan(static_cast<size_t>(whole.first), static_cast<size_t>(whole.places));
  }

  // Positions of the longest sequence.
  int64_t reached() const;

  std::vector<Round> rounds;
  Whole whole;
  int64_t rows = 0;  // of sequences
  int64_t size = 0;  // with padding
  int64_t sequence_count = 0;
  int page_stride = 1;
  bool put_off = false;  // states of some sequences are, or may have been

  // On the device.
  DeviceAddress tokens = 0, lives = 0, sequences = 0, updates = 0, state_out = 0, pages = 0;
  DeviceAddress chunk_places = 0, first_chunk = 0, chunk_state_out = 0;

 private:
  void add_round(std::span<const ops::Sequence> batch, const std::vector<int>& members, int put_off_rows);
  int add_pages(const ops::Sequence& sequence);

  std::vector<int> singles_, few_, many_;
  std::vector<SequenceRows> places_;
  std::vector<StateUpdates> updates_;  // of each place
  std::vector<int> slots_, pages_, lives_, chunk_slots_, first_chunks_;
  std::vector<gdn::ChunkPlace> chunks_;
};

}  // namespace fourfold::cuda
