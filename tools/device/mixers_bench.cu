// Checks and times the kernels of the mixers. tools/device/mixers.sh builds and runs it.
//   mixers_bench check     every kernel against plain double arithmetic
//   mixers_bench time      in graphs of dependent nodes, each with a state or cache of its own
#include <cstring>

#include "../../tests/kernels/mixer_problems.h"
#include "kernels/attn/combine.cuh"
#include "kernels/attn/decode.cuh"
#include "kernels/attn/narrow.cuh"
#include "kernels/attn/prefill_prepare.cuh"
#include "kernels/attn/prefill_sm90.cuh"
#include "kernels/gdn/chunk_scan_sm90.cuh"
#include "kernels/gdn/recurrent.cuh"
#include "mixers_buffers.cuh"
#include "mixers_support.cuh"

using namespace fourfold;
using measure::AttentionBuffers;
using measure::Chunks;
using measure::DeltaBuffers;
using measure::Device;
using measure::launch;
using mixers::AttentionProblem;
using mixers::DeltaProblem;
using mixers::SequencePlan;

namespace {

int g_failed = 0;

void verdict(const char* name, const std::string& error, double relative, double state = -1.0) {
  if (!error.empty()) ++g_failed;
  std::printf("%s %-44s error %.2e", error.empty() ? "ok  " : "FAIL", name, relative);
  if (state >= 0) std::printf(" state %.2e", state);
  std::printf(" %s\n", error.c_str());
}

// A kernel of one tile.
template <typename Tile, typename Args>
struct Entry {
  const char* name;
  Tile tile;
  void (*kernel)(Args);
};

// ---- delta rule, few rows

using RecurrentEntry = Entry<gdn::RecurrentTile, gdn::DeltaArgs>;
template <int... V>
RecurrentEntry recurrent(const char* name) {
  using Tile = gdn::RecurrentTileOf<V...>;
  if constexpr (Tile::value.split > 1) {
    return {name, Tile::value, gdn::delta_recurrent_split<Tile>};
  } else {
    return {name, Tile::value, gdn::delta_recurrent<Tile>};
  }
}
#define RECURRENT(...) recurrent<__VA_ARGS__>("recurrent {" #__VA_ARGS__ "}")
std::vector<RecurrentEntry> recurrent_entries() {
  return {
      RECURRENT(128, 128, 1, 16, 2, 0),        RECURRENT(128, 128, 1, 8, 4, 0),
      RECURRENT(128, 128, 16, 16, 1, 0),       RECURRENT(128, 128, 16, 8, 3, 0, 4),
      RECURRENT(128, 128, 1, 16, 2, 0, 1, 1),  RECURRENT(128, 128, 1, 8, 4, 0, 1, 1),
      RECURRENT(128, 128, 16, 16, 1, 0, 1, 1), RECURRENT(128, 128, 6, 8, 3, 0, 4, 1),
      RECURRENT(128, 128, 6, 8, 3, 0, 1, 1),
  };
}
void run(const RecurrentEntry& e, const gdn::DeltaArgs& args, int sequences, cudaStream_t stream) {
  const gdn::RecurrentLaunch l = gdn::recurrent_launch(e.tile, args.shape, sequences);
  launch(e.kernel, dim3(l.grid_x, l.grid_y), l.threads, l.shared_bytes, stream, args);
}

void check_recurrent() {
  unsigned seed = 100;
  for (const RecurrentEntry& e : recurrent_entries()) {
    std::vector<int> drafts;
    for (int i = 0; i < e.tile.rows; ++i) drafts.push_back(i == 1 ? -1 : i == 2 ? 4 : 8 + i);
    const DeltaProblem p = mixers::make_delta(
        {2, 4, e.tile.key_dim, e.tile.value_dim}, e.tile.float32,
        {{1, 7, 0, {0}}, {1, 3, 1, {2}}, {1, 0, 3, {3}}, {0, 0, 0, {}}, {e.tile.rows, 100, 4, drafts}}, 8 + e.tile.rows,
        ++seed);
    DeltaBuffers b(p);
    gdn::DeltaArgs a = p.args();
    b.set(&a);
    run(e, a, p.live + 2, nullptr);
    CUDA_CHECK(cudaDeviceSynchronize());
    double error = -1, state = -1;
    const std::string text = mixers::compare_delta(p, b.out.get().data(), b.states.get().data(), b.history.get().data(),
                                                   3e-3, 2e-6, &error, &state);
    verdict(e.name, text, error, state);
  }
}

// What every tile must leave the same to the bit: outputs, states and history of 12 sequences of a row, on all SMs and
// as on 20; and those of 4 rows of a sequence, at once and one after the other.
struct DeltaBits {
  std::vector<unsigned short> out;
  std::vector<float> states;
  std::vector<unsigned char> history;
  std::string unlike(const DeltaBits& o) const {
    const auto same = [](const auto& a, const auto& b) {
      return std::memcmp(&a[0], &b[0], a.size() * sizeof a[0]) == 0;
    };
    return std::string(same(out, o.out) ? "" : "outputs differ ") + (same(states, o.states) ? "" : "states differ ") +
           (same(history, o.history) ? "" : "history differs");
  }
};
void check_recurrent_bits() {
  std::vector<SequencePlan> many;
  for (int i = 0; i < 12; ++i) many.push_back({i == 7 ? 0 : 1, i == 3 ? 0 : 5 + i, i, {i % 5 == 4 ? 12 + i : i}});
  const DeltaProblem p = mixers::make_delta({16, 32, 128, 128}, false, many, 24, 7);
  const DeltaProblem drafts = mixers::make_delta({16, 32, 128, 128}, false, {{4, 9, 0, {1, 2, 3, 4}}}, 5, 8);
  DeltaBits first, first_drafts;
  for (const RecurrentEntry& e : recurrent_entries()) {
    for (int again = 0; again < 2; ++again) {
      DeltaBuffers b(p);
      gdn::DeltaArgs a = p.args();
      b.set(&a);
      run(e, a, p.live, nullptr);
      const DeltaBits bits{b.out.get(), b.states.get(), b.history.get()};
      if (first.out.empty()) first = bits;
      const std::string unlike = bits.unlike(first);
      if (!unlike.empty() || again == 1) verdict((std::string(e.name) + " bits").c_str(), unlike, 0);
    }
    DeltaBuffers b(drafts);
    gdn::DeltaArgs a = drafts.args();
    b.set(&a);
    if (e.tile.rows >= 4) {
      run(e, a, 1, nullptr);
    } else {
      for (int i = 0; i < 4; ++i) {
        b.sequences.put({{drafts.sequences[0].first + i, 1, 9 + i, i}});
        b.state_out.put({i + 1});
        run(e, a, 1, nullptr);
      }
    }
    const DeltaBits bits{b.out.get(), b.states.get(), b.history.get()};
    if (first_drafts.out.empty()) first_drafts = bits;
    verdict((std::string(e.name) + " bits of 4 rows").c_str(), bits.unlike(first_drafts), 0);
  }
}

void time_recurrent() {
  struct Case {
    int heads, sequences, rows;
  };
  constexpr Case kCases[] = {{32, 1, 1},   {64, 1, 1}, {32, 4, 1}, {32, 8, 1}, {32, 16, 1}, {32, 64, 1}, {64, 64, 1},
                             {32, 256, 1}, {32, 1, 4}, {32, 1, 8}, {32, 4, 4}, {32, 16, 4}, {32, 64, 2}, {32, 64, 4}};
  for (const Case& c : kCases) {
    const gdn::DeltaShape shape{16, c.heads, 128, 128};
    const int layers = std::clamp(400 / (2 * c.sequences), 8, 40);
    const int slots = c.sequences * c.rows;
    const long long floats = shape.state_floats();
    Device<float> states(static_cast<size_t>(floats) * slots * layers);
    measure::fill_floats<<<1024, 256>>>(states.p, states.count, 0.3f);
    Device<unsigned short> history(static_cast<size_t>(shape.history_elements()) * slots * layers);
    measure::fill_bf16<<<1024, 256>>>(history.p, history.count, 0.5f);
    const int stride = (shape.columns() + 7) / 8 * 8;
    Device<unsigned short> rows(static_cast<size_t>(stride) * c.sequences * c.rows);
    measure::fill_bf16<<<256, 256>>>(rows.p, rows.count, 1.5f);
    Device<unsigned short> out(static_cast<size_t>(shape.value_heads) * 128 * c.sequences * c.rows);
    Device<float> params(static_cast<size_t>(shape.channels()) * 4 + 1024);
    measure::fill_floats<<<64, 256>>>(params.p, params.count, 0.5f);
    std::vector<SequenceRows> sequences;
    std::vector<int> state_out;
    std::vector<StateUpdates> added;  // all rows before were accepted, and all are put off
    for (int i = 0; i < c.sequences; ++i) {
      const int most = c.rows > 1 + gdn::kMostUpdates ? 0 : c.rows - 1;
      added.push_back({i * c.rows, i * c.rows + 1, most, most > 0 ? 1 : 0});
      sequences.push_back({i * c.rows, c.rows, 100 + i, i * c.rows});
      for (int j = 0; j < c.rows; ++j) state_out.push_back(i * c.rows + j);
    }
    Device<SequenceRows> table(sequences);
    Device<int> live(std::vector<int>{c.sequences});
    Device<int> targets(state_out);
    Device<StateUpdates> updates(added);
    gdn::DeltaArgs a{};
    a.shape = shape;
    a.updates = updates.p;
    a.sequences = table.p;
    a.live = live.p;
    a.state_out = targets.p;
    a.state_out_stride = c.rows;
    a.rows = rows.p;
    a.conv = params.p;
    a.a_log = params.p;
    a.dt_bias = params.p + 256;
    a.norm = params.p + 512;
    a.out = out.p;
    a.row_stride = stride;
    a.out_stride = shape.value_heads * 128;
    a.state_stride = floats;
    a.history_stride = shape.history_elements();
    a.norm_eps = 1e-6f;
    for (const RecurrentEntry& e : recurrent_entries()) {
      if (e.tile.rows < c.rows || (c.rows == 1 && e.tile.rows > 1)) continue;
      const double written = e.tile.updates && added[0].put_off != 0 ? 1 + 0.09 * (c.rows - 1) : c.rows;
      const double bytes = static_cast<double>(floats) * 4 * c.sequences * (1 + written);
      double us[2];
      for (int settled = 0; settled < 2; ++settled) {
        a.settled = settled;
        us[settled] = measure::graph_us(layers, [&](cudaStream_t s) {
          for (int i = 0; i < layers; ++i) {
            gdn::DeltaArgs own = a;
            own.states = states.p + static_cast<long long>(i) * floats * slots;
            own.history = history.p + static_cast<long long>(i) * shape.history_elements() * slots;
            run(e, own, c.sequences, s);
          }
        });
      }
      std::printf(
          "recurrence %2d heads, %3d sequences x %d rows  %-36s %7.2f "
          "us, early %7.2f us  %.2f TB/s\n",
          c.heads, c.sequences, c.rows, e.name, us[0], us[1], bytes / us[1] * 1e-6);
    }
  }
}

// ---- delta rule in chunks

struct ChunkEntry {
  const char* name;
  gdn::ChunkTile tile;
  void (*prepare)(gdn::ChunkArgs);
  void (*scan)(gdn::ChunkArgs);
  void (*scale)(gdn::ChunkArgs);
  void (*beside)(gdn::ChunkArgs);
};
template <int... V>
ChunkEntry chunk(const char* name) {
  using Tile = gdn::ChunkTileOf<V...>;
  if constexpr (Tile::value.wgmma) {
    return {name,
            Tile::value,
            gdn::delta_prepare<Tile>,
            gdn::delta_scan_wgmma<Tile>,
            gdn::delta_gate<Tile>,
            gdn::delta_prepare<Tile, true>};
  } else {
    return {name, Tile::value, gdn::delta_prepare<Tile>, gdn::delta_scan<Tile>, gdn::delta_scale<Tile>, nullptr};
  }
}
#define CHUNK(...) chunk<__VA_ARGS__>("chunk {" #__VA_ARGS__ "}")
std::vector<ChunkEntry> chunk_entries() {
  return {CHUNK(128, 128, 64, 64, 0, 1, 0, 1), CHUNK(128, 128, 64, 32, 1, 1, 0), CHUNK(128, 128, 64, 32, 0, 1, 0),
          CHUNK(128, 128, 32, 32, 0, 1, 0),    CHUNK(128, 128, 32, 64, 0, 1, 0), CHUNK(128, 128, 32, 16, 1, 0, 0)};
}
constexpr int kPrepare = 1, kScan = 2, kScale = 4;
int sms() {
  int count = 0;
  CUDA_CHECK(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, 0));
  return count;
}
// A part by itself has nobody beside it. `flags` of the arguments: for the scan beside prepare.
void run(const ChunkEntry& e, const gdn::ChunkArgs& given, int chunks, int sequences, int most_rows, int what,
         cudaStream_t stream) {
  gdn::ChunkArgs args = given;
  const gdn::DeltaShape& shape = args.delta.shape;
  args.count = chunks;
  const bool both = (what & kPrepare) && (what & kScan);
  args.kept = both ? gdn::beside_sms(e.tile, shape, chunks, sequences, most_rows, sms()) : 0;
  if (args.kept == 0) args.flags = nullptr;
  const auto one = [&](int bit, void (*kernel)(gdn::ChunkArgs), const gdn::ChunkLaunch& l) {
    if (what & bit) launch(kernel, dim3(l.grid_x, l.grid_y), l.threads, l.shared_bytes, stream, args);
  };
  if (args.kept > 0) {
    one(kPrepare, e.beside, gdn::beside_launch(e.tile, sms()));
  } else {
    one(kPrepare, e.prepare, gdn::prepare_launch(e.tile, shape, chunks));
  }
  one(kScan, e.scan, gdn::scan_launch(e.tile, shape, sequences));
  one(kScale, e.scale, gdn::scale_launch(e.tile, shape, chunks));
}

