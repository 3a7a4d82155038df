#include "cuda/backend/listing.h"

#include <algorithm>
#include <new>

#include "base/check.h"
#include "cuda/backend/memory.h"
#include "cuda/backend/plain_experts.h"
#include "cuda/backend/sources.h"
#include "cuda/gemm/packed_matrix.h"
#include "cuda/moe/sources.h"

namespace fourfold::cuda {
namespace {

// Memory that nobody looks at: addresses to count from.
class Untouched : public ops::Buffer {
 public:
  explicit Untouched(int64_t bytes)
      : memory_(::operator new(static_cast<size_t>(std::max<int64_t>(bytes, 1)))), bytes_(bytes) {}
  ~Untouched() override { ::operator delete(memory_); }
  void* data() override { return memory_; }
  int64_t bytes() const override { return bytes_; }

 private:
  void* memory_;
  int64_t bytes_;
};

class ListedMatrix : public ops::Matrix {
 public:
  explicit ListedMatrix(std::span<const ops::MatrixSource> parts) : columns_(parts[0].columns) {
    for (const ops::MatrixSource& part : parts) {
      rows_ += part.rows;
      bytes_ += part.bytes();
    }
  }
  int64_t rows() const override { return rows_; }
  int64_t columns() const override { return columns_; }
  int64_t bytes() const override { return bytes_; }
  int formats = 0;

 private:
  int64_t rows_ = 0, columns_, bytes_ = 0;
};

class ListedExperts : public ops::Experts {
 public:
  plan::moe::Problem problem;
  int64_t bytes = 0;
  int gate_up_formats = 0, down_formats = 0;  // of plain ones; 0: NVFP4
  int64_t count() const override { return problem.experts; }
  int64_t hidden() const override { return problem.hidden; }
  int64_t intermediate() const override { return problem.intermediate; }
  int64_t bytes_per_expert() const override { return bytes; }
  int64_t shared_slices() const override { return problem.shared_slices(); }
};

class ListedKvCache : public ops::KvCache {
 public:
  explicit ListedKvCache(const ops::KvCacheShape& shape) : shape_(shape) {}
  const ops::KvCacheShape& shape() const override { return shape_; }
  int64_t bytes() const override { return 0; }
  void copy_page(int64_t, int64_t) override {}

 private:
  ops::KvCacheShape shape_;
};

class ListedStateCache : public ops::StateCache {
 public:
  explicit ListedStateCache(const ops::StateCacheShape& shape) : shape_(shape) {}
  const ops::StateCacheShape& shape() const override { return shape_; }
  int64_t bytes() const override { return 0; }
  void copy(int64_t, int64_t) override {}

 private:
  ops::StateCacheShape shape_;
};

// A step's body that only says what it calls.
class Rehearsal : public ops::StepScope {
 public:
  explicit Rehearsal(int64_t lanes) : lanes_(lanes) {}
  void begin_trunk() override {}
  void gather_logit_rows(const ops::Tensor&, const ops::Tensor&) override {}
  void choose(const ops::Tensor&) override {}
  void begin_feed() override {}
  int64_t begin_draft(int64_t) override { return lanes_; }
  void gather_ends(const ops::Tensor&, const ops::Tensor&) override {}
  void draft(int64_t, const ops::Tensor&) override {}

