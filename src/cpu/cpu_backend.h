// What all CPU backends share: memory, tables, caches, norms, row copies, attention and Gated DeltaNet. A subclass adds
// its form of the weight matrices and the operations that multiply with them.
//
// Activations are fp32 on every CPU backend. Operations run on one thread pool; work too small to be worth a parallel
// region runs on the calling thread. Results do not depend on the number of threads.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/check.h"
#include "base/threads.h"
#include "cpu/backend.h"
#include "ops/ops.h"

namespace fourfold::cpu {

// Host memory, zeroed. From 1 MiB on it is mapped on its own, aligned to 2 MiB and marked for transparent huge pages;
// smaller blocks are aligned to 64 bytes. An Error when the system has no memory.
class HostBuffer : public ops::Buffer {
 public:
  HostBuffer() = default;
  explicit HostBuffer(int64_t bytes);
  HostBuffer(HostBuffer&& other) noexcept;
  HostBuffer& operator=(HostBuffer&& other) noexcept;
  ~HostBuffer() override;

  void* data() override { return data_; }
  const void* data() const { return data_; }
  int64_t bytes() const override { return bytes_; }

 private:
  void release();
  void* data_ = nullptr;
  int64_t bytes_ = 0;
  void* mapping_ = nullptr;  // of large blocks
  size_t mapped_bytes_ = 0;
};

// Scratch memory that grows and never shrinks: once the largest step was seen, nothing is allocated. get() leaves the
// contents undefined and invalidates what it returned before.
class Workspace {
 public:
  template <typename T>
  T* get(int64_t count) {
    const int64_t bytes = count * static_cast<int64_t>(sizeof(T));
    if (bytes > buffer_.bytes()) {
      buffer_ = HostBuffer();  // frees first
      buffer_ = HostBuffer(bytes + bytes / 4);
    }
    return static_cast<T*>(buffer_.data());
  }

 private:
  HostBuffer buffer_;
};

// Keys and values: [layer][page][kv head][0: keys, 1: values][position in page][padded_dim], elements fp32 or f16.
// padded_dim is head_dim rounded up to 32; the padding is always zero.
class HostKvCache : public ops::KvCache {
 public:
  HostKvCache(const ops::KvCacheShape& shape, ops::DType type);
  const ops::KvCacheShape& shape() const override { return shape_; }
  int64_t bytes() const override { return buffer_.bytes(); }

  ops::DType type() const { return type_; }
  int64_t padded_dim() const { return padded_dim_; }
  // Elements from the keys of a page to its values.
  int64_t values_offset() const { return shape_.page_size * padded_dim_; }
  // The first key of a page.
  template <typename T>
  T* keys(int64_t layer, int64_t page, int64_t kv_head) {
    return static_cast<T*>(buffer_.data()) +
           ((layer * shape_.pages + page) * shape_.kv_heads + kv_head) * 2 * values_offset();
  }

 private:
  ops::KvCacheShape shape_;
  ops::DType type_;
  int64_t padded_dim_;
  HostBuffer buffer_;
};

// Recurrent state, all fp32: [slot][layer][state, then convolution].
//   state: [value head][panel of 16 values][key_dim][16]; value_dim is rounded up to whole panels, padding zero. A
//   panel is what one pass of the recurrence holds in L1 (8 KiB for 128 keys) and a packed operand of the chunked form.
//   convolution: [conv_taps - 1][conv_channels], oldest first.
class HostStateCache : public ops::StateCache {
 public:
  static constexpr int64_t kPanel = 16;

  HostStateCache(const ops::StateCacheShape& shape, ThreadPool& pool);
  const ops::StateCacheShape& shape() const override { return shape_; }
  int64_t bytes() const override { return buffer_.bytes(); }
  void copy(int64_t from, int64_t to) override;

  int64_t head_floats() const { return head_floats_; }  // of one value head's state
  float* state(int64_t layer, int64_t slot, int64_t value_head) {
    return layer_data(layer, slot) + value_head * head_floats_;
  }
  float* convolution(int64_t layer, int64_t slot) {
    return layer_data(layer, slot) + shape_.value_heads * head_floats_;
  }
  // The state of one head as [key_dim, value_dim] without gaps, for tests and tools.
  void read_state(int64_t layer, int64_t slot, int64_t value_head, std::span<float> out);
  void write_state(int64_t layer, int64_t slot, int64_t value_head, std::span<const float> values);

 private:
  float* layer_data(int64_t layer, int64_t slot) {
    return static_cast<float*>(buffer_.data()) + (slot * shape_.layers + layer) * layer_floats_;
  }
  ops::StateCacheShape shape_;
  ThreadPool& pool_;
  int64_t head_floats_;
  int64_t layer_floats_;
  HostBuffer buffer_;
};

// The inner loops of one instruction set (src/cpu/kernels.h); null for the reference.
struct Kernels;

class CpuBackend : public ops::Backend {
 public:
  ~CpuBackend() override;

