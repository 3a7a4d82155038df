// Random problems for the kernels of the mixers, and what they must give, in plain double arithmetic that knows neither
// pages nor splits nor chunks. Used on the host executor and on cards; includes nothing of CUDA.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/attn/tables.h"
#include "kernels/gdn/tables.h"

namespace fourfold::mixers {

struct SequencePlan {
  int count = 1;     // rows; 0: an unused place of the bucket
  int position = 0;  // of the first
  int state_in = 0;
  std::vector<int> state_out;  // recurrent: for each row; chunked: one
};

// ---- Gated DeltaNet
// ----------------------------------------------------------------------------------------------------

struct DeltaProblem {
  gdn::DeltaShape shape{};
  bool float32 = false;
  std::vector<SequenceRows> sequences;
  int live = 0;
  std::vector<int> state_out;
  int state_out_stride = 1;
  int rows = 0;
  int row_stride = 0;
  int out_stride = 0;
  long long state_stride = 0;
  long long history_stride = 0;
  std::vector<unsigned char> row_bytes;      // NaN where no kernel may look
  std::vector<unsigned char> history_bytes;  //
  std::vector<float> states;                 //
  std::vector<float> conv, a_log, dt_bias, norm;
  float norm_eps = 1e-6f;

  // Expected.
  std::vector<double> out;  // [rows][value_heads x value_dim], NaN: not written
  std::vector<double> states_after;
  std::vector<unsigned char> history_after;

  int element() const { return float32 ? 4 : 2; }
  gdn::DeltaArgs args() const;  // without addresses
};
// `slots` of state. bf16_keys: the normalised q and k are rounded to bf16 before they are used.
DeltaProblem make_delta(const gdn::DeltaShape& shape, bool float32, const std::vector<SequencePlan>& plan, int slots,
                        unsigned seed, bool bf16_keys = false);

// Empty, or what is wrong. `out`: bf16 [rows][out_stride], 0xffff where nothing was written.
std::string compare_delta(const DeltaProblem& p, const unsigned short* out, const float* states,
                          const unsigned char* history, double tolerance, double state_tolerance,
                          double* error = nullptr, double* state_error = nullptr);

// ---- attention
// -----------------------------------------------------------------------------------------------------------

struct AttentionProblem {
  attn::AttentionShape shape{};
  int rotary_dim = 0;
  int page_size = 16;
  bool fp8 = false;
  std::vector<SequenceRows> sequences;
  int live = 0;
  std::vector<int> pages;
  int page_table_stride = 0;
  int page_count = 0;
  int rows = 0;
  int most_rows = 1;  // of a sequence
  int longest = 1;    // context
  int row_stride = 0;
  int out_stride = 0;
  long long page_bytes = 0;
  std::vector<unsigned short> row_values;
  std::vector<unsigned char> cache;
  std::vector<float> q_norm, k_norm, frequencies;
  float cache_scales[2] = {1.0f, 1.0f};
  float scale = 0.0f;
  float norm_eps = 1e-6f;

  std::vector<double> out;          // [rows][heads x head_dim], NaN: not written
  std::vector<double> cache_after;  // values, in the cache's order, NaN: not looked at

  attn::AttentionArgs args() const;  // without addresses
};
AttentionProblem make_attention(const attn::AttentionShape& shape, int rotary_dim, int page_size, bool fp8,
                                const std::vector<SequencePlan>& plan, unsigned seed, bool norms = true);
std::string compare_attention(const AttentionProblem& p, const unsigned short* out, const unsigned char* cache,
                              double tolerance, double* error = nullptr);

}  // namespace fourfold::mixers
