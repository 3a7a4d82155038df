// A backend whose steps wait until they may go on.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <utility>

#include "ops/ops.h"

namespace fourfold::serve {

// Steps wait while it is closed.
class Gate {
 public:
  void open() { pass(int64_t{1} << 40); }
  // Lets that many steps more through.
  void pass(int64_t steps) {
    const std::lock_guard lock(mutex_);
    steps_ += steps;
    changed_.notify_all();
  }
  void wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return steps_ > 0; });
    --steps_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int64_t steps_ = 0;
};

class StallingBackend final : public ops::Backend {
 public:
  StallingBackend(std::shared_ptr<ops::Backend> inner, std::shared_ptr<Gate> gate)
      : inner_(std::move(inner)), gate_(std::move(gate)) {}

  void embed(const ops::Matrix& table, const ops::Tensor& out) override {
    gate_->wait();
    inner_->embed(table, out);
  }

  std::string description() const override { return inner_->description(); }
  ops::DType activation_type() const override { return inner_->activation_type(); }
  std::unique_ptr<ops::Buffer> allocate(int64_t bytes) override { return inner_->allocate(bytes); }
  ops::Vector load_vector(std::span<const float> values) override { return inner_->load_vector(values); }
  std::unique_ptr<ops::Matrix> load_matrix(std::span<const ops::MatrixSource> parts) override {
    return inner_->load_matrix(parts);
  }
  std::unique_ptr<ops::Matrix> first_rows(const ops::Matrix& matrix, int64_t rows) override {
    return inner_->first_rows(matrix, rows);
  }
  std::unique_ptr<ops::Matrix> load_table(const ops::MatrixSource& source) override {
    return inner_->load_table(source);
  }
  std::unique_ptr<ops::Experts> load_experts(int64_t count, const std::function<ops::ExpertSource(int64_t)>& source,
                                             const std::function<void(int64_t)>& done) override {
    return inner_->load_experts(count, source, done);
  }
  std::unique_ptr<ops::KvCache> make_kv_cache(const ops::KvCacheShape& shape) override {
    return inner_->make_kv_cache(shape);
  }
  std::unique_ptr<ops::StateCache> make_state_cache(const ops::StateCacheShape& shape) override {
    return inner_->make_state_cache(shape);
  }
  int64_t kv_element_bytes() const override { return inner_->kv_element_bytes(); }
  void reserve(const ops::ReserveLimits& limits) override { inner_->reserve(limits); }
  void begin_step(const ops::Batch& batch) override { inner_->begin_step(batch); }
  void rms_norm(const ops::Tensor& x, const ops::Vector& weight, float eps, const ops::Tensor& out) override {
    inner_->rms_norm(x, weight, eps, out);
  }
  void add_rms_norm(const ops::Tensor& residual, const ops::Tensor& delta, const ops::Vector& weight, float eps,
                    const ops::Tensor& out) override {
    inner_->add_rms_norm(residual, delta, weight, eps, out);
  }
  void add(const ops::Tensor& residual, const ops::Tensor& delta) override { inner_->add(residual, delta); }
  void linear(const ops::Tensor& x, const ops::Matrix& weight, const ops::Tensor& out) override {
    inner_->linear(x, weight, out);
  }
  void attention(const ops::AttentionParams& params, const ops::Tensor& q, const ops::Tensor& k, const ops::Tensor& v,
                 ops::KvCache& cache, int64_t layer, const ops::Tensor& out) override {
    inner_->attention(params, q, k, v, cache, layer, out);
  }
  void append_keys(const ops::AttentionParams& params, const ops::Tensor& k, const ops::Tensor& v, ops::KvCache& cache,
                   int64_t layer) override {
    inner_->append_keys(params, k, v, cache, layer);
  }
  void delta_net(const ops::DeltaNetParams& params, const ops::Tensor& qkv, const ops::Tensor& z, const ops::Tensor& b,
                 const ops::Tensor& a, ops::StateCache& states, int64_t layer, const ops::Tensor& out) override {
    inner_->delta_net(params, qkv, z, b, a, states, layer, out);
  }
  void moe(const ops::MoeParams& params, const ops::Tensor& x, const ops::Tensor& out) override {
    inner_->moe(params, x, out);
  }
  void mlp(const ops::MlpParams& params, const ops::Tensor& x, const ops::Tensor& out) override {
    inner_->mlp(params, x, out);
  }
  void gather_rows(const ops::Tensor& x, std::span<const int32_t> rows, const ops::Tensor& out) override {
    inner_->gather_rows(x, rows, out);
  }
  std::unique_ptr<ops::Stepper> make_stepper(const ops::StepLimits& limits, ops::KvCache* kv, ops::StateCache* states,
                                             ops::StepBody body) override {
    return inner_->make_stepper(limits, kv, states, std::move(body));
  }
  void read(const ops::Tensor& x, std::span<float> out) override { inner_->read(x, out); }

 private:
  std::shared_ptr<ops::Backend> inner_;
  std::shared_ptr<Gate> gate_;
};

}  // namespace fourfold::serve
