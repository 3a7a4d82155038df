// What the CUDA backend keeps on the device: buffers, weights, caches. Each holds the card that it lives on.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "cuda/backend/weight_feed.h"
#include "cuda/device/loader.h"
#include "cuda/gemm/packed_matrix.h"
#include "cuda/moe/weights.h"
#include "jit/store.h"
#include "kernels/gdn/tables.h"
#include "kernels/step/rows_args.h"
#include "ops/ops.h"

namespace fourfold::cuda {

// A device, the stream that everything runs on, and its kernels.
struct Card {
  // `emulate`: null, or the card whose kernels are to run here (LoadOptions).
  Card(int index, const std::filesystem::path& store_directory, const plan::Gpu* emulate = nullptr)
      : Card(index, store_directory, LoadOptions{.emulate = emulate}) {}
  Card(int index, const std::filesystem::path& store_directory, const LoadOptions& options)
      : device(index), stream(device), store(store_directory), load(options), loader(device, store, load) {}
  // One that is only counted on.
  Card(const jit::DeviceInfo& info, uint64_t memory, const std::filesystem::path& store_directory,
       const plan::Gpu* emulate = nullptr)
      : device(info, memory),
        stream(device),
        store(store_directory),
        load{.emulate = emulate},
        loader(device, store, load) {}
  Device device;
  Stream stream;
  jit::KernelStore store;
  LoadOptions load;
  KernelLoader loader;
  FixedKernels experts;  // what uploading experts needs

  // Where weights are loaded through; there from the first one until they are settled.
  WeightFeed& weights();
  // All weights that were given are in their place, or an Error says what is wrong with one of them.
  void settle_weights();
  // The same for memory that goes: nothing is on its way to it any more.
  void let_go() { feed_.reset(); }
  int loading_threads = 0;
  uint64_t loading_block = WeightFeed::kBlockBytes;

 private:
  std::unique_ptr<WeightFeed> feed_;
};

// The routing kernels of experts, where they are not loaded yet.
void load_routing(Card& card);

// Bytes of a matrix's elements in a checkpoint's form, and that form as kernels know it.
int64_t element_bytes(const ops::MatrixSource& m);
gemm::Stored stored_of(ops::Format format);

class DeviceBuffer : public ops::Buffer {
 public:
  // Zeroed.
  DeviceBuffer(std::shared_ptr<Card> card, int64_t bytes, std::string_view what);
  void* data() override { return buffer_.as<void>(); }
  int64_t bytes() const override { return static_cast<int64_t>(buffer_.bytes()); }
  cuda::Buffer& buffer() { return buffer_; }

 private:
  std::shared_ptr<Card> card_;
  cuda::Buffer buffer_;
};

// Small tables on their way to the device while kernels run: host blocks taken in turns, one place on the device, which
// is overwritten in the stream's order. TableCopies copies them.
class Uploads {
 public:
  // `blocks`: that may be under way.
  explicit Uploads(Card& card, size_t blocks = 8) : card_(card), block_count_(blocks) {}
  // Page-locked memory to fill, which the device can read, until take().
  uint8_t* prepare(uint64_t bytes);
  // It is filled, and on its way: not written again before it is settled.
  step::TableCopy take(uint64_t bytes);
  // Where it is copied to.
  DeviceAddress place() const { return device_.address(); }
  // The stream was waited for: nothing is under way, or nothing of the first `upto` that were taken.
  void settled() { settled(taken_); }
  void settled(uint64_t upto) { under_way_ = std::min(under_way_, static_cast<size_t>(taken_ - upto)); }
  uint64_t taken() const { return taken_; }

 private:
  Card& card_;
  const size_t block_count_;
  PinnedBuffer blocks_;
  cuda::Buffer device_;
  uint64_t block_bytes_ = 0, taken_ = 0;
  size_t next_ = 0, under_way_ = 0;
};

// Tables, and tokens to be carried into them, that the next launches read: gathered, and then copied by one kernel.
class TableCopies {
 public:
  explicit TableCopies(Card& card) : card_(card) {}
  void add(const step::TableCopy& table);
  void carry(const step::CarryArgs& carried);
  // What is launched from here on finds the tables in their places. `kernel`: step::copy_tables.
  void flush(const Kernel& kernel, Overlap overlap);
  // What a kernel is still to copy for that, instead: the rest is under way, and carried; `kernel` as above.
  step::TablesArgs take(const Kernel& kernel, Overlap overlap);
  // Whether some of it goes by the copy engine.
  bool large() const { return !large_.empty(); }
  void drop() {
    args_ = {};
    large_.clear();
  }

