// A column of the table of operations: a backend, how tensors get to it and back, and how far it may be off.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "op_harness.h"

namespace fourfold::test {

// Of a tensor: of the backend's activation type, or fp32, which may be the same.
enum class Type { kActivation, kFloat };
// Rows further apart than their length with NaN between them, or not where the column's backend wants them so.
enum class Rows { kApart, kDense };

// Rows of a tensor in memory that may have others beside them.
struct Placed {
  std::shared_ptr<ops::Buffer> buffer;
  ops::Tensor tensor;
};

// What a product's sums are made of.
struct ProductOf {
  int64_t depth = 0;
  bool nvfp4 = false;    // weights
  bool rounded = false;  // weights of more bits than bf16 has
  void add(ops::Format format) {
    nvfp4 = nvfp4 || format == ops::Format::kNvfp4;
    rounded = rounded || format == ops::Format::kF32 || format == ops::Format::kF16;
  }
};

class Column {
 public:
  virtual ~Column() = default;
  virtual ops::Backend& backend() = 0;
  // Rows of the steps that operations without a script are tried with.
  virtual std::span<const int64_t> token_counts() const = 0;
  // A value as tensors of the activation type hold it: the table computes from these.
  virtual float stored(float value) const { return value; }

  // Random values as a tensor of that type holds them.
  std::vector<float> inputs(Random& random, int64_t count, double scale = 1, Type type = Type::kActivation) const;
  Placed place(const std::vector<float>& values, int64_t rows, int64_t cols, Type type = Type::kActivation,
               Rows kind = Rows::kApart);
  Placed empty(int64_t rows, int64_t cols, Type type = Type::kActivation, Rows kind = Rows::kApart);
  // Activations in the order of an operation's arguments: in rows of one buffer where the backend wants them so.
  std::vector<Placed> beside(int64_t rows, const std::vector<std::vector<float>>& values);
  // Its rows; what lies between them must still be NaN.
  std::vector<float> values(const Placed& placed);

  virtual void poison(ops::KvCache& cache) = 0;
  virtual void poison(ops::StateCache& cache) = 0;
  // [value heads][key_dim][value_dim], and [taps - 1][channels], of a slot.
  virtual std::vector<float> state(ops::StateCache& cache, int64_t layer, int64_t slot) = 0;
  virtual std::vector<float> history(ops::StateCache& cache, int64_t layer, int64_t slot) = 0;

  // Of the norm of a row's difference, relative to the row's norm:
  virtual double product_error(const ProductOf& of, Type out) const = 0;
  virtual double mlp_error(const ProductOf& of) const = 0;  // and of experts
  virtual double norm_error(int64_t cols) const = 0;
  virtual double rounding_error(Type out) const = 0;  // of what is computed exactly
  virtual double attention_error(bool exact_cache) const = 0;
  virtual double delta_error() const = 0;
  virtual double state_error() const = 0;

 protected:
  virtual void write(ops::Buffer& buffer, const std::vector<uint8_t>& bytes) = 0;
  virtual bool wants_beside() const = 0;
  virtual bool wants_dense() const = 0;

 private:
  Placed place_rows(const std::vector<float>* values, int64_t rows, int64_t cols, Type type, Rows kind);
};

class CpuColumn : public Column {
 public:
  // `rounded`: how inputs are, null: not; both for the reference of a column whose backend does that.
  explicit CpuColumn(cpu::CpuBackend& backend, std::span<const int64_t> counts = {}, float (*rounded)(float) = nullptr)
      : backend_(backend), counts_(counts), stored_(rounded) {}
  ops::Backend& backend() override { return backend_; }
  std::span<const int64_t> token_counts() const override;
  float stored(float value) const override { return stored_ == nullptr ? value : stored_(value); }
  void poison(ops::KvCache& cache) override;
  void poison(ops::StateCache& cache) override;
  std::vector<float> state(ops::StateCache& cache, int64_t layer, int64_t slot) override;
  std::vector<float> history(ops::StateCache& cache, int64_t layer, int64_t slot) override;
  double product_error(const ProductOf& of, Type) const override {
    return product_tolerance(backend_.isa(), of.nvfp4, of.depth);
  }
  double mlp_error(const ProductOf& of) const override { return 3.0 * product_error(of, Type::kFloat); }
  double norm_error(int64_t cols) const override { return 0x1p-24 * (8.0 + std::sqrt(static_cast<double>(cols))); }
  double rounding_error(Type) const override { return 0; }
  // f16 keys and values are off by up to 2^-12; scores of a few units turn that into about the same relative error.
  double attention_error(bool exact_cache) const override {
    return backend_.kv_element_bytes() == 2 && !exact_cache ? 0x1p-9 : 5e-6;
  }
  // The output norm divides by the size of o, which can be small against its terms.
  double delta_error() const override { return 2e-5; }
  double state_error() const override { return 1e-5; }

 protected:
  void write(ops::Buffer& buffer, const std::vector<uint8_t>& bytes) override;
  bool wants_beside() const override { return false; }
  bool wants_dense() const override { return false; }

 private:
  cpu::CpuBackend& backend_;
  std::span<const int64_t> counts_;
  float (*stored_)(float);
};

}  // namespace fourfold::test