void check_chunks() {
  unsigned seed = 300;
  for (const ChunkEntry& e : chunk_entries()) {
    for (const bool rounded : {true, false}) {
      const DeltaProblem p = mixers::make_delta(
          {2, 4, e.tile.key_dim, e.tile.value_dim}, e.tile.float32,
          {{700, 5, 0, {0}}, {64, 9, 1, {2}}, {300, 0, 3, {3}}, {0, 0, 0, {}}, {2, 4, 4, {4}}}, 6, ++seed, rounded);
      DeltaBuffers b(p);
      gdn::ChunkArgs a{};
      a.delta = p.args();
      b.set(&a.delta);
      const Chunks chunks(p.sequences, p.live, e.tile.chunk);
      const int n = static_cast<int>(chunks.places.size());
      Device<gdn::ChunkPlace> places(chunks.places);
      Device<int> first(chunks.first);
      a.chunks = places.p;
      a.first_chunk = first.p;
      a.at = gdn::chunk_space(e.tile, p.shape, n, p.rows);
      Device<unsigned char> space(static_cast<size_t>(a.at.total));
      space.poison();
      a.space = space.p;
      Device<int> flags(std::vector<int>(static_cast<size_t>(gdn::chunk_flags(e.tile, p.shape, n)) + 1, 0));
      a.flags = flags.p;
      run(e, a, n, p.live, 700, kPrepare | kScan | kScale, nullptr);
      CUDA_CHECK(cudaDeviceSynchronize());
      double error = -1, state = -1;
      const std::string text =
          mixers::compare_delta(p, b.out.get().data(), b.states.get().data(), b.history.get().data(),
                                rounded ? 4e-3 : 1e-2, rounded ? 1e-4 : 1e-2, &error, &state);
      verdict((std::string(e.name) + (rounded ? " q, k in bf16" : " q, k exact")).c_str(), text, error, state);
    }
  }
}

