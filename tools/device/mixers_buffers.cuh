// The problems of tests/kernels/mixer_problems.h in device memory.
#pragma once

#include <string>
#include <vector>

#include "../../tests/kernels/mixer_problems.h"
#include "kernels/gdn/chunk_tile.h"
#include "mixers_support.cuh"

namespace measure {

using namespace fourfold;
using mixers::AttentionProblem;
using mixers::DeltaProblem;

struct DeltaBuffers {
  Device<SequenceRows> sequences;
  Device<StateUpdates> updates;  // none
  Device<int> live, state_out;
  Device<unsigned char> rows, history;
  Device<float> states, conv, a_log, dt_bias, norm;
  Device<unsigned short> out;
  explicit DeltaBuffers(const DeltaProblem& p)
      : sequences(p.sequences),
        updates(std::vector<StateUpdates>(p.sequences.size())),
        live(std::vector<int>{p.live}),
        state_out(p.state_out),
        rows(p.row_bytes),
        history(p.history_bytes),
        states(p.states),
        conv(p.conv),
        a_log(p.a_log),
        dt_bias(p.dt_bias),
        norm(p.norm),
        out(static_cast<size_t>(p.rows) * static_cast<size_t>(p.out_stride)) {
    out.poison();
  }
  void set(gdn::DeltaArgs* a) const {
    a->sequences = sequences.p;
    a->updates = updates.p;
    a->live = live.p;
    a->state_out = state_out.p;
    a->rows = rows.p;
    a->history = history.p;
    a->states = states.p;
    a->conv = conv.p;
    a->a_log = a_log.p;
    a->dt_bias = dt_bias.p;
    a->norm = norm.p;
    a->out = out.p;
  }
};

struct AttentionBuffers {
  Device<SequenceRows> sequences;
  Device<int> live, pages;
  Device<unsigned short> rows;
  Device<unsigned char> cache;
  Device<float> q_norm, k_norm, frequencies, scales, partial, sums;
  Device<unsigned> words;  // of one sequence in attention_narrow, all ones
  Device<unsigned short> out;
  explicit AttentionBuffers(const AttentionProblem& p)
      : sequences(p.sequences),
        live(std::vector<int>{p.live}),
        pages(p.pages),
        rows(p.row_values),
        cache(p.cache),
        q_norm(p.q_norm),
        k_norm(p.k_norm),
        frequencies(p.frequencies),
        scales(std::vector<float>{p.cache_scales[0], p.cache_scales[1]}),
        partial(static_cast<size_t>(attn::partial_floats(p.shape, attn::kMostSplits, p.most_rows, p.live + 2))),
        sums(partial.count / 32),
        words(static_cast<size_t>(attn::narrow_words(p.shape, attn::kMostSplits, p.most_rows, 1))),
        out(static_cast<size_t>(p.rows) * static_cast<size_t>(p.out_stride)) {
    out.poison();
    partial.poison();
    sums.poison();
    words.poison();
  }
  void set(const AttentionProblem& p, attn::AttentionArgs* a) const {
    a->sequences = sequences.p;
    a->live = live.p;
    a->pages = pages.p;
    a->rows = rows.p;
    a->cache = cache.p;
    a->q_norm = p.q_norm.empty() ? nullptr : q_norm.p;
    a->k_norm = p.k_norm.empty() ? nullptr : k_norm.p;
    a->frequencies = frequencies.p;
    a->cache_scales = scales.p;
    a->partial = partial.p;
    a->partial_sums = sums.p;
    a->words = words.p;
    a->out = out.p;
  }
};

// The chunks of sequences, and the first one of each.
struct Chunks {
  std::vector<gdn::ChunkPlace> places;
  std::vector<int> first;
  Chunks(const std::vector<SequenceRows>& sequences, int live, int chunk) {
    for (int i = 0; i < live; ++i) {
      first.push_back(static_cast<int>(places.size()));
      for (int j = 0; j * chunk < sequences[static_cast<size_t>(i)].count; ++j) places.push_back({i, j});
    }
  }
};

}  // namespace measure