 private:
  static constexpr int64_t kMostBytes = 64 << 10;  // more of a table goes by the copy engine
  void copy_large();
  Card& card_;
  step::TablesArgs args_ = {};
  std::vector<step::TableCopy> large_;
};

// Through the card's feed: `bytes` from host memory to a place on the device, and a matrix, or the two of a pair, in
// the kept form to `out`, whole row tiles at a time, as many as a block has room for. Padding of `part` becomes zeros.
void feed_bytes(Card& card, const void* from, uint64_t bytes, const std::shared_ptr<const void>& owner,
                DeviceAddress to, const std::string* scales_of = nullptr);
void feed_part(Card& card, std::span<const ops::MatrixSource> sources, const PackedMatrix::Part& part, int units,
               uint8_t* out);

class Stack : public ops::Matrix {
 public:
  Stack(std::shared_ptr<Card> card, std::span<const ops::MatrixSource> parts);
  // Gate and up as a pair, for products that end in SwiGLU (makes_pair()).
  Stack(std::shared_ptr<Card> card, const ops::MatrixSource& gate, const ops::MatrixSource& up);
  // The first rows of one with one part, whole tiles, in the same memory.
  Stack(const Stack& of, int64_t rows);
  ~Stack() override { card_->let_go(); }
  bool paired() const { return packed_.paired; }
  // Of weights: of a pair gate and up.
  int64_t rows() const override { return packed_.rows * (paired() ? 2 : 1); }
  int64_t columns() const override { return packed_.columns; }
  int64_t bytes() const override { return bytes_; }
  int formats() const { return formats_; }
  const gemm::Matrix& matrix() const { return matrix_; }
  const std::string& name() const { return name_; }
  // Of all rows of a part; nothing where they differ, or depend on the columns, or the card only counts.
  std::optional<float> factor(int part) const { return factors_[static_cast<size_t>(part)]; }

 private:
  Stack(std::shared_ptr<Card> card, std::span<const ops::MatrixSource> sources, PackedMatrix packed);
  std::shared_ptr<Card> card_;
  PackedMatrix packed_;
  cuda::Buffer buffer_;
  gemm::Matrix matrix_;
  int formats_ = 0;
  int64_t bytes_ = 0;
  std::string name_;
  std::vector<std::optional<float>> factors_;
};

class Table : public ops::Matrix {
 public:
  Table(std::shared_ptr<Card> card, const ops::MatrixSource& source);
  ~Table() override { card_->let_go(); }
  int64_t rows() const override { return source_.rows; }
  int64_t columns() const override { return source_.columns; }
  int64_t bytes() const override { return bytes_; }
  const gemm::Source& source() const { return source_; }
  const float* grid_scales() const { return grid_.bytes() == 0 ? nullptr : grid_.as<const float>(); }
  int scale_rows = 1, scale_columns = 1;
  float tensor_scale = 1;

 private:
  std::shared_ptr<Card> card_;
  cuda::Buffer data_, scales_, grid_;
  gemm::Source source_ = {};
  int64_t bytes_ = 0;
};

class CardExperts : public ops::Experts {
 public:
  // `shared`: null, or the shared expert, to be held as slices.
  CardExperts(std::shared_ptr<Card> card, int64_t count, const std::function<ops::ExpertSource(int64_t)>& source,
              const std::function<void(int64_t)>& done, const ops::ExpertSource* shared);
  ~CardExperts() override { card_->let_go(); }
  int64_t shared_slices() const override { return problem_.shared_slices(); }
  // With the layer's number of choices.
  plan::moe::Problem problem(int64_t top_k) const;
  int64_t count() const override { return problem_.experts; }
  int64_t hidden() const override { return problem_.hidden; }
  int64_t intermediate() const override { return problem_.intermediate; }
  int64_t bytes_per_expert() const override { return bytes_per_expert_; }
  const ExpertWeights& weights() const { return *weights_; }

 private:
  std::shared_ptr<Card> card_;
  plan::moe::Problem problem_;
  std::unique_ptr<ExpertWeights> weights_;
  int64_t bytes_per_expert_ = 0;
};

// Whether the expert kernels can hold this shared expert beside such experts, as slices of their width.
bool holds_shared(const ops::ExpertSource& expert, const ops::ExpertSource& shared);

// [page][layer][kv head][keys, values][position][head_dim] bf16 or e4m3 (kernels/attn/tables.h).
class CardKvCache : public ops::KvCache {
 public:
  CardKvCache(std::shared_ptr<Card> card, const ops::KvCacheShape& shape, int64_t element_bytes);
  const ops::KvCacheShape& shape() const override { return shape_; }
  int64_t bytes() const override { return static_cast<int64_t>(buffer_.bytes()); }
  void copy_page(int64_t from, int64_t to) override;
  int64_t page_bytes() const { return layer_bytes_ * shape_.layers; }
  uint8_t* layer(int64_t index) const { return buffer_.as<uint8_t>() + index * layer_bytes_; }

 private:
  std::shared_ptr<Card> card_;
  ops::KvCacheShape shape_;
  int64_t layer_bytes_;
  cuda::Buffer buffer_;
};

// [slot][layer] of both (kernels/gdn/tables.h).
class CardStateCache : public ops::StateCache {
 public:
  CardStateCache(std::shared_ptr<Card> card, const ops::StateCacheShape& shape);
  const ops::StateCacheShape& shape() const override { return shape_; }
  int64_t bytes() const override { return static_cast<int64_t>(states_.bytes() + history_.bytes()); }
  void copy(int64_t from, int64_t to) override;
  int64_t state_stride() const { return delta_.state_floats() * shape_.layers; }
  int64_t history_stride() const { return delta_.history_elements() * shape_.layers; }
  float* states(int64_t layer) const { return states_.as<float>() + layer * delta_.state_floats(); }
  uint16_t* history(int64_t layer) const { return history_.as<uint16_t>() + layer * delta_.history_elements(); }

 private:
  std::shared_ptr<Card> card_;
  ops::StateCacheShape shape_;
  gdn::DeltaShape delta_;
  cuda::Buffer states_, history_;
};

gdn::DeltaShape delta_shape(const ops::StateCacheShape& shape);

}  // namespace fourfold::cuda
