#include "cuda/backend/choice_tables.h"

#include <cstring>

#include "base/math.h"

namespace fourfold::cuda {

static_assert(step::kMostLogprobs == ops::kMaxLogprobs);

template <typename Tables, typename F>
void ChoiceTables::for_tables(Tables& tables, F&& fn) {
  fn(tables.samples_), fn(tables.reports_), fn(tables.biases_), fn(tables.banned_), fn(tables.masks_);
  fn(tables.drawn_), fn(tables.reported_), fn(tables.lanes_), fn(tables.counted_);
}

step::SampleRow ChoiceTables::row_of(const cpu::RowChoice& row, int64_t vocabulary) {
  const cpu::Choice& c = row.choice;
  const ops::SamplingParams& p = c.params;
  step::SampleRow s = {};
  s.row = s.adjusted = static_cast<int>(row.row);
  s.place = static_cast<int>(samples_.values.size());
  s.given = c.given >= 0 ? c.given : step::kToBeChosen;
  s.temperature = p.temperature;
  s.top_p = p.top_p;
  s.min_p = p.min_p;
  s.top_k = p.top_k;
  s.defined = c.defined_tokens > 0 ? c.defined_tokens : static_cast<int>(vocabulary);
  s.seed = c.seed;
  s.index = c.index;
  s.bias_first = static_cast<int>(biases_.values.size());
  for (const auto& [token, value] : p.logit_bias) biases_.values.push_back({token, value});
  s.bias_count = static_cast<int>(biases_.values.size()) - s.bias_first;
  std::vector<int>& banned = banned_.values;
  s.banned_first = static_cast<int>(banned.size());
  banned.insert(banned.end(), c.banned.begin(), c.banned.end());
  banned.insert(banned.end(), c.too_early.begin(), c.too_early.end());
  s.banned_count = static_cast<int>(banned.size()) - s.banned_first;
  std::vector<uint32_t>& masks = masks_.values;
  s.mask = c.mask.empty() ? -1 : static_cast<int>(static_cast<int64_t>(masks.size()) / mask_words_);
  masks.insert(masks.end(), c.mask.begin(), c.mask.end());
  s.counts = row.counted.lane;
  s.repetition_penalty = p.repetition_penalty;
  s.presence_penalty = p.presence_penalty;
  s.frequency_penalty = p.frequency_penalty;
  s.draft_first = row.counted.draft_row;
  s.draft_count = row.counted.drafts;
  if (const auto& more = row.counted.more; !more.empty() || row.counted.choice >= 0) {
    std::vector<int>& counted = counted_.values;
    lanes_.values.push_back(
        {row.counted.lane, static_cast<int>(counted.size()), static_cast<int>(more.size()), row.counted.choice});
    counted.insert(counted.end(), more.begin(), more.end());
  }
  s.logprobs = p.logprobs;
  return s;
}

bool ChoiceTables::lay_out(std::span<const cpu::RowChoice> rows, int64_t vocabulary, int64_t computed, int64_t room) {
  for_tables(*this, [](auto& table) { table.values.clear(); });
  given_ = false;
  mask_words_ = ceil_div(vocabulary, 32);
  int64_t spare = computed;
  for (const cpu::RowChoice& row : rows) {
    const auto place = static_cast<int>(samples_.values.size());
    step::SampleRow s = row_of(row, vocabulary);
    given_ = given_ || s.given >= 0;
    if (s.logprobs >= 0 && step::adjusts(s)) {
      step::SampleRow report = s;
      report.given = step::kChosenBefore;
      report.temperature = 0;
      report.bias_count = report.banned_count = 0;
      report.mask = report.counts = -1;
      reports_.values.push_back(report);
      s.logprobs = -1;
      if (s.temperature != 0.0f) {
        if (spare == room) return false;
        s.adjusted = static_cast<int>(spare++);
      }
    }
    if (s.temperature != 0.0f) drawn_.values.push_back(place);
    if (s.logprobs >= 0) reported_.values.push_back(place);
    samples_.values.push_back(s);
  }
  bytes_ = 0;
  for_tables(*this, [this](auto& table) {
    table.at = bytes_;
    bytes_ += (table.values.size() * sizeof(table.values[0]) + 15) / 16 * 16;
  });
  return true;
}

uint64_t ChoiceTables::most_bytes(int64_t rows, int64_t lanes, int64_t vocabulary) {
  constexpr uint64_t kLists = 64 << 10;
  constexpr uint64_t kCounted = 32;  // tokens of a lane that the device did not know
  const auto words = static_cast<uint64_t>(ceil_div(vocabulary, 32));
  return static_cast<uint64_t>(rows) * (2 * sizeof(step::SampleRow) + (2 + words) * sizeof(int)) +
         static_cast<uint64_t>(lanes) * (sizeof(step::CountedLane) + kCounted * sizeof(int)) + kLists;
}

void ChoiceTables::write(uint8_t* to) const {
  for_tables(*this, [to](const auto& table) {
    if (table.values.empty()) return;
    std::memcpy(to + table.at, table.values.data(), table.values.size() * sizeof(table.values[0]));
  });
}

void ChoiceTables::point(step::SampleArgs& args, DeviceAddress tables) const {
  args.samples = device_pointer<const step::SampleRow>(samples_at(tables));
  args.biases = device_pointer<const step::Bias>(tables + biases_.at);
  args.banned = device_pointer<const int>(tables + banned_.at);
  args.masks = device_pointer<const uint32_t>(tables + masks_.at);
  args.mask_words = mask_words_;
}

step::CountArgs ChoiceTables::counted(DeviceAddress tables) const {
  step::CountArgs args = {};
  args.lanes = device_pointer<const step::CountedLane>(tables + lanes_.at);
  args.count = counted_lanes();
  args.tokens = device_pointer<const int>(tables + counted_.at);
  return args;
}

}  // namespace fourfold::cuda
