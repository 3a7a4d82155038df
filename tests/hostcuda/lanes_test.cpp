// Lanes that the device moves on (kernels/step/lanes.cuh), by the host driver: what became of a lane, and what tables
// take from it.
#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <vector>

#include "cuda/backend/memory.h"
#include "cuda/backend/sources.h"
#include "hostcuda/testing.h"
#include "kernels/step/lanes_args.h"

namespace fourfold::hostcuda {
namespace {

using cuda::Buffer;
using step::Carry;
using step::LaneState;

template <typename T>
Buffer upload(const cuda::Device& device, const cuda::Stream& stream, const std::vector<T>& values) {
  Buffer buffer(device, values.size() * sizeof(T), "a table");
  buffer.upload(stream, values);
  return buffer;
}

TEST(HostLanes, AreMovedOnAndCarried) {
  if (!executor::Device::checks_plain_accesses()) GTEST_SKIP() << "sanitizers see the kernels' accesses here";
  install({});
  const cuda::Device device;
  const cuda::Stream stream(device);
  jit::KernelStore store(kernel_store());
  cuda::KernelLoader loader(device, store, {});
  const std::vector<cuda::Kernel> kernels = loader.load(cuda::lanes_source());

  // Lanes 0 to 5: two of three drafts right; the first wrong; a stop token behind a right one; no token; gone before;
  // the end of a prompt. Their rows follow each other, and places are the lanes' numbers backwards.
  const std::vector<int> row_tokens = {9, 4, 5, 6, 9, 4, 9, 7, 8, 3, 2, 2, 1};
  const std::vector<int> chosen = {4, 5, 1, 2, 5, 6, 7, 8, 2, -1, 2, 2, 30};
  std::vector<SequenceRows> sequences(5);
  sequences[4] = {0, 4, 100, 0};
  sequences[3] = {4, 2, 200, 0};
  sequences[2] = {6, 3, 300, 0};
  sequences[1] = {9, 1, 400, 0};
  sequences[0] = {10, 0, 500, 0};
  std::vector<int> slots(5 * 16);
  for (size_t i = 0; i < slots.size(); ++i) slots[i] = static_cast<int>(i);
  // States of lanes 0 and 1 were put off: the latter's is that of its first row all the same.
  const std::vector<step::MoveLane> moved = {
      {0, 4, 0, 4, 0, 0, 0, 0, 0, 1, 1}, {1, 3, 4, 2, 4, 0, 0, 0, 0, 0, 1},   {2, 2, 6, 3, 6, 0, 0, 0, 1, 1, 0},
      {3, 1, 9, 1, 9, 0, 0, 0, 0, 1, 0}, {4, 0, 10, 2, 10, 0, 0, 0, 0, 1, 0}, {5, -1, 12, 1, 12, 77, 66, 0, 1, 1, 0}};
  const std::vector<int> stops = {8};
  const Buffer m = upload(device, stream, moved), s = upload(device, stream, stops), c = upload(device, stream, chosen),
               r = upload(device, stream, row_tokens), q = upload(device, stream, sequences),
               o = upload(device, stream, slots), counts = upload(device, stream, std::vector<int>(6 * 31)),
               states = upload(device, stream, std::vector<LaneState>(6));
  const step::MoveArgs move = {m.as<step::MoveLane>(),
                               6,
                               s.as<int>(),
                               c.as<int>(),
                               r.as<int>(),
                               q.as<SequenceRows>(),
                               o.as<int>(),
                               16,
                               states.as<LaneState>(),
                               counts.as<int>(),
                               31};
  step::LanesArgs args = {};
  args.move = move;
  cuda::launch(stream, kernels[0], {1}, cuda::Overlap::kNone, args);
  const auto got = states.download<LaneState>(stream, 6);
  // position, state, token, row, start, kept, ended, gone, updates
  const std::vector<LaneState> want = {{103, 66, 1, 2, 100, 3, 0, 0, {64, 65, 2, 0}},
                                       {201, 48, 5, 4, 200, 1, 0, 0, {}},
                                       {302, 33, 8, 7, 300, 2, 1, 0, {}},
                                       {400, 16, 0, 9, 400, 0, 1, 0, {}},
                                       {0, 0, 0, 10, 0, 0, 1, 1, {}},
                                       {77, 66, 30, 12, 77, 1, 0, 0, {}}};
  for (size_t i = 0; i < want.size(); ++i) {
    EXPECT_EQ(std::memcmp(&got[i], &want[i], sizeof(LaneState)), 0) << "lane " << i << ", position " << got[i].position;
  }

  // Those that are kept are counted, of the lanes that ask for it.
  std::vector<int> want_counts(6 * 31);
  for (const auto& [lane, token] : {std::pair{0, 4}, {0, 5}, {0, 1}, {2, 7}, {2, 8}, {5, 30}}) {
    want_counts[static_cast<size_t>(lane * 31 + token)] = 2;
  }
  EXPECT_EQ(counts.download<int>(stream, want_counts.size()), want_counts);

  // Lane 0 goes on with two drafts of drafter 1, the ended lane 2 does not; both are fed; both would draft; lane 0's
  // last row is gathered, and its next token's number known.
  const std::vector<int> first_pass = {11, 12}, second_pass = {21, -1};
  const Buffer f = upload(device, stream, first_pass), g = upload(device, stream, second_pass);
  const std::vector<step::CarryLane> carried = {
      {Carry::kGoesOn, 0, 0, 0, 3, 0, 1, 0},  {Carry::kGoesOn, 2, 1, 3, 1, 0, 0, 0},
      {Carry::kFed, 0, 2, 4, 4, 0, 0, 0},     {Carry::kFed, 4, 3, 8, 1, 10, 0, 0},
      {Carry::kFed, 5, -1, 9, 1, 12, 0, 0},   {Carry::kDrafts, 0, 4, 10, 1, 0, 1, 0},
      {Carry::kDrafts, 1, 5, 11, 1, 0, 0, 2}, {Carry::kDrafts, 3, 6, 12, 1, 0, 0, 1},
      {Carry::kEnd, 0, -1, 1, 1, 0, 0, 0},    {Carry::kSample, 0, -1, 0, 1, 0, 0, 0}};
  step::SampleRow sample = {};
  sample.index = 40;
  const Buffer l = upload(device, stream, carried), tokens = upload(device, stream, std::vector<int>(13, 55)),
               tables = upload(device, stream, std::vector<SequenceRows>(7, SequenceRows{0, 3, 9, 8})),
               samples = upload(device, stream, std::vector<step::SampleRow>{sample}),
               updates = upload(device, stream, std::vector<StateUpdates>(7, StateUpdates{-1, -1, 0, 1}));
  step::CarryLanesArgs& carry = args.carry;
  carry.lanes = l.as<step::CarryLane>();
  carry.count = static_cast<int>(carried.size());
  carry.states = states.as<LaneState>();
  carry.chosen = c.as<int>();
  carry.drafts[0] = f.as<int>();
  carry.drafts[1] = g.as<int>();
  carry.tokens = tokens.as<int>();
  carry.sequences = tables.as<SequenceRows>();
  carry.updates = updates.as<StateUpdates>();
  carry.samples = samples.as<step::SampleRow>();
  args.move.count = 0;
  // A table of more pieces than there are threads, under what is carried into it, and one whose copy is all there is.
  std::vector<int> long_table(4 * step::kTablesThreads + 8), short_table = {1, 2, 3, 4};
  for (size_t i = 0; i < long_table.size(); ++i) long_table[i] = static_cast<int>(1000 + i);
  const Buffer from = upload(device, stream, long_table), more = upload(device, stream, short_table),
               to = upload(device, stream, std::vector<int>(long_table.size(), 0)),
               other = upload(device, stream, std::vector<int>(4, 0));
  args.tables.count = 2;
  args.tables.tables[0] = {from.as<int>(), to.as<int>(), static_cast<long long>(long_table.size() * sizeof(int))};
  args.tables.tables[1] = {more.as<int>(), other.as<int>(), 16};
  carry.ends = to.as<int>();
  cuda::launch(stream, kernels[0], {1}, cuda::Overlap::kNone, args);
  long_table[1] = 2;
  EXPECT_EQ(to.download<int>(stream, long_table.size()), long_table);
  EXPECT_EQ(other.download<int>(stream, 4), short_table);
  EXPECT_EQ(tokens.download<int>(stream, 13), (std::vector<int>{1, 12, 0, 55, 4, 5, 1, 2, 2, 30, 1, 21, 55}));
  const auto rows = tables.download<SequenceRows>(stream, 7);
  const std::vector<std::array<int, 3>> places = {{3, 103, 66}, {0, 9, 8},   {3, 100, 8}, {0, 9, 8},
                                                  {3, 102, 8},  {3, 202, 8}, {0, 9, 8}};  // count, position, state
  for (size_t i = 0; i < places.size(); ++i) {
    EXPECT_EQ((std::array{rows[i].count, rows[i].position, rows[i].state_in}), places[i]) << "place " << i;
  }
  const auto added = updates.download<StateUpdates>(stream, 7);
  EXPECT_EQ((std::array{added[0].base, added[0].from, added[0].count, added[0].put_off}), (std::array{64, 65, 2, 1}));
  EXPECT_EQ(added[1].count, 0);
  EXPECT_EQ(samples.download<step::SampleRow>(stream, 1)[0].index, 42);
}

}  // namespace
}  // namespace fourfold::hostcuda
