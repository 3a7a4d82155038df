#include "cuda/backend/step_tables.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "base/check.h"
#include "base/math.h"
#include "kernels/attn/tables.h"

namespace fourfold::cuda {
namespace {

constexpr int kRows = gdn::kRecurrentRows;
static_assert(kRows == attn::kMostRows && kRows == StepTables::kSlotStride);
constexpr int kLeastTier = 4 * attn::kLeastSplit;  // positions

}  // namespace

int StepTables::add_pages(const ops::Sequence& sequence) {
  const int row = static_cast<int>(pages_.size()) / page_stride;
  pages_.resize(pages_.size() + static_cast<size_t>(page_stride), 0);
  const size_t count = std::min(sequence.pages.size(), static_cast<size_t>(page_stride));
  std::copy_n(sequence.pages.begin(), count, pages_.end() - page_stride);
  return row;
}

// Of sequences that have at most kRows rows.
void StepTables::add_round(std::span<const ops::Sequence> batch, const std::vector<int>& members, int put_off_rows) {
  if (members.empty()) return;
  Round round;
  round.first = static_cast<int>(places_.size());
  round.places = static_cast<int>(members.size());
  round.live = static_cast<int>(lives_.size());
  lives_.push_back(round.places);
  for (const int i : members) {
    const ops::Sequence& s = batch[static_cast<size_t>(i)];
    const int row = add_pages(s);
    if (i == members.front()) round.page_row = row;
    places_.push_back({s.first, s.count, s.position, s.state_in});
    slots_.resize(places_.size() * kRows, -1);
    const std::span<const int32_t> slots = s.written_slots();
    const bool puts_off = s.puts_off && s.count > 1 && s.count <= put_off_rows;
    FF_ASSERT(!puts_off || slots.size() == static_cast<size_t>(s.count));
    put_off = put_off || puts_off || s.updates.count > 0;
    updates_.resize(places_.size() - 1);
    updates_.push_back({s.updates.base, s.updates.from, s.updates.count, puts_off ? 1 : 0});
    for (size_t k = 0; k < slots.size(); ++k) {
      const size_t at = slots.size() == 1 ? static_cast<size_t>(s.count) - 1 : k;
      slots_[(places_.size() - 1) * kRows + at] = slots[k];
    }
    round.most_rows = std::max(round.most_rows, s.count);
    round.longest = std::max(round.longest, s.position + s.count);
  }
  rounds.push_back(round);
}

std::vector<attn::RowBlock> StepTables::blocks(int block_rows, int group) const {
  std::vector<attn::RowBlock> all;
  for (int place = 0; place < whole.places; ++place) {
    const int rows_of_place = places_[static_cast<size_t>(whole.first + place)].count * group;
    for (int first = 0; first < rows_of_place; first += block_rows) all.push_back({place, first});
  }
  const auto context = [&](const attn::RowBlock& b) {
    return places_[static_cast<size_t>(whole.first + b.sequence)].position + b.first / group;
  };
  std::stable_sort(all.begin(), all.end(), [&](const auto& a, const auto& b) { return context(a) > context(b); });
  return all;
}

int StepTables::place_of(int row) const {
  const auto singles = std::span(places_).first(singles_.size());  // the first round, in the order of rows
  const auto found = std::lower_bound(singles.begin(), singles.end(), row,
                                      [](const SequenceRows& s, int wanted) { return s.first < wanted; });
  FF_ASSERT(found != singles.end() && found->first == row);
  return static_cast<int>(found - singles.begin());
}

int StepTables::place_of_sequence(int sequence) const {
  const auto in = [&](const std::vector<int>& members) {
    const auto found = std::lower_bound(members.begin(), members.end(), sequence);
    return found != members.end() && *found == sequence ? static_cast<int>(found - members.begin()) : -1;
  };
  if (const int place = in(singles_); place >= 0) return place;
  const int place = in(few_);
  FF_ASSERT(place >= 0);
  return static_cast<int>(singles_.size()) + place;
}

int64_t StepTables::reached() const {
  int64_t most = 0;
  for (const Round& round : rounds) most = std::max<int64_t>(most, round.reached);
  for (const SequenceRows& s : long_sequences()) most = std::max<int64_t>(most, s.position + s.count);
  return most;
}

std::vector<int64_t> StepTables::shape() const {
  if (whole.places > 0) return {};
  std::vector<int64_t> all = {size, rows, page_stride, static_cast<int64_t>(tokens), put_off ? 1 : 0};
  for (const Round& r : rounds) all.insert(all.end(), {r.first, r.places, r.page_row, r.most_rows, r.longest, r.live});
  return all;
}

step::TableCopy StepTables::build(const ops::Batch& batch, int64_t page_size, int64_t context, int chunk,
                                  int put_off_rows, Uploads& uploads) {
  rounds.clear();
  places_.clear();
  updates_.clear();
  put_off = false;
  slots_.clear();
  pages_.clear();
  lives_.clear();
  chunk_slots_.clear();
  first_chunks_.clear();
  chunks_.clear();
  singles_.clear();
  few_.clear();
  many_.clear();
  whole = {};
  rows = batch.rows();
  size = batch.size();
  sequence_count = static_cast<int64_t>(batch.sequences.size());
  page_stride = 1;
  bool chunked = chunk > 0;
  for (size_t i = 0; i < batch.sequences.size(); ++i) {
    const ops::Sequence& s = batch.sequences[i];
    FF_ASSERT(s.count >= 1 && s.position >= 0);
    (s.count == 1 ? singles_ : s.count <= kRows ? few_ : many_).push_back(static_cast<int>(i));
    if (s.count > kRows && s.written_slots().size() != 1) chunked = false;
    if (page_size > 0) {
      const int64_t pages_used = ceil_div(int64_t{s.position} + s.count, page_size);
      page_stride = std::max(page_stride, static_cast<int>(pages_used));
    }
  }
  const auto tier = [](int64_t value, int64_t most) {
    return static_cast<int>(
        std::max(value, std::min(static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(value))), most)));
  };
  if (page_size > 0) page_stride = tier(page_stride, ceil_div(context, page_size) + 1);
  add_round(batch.sequences, singles_, put_off_rows);
  add_round(batch.sequences, few_, put_off_rows);
  for (const int i : many_) {
    const ops::Sequence& s = batch.sequences[static_cast<size_t>(i)];
    const std::span<const int32_t> slots = s.written_slots();
    const int page_row = add_pages(s);
    if (i == many_.front()) whole.page_row = page_row;
    FF_ASSERT(s.updates.count == 0);
    int state_in = s.state_in;
    for (int at = 0; at < s.count; at += kRows) {
      Round round;
      round.first = static_cast<int>(places_.size());
      round.places = 1;
      round.page_row = page_row;
      round.most_rows = std::min(kRows, s.count - at);
      round.longest = s.position + at + round.most_rows;
      round.live = static_cast<int>(lives_.size());
      round.follows = at > 0;
      round.part = true;
      lives_.push_back(1);
      places_.push_back({s.first + at, round.most_rows, s.position + at, state_in});
      slots_.resize(places_.size() * kRows, -1);
      for (int k = 0; k < round.most_rows; ++k) {
        const bool last = k + 1 == round.most_rows;
        if (slots.size() == 1 && !last) continue;
        const int slot = slots.size() == 1 ? slots[0] : slots[static_cast<size_t>(at + k)];
        slots_[(places_.size() - 1) * kRows + static_cast<size_t>(k)] = slot;
        if (last) state_in = slot;
      }
      rounds.push_back(round);
    }
  }
  for (Round& round : rounds) {
    round.reached = round.longest;
    if (!round.part) round.longest = tier(std::max(round.longest, kLeastTier), context);
  }
  if (!many_.empty()) {
    whole.first = static_cast<int>(places_.size());
    whole.places = static_cast<int>(many_.size());
    whole.live = static_cast<int>(lives_.size());
    lives_.push_back(whole.places);
  }
  for (int place = 0; place < whole.places; ++place) {
    const ops::Sequence& s = batch.sequences[static_cast<size_t>(many_[static_cast<size_t>(place)])];
    places_.push_back({s.first, s.count, s.position, s.state_in});
    whole.most_rows = std::max(whole.most_rows, s.count);
    if (!chunked) continue;
    chunk_slots_.push_back(s.written_slots()[0]);
    first_chunks_.push_back(static_cast<int>(chunks_.size()));
    for (int j = 0; j * chunk < s.count; ++j) chunks_.push_back({place, j});
    whole.chunks = static_cast<int>(chunks_.size());
  }
  updates_.resize(places_.size());  // of long ones there are none

  uint64_t total = 0;
  const auto place = [&total](uint64_t bytes) {
    const uint64_t at = total;
    total += (bytes + 127) / 128 * 128;
    return at;
  };
  const uint64_t at_tokens = place(static_cast<uint64_t>(batch.size()) * sizeof(int));
  const uint64_t at_lives = place(lives_.size() * sizeof(int));
  const uint64_t at_places = place(places_.size() * sizeof(SequenceRows));
  const uint64_t at_updates = place(updates_.size() * sizeof(StateUpdates));
  const uint64_t at_slots = place(slots_.size() * sizeof(int));
  const uint64_t at_pages = place(pages_.size() * sizeof(int));
  const uint64_t at_chunks = place(chunks_.size() * sizeof(gdn::ChunkPlace));
  const uint64_t at_first = place(first_chunks_.size() * sizeof(int));
  const uint64_t at_chunk_slots = place(chunk_slots_.size() * sizeof(int));
  uint8_t* to = uploads.prepare(total);
  // Padding is embedded as token 0.
  auto* ids = reinterpret_cast<int*>(to + at_tokens);
  std::copy_n(batch.tokens.begin(), rows, ids);
  std::fill(ids + rows, ids + batch.size(), 0);
  const auto write = [&](uint64_t at, const auto& values) {
    if (!values.empty()) std::memcpy(to + at, values.data(), values.size() * sizeof(values[0]));
  };
  write(at_lives, lives_);
  write(at_places, places_);
  write(at_updates, updates_);
  write(at_slots, slots_);
  write(at_pages, pages_);
  write(at_chunks, chunks_);
  write(at_first, first_chunks_);
  write(at_chunk_slots, chunk_slots_);
  const DeviceAddress base = uploads.place();
  tokens = base + at_tokens;
  lives = base + at_lives;
  sequences = base + at_places;
  updates = base + at_updates;
  state_out = base + at_slots;
  pages = base + at_pages;
  chunk_places = base + at_chunks;
  first_chunk = base + at_first;
  chunk_state_out = base + at_chunk_slots;
  return uploads.take(total);
}

}  // namespace fourfold::cuda