void time_chunks() {
  for (const int heads : {32, 64}) {
    for (const int tokens : {8192, 2048}) {
      const gdn::DeltaShape shape{16, heads, 128, 128};
      const int layers = 4;
      Device<float> states(static_cast<size_t>(shape.state_floats()) * layers);
      measure::fill_floats<<<1024, 256>>>(states.p, states.count, 0.3f);
      Device<unsigned short> history(static_cast<size_t>(shape.history_elements()) * layers);
      measure::fill_bf16<<<1024, 256>>>(history.p, history.count, 0.5f);
      const int stride = (shape.columns() + 7) / 8 * 8;
      Device<unsigned short> rows(static_cast<size_t>(stride) * tokens);
      measure::fill_bf16<<<1024, 256>>>(rows.p, rows.count, 1.5f);
      Device<unsigned short> out(static_cast<size_t>(heads) * 128 * tokens);
      Device<float> params(static_cast<size_t>(shape.channels()) * 4 + 1024);
      measure::fill_floats<<<64, 256>>>(params.p, params.count, 0.5f);
      Device<SequenceRows> table(std::vector<SequenceRows>{{0, tokens, 100, 0}});
      Device<int> live(std::vector<int>{1});
      Device<int> targets(std::vector<int>{0});
      gdn::ChunkArgs a{};
      a.delta.shape = shape;
      a.delta.sequences = table.p;
      a.delta.live = live.p;
      a.delta.state_out = targets.p;
      a.delta.state_out_stride = 1;
      a.delta.rows = rows.p;
      a.delta.states = states.p;
      a.delta.history = history.p;
      a.delta.conv = params.p;
      a.delta.a_log = params.p;
      a.delta.dt_bias = params.p + 256;
      a.delta.norm = params.p + 512;
      a.delta.out = out.p;
      a.delta.row_stride = stride;
      a.delta.out_stride = heads * 128;
      a.delta.state_stride = shape.state_floats();
      a.delta.history_stride = shape.history_elements();
      a.delta.norm_eps = 1e-6f;
      a.delta.settled = 1;
      for (const ChunkEntry& e : chunk_entries()) {
        const Chunks chunks({{0, tokens, 100, 0}}, 1, e.tile.chunk);
        const int n = static_cast<int>(chunks.places.size());
        Device<gdn::ChunkPlace> places(chunks.places);
        Device<int> first(chunks.first);
        a.chunks = places.p;
        a.first_chunk = first.p;
        a.at = gdn::chunk_space(e.tile, shape, n, tokens);
        Device<unsigned char> space(static_cast<size_t>(a.at.total));
        a.space = space.p;
        Device<int> flags(std::vector<int>(static_cast<size_t>(gdn::chunk_flags(e.tile, shape, n)) + 1, 0));
        a.flags = flags.p;
        run(e, a, n, 1, tokens, kPrepare | kScan | kScale, nullptr);
        CUDA_CHECK(cudaDeviceSynchronize());
        // The same bits beside each other, in every run, as one after the other.
        const auto bits = [&](const std::vector<int>& of) {
          measure::fill_floats<<<1024, 256>>>(states.p, states.count, 0.3f);
          measure::fill_bf16<<<1024, 256>>>(history.p, history.count, 0.5f);
          for (const int part : of) run(e, a, n, 1, tokens, part, nullptr);
          CUDA_CHECK(cudaDeviceSynchronize());
          return measure::bits_of(out);
        };
        const unsigned long long want = e.beside != nullptr ? bits({kPrepare, kScan, kScale}) : 0;
        bool same = true;
        for (int i = 0; e.beside != nullptr && i < 6; ++i) same &= bits({kPrepare | kScan | kScale}) == want;
        if (!same) verdict(e.name, "other bits", -1, -1);
        double us[5];
        const int parts[] = {kPrepare, kScan, kScale, kPrepare | kScan | kScale, kPrepare | kScan};
        for (int i = 0; i < 5; ++i) {
          us[i] = measure::graph_us(layers, [&](cudaStream_t s) {
            for (int j = 0; j < layers; ++j) {
              gdn::ChunkArgs own = a;
              own.delta.states = states.p + j * shape.state_floats();
              own.delta.history = history.p + j * shape.history_elements();
              run(e, own, n, 1, tokens, parts[i], s);
            }
          });
        }
        std::printf(
            "delta rule %2d heads, %4d tokens  %-28s %7.1f us: prepare "
            "%6.1f, scan %6.1f, scale %6.1f; prepare and scan %6.1f\n",
            heads, tokens, e.name, us[3], us[0], us[1], us[2], us[4]);
      }
    }
  }
}

