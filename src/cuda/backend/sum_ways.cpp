#include "cuda/backend/sum_ways.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <utility>

#include "base/check.h"

namespace fourfold::cuda {
namespace {

constexpr std::array<std::string_view, 5> kNames = {"words", "flags", "two-shot", "nccl", "host"};

// `bench comm` on two and on four H200 (docs/kernels/comm.md).
const std::vector<SumTable::Entry> kOfTwo = {{SumWay::kWords, 0}, {SumWay::kTwoShot, 2 << 20}};
const std::vector<SumTable::Entry> kOfMany = {{SumWay::kWords, 0}, {SumWay::kTwoShot, 512 << 10}};

std::string bytes_text(int64_t bytes) {
  if (bytes % (1 << 20) == 0) return fmt::format("{} MB", bytes >> 20);
  if (bytes % (1 << 10) == 0) return fmt::format("{} KB", bytes >> 10);
  return fmt::format("{} bytes", bytes);
}

// -1: it is none.
int64_t parse_bytes(std::string_view text) {
  int64_t value = 0;
  const auto [rest, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  const std::string_view unit = text.substr(static_cast<size_t>(rest - text.data()));
  const int shift = unit == "K" ? 10 : unit == "M" ? 20 : 0;
  if (error != std::errc() || value <= 0 || value > (int64_t{1} << 40) || (shift == 0 && !unit.empty())) return -1;
  return value << shift;
}

}  // namespace

std::string_view name_of(SumWay way) { return kNames[static_cast<size_t>(way)]; }

SumTable SumTable::parse(std::string_view text) {
  SumTable table;
  for (std::string_view left = text;;) {
    const size_t comma = left.find(',');
    std::string_view item = left.substr(0, comma);
    int64_t from = 0;
    const size_t colon = item.find(':');
    if (colon != std::string_view::npos) {
      from = parse_bytes(item.substr(colon + 1));
      item = item.substr(0, colon);
    }
    const auto* const found = std::find(kNames.begin(), kNames.end(), item);
    const bool first = table.entries_.empty();
    if (found == kNames.end() || (first ? from != 0 : from <= table.entries_.back().from_bytes)) {
      fail(
          "'{}': wanted words, flags, two-shot, nccl or host, or several with the bytes of a sum from which on each of "
          "the others begins, in ascending order: words,two-shot:4M",
          text);
    }
    table.entries_.push_back({static_cast<SumWay>(found - kNames.begin()), from});
    if (comma == std::string_view::npos) return table;
    left = left.substr(comma + 1);
  }
}

const std::vector<SumTable::Entry>& SumTable::entries(int64_t ranks) const {
  return !entries_.empty() ? entries_ : ranks > 2 ? kOfMany : kOfTwo;
}

SumWay SumTable::way(int64_t ranks, int64_t bytes) const {
  SumWay way = SumWay::kWords;
  for (const Entry& entry : entries(ranks)) {
    if (bytes >= entry.from_bytes) way = entry.way;
  }
  return way;
}

bool SumTable::has(int64_t ranks, SumWay way) const {
  const std::vector<Entry>& all = entries(ranks);
  return std::any_of(all.begin(), all.end(), [&](const Entry& entry) { return entry.way == way; });
}

std::string SumTable::text(int64_t ranks) const {
  std::string text;
  for (const Entry& entry : entries(ranks)) {
    if (!text.empty()) text += ", ";
    text += name_of(entry.way);
    if (entry.from_bytes > 0) text += fmt::format(" from {}", bytes_text(entry.from_bytes));
  }
  return text;
}

}  // namespace fourfold::cuda