  std::string description() const override;
  ops::DType activation_type() const override { return ops::DType::kF32; }

  std::unique_ptr<ops::Buffer> allocate(int64_t bytes) override;
  ops::Vector load_vector(std::span<const float> values) override;
  // Kept in the form it has in the checkpoint (memory = checkpoint bytes).
  std::unique_ptr<ops::Matrix> load_table(const ops::MatrixSource& source) override;
  std::unique_ptr<ops::KvCache> make_kv_cache(const ops::KvCacheShape& shape) override;
  std::unique_ptr<ops::StateCache> make_state_cache(const ops::StateCacheShape& shape) override;

  void begin_step(const ops::Batch& batch) override;
  void embed(const ops::Matrix& table, const ops::Tensor& out) override;
  void rms_norm(const ops::Tensor& x, const ops::Vector& weight, float eps, const ops::Tensor& out) override;
  void add_rms_norm(const ops::Tensor& residual, const ops::Tensor& delta, const ops::Vector& weight, float eps,
                    const ops::Tensor& out) override;
  void add(const ops::Tensor& residual, const ops::Tensor& delta) override;
  void attention(const ops::AttentionParams& params, const ops::Tensor& q, const ops::Tensor& k, const ops::Tensor& v,
                 ops::KvCache& cache, int64_t layer, const ops::Tensor& out) override;
  void delta_net(const ops::DeltaNetParams& params, const ops::Tensor& qkv, const ops::Tensor& z, const ops::Tensor& b,
                 const ops::Tensor& a, ops::StateCache& states, int64_t layer, const ops::Tensor& out) override;
  void gather_rows(const ops::Tensor& x, std::span<const int32_t> rows, const ops::Tensor& out) override;
  void read(const ops::Tensor& x, std::span<float> out) override;

  Isa isa() const { return isa_; }
  const CpuOptions& options() const { return options_; }

 protected:
  // An Error when the processor lacks `isa`. `kv_type` is the element type of the key/value cache.
  CpuBackend(Isa isa, const CpuOptions& options, ops::DType kv_type);

  ThreadPool& pool() { return pool_; }
  const ops::Batch& batch() const { return batch_; }

  // Norm (optional), RoPE and append of one step's queries and keys; used by every attention implementation.
  // Queries and keys change in place; keys and values go to the cache.
  void prepare_attention(const ops::AttentionParams& params, const ops::Tensor& q, const ops::Tensor& k,
                         const ops::Tensor& v, HostKvCache& cache, int64_t layer);
  // Once per step and recurrent model: slots that one sequence writes are touched by no other sequence.
  void check_state_slots(const HostStateCache& states);

  // fn(begin, end) over [0, n): on the calling thread when n * cost (about nanoseconds) is not worth a parallel region.
  template <typename F>
  void for_each(int64_t n, double nanoseconds_each, F&& fn) {
    constexpr double kSerialBelow = 4000.0;
    if (n <= 0) return;
    if (pool_.size() == 1 || static_cast<double>(n) * nanoseconds_each < kSerialBelow) {
      fn(int64_t{0}, n);
      return;
    }
    int64_t grain = n / (4 * pool_.size());
    const auto least = static_cast<int64_t>(kSerialBelow / 4 / (nanoseconds_each > 0 ? nanoseconds_each : 1));
    if (grain < least) grain = least;
    if (grain < 1) grain = 1;
    pool_.parallel_for(n, grain, fn);
  }

  // fn(thread, item) over [0, n) in parallel, each thread with items that follow each other.
  template <typename F>
  void for_ranges(int64_t n, F&& fn) {
    pool_.parallel_ranges(n, 1, [&](int thread, int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) fn(thread, i);
    });
  }

 private:
  void compute_rope(const ops::AttentionParams& params);

  Isa isa_;
  CpuOptions options_;
  ops::DType kv_type_;
  ThreadPool pool_;
  const Kernels* kernels_ = nullptr;
  ops::Batch batch_;

  // RoPE factors of the current step: [tokens][rotary_dim / 2] cosines, then sines of each token.
  Workspace rope_;
  bool rope_valid_ = false;
  float rope_theta_ = 0.0f;
  int64_t rope_dim_ = 0;
  std::vector<float> rope_frequencies_;  // of theta and dim
  bool slots_checked_ = false;
  Workspace attention_work_, delta_work_;
  std::vector<std::vector<int64_t>> last_keys_;  // per thread, of attention's query rows
};

}  // namespace fourfold::cpu