// ---- attention, few rows

struct DecodeEntry {
  const char* name;
  attn::DecodeTile tile;
  void (*kernel)(attn::AttentionArgs);
  void (*combine)(attn::AttentionArgs);
};
template <int... V>
DecodeEntry decode(const char* name) {
  using Tile = attn::DecodeTileOf<V...>;
  return {name, Tile::value, attn::attention_decode<Tile>, attn::attention_combine<Tile::value.head_dim>};
}
#define DECODE(...) decode<__VA_ARGS__>("decode {" #__VA_ARGS__ "}")
std::vector<DecodeEntry> decode_entries() {
  return {
      DECODE(256, 64, 1, 4, 2, 1, 3, 0, 1, 1), DECODE(256, 64, 1, 2, 2, 1, 3, 0, 1, 2),
      DECODE(256, 64, 1, 2, 2, 2, 3, 0, 1, 1), DECODE(256, 64, 2, 4, 1, 1, 3, 0, 1, 1),
      DECODE(256, 64, 4, 2, 1, 1, 3, 0, 1, 1), DECODE(256, 64, 2, 2, 2, 2, 3, 0, 1, 1),
      DECODE(256, 64, 1, 4, 2, 2, 3, 1, 1, 1), DECODE(256, 64, 1, 2, 2, 2, 3, 1, 1, 2),
      DECODE(256, 64, 1, 8, 1, 1, 3, 1, 1, 1), DECODE(256, 64, 1, 4, 1, 2, 3, 1, 1, 1),
      DECODE(256, 64, 2, 4, 1, 2, 3, 1, 1, 1), DECODE(256, 64, 4, 1, 2, 2, 4, 1, 1, 1),
      DECODE(256, 64, 1, 2, 2, 1, 2, 0, 0, 1), DECODE(256, 64, 1, 2, 2, 2, 2, 1, 0, 1),
  };
}
void run(const DecodeEntry& e, const attn::AttentionArgs& args, int sequences, cudaStream_t stream) {
  const attn::DecodeLaunch l =
      attn::decode_launch(e.tile, args.shape, args.splits, args.most_rows, sequences, std::max(args.span, 1));
  launch(e.kernel, dim3(l.grid_x, l.grid_y, l.grid_z), l.threads, l.shared_bytes, stream, args);
  const attn::DecodeLaunch c = attn::combine_launch(args.shape, args.most_rows, sequences);
  launch(e.combine, dim3(c.grid_x, c.grid_y, c.grid_z), c.threads, 0, stream, args);
}

