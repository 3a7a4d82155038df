// Arguments of what ranks that are cards do together, and the memory that they have for each other. Host and device,
// freestanding.
#pragma once

#include "kernels/gemm/routing.h"
#include "kernels/moe/sum_args.h"
#include "kernels/norm/norm_args.h"

namespace fourfold::comm {

inline constexpr int kMostRanks = 8;
// A rank may put its part of the next sum before the slowest has read those of this one.
inline constexpr int kSlots = 2;

// What each rank has for the others, in memory of its own that they reach: parts whose rows have flags, the flags, and
// parts whose words are there when they are not all ones (0xffffffff). `rows`: of the latter that one launch exchanges
// at most; `flag_rows`: of the former, at most as many; `columns`: of a row at most, bf16, a multiple of 8.
struct Exchange {
  int ranks;
  int rows;
  int columns;
  int flag_rows;

  // Of the part that `rank` puts there for a row: elements, bf16.
  FOURFOLD_HD constexpr long long part(int slot, int rank, int row) const { return place(rows, slot, rank, row); }
  FOURFOLD_HD constexpr long long flag_part(int slot, int rank, int row) const {
    return place(flag_rows, slot, rank, row);
  }
  FOURFOLD_HD constexpr long long flag_parts_bytes() const { return flag_part(kSlots, 0, 0) * 2; }
  // flags[row][rank]: how often that rank has put its part of the row there. Zero at first.
  FOURFOLD_HD constexpr long long flag(int row, int rank) const { return static_cast<long long>(row) * ranks + rank; }
  // Where the parts without flags begin; all ones at first.
  FOURFOLD_HD constexpr long long words_at() const {
    return (flag_parts_bytes() + flag(flag_rows, 0) * 4 + 255) / 256 * 256;
  }
  FOURFOLD_HD constexpr long long bytes() const { return words_at() + part(kSlots, 0, 0) * 2; }

 private:
  FOURFOLD_HD constexpr long long place(int of, int slot, int rank, int row) const {
    return ((static_cast<long long>(slot) * ranks + rank) * of + row) * columns;
  }
};

// One rank's end of the exchange, the same in all launches.
struct Peers {
  Exchange exchange;
  unsigned char* memory[kMostRanks];  // Exchange::bytes() of each rank, as this rank reaches it
  int rank;
  // Not zero: the kernel behind this one may start while ranks are waited for. Zero where ranks share a card: there it
  // would take the room that the other rank's kernels need to come so far.
  int early;
  // Of this rank's own, zero at first.
  unsigned* uses;               // [2][rows]: how often a row was exchanged with a flag, and how often without
  unsigned* absent;             // [ranks]: not zero: that rank did not come, and is not waited for any more
  unsigned* report;             // 1 + a rank that did not come, in memory that the host reads
  unsigned long long patience;  // nanoseconds
};

// residual += the ranks' deltas, in the order of ranks, in fp32; out = bf16(residual / rms(residual) x weight). On
// every rank, with the same rows and the same grid, of at most as many CTAs of norm::kRowThreads as run at once.
struct ReduceArgs {
  Peers peers;
  // delta: this rank's part, not null; share: a part of it, of kernels that take one; columns: at most the exchange's.
  norm::NormArgs norm;
  int rows;  // at most those of the exchange
  // Of kernels that take it: this rank's part is what its experts left as rows of groups, and norm.delta is not read.
  moe::RowSum sum;
};
// The same with the router's choice behind it, by logits that the products in front have added up (gemm/routing.h): of
// each rank those of its own part, of rank 0 with the residual's. A CTA for each row. Logits go in the place of a row
// behind args.rows, so there are at most half as many rows as the exchange has.
struct ReduceRoutedArgs {
  Peers peers;
  gemm::RoutedArgs routed;  // norm: as that of ReduceArgs, without a share
  int rows;
};
// Columns of a router, four to a thread, that go along with rows of so many columns.
FOURFOLD_HD constexpr bool routes_with_sum(int columns, int row_columns) {
  return columns <= 4 * norm::kRowThreads && (columns + 3) / 4 * 8 <= row_columns;
}
// Sums by words: a CTA puts so many rows before the one that it adds up.
inline constexpr int kRowsAhead = 2;
// Launches of more CTAs than these look for words less often, to leave memory to those who work.
inline constexpr int kBusyCtas = 32;
inline constexpr unsigned kPause = 100;  // nanoseconds
// Of a kernel that exchanges: so many CTAs have room on an SM. `pieces`: as norm_pieces() has them.
FOURFOLD_HD constexpr int reduce_ctas(int pieces) { return pieces > 2 ? 1 : 2; }
FOURFOLD_HD constexpr int words_ctas(int pieces, bool share = false) {
  return pieces > 2 ? 1 : share && pieces > 1 ? 2 : 3;
}
inline constexpr int kGatherCtas = 2;

// out[row][first[r] ...] = the part of rank r; words of 4 bytes. Rows are exchanged in pieces; launched as ReduceArgs.
struct GatherColumnsArgs {
  Peers peers;
  const unsigned* part;
  long long part_stride;  // words
  unsigned* out;          // its own columns may be `part`
  long long out_stride;
  int rows;
  int pieces;                 // of a row, of the widest part; rows x pieces at most the exchange's rows
  int first[kMostRanks + 1];  // column of each rank's part, and all columns
};
inline constexpr int kGatherThreads = 256;
FOURFOLD_HD constexpr int words_of_piece(const Exchange& exchange) { return exchange.columns / 2; }

// Sums whose parts are in this rank's own memory: [ranks][rows][norm.columns] bf16, norm.delta unused.
struct GatheredArgs {
  norm::NormArgs norm;
  const unsigned short* parts;
  int ranks;
  int rows;
};
// to[row][i] = from[row][i] for words of 4 bytes.
struct CopyColumnsArgs {
  const unsigned* from;
  unsigned* to;
  long long from_stride, to_stride;  // words
  int words;                         // of a row
};

// Of rows of words of 4 bytes: *sum += that of each word and its place.
struct ChecksumArgs {
  const unsigned* words;
  long long stride;  // words
  int columns;
  unsigned long long* sum;
};
FOURFOLD_HD constexpr unsigned long long checksum_of(long long place, unsigned word) {
  unsigned long long z = static_cast<unsigned long long>(place) << 32 | word;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ z >> 27) * 0x94d049bb133111ebull;
  return z ^ z >> 31;
}

// to[i] = from[i], 16 bytes each, any grid of kGatherThreads.
struct PeerCopyArgs {
  const void* from;
  void* to;
  long long count;
};

}  // namespace fourfold::comm
