// The device kernels of the expert layer as the host executor runs them. What is listed here is instantiated; tiles are
// named as their template arguments.
#pragma once

#include <string>
#include <vector>

#include "kernels/moe/tables.h"
#include "kernels/ptx/tensor_map.h"
#include "plan/smem.h"

namespace fourfold::moe {

struct ExpertKernel {
  std::string name;
  plan::Family family;
  bool gate_up;
  bool one;           // one token, or few: choices are not sorted
  bool wide = false;  // raises flags for the next kernel
  bool gated;         // gate-up: SwiGLU, otherwise squared ReLU
  int tokens;         // of a block; unsorted: at most
  int row_units = 0;  // few tokens, gate-up: K at most
  int row_tiles;      // of a CTA
  int ctas;
  int threads;
  unsigned shared_bytes;
  void (*run)(const GemmArgs&);
  void (*run_gather)(const ptx::TensorMap& rows, const GemmArgs&);  // wgmma gate-up, instead
  void (*run_fp4)(const Fp4Args&);

  bool slots() const { return family == plan::Family::kWgmma; }  // h in the form of tables.h
  bool fp4() const { return family == plan::Family::kFp4; }
};

std::vector<ExpertKernel> stream_kernels();
std::vector<ExpertKernel> prefill_kernels();
std::vector<ExpertKernel> async_kernels();  // mma.sync and FP4
std::vector<ExpertKernel> all_kernels();
// Whether the two run in one layer.
bool fit(const ExpertKernel& up, const ExpertKernel& down);

// Threads and grid as the launcher chooses them.
struct RouteKernels {
  int one_pass_picks;  // more picks take two kernels
  int one_pass_threads;
  int many_picks;  // of one CTA
  int count_threads;
  int scatter_threads;
  int max_experts;
  void (*one_pass)(const Routing&, const RouteTable&, int tile);
  void (*count)(const Routing&, const RouteTable&, int tile);
  void (*scatter)(const Routing&, const RouteTable&);
  void (*combine)(const float* partial, long long partial_stride, const int* pick_slot, const float* weights, int top_k,
                  int columns, unsigned short* out, long long out_stride);
  int beside_threads;
  int beside_columns;  // of one CTA
  void (*combine_beside)(const float* partial, long long partial_stride, const RouteTable&, const float* weights,
                         int top_k, int columns, unsigned short* out, long long out_stride);
  void (*combine_packed)(const PackedGroup* partial, long long stride, const int* pick_slot, const Routing&,
                         const float* scales, int columns, unsigned short* out, long long out_stride);
};
RouteKernels route_kernels();
// What runs at load, and before a layer whose width no kernel takes; 128 threads.
void repack_kernel(const RepackArgs& args);
void pad_rows_kernel(const unsigned short* from, unsigned short* to, int columns, int padded);
void append_shared_kernel(const int* ids, const float* weights, const float* gates, int tokens, int top_k,
                          int first_slice, int slices, int* all_ids, float* all_weights);
void quantize_kernel(const unsigned short* rows, long long stride, int columns, int units, const float* input_scale,
                     unsigned char* codes, long long code_stride, unsigned char* scales, long long scale_stride);

}  // namespace fourfold::moe