using NarrowEntry = Entry<attn::NarrowTile, attn::AttentionArgs>;
template <int... V>
NarrowEntry narrow(const char* name) {
  using Tile = attn::NarrowTileOf<V...>;
  return {name, Tile::value, attn::attention_narrow<Tile>};
}
#define NARROW(...) narrow<__VA_ARGS__>("narrow {" #__VA_ARGS__ "}")
std::vector<NarrowEntry> narrow_entries() {
  return {NARROW(256, 64, 4, 1, 3, 0), NARROW(256, 64, 8, 1, 3, 0), NARROW(256, 64, 4, 1, 6, 1)};
}
// One sequence: all CTAs have room at once. `splits`: narrow_most_splits().
void run(const NarrowEntry& e, const attn::AttentionArgs& args, cudaStream_t stream) {
  const attn::DecodeLaunch l = attn::narrow_launch(e.tile, args.shape, args.parts, args.splits, args.most_rows, 1);
  launch(e.kernel, dim3(l.grid_x, l.grid_y, l.grid_z), l.threads, l.shared_bytes, stream, args);
}

void check_decode() {
  unsigned seed = 200;
  for (const DecodeEntry& e : decode_entries()) {
    for (const int group : {8, 16}) {
      const AttentionProblem p = mixers::make_attention(
          {2 * group, 2, e.tile.head_dim, true}, e.tile.rotary_dim, 64, e.tile.fp8,
          {{1, 3000, 0, {}}, {1, 0, 0, {}}, {0, 0, 0, {}}, {5, 126, 0, {}}, {16, 500, 0, {}}, {3, 0, 0, {}}}, ++seed);
      AttentionBuffers b(p);
      attn::AttentionArgs a = p.args();
      b.set(p, &a);
      run(e, a, p.live + 2, nullptr);
      CUDA_CHECK(cudaDeviceSynchronize());
      double error = -1;
      const std::string text = mixers::compare_attention(p, b.out.get().data(), b.cache.get().data(), 6e-3, &error);
      verdict((std::string(e.name) + " group " + std::to_string(group)).c_str(), text, error);
    }
  }
}

void check_narrow() {
  unsigned seed = 250;
  Device<int> one(std::vector<int>{1});
  for (const NarrowEntry& e : narrow_entries()) {
    for (const int group : {8, 2, 16}) {
      const int rows = std::max(1, 8 / group);
      const AttentionProblem p = mixers::make_attention(
          {2 * group, 2, e.tile.head_dim, true}, e.tile.rotary_dim, 64, e.tile.fp8,
          {{rows, 5000, 0, {}}, {1, 0, 0, {}}, {rows, 126, 0, {}}, {rows, 1024 - rows, 0, {}}}, ++seed);
      AttentionBuffers b(p);
      attn::AttentionArgs a = p.args();
      b.set(p, &a);
      a.splits = attn::narrow_most_splits(p.longest);
      a.parts = attn::narrow_parts(p.shape, rows);
      a.live = one.p;
      for (int i = 0; i < p.live; ++i, ++a.sequences, a.pages += a.page_table_stride) run(e, a, nullptr);
      CUDA_CHECK(cudaDeviceSynchronize());
      double error = -1;
      const std::string text = mixers::compare_attention(p, b.out.get().data(), b.cache.get().data(), 6e-3, &error);
      verdict((std::string(e.name) + " group " + std::to_string(group)).c_str(), text, error);
    }
  }
}