 private:
  int64_t lanes_;
};

int formats_of(const ops::Matrix& matrix) { return static_cast<const ListedMatrix&>(matrix).formats; }

}  // namespace

KernelListing::KernelListing(const plan::Gpu& card, ListingOptions options)
    : card_(card), arch_(plan::arch_of(card)), options_(std::move(options)) {
  note(step_source(), "sums, gates, the router's choice, repacking of weights");
  note(norm_source(), "norms, embeddings, rows picked out");
  note(sample_source(), "choice of tokens, verification of drafts");
}

std::string KernelListing::description() const { return fmt::format("kernels of {}", card_.title); }

void KernelListing::note(plan::KernelSource source, std::string operation) {
  if (seen_.insert(source.name).second) kernels_.push_back({std::move(source), std::move(operation)});
}

void KernelListing::product(int formats, int64_t rows, int64_t columns) {
  note(wide_source(arch_, formats), "products of 17 rows and more");
  note(rows_source(arch_, rows_way(arch_, formats, rows, columns)), "products of 1 to 16 rows");
}

std::vector<ListedKernel> KernelListing::kernels(const std::set<std::string>& refused) const {
  std::vector<ListedKernel> all = kernels_;
  std::set<std::string> seen = seen_;
  for (const auto& [name, problem] : experts_) {
    for (plan::KernelSource& source : layer_sources(problem, card_, refused, options_.most_rows)) {
      if (seen.insert(source.name).second) all.push_back({std::move(source), "experts"});
    }
  }
  return all;
}

// ---- weights and caches

std::unique_ptr<ops::Buffer> KernelListing::allocate(int64_t bytes) { return std::make_unique<Untouched>(bytes); }

ops::Vector KernelListing::load_vector(std::span<const float> values) {
  ops::Vector vector;
  vector.count = static_cast<int64_t>(values.size());
  vector.buffer = std::make_unique<Untouched>(static_cast<int64_t>(values.size_bytes()));
  return vector;
}

std::unique_ptr<ops::Matrix> KernelListing::load_matrix(std::span<const ops::MatrixSource> parts) {
  auto matrix = std::make_unique<ListedMatrix>(parts);
  matrix->formats = place_stack(parts).formats();
  product(matrix->formats, matrix->rows(), matrix->columns());
  return matrix;
}

std::unique_ptr<ops::Matrix> KernelListing::load_table(const ops::MatrixSource& source) {
  return std::make_unique<ListedMatrix>(std::span(&source, 1));
}

std::unique_ptr<ops::Experts> KernelListing::load_experts(int64_t count,
                                                          const std::function<ops::ExpertSource(int64_t)>& source,
                                                          const std::function<void(int64_t)>& done) {
  auto experts = std::make_unique<ListedExperts>();
  const ops::ExpertSource first = source(0);
  done(0);
  plan::moe::Problem& problem = experts->problem;
  problem.name = "experts";
  problem.experts = count;
  problem.top_k = 1;
  problem.hidden = first.gate.columns;
  problem.intermediate = first.gate.rows;
  if (!all_nvfp4(first)) {
    experts->gate_up_formats = place_pair(first.gate, first.up).formats();
    experts->down_formats = place_stack(std::span(&first.down, 1)).formats();
  }
  experts->bytes = first.gate.bytes() + first.up.bytes() + first.down.bytes();
  return experts;
}

std::unique_ptr<ops::Experts> KernelListing::load_experts_with_shared(
    int64_t count, const std::function<ops::ExpertSource(int64_t)>& source, const std::function<void(int64_t)>& done,
    const ops::ExpertSource& shared) {
  if (!holds_shared(source(0), shared)) return nullptr;
  auto experts = load_experts(count, source, done);
  plan::moe::Problem& problem = static_cast<ListedExperts&>(*experts).problem;
  problem.shared = plan::moe::SharedExpert::kNvfp4;
  problem.shared_intermediate = shared.gate.rows;
  return experts;
}

std::unique_ptr<ops::KvCache> KernelListing::make_kv_cache(const ops::KvCacheShape& shape) {
  return std::make_unique<ListedKvCache>(shape);
}

std::unique_ptr<ops::StateCache> KernelListing::make_state_cache(const ops::StateCacheShape& shape) {
  return std::make_unique<ListedStateCache>(shape);
}

// ---- operations. What all models have is noted when the list begins, products when their weights are loaded.

void KernelListing::embed(const ops::Matrix&, const ops::Tensor&) {}
void KernelListing::rms_norm(const ops::Tensor&, const ops::Vector&, float, const ops::Tensor&) {}
void KernelListing::add_rms_norm(const ops::Tensor&, const ops::Tensor&, const ops::Vector&, float,
                                 const ops::Tensor&) {}
void KernelListing::add(const ops::Tensor&, const ops::Tensor&) {}
void KernelListing::linear(const ops::Tensor&, const ops::Matrix&, const ops::Tensor&) {}
void KernelListing::mlp(const ops::MlpParams&, const ops::Tensor&, const ops::Tensor&) {}
void KernelListing::gather_rows(const ops::Tensor&, std::span<const int32_t>, const ops::Tensor&) {}

void KernelListing::attention(const ops::AttentionParams& params, const ops::Tensor& q, const ops::Tensor& k,
                              const ops::Tensor& v, ops::KvCache& cache, int64_t layer, const ops::Tensor&) {
  FF_ASSERT(q.rows == k.rows);
  append_keys(params, k, v, cache, layer);
  const int head_dim = static_cast<int>(params.head_dim), rotary_dim = static_cast<int>(params.rotary_dim);
  for (const bool fp8 : options_.fp8_caches) {
    if (!prefill_tile(arch_, head_dim, rotary_dim, fp8)) continue;
    note(prefill_source(arch_, head_dim, rotary_dim, fp8), "attention over whole pieces");
  }
}

void KernelListing::append_keys(const ops::AttentionParams& params, const ops::Tensor&, const ops::Tensor&,
                                ops::KvCache&, int64_t) {
  for (const bool fp8 : options_.fp8_caches) {
    note(attention_source(arch_, static_cast<int>(params.head_dim), static_cast<int>(params.rotary_dim), fp8),
         "attention of few rows, keys and values appended");
  }
}

void KernelListing::delta_net(const ops::DeltaNetParams& params, const ops::Tensor&, const ops::Tensor&,
                              const ops::Tensor&, const ops::Tensor&, ops::StateCache&, int64_t, const ops::Tensor&) {
  note(delta_source(arch_, static_cast<int>(params.key_dim), static_cast<int>(params.value_dim)), "delta rule");
}

void KernelListing::moe(const ops::MoeParams& params, const ops::Tensor& x, const ops::Tensor&) {
  int formats = formats_of(*params.router);
  int64_t rows = params.router->rows();
  if (params.shared_gate != nullptr) {  // one more row of the router
    formats |= formats_of(*params.shared_gate);
    ++rows;
  }
  product(formats, rows, x.cols);
  const auto& experts = static_cast<const ListedExperts&>(*params.experts);
  if (experts.gate_up_formats != 0) {
    note(plain_source(arch_, experts.gate_up_formats, experts.down_formats), "experts that are not NVFP4");
    note(route_source(), "experts");
    return;
  }
  plan::moe::Problem problem = experts.problem;
  problem.top_k = params.top_k;
  experts_[fmt::format("{}/{}/{}/{}/{}", problem.experts, problem.top_k, problem.hidden, problem.intermediate,
                       problem.shared_slices())] = problem;
}

std::unique_ptr<ops::Stepper> KernelListing::make_stepper(const ops::StepLimits& limits, ops::KvCache*,
                                                          ops::StepBody body) {
  Rehearsal rehearsal(limits.lanes);
  body({limits.rows, limits.logit_rows, limits.lanes, limits.drafts, limits.drafts > 0}, rehearsal);
  return nullptr;
}

void KernelListing::read(const ops::Tensor&, std::span<float>) { fail("a list of kernels computes nothing"); }

}  // namespace fourfold::cuda
