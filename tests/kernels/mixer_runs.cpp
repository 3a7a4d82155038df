#include "kernels/mixer_runs.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include <fmt/format.h>

namespace fourfold::mixers {
namespace {

using executor::Device;
using executor::Options;

template <typename T>
T* upload(Device& device, const std::vector<T>& values, const char* name) {
  T* p = device.alloc<T>(values.size(), name);
  std::copy(values.begin(), values.end(), p);
  return p;
}

struct Slots {
  float* states;
  unsigned char* history;
  unsigned short* out;
};

gdn::DeltaArgs upload_delta(Device& device, const DeltaProblem& p, Slots* slots) {
  gdn::DeltaArgs a = p.args();
  a.sequences = device.constant(p.sequences, "sequences");
  a.live = device.constant(std::vector<int>{p.live}, "live");
  a.updates = device.constant(std::vector<StateUpdates>(p.sequences.size()), "updates");
  a.state_out = device.constant(p.state_out, "state_out");
  unsigned char* rows = upload(device, p.row_bytes, "rows");
  device.make_constant(rows);
  device.produced(rows);
  a.rows = rows;
  a.conv = device.constant(p.conv, "conv");
  a.a_log = device.constant(p.a_log, "a_log");
  a.dt_bias = device.constant(p.dt_bias, "dt_bias");
  a.norm = device.constant(p.norm, "norm");
  a.states = slots->states = upload(device, p.states, "states");
  a.history = slots->history = upload(device, p.history_bytes, "history");
  a.out = slots->out = device.alloc<unsigned short>(static_cast<size_t>(p.rows * p.out_stride), "out");
  return a;
}

attn::AttentionArgs upload_attention(Device& device, const AttentionProblem& p) {
  attn::AttentionArgs a = p.args();
  a.sequences = device.constant(p.sequences, "sequences");
  a.live = device.constant(std::vector<int>{p.live}, "live");
  a.pages = device.constant(p.pages, "pages");
  unsigned short* rows = upload(device, p.row_values, "rows");
  device.make_constant(rows);
  device.produced(rows);
  a.rows = rows;
  if (!p.q_norm.empty()) {
    a.q_norm = device.constant(p.q_norm, "q_norm");
    a.k_norm = device.constant(p.k_norm, "k_norm");
  }
  a.frequencies = p.frequencies.empty() ? nullptr : device.constant(p.frequencies, "frequencies");
  a.cache_scales = device.constant(std::vector<float>{p.cache_scales[0], p.cache_scales[1]}, "cache_scales");
  a.cache = upload(device, p.cache, "cache");
  a.out = device.alloc<unsigned short>(static_cast<size_t>(p.rows * p.out_stride), "out");
  return a;
}

}  // namespace

std::string run_recurrent(const RecurrentKernel& kernel, const DeltaProblem& p, const Options& options,
                          std::set<executor::SeenSite>* seen) {
  try {
    Device device(options);
    Slots slots{};
    const gdn::DeltaArgs args = upload_delta(device, p, &slots);
    const gdn::RecurrentLaunch launch = gdn::recurrent_launch(kernel.tile, p.shape, p.live + 2);
    executor::LaunchConfig config = {
        kernel.name, {launch.grid_x, launch.grid_y}, static_cast<int>(launch.threads), launch.shared_bytes};
    config.cluster = kernel.tile.split;
    device.launch(config, [&] { kernel.run(args); });
    if (seen != nullptr) *seen = device.seen();
    return compare_delta(p, slots.out, slots.states, slots.history, 3e-3, 2e-6);
  } catch (const executor::Violation& v) {
    return v.what();
  }
}

std::string run_updates(const RecurrentKernel& kernel, const DeltaProblem& p, int accepted, bool made,
                        const Options& options, std::set<executor::SeenSite>* seen) {
  try {
    Device device(options);
    const size_t history_bytes = p.history_bytes.size(), outputs = static_cast<size_t>(p.rows * p.out_stride);
    Slots whole{}, off{};
    gdn::DeltaArgs args = upload_delta(device, p, &whole), off_args = args;
    off_args.states = off.states = upload(device, p.states, "states, put off");
    off_args.history = off.history = upload(device, p.history_bytes, "history of states that are put off");
    off_args.out = off.out = device.alloc<unsigned short>(outputs, "out, put off");
    const auto slot = [&](size_t sequence, int row) {
      return p.state_out[sequence * static_cast<size_t>(p.state_out_stride) + static_cast<size_t>(row)];
    };
    const auto live = static_cast<size_t>(p.live);
    const auto run = [&](const gdn::DeltaArgs& a) {
      const gdn::RecurrentLaunch l = gdn::recurrent_launch(kernel.tile, p.shape, p.live + 2);
      executor::LaunchConfig config = {kernel.name, {l.grid_x, l.grid_y}, static_cast<int>(l.threads), l.shared_bytes};
      config.cluster = kernel.tile.split;
      device.produced(a.rows);
      device.launch(config, [&] { kernel.run(a); });
    };
    // Empty where outputs, inputs of the convolution and the states of these slots have the same bits.
    const auto compare = [&](const char* when, const std::vector<int>& slots) -> std::string {
      if (std::memcmp(off.out, whole.out, outputs * 2) != 0) return fmt::format("outputs differ {}", when);
      if (std::memcmp(off.history, whole.history, history_bytes) != 0) return fmt::format("inputs differ {}", when);
      for (const int s : slots) {
        const long long at = s * p.state_stride;
        if (std::memcmp(off.states + at, whole.states + at, static_cast<size_t>(p.shape.state_floats()) * 4) != 0) {
          return fmt::format("the state in slot {} differs {}", s, when);
        }
      }
      return "";
    };
    std::vector<StateUpdates> updates(p.sequences.size());
    std::vector<int> first, last, all;
    for (size_t s = 0; s < live; ++s) {
      updates[s].put_off = 1;
      first.push_back(slot(s, 0));
      last.push_back(slot(s, accepted));
      for (int row = 0; row < p.sequences[s].count; ++row) all.push_back(slot(s, row));
    }
    run(args);
    off_args.updates = device.constant(updates, "rows that put off");
    run(off_args);
    if (const std::string wrong = compare("where states are put off", first); !wrong.empty()) return wrong;
    std::vector<SequenceRows> sequences = p.sequences;
    for (size_t s = 0; s < live; ++s) {
      sequences[s].position += accepted + 1;
      sequences[s].state_in = slot(s, accepted);
      updates[s] = {slot(s, 0), slot(s, 1), made ? 0 : accepted, 0};
    }
    if (made) {
      gdn::MakeStatesArgs m{};
      m.states = off.states;
      m.state_stride = p.state_stride;
      for (size_t s = 0; s < live; ++s) m.made[s] = {slot(s, accepted), slot(s, 0), slot(s, 1), accepted};
      const gdn::MakeStatesLaunch l = gdn::make_states_launch(p.shape, 1, p.live);
      device.launch({"make states", {l.grid_x, l.grid_y, l.grid_z}, static_cast<int>(l.threads), 0},
                    [&] { kernel.make_states(m); });
      if (const std::string wrong = compare("once it is made", last); !wrong.empty()) return wrong;
    }
    args.sequences = off_args.sequences = device.constant(sequences, "sequences that go on");
    off_args.updates = device.constant(updates, "updates of rows before");
    run(args);
    run(off_args);
    if (seen != nullptr) *seen = device.seen();
    return compare("behind them", all);
  } catch (const executor::Violation& v) {
    return v.what();
  }
}

std::string run_chunks(const ChunkKernel& kernel, const DeltaProblem& p, const Options& options, double tolerance,
                       double state_tolerance, std::set<executor::SeenSite>* seen, bool beside) {
  try {
    Device device(options);
    Slots slots{};
    gdn::ChunkArgs args{};
    args.delta = upload_delta(device, p, &slots);
    std::vector<gdn::ChunkPlace> chunks;
    std::vector<int> first;
    for (int i = 0; i < p.live; ++i) {
      first.push_back(static_cast<int>(chunks.size()));
      for (int j = 0; j * kernel.tile.chunk < p.sequences[static_cast<size_t>(i)].count; ++j) chunks.push_back({i, j});
    }
    chunks.push_back({-1, 0});
    chunks.push_back({p.live, 0});  // not live: must not be looked at
    args.chunks = device.constant(chunks, "chunks");
    args.first_chunk = device.constant(first, "first_chunk");
    const int n = static_cast<int>(chunks.size());
    const int* lowered = nullptr;
    size_t flag_count = 0;
    args.at = gdn::chunk_space(kernel.tile, p.shape, n, p.rows);
    args.space = device.alloc<unsigned char>(static_cast<size_t>(args.at.total), "space");
    const auto launch = [&](const char* name, const gdn::ChunkLaunch& l, void (*run)(const gdn::ChunkArgs&)) {
      device.launch({name, {l.grid_x, l.grid_y}, static_cast<int>(l.threads), l.shared_bytes}, [&] { run(args); });
    };
    if (beside) {
      args.count = n;
      args.kept = 1;
      flag_count = static_cast<size_t>(gdn::chunk_flags(kernel.tile, p.shape, n));
      lowered = args.flags = upload(device, std::vector<int>(flag_count, 0), "flags");
      launch("prepare beside", gdn::beside_launch(kernel.tile, 2), kernel.beside);
    } else {
      launch("prepare", gdn::prepare_launch(kernel.tile, p.shape, n), kernel.prepare);
    }
    launch("scan", gdn::scan_launch(kernel.tile, p.shape, p.live), kernel.scan);
    launch("scale", gdn::scale_launch(kernel.tile, p.shape, n), kernel.scale);
    if (seen != nullptr) *seen = device.seen();
    if (std::any_of(lowered, lowered + flag_count, [](int flag) { return flag != 0; })) return "a flag is still up";
    return compare_delta(p, slots.out, slots.states, slots.history, tolerance, state_tolerance);
  } catch (const executor::Violation& v) {
    return v.what();
  }
}

std::string run_prefill(const PrefillKernel& kernel, const AttentionProblem& p, const Options& options,
                        double tolerance, std::set<executor::SeenSite>* seen) {
  try {
    Device device(options);
    attn::PrefillArgs a{};
    a.attention = upload_attention(device, p);
    std::vector<attn::RowBlock> blocks;
    for (int i = 0; i < p.live; ++i)
      for (int j = 0; j < p.sequences[static_cast<size_t>(i)].count * p.shape.group(); j += kernel.tile.rows())
        blocks.push_back({i, j});
    blocks.push_back({-1, 0});
    blocks.push_back({p.live, 0});  // not live: must not be taken
    a.blocks = device.constant(blocks, "blocks");
    a.block_count = static_cast<int>(blocks.size());
    a.queries =
        device.alloc<unsigned short>(static_cast<size_t>(attn::query_bytes(p.shape, p.rows, p.live) / 2), "queries");
    a.query_rows = attn::query_rows(p.rows, p.live, p.shape.group());
    const attn::PrefillLaunch prepare = attn::prefill_prepare_launch(p.most_rows, static_cast<int>(p.sequences.size()));
    device.launch({"prepare", {prepare.grid_x, prepare.grid_y}, static_cast<int>(prepare.threads), 0},
                  [&] { kernel.prepare(a); });
    constexpr int kSms = 2;  // so that CTAs have several blocks
    const attn::PrefillLaunch launch = attn::prefill_launch(kernel.tile, p.shape, a.block_count, kSms);
    device.launch({kernel.name, {launch.grid_x, launch.grid_y}, static_cast<int>(launch.threads), launch.shared_bytes},
                  [&] { kernel.run(a); });
    if (seen != nullptr) *seen = device.seen();
    return compare_attention(p, a.attention.out, a.attention.cache, tolerance);
  } catch (const executor::Violation& v) {
    return v.what();
  }
}

std::string run_append(const PrefillKernel& kernel, const AttentionProblem& p, const Options& options) {
  try {
    Device device(options);
    attn::PrefillArgs a{};
    // Rows of keys and values alone.
    AttentionProblem rows = p;
    const int first = p.shape.k_column(0), width = p.shape.columns() - first;
    rows.row_values.clear();
    for (size_t at = 0; at < p.row_values.size(); at += static_cast<size_t>(p.row_stride)) {
      const auto row = p.row_values.begin() + static_cast<std::ptrdiff_t>(at) + first;
      rows.row_values.insert(rows.row_values.end(), row, row + width);
    }
    a.attention = upload_attention(device, rows);
    a.attention.row_stride = width;
    a.attention.shape.heads = 0;
    const attn::PrefillLaunch launch = attn::prefill_prepare_launch(p.most_rows, static_cast<int>(p.sequences.size()));
    device.launch({"append", {launch.grid_x, launch.grid_y}, static_cast<int>(launch.threads), 0},
                  [&] { kernel.prepare(a); });
    rows.out.assign(rows.out.size(), std::nan(""));
    return compare_attention(rows, a.attention.out, a.attention.cache, 0.0);
  } catch (const executor::Violation& v) {
    return v.what();
  }
}

CacheRun run_decode(const DecodeKernel& kernel, const AttentionProblem& p, const Options& options, double tolerance,
                    std::set<executor::SeenSite>* seen, int span) {
  try {
    Device device(options);
    attn::AttentionArgs a = upload_attention(device, p);
    const size_t parts =
        static_cast<size_t>(attn::partial_floats(p.shape, a.splits, a.most_rows, static_cast<int>(p.sequences.size())));
    a.partial = device.alloc<float>(parts, "partial");
    a.partial_sums = device.alloc<float>(parts / static_cast<size_t>(p.shape.head_dim) * 2, "partial_sums");
    a.span = span;
    const attn::DecodeLaunch launch =
        attn::decode_launch(kernel.tile, p.shape, a.splits, a.most_rows, static_cast<int>(p.sequences.size()), span);
    device.launch({kernel.name,
                   {launch.grid_x, launch.grid_y, launch.grid_z},
                   static_cast<int>(launch.threads),
                   launch.shared_bytes},
                  [&] { kernel.run(a); });
    const attn::DecodeLaunch combine = attn::combine_launch(p.shape, a.most_rows, static_cast<int>(p.sequences.size()));
    device.launch({"combine", {combine.grid_x, combine.grid_y, combine.grid_z}, static_cast<int>(combine.threads), 0},
                  [&] { kernel.combine(a); });
    // A warp for each head and row gives the same bits.
    CacheRun run = {compare_attention(p, a.out, a.cache, tolerance),
                    {a.out, a.out + static_cast<size_t>(p.rows * p.out_stride)}};
    std::fill_n(a.out, run.out.size(), static_cast<unsigned short>(0xffff));  // NaN, as it was
    const attn::DecodeLaunch many =
        attn::combine_many_launch(p.shape, a.most_rows, static_cast<int>(p.sequences.size()));
    device.launch({"combine many", {many.grid_x, many.grid_y}, static_cast<int>(many.threads), 0},
                  [&] { kernel.combine_many(a); });
    if (run.error.empty()) run.error = compare_attention(p, a.out, a.cache, tolerance);
    if (run.error.empty() && !std::equal(run.out.begin(), run.out.end(), a.out)) {
      run.error = "a warp for each head and row gives other bits";
    }
    if (seen != nullptr) *seen = device.seen();
    return run;
  } catch (const executor::Violation& v) {
    return {v.what(), {}};
  }
}

CacheRun run_narrow(const NarrowKernel& kernel, const AttentionProblem& p, const Options& options, double tolerance,
                    std::set<executor::SeenSite>* seen) {
  try {
    Device device(options);
    attn::AttentionArgs a = upload_attention(device, p);
    const int sequences = static_cast<int>(p.sequences.size());
    a.splits = attn::narrow_most_splits(p.longest);
    int most_rows = 0;  // of those that are live
    for (int i = 0; i < p.live; ++i) most_rows = std::max(most_rows, p.sequences[static_cast<size_t>(i)].count);
    a.parts = attn::narrow_parts(p.shape, most_rows);
    const auto words = static_cast<size_t>(attn::narrow_words(p.shape, a.splits, a.most_rows, sequences));
    constexpr unsigned kNotThere = 0xffffffffu;
    a.words = device.alloc<unsigned>(words, "words");
    std::fill_n(a.words, words, kNotThere);
    const attn::DecodeLaunch launch =
        attn::narrow_launch(kernel.tile, p.shape, a.parts, a.splits, a.most_rows, sequences);
    executor::LaunchConfig config{kernel.name,
                                  {launch.grid_x, launch.grid_y, launch.grid_z},
                                  static_cast<int>(launch.threads),
                                  launch.shared_bytes};
    config.resident = static_cast<int>(launch.grid_x * launch.grid_y * launch.grid_z);
    device.launch(config, [&] { kernel.run(a); });
    if (std::count(a.words, a.words + words, kNotThere) != static_cast<std::ptrdiff_t>(words)) {
      return {"words that are still there afterwards", {}};
    }
    if (seen != nullptr) *seen = device.seen();
    return {compare_attention(p, a.out, a.cache, tolerance),
            {a.out, a.out + static_cast<size_t>(p.rows * p.out_stride)}};
  } catch (const executor::Violation& v) {
    return {v.what(), {}};
  }
}

}  // namespace fourfold::mixers