void time_decode() {
  struct Case {
    int heads, sequences, context, rows;
  };
  for (const Case c : {Case{16, 1, 1024, 1},
                       {16, 1, 2048, 1},
                       {16, 1, 8192, 1},
                       {16, 1, 32768, 1},
                       {32, 1, 1024, 1},
                       {32, 1, 2048, 1},
                       {32, 1, 8192, 1},
                       {32, 1, 32768, 1},
                       {16, 1, 131072, 1},
                       {16, 64, 2048, 1},
                       {16, 256, 2048, 1},
                       {16, 1, 32768, 4}}) {
    for (const bool fp8 : {false, true}) {
      const attn::AttentionShape shape{c.heads, 2, 256, true};
      const int page = 64;
      const int pages = (c.context + page - 1) / page;
      const long long page_bytes = 2LL * 2 * page * 256 * (fp8 ? 1 : 2);
      const long long layer_bytes = page_bytes * pages * c.sequences;
      const int layers = static_cast<int>(std::clamp<long long>(600000000 / layer_bytes, 4, 40));
      Device<unsigned char> cache(static_cast<size_t>(layer_bytes * layers));
      if (fp8) {
        measure::fill_e4m3<<<1024, 256>>>(cache.p, cache.count);
      } else {
        measure::fill_bf16<<<1024, 256>>>(reinterpret_cast<unsigned short*>(cache.p), cache.count / 2, 1.5f);
      }
      std::vector<SequenceRows> sequences;
      std::vector<int> table;
      for (int i = 0; i < c.sequences; ++i) {
        sequences.push_back({i * c.rows, c.rows, c.context - c.rows, 0});
        for (int j = 0; j < pages; ++j) table.push_back(i * pages + (j * 37 + 11) % pages);
      }
      Device<SequenceRows> sequence_table(sequences);
      Device<int> live(std::vector<int>{c.sequences});
      Device<int> page_table(table);
      Device<unsigned short> rows(static_cast<size_t>(shape.columns()) * c.sequences * c.rows);
      measure::fill_bf16<<<256, 256>>>(rows.p, rows.count, 1.5f);
      Device<float> params(1024);
      measure::fill_floats<<<64, 256>>>(params.p, params.count, 0.5f);
      Device<float> scales(std::vector<float>{0.1f, 0.1f});
      attn::AttentionArgs a{};
      a.shape = shape;
      a.sequences = sequence_table.p;
      a.live = live.p;
      a.pages = page_table.p;
      a.rows = rows.p;
      a.q_norm = a.k_norm = params.p;
      a.frequencies = params.p + 512;
      a.cache_scales = scales.p;
      a.splits = attn::most_splits(c.context);
      a.most_rows = c.rows;
      Device<float> partial(static_cast<size_t>(attn::partial_floats(shape, attn::kMostSplits, c.rows, c.sequences)));
      Device<float> sums(partial.count / 128);
      a.partial = partial.p;
      a.partial_sums = sums.p;
      Device<unsigned short> out(static_cast<size_t>(c.heads) * 256 * c.sequences * c.rows);
      a.out = out.p;
      a.row_stride = shape.columns();
      a.out_stride = c.heads * 256;
      a.page_bytes = page_bytes;
      a.page_shift = 6;
      a.page_table_stride = pages;
      a.scale = 1.0f / 16;
      a.norm_eps = 1e-6f;
      for (const DecodeEntry& e : decode_entries()) {
        if (e.tile.fp8 != fp8 || (c.rows == 1 && e.tile.row_tiles > 1)) continue;
        // Splits of a CTA one after the other: the same bits, in every run.
        const int most = c.sequences > 1 ? attn::most_span(e.tile, c.context) : 1;
        unsigned long long bits = 0;
        for (a.span = 1; a.span <= std::min(most, 8); a.span *= 2) {
          double us[2];
          for (int settled = 0; settled < 2; ++settled) {
            a.settled = settled;
            us[settled] = measure::graph_us(layers, [&](cudaStream_t s) {
              for (int i = 0; i < layers; ++i) {
                attn::AttentionArgs own = a;
                own.cache = cache.p + i * layer_bytes;
                run(e, own, c.sequences, s);
              }
            });
          }
          bool same = true;
          for (int i = 0; i < 8; ++i) {
            attn::AttentionArgs own = a;
            own.cache = cache.p;
            out.poison();
            run(e, own, c.sequences, nullptr);
            const unsigned long long now = measure::bits_of(out);
            if (i == 0 && a.span == 1) bits = now;
            same = same && now == bits;
          }
          if (!same) ++g_failed;
          std::printf(
              "attention %2d heads, %3d sequences x %d rows of %6d %s  "
              "%-32s span %d %7.2f us, early %7.2f us  %.2f "
              "TB/s%s\n",
              c.heads, c.sequences, c.rows, c.context, fp8 ? "e4m3" : "bf16", e.name, a.span, us[0], us[1],
              static_cast<double>(layer_bytes) / us[1] * 1e-6, same ? "" : " FAIL: other bits");
        }
        a.span = 1;
      }
      a.splits = attn::narrow_most_splits(c.context);
      Device<unsigned> words(static_cast<size_t>(attn::narrow_words(shape, a.splits, c.rows, 1)));
      words.poison();
      a.words = words.p;
      a.parts = attn::narrow_parts(shape, c.rows);
      for (const NarrowEntry& e : narrow_entries()) {
        if (e.tile.fp8 != fp8 || c.sequences > 1 || a.parts == 0) continue;
        double us[2];
        for (int settled = 0; settled < 2; ++settled) {
          a.settled = settled;
          us[settled] = measure::graph_us(layers, [&](cudaStream_t s) {
            for (int i = 0; i < layers; ++i) {
              attn::AttentionArgs own = a;
              own.cache = cache.p + i * layer_bytes;
              run(e, own, s);
            }
          });
        }
        unsigned long long bits[8];
        for (unsigned long long& each : bits) {
          attn::AttentionArgs own = a;
          own.cache = cache.p;
          out.poison();
          run(e, own, nullptr);
          each = measure::bits_of(out);
        }
        const bool same = std::count(bits, bits + 8, bits[0]) == 8;
        if (!same) ++g_failed;
        std::printf("attention %2d heads, one row of %6d %s  %-32s %7.2f us, early %7.2f us  %.2f TB/s%s\n", c.heads,
                    c.context, fp8 ? "e4m3" : "bf16", e.name, us[0], us[1],
                    static_cast<double>(layer_bytes) / us[1] * 1e-6, same ? "" : " FAIL: other bits");
      }
    }
  }
}

