// Every kernel that a model needs on a card, found without the card and without the bytes of its weights: a backend
// that a model is loaded on like on any other, and that notes what each operation would launch.
//
//   const auto list = std::make_shared<KernelListing>(card, ListingOptions{});
//   const auto model = model::load_model(source, list, options);  // a source of shapes will do: model::shapes_of()
//   model->make_stepper(limits, caches);                          // the step's body is called once
//   list->kernels()
#pragma once

#include <map>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "ops/ops.h"
#include "plan/arch.h"
#include "plan/kernel.h"
#include "plan/moe/problem.h"

namespace fourfold::cuda {

struct ListingOptions {
  std::vector<bool> fp8_caches = {false};  // caches of keys and values that steps may have: bf16, e4m3
  int64_t most_rows = int64_t{1} << 20;    // of a step: larger token buckets of the expert layers are left out
};

struct ListedKernel {
  plan::KernelSource source;
  std::string operation;  // what it computes, for people
};

class KernelListing : public ops::Backend {
 public:
  KernelListing(const plan::Gpu& card, ListingOptions options);

  // Each source once, in the order in which they were asked for. Kernels of experts that `refused` names are done
  // without, as build_all() wants it.
  std::vector<ListedKernel> kernels(const std::set<std::string>& refused = {}) const;

  std::string description() const override;
  ops::DType activation_type() const override { return ops::DType::kBf16; }
  int64_t kv_element_bytes() const override { return 2; }

  // Weights are shapes and formats: their bytes are not read, except the scales that an FP8 matrix has one or a few of.
  std::unique_ptr<ops::Buffer> allocate(int64_t bytes) override;
  ops::Vector load_vector(std::span<const float> values) override;
  std::unique_ptr<ops::Matrix> load_matrix(std::span<const ops::MatrixSource> parts) override;
  std::unique_ptr<ops::Matrix> load_table(const ops::MatrixSource& source) override;
  std::unique_ptr<ops::Experts> load_experts(int64_t count, const std::function<ops::ExpertSource(int64_t)>& source,
                                             const std::function<void(int64_t)>& done) override;
  std::unique_ptr<ops::Experts> load_experts_with_shared(int64_t count,
                                                         const std::function<ops::ExpertSource(int64_t)>& source,
                                                         const std::function<void(int64_t)>& done,
                                                         const ops::ExpertSource& shared) override;
  std::unique_ptr<ops::KvCache> make_kv_cache(const ops::KvCacheShape& shape) override;
  std::unique_ptr<ops::StateCache> make_state_cache(const ops::StateCacheShape& shape) override;
  void reserve(const ops::ReserveLimits&) override {}

  void begin_step(const ops::Batch&) override {}
  void embed(const ops::Matrix& table, const ops::Tensor& out) override;
  void rms_norm(const ops::Tensor& x, const ops::Vector& weight, float eps, const ops::Tensor& out) override;
  void add_rms_norm(const ops::Tensor& residual, const ops::Tensor& delta, const ops::Vector& weight, float eps,
                    const ops::Tensor& out) override;
  void add(const ops::Tensor& residual, const ops::Tensor& delta) override;
  void linear(const ops::Tensor& x, const ops::Matrix& weight, const ops::Tensor& out) override;
  void attention(const ops::AttentionParams& params, const ops::Tensor& q, const ops::Tensor& k, const ops::Tensor& v,
                 ops::KvCache& cache, int64_t layer, const ops::Tensor& out) override;
  void append_keys(const ops::AttentionParams& params, const ops::Tensor& k, const ops::Tensor& v, ops::KvCache& cache,
                   int64_t layer) override;
  void delta_net(const ops::DeltaNetParams& params, const ops::Tensor& qkv, const ops::Tensor& z, const ops::Tensor& b,
                 const ops::Tensor& a, ops::StateCache& states, int64_t layer, const ops::Tensor& out) override;
  void moe(const ops::MoeParams& params, const ops::Tensor& x, const ops::Tensor& out) override;
  void mlp(const ops::MlpParams& params, const ops::Tensor& x, const ops::Tensor& out) override;
  void gather_rows(const ops::Tensor& x, std::span<const int32_t> rows, const ops::Tensor& out) override;
  // Runs the body once. There is no stepper: null.
  std::unique_ptr<ops::Stepper> make_stepper(const ops::StepLimits& limits, ops::KvCache* kv,
                                             ops::StepBody body) override;
  void read(const ops::Tensor& x, std::span<float> out) override;

 private:
  void note(plan::KernelSource source, std::string operation);
  void product(int formats, int64_t rows, int64_t columns);

  plan::Gpu card_;
  const plan::Arch& arch_;
  ListingOptions options_;
  std::set<std::string> seen_;
  std::vector<ListedKernel> kernels_;
  std::map<std::string, plan::moe::Problem> experts_;  // by their sizes
};

}  // namespace fourfold::cuda
