// Ways in which ranks that are cards add up their parts, and which one a sum takes (docs/kernels/comm.md). All give the
// same bits.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace fourfold::cuda {

enum class SumWay : uint8_t {
  kWords,    // one shot over peer memory, every word its own flag
  kFlags,    // one shot over peer memory, each row with a flag
  kTwoShot,  // over peer memory by words: an owner adds up a row and sends what comes of it
  kNccl,     // parts are brought by NCCL
  kHost,     // parts are brought through host memory; the host waits
};
std::string_view name_of(SumWay way);  // "words", "flags", "two-shot", "nccl", "host"

// Sums by their size.
class SumTable {
 public:
  struct Entry {
    SumWay way;
    int64_t from_bytes;  // of one rank's part, from which on it is this way
  };

  // By what was measured.
  SumTable() = default;
  // All sums one way.
  explicit SumTable(SumWay way) : entries_{{way, 0}} {}
  // "words", or "words,two-shot:4M,nccl:64M": ways, and from which number of bytes on (K, M: of 1,024). Error, with
  // what is wrong, for anything else.
  static SumTable parse(std::string_view text);

  // Asked for: then another way does not take the place of one that does not work.
  bool asked() const { return !entries_.empty(); }
  SumWay way(int64_t ranks, int64_t bytes) const;
  // Whether any sum goes this way.
  bool has(int64_t ranks, SumWay way) const;
  // "words", "words, two-shot from 4 MB"
  std::string text(int64_t ranks) const;

 private:
  const std::vector<Entry>& entries(int64_t ranks) const;
  std::vector<Entry> entries_;
};

}  // namespace fourfold::cuda