// ---- attention, many rows

struct PrefillEntry {
  const char* name;
  attn::PrefillTile tile;
  void (*prepare)(attn::PrefillArgs);
  void (*kernel)(attn::PrefillArgs);
};
template <int... V>
PrefillEntry prefill(const char* name) {
  using Tile = attn::PrefillTileOf<V...>;
  constexpr attn::PrefillTile t = Tile::value;
  if constexpr (t.wgmma) {
    return {name, t, attn::attention_prepare<t.head_dim, t.rotary_dim, t.fp8>, attn::attention_prefill_wgmma<Tile>};
  } else {
    return {name, t, attn::attention_prepare<t.head_dim, t.rotary_dim, t.fp8>, attn::attention_prefill_mma<Tile>};
  }
}
#define PREFILL(...) prefill<__VA_ARGS__>("prefill {" #__VA_ARGS__ "}")
std::vector<PrefillEntry> prefill_entries() {
  return {PREFILL(256, 64, 8, 64, 2, 0, 1), PREFILL(256, 64, 8, 32, 2, 0, 0), PREFILL(256, 64, 8, 32, 3, 1, 0),
          PREFILL(256, 64, 4, 32, 2, 1, 0)};
}
std::vector<attn::RowBlock> row_blocks(const std::vector<SequenceRows>& sequences, int live, int group, int rows) {
  std::vector<attn::RowBlock> blocks;
  for (int i = 0; i < live; ++i)
    for (int j = 0; j < sequences[static_cast<size_t>(i)].count * group; j += rows) blocks.push_back({i, j});
  const auto keys = [&](const attn::RowBlock& b) {
    return sequences[static_cast<size_t>(b.sequence)].position + b.first / group;
  };
  std::stable_sort(blocks.begin(), blocks.end(), [&](const auto& x, const auto& y) { return keys(x) > keys(y); });
  return blocks;
}
void run(const PrefillEntry& e, const attn::PrefillArgs& args, int longest, int sequences, int what,
         cudaStream_t stream) {
  const attn::PrefillLaunch p = attn::prefill_prepare_launch(longest, sequences);
  if (what & 1) launch(e.prepare, dim3(p.grid_x, p.grid_y), p.threads, 0, stream, args);
  const attn::PrefillLaunch l = attn::prefill_launch(e.tile, args.attention.shape, args.block_count, sms());
  if (what & 2) launch(e.kernel, dim3(l.grid_x, l.grid_y), l.threads, l.shared_bytes, stream, args);
}

void check_prefill() {
  unsigned seed = 400;
  for (const PrefillEntry& e : prefill_entries()) {
    for (const int group : {8, 16}) {
      const AttentionProblem p = mixers::make_attention(
          {2 * group, 2, e.tile.head_dim, true}, e.tile.rotary_dim, group == 8 ? 64 : 16, e.tile.fp8,
          {{300, 0, 0, {}}, {17, 123, 0, {}}, {0, 0, 0, {}}, {1, 5, 0, {}}, {129, 300, 0, {}}}, ++seed);
      AttentionBuffers b(p);
      attn::PrefillArgs a{};
      a.attention = p.args();
      b.set(p, &a.attention);
      std::vector<attn::RowBlock> blocks = row_blocks(p.sequences, p.live, group, e.tile.rows());
      blocks.push_back({-1, 0});
      Device<attn::RowBlock> table(blocks);
      Device<unsigned short> queries(static_cast<size_t>(attn::query_bytes(p.shape, p.rows, p.live) / 2));
      queries.poison();
      a.blocks = table.p;
      a.block_count = static_cast<int>(blocks.size());
      a.queries = queries.p;
      a.query_rows = attn::query_rows(p.rows, p.live, group);
      run(e, a, p.most_rows, p.live + 2, 3, nullptr);
      CUDA_CHECK(cudaDeviceSynchronize());
      double error = -1;
      const std::string text = mixers::compare_attention(p, b.out.get().data(), b.cache.get().data(), 6e-3, &error);
      verdict((std::string(e.name) + " group " + std::to_string(group)).c_str(), text, error);
    }
  }
}

void time_prefill() {
  struct Case {
    int heads, tokens, position;
  };
  for (const Case c : {Case{16, 8192, 0}, {32, 8192, 0}, {16, 2048, 30720}, {16, 2048, 0}, {16, 512, 0}}) {
    const attn::AttentionShape shape{c.heads, 2, 256, true};
    const int pages = (c.tokens + c.position + 63) / 64;
    Device<unsigned short> rows(static_cast<size_t>(shape.columns()) * c.tokens);
    measure::fill_bf16<<<1024, 256>>>(rows.p, rows.count, 1.5f);
    std::vector<int> table;
    for (int j = 0; j < pages; ++j) table.push_back((j * 37 + 11) % pages);
    const std::vector<SequenceRows> sequences{{0, c.tokens, c.position, 0}};
    Device<SequenceRows> sequence_table(sequences);
    Device<int> live(std::vector<int>{1});
    Device<int> page_table(table);
    Device<float> params(1024);
    measure::fill_floats<<<64, 256>>>(params.p, params.count, 0.5f);
    Device<float> scales(std::vector<float>{0.1f, 0.1f});
    Device<unsigned short> out(static_cast<size_t>(c.heads) * 256 * c.tokens);
    Device<unsigned short> queries(static_cast<size_t>(attn::query_bytes(shape, c.tokens, 1) / 2));
    const double flops = 4.0 * 256 * c.heads * c.tokens * (c.position + 0.5 * c.tokens);
    for (const PrefillEntry& e : prefill_entries()) {
      const long long page_bytes = 2LL * 2 * 64 * 256 * (e.tile.fp8 ? 1 : 2);
      Device<unsigned char> cache(static_cast<size_t>(page_bytes * pages));
      if (e.tile.fp8) {
        measure::fill_e4m3<<<1024, 256>>>(cache.p, cache.count);
      } else {
        measure::fill_bf16<<<1024, 256>>>(reinterpret_cast<unsigned short*>(cache.p), cache.count / 2, 1.5f);
      }
      const std::vector<attn::RowBlock> blocks = row_blocks(sequences, 1, shape.group(), e.tile.rows());
      Device<attn::RowBlock> block_table(blocks);
      attn::PrefillArgs a{};
      a.attention.shape = shape;
      a.attention.sequences = sequence_table.p;
      a.attention.live = live.p;
      a.attention.pages = page_table.p;
      a.attention.rows = rows.p;
      a.attention.q_norm = a.attention.k_norm = params.p;
      a.attention.frequencies = params.p + 512;
      a.attention.cache_scales = scales.p;
      a.attention.cache = cache.p;
      a.attention.out = out.p;
      a.attention.row_stride = shape.columns();
      a.attention.out_stride = c.heads * 256;
      a.attention.page_bytes = page_bytes;
      a.attention.page_shift = 6;
      a.attention.page_table_stride = pages;
      a.attention.scale = 1.0f / 16;
      a.attention.norm_eps = 1e-6f;
      a.attention.settled = 1;
      a.blocks = block_table.p;
      a.block_count = static_cast<int>(blocks.size());
      a.queries = queries.p;
      a.query_rows = attn::query_rows(c.tokens, 1, shape.group());
      double us[2];
      for (int what = 1; what <= 2; ++what) {
        us[what - 1] = measure::graph_us(4, [&](cudaStream_t s) {
          for (int i = 0; i < 4; ++i) run(e, a, c.tokens, 1, what, s);
        });
      }
      unsigned long long bits[2];
      for (unsigned long long& b : bits) {
        out.poison();
        run(e, a, c.tokens, 1, 3, nullptr);
        b = measure::bits_of(out);
      }
      if (bits[0] != bits[1]) ++g_failed;
      std::printf(
          "prefill %2d heads, %d tokens at %5d  %-32s %8.1f us, %.0f "
          "TFLOP/s; prepare %.1f us; bits %016llx%s\n",
          c.heads, c.tokens, c.position, e.name, us[1], flops / us[1] * 1e-6, us[0], bits[0],
          bits[0] == bits[1] ? "" : " FAIL: others in a second run");
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, 1 << 16);
  const auto asked = [&](const char* what) {
    for (int i = 1; i < argc; ++i)
      if (std::strcmp(argv[i], what) == 0) return true;
    return argc == 1;
  };
  if (asked("check") || asked("check-recurrent")) {
    check_recurrent();
    check_recurrent_bits();
  }
  if (asked("check")) {
    check_chunks();
    check_decode();
    check_narrow();
    check_prefill();
    std::printf(g_failed == 0 ? "all checks passed\n" : "%d checks FAILED\n", g_failed);
  }
  if (asked("time") || asked("ceilings")) measure::time_ceilings();
  if (asked("time") || asked("recurrent")) time_recurrent();
  if (asked("time") || asked("chunks")) time_chunks();
  if (asked("time") || asked("decode")) time_decode();
  if (asked("time") || asked("prefill")) time_prefill();
  return g_failed == 0 ? 0 : 1;
}
