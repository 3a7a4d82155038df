// Steps within what was reserved allocate nothing: neither with operator new, which this program replaces to count, nor
// in a workspace.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <new>

#include "cpu/memory/workspace.h"
#include "op_harness.h"

namespace {
std::atomic<bool> counting{false};
std::atomic<long> allocations{0};

void* counted(size_t size) {
  if (counting) ++allocations;
  void* memory = std::malloc(size == 0 ? 1 : size);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
}  // namespace

void* operator new(size_t size) { return counted(size); }
void* operator new[](size_t size) { return counted(size); }
void* operator new(size_t size, const std::nothrow_t&) noexcept {
  if (counting) ++allocations;
  return std::malloc(size);
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, size_t) noexcept { std::free(memory); }
void operator delete(void* memory, const std::nothrow_t&) noexcept { std::free(memory); }

namespace fourfold::test {
namespace {

using ops::Format;

constexpr int64_t kHidden = 96;

std::unique_ptr<ops::Matrix> load(ops::Backend& backend, Random& random, int64_t columns,
                                  std::initializer_list<std::pair<Format, int64_t>> parts) {
  std::vector<std::shared_ptr<OwnedMatrix>> owned;
  std::vector<ops::MatrixSource> sources;
  for (const auto& [format, rows] : parts) {
    owned.push_back(random_matrix(random, format, rows, columns));
    sources.push_back(owned.back()->source);
  }
  return backend.load_matrix(sources);
}

// A layer of everything, its caches and its activations.
class Layer {
 public:
  Layer(cpu::CpuBackend& backend, int64_t rows) : backend_(backend), random_(1), rows_(rows) {
    projection_ = load(backend, random_, kHidden, {{Format::kNvfp4, 70}, {Format::kBf16, 9}, {Format::kFp8, 17}});
    odd_ = load(backend, random_, 50, {{Format::kBf16, 30}});
    head_ = load(backend, random_, kHidden, {{Format::kBf16, 40}});
    gate_up_ = load(backend, random_, kHidden, {{Format::kNvfp4, 64}, {Format::kNvfp4, 64}});
    down_ = load(backend, random_, 64, {{Format::kNvfp4, kHidden}});
    router_ = load(backend, random_, kHidden, {{Format::kBf16, kExperts}});
    shared_gate_ = load(backend, random_, kHidden, {{Format::kBf16, 1}});
    std::vector<std::shared_ptr<OwnedMatrix>> weights;
    for (int64_t e = 0; e < kExperts; ++e) {
      weights.push_back(random_matrix(random_, Format::kNvfp4, 32, kHidden));
      weights.push_back(random_matrix(random_, Format::kNvfp4, 32, kHidden));
      weights.push_back(random_matrix(random_, e % 2 == 0 ? Format::kNvfp4 : Format::kBf16, kHidden, 32));
    }
    const auto at = [&](int64_t i) { return weights[static_cast<size_t>(i)]->source; };
    experts_ = backend.load_experts(kExperts,
                                    [&](int64_t e) {
                                      return ops::ExpertSource{at(3 * e), at(3 * e + 1), at(3 * e + 2)};
                                    },
                                    {});
    table_ = backend.load_table(random_matrix(random_, Format::kBf16, 30, kHidden)->source);
    norm_ = backend.load_vector(std::vector<float>(kHidden, 1.0f));

    attention_.heads = 6;
    attention_.kv_heads = 2;
    attention_.head_dim = 32;
    attention_.rotary_dim = 16;
    attention_.rope_theta = 1e4f;
    attention_.scale = 0.2f;
    attention_.gated = true;
    kv_ = backend.make_kv_cache({1, 2, 32, 200, 16});
    ops::StateCacheShape shape{1, 40, 2, 4, 16, 32, 4};
    states_ = backend.make_state_cache(shape);
    conv_ = backend.load_vector(random_values(random_, shape.conv_channels() * 4, 0.5));
    heads_ = backend.load_vector(random_values(random_, 4));
    delta_norm_ = backend.load_vector(random_values(random_, 32));
    delta_ = {2, 4, 16, 32, 4, 1e-6f, &conv_, &heads_, &heads_, &delta_norm_};
    memory_ = backend.allocate(rows * 512 * 4);
    for (int32_t p = 0; p < 200; ++p) pages_.push_back(p);
    rows_index_.reserve(static_cast<size_t>(rows));
  }

  ops::Tensor tensor(int64_t rows, int64_t cols) {
    const ops::Tensor x = backend_.tensor(*memory_, rows, cols);
    for (int64_t i = 0; i < rows * cols; ++i) x.f32()[i] = 0.01f * static_cast<float>(i * 37 % 201 - 100);
    return x;
  }

  // One step; what comes out is not looked at here. In place where shapes allow it.
  void run(const ops::Batch& batch) {
    backend_.begin_step(batch);
    const int64_t rows = batch.size();
    const auto other = [&](const ops::Tensor& x, int64_t cols) {  // behind x in the same memory
      return ops::Tensor{x.f32() + x.rows * x.stride, ops::DType::kF32, x.rows, cols, cols};
    };
    ops::Tensor x = tensor(rows, kHidden);
    backend_.embed(*table_, x);
    backend_.add_rms_norm(x, x, norm_, 1e-6f, other(x, kHidden));
    backend_.linear(tensor(rows, kHidden), *projection_, other(x, 96));
    const ops::Tensor narrow = tensor(rows, 50);
    backend_.linear(narrow, *odd_, other(narrow, 30));
    const ops::MlpParams mlp{gate_up_.get(), down_.get()};
    backend_.mlp(mlp, tensor(rows, kHidden), other(x, kHidden));
    ops::MoeParams moe;
    moe.router = router_.get();
    moe.experts = experts_.get();
    moe.top_k = 3;
    moe.shared_gate_up = gate_up_.get();
    moe.shared_down = down_.get();
    moe.shared_gate = shared_gate_.get();
    backend_.moe(moe, tensor(rows, kHidden), other(x, kHidden));
    const ops::Tensor all = tensor(rows, 512);
    backend_.attention(attention_, all.slice_cols(0, 384), all.slice_cols(384, 448), all.slice_cols(448, 512), *kv_, 0,
                       all.slice_cols(0, 192));
    tensor(rows, 512);
    backend_.delta_net(delta_, all.slice_cols(0, 192), all.slice_cols(192, 320), all.slice_cols(320, 324),
                       all.slice_cols(324, 328), *states_, 0, all.slice_cols(328, 456));
    const auto logits = static_cast<int64_t>(batch.logit_rows.size());
    if (logits == 0) return;
    x = tensor(rows, kHidden);
    const ops::Tensor gathered{other(x, kHidden).f32(), ops::DType::kF32, logits, kHidden, kHidden};
    backend_.gather_rows(x, batch.logit_rows, gathered);
    backend_.linear(gathered, *head_, other(gathered, 40));
  }

  std::span<const int32_t> pages(int64_t first, int64_t count) const {
    return std::span(pages_).subspan(static_cast<size_t>(first), static_cast<size_t>(count));
  }

 private:
  static constexpr int64_t kExperts = 9;
  cpu::CpuBackend& backend_;
  Random random_;
  int64_t rows_;
  std::unique_ptr<ops::Matrix> projection_, odd_, head_, gate_up_, down_, router_, shared_gate_, table_;
  std::unique_ptr<ops::Experts> experts_;
  ops::Vector norm_, conv_, heads_, delta_norm_;
  ops::AttentionParams attention_;
  ops::DeltaNetParams delta_;
  std::unique_ptr<ops::KvCache> kv_;
  std::unique_ptr<ops::StateCache> states_;
  std::unique_ptr<ops::Buffer> memory_;
  std::vector<int32_t> pages_, rows_index_;
};

TEST(Allocation, NothingInAStepWithinTheLimits) {
  constexpr int64_t kRows = 150;
  struct Work {
    int64_t count, position;
  };
  const std::vector<std::vector<Work>> steps = {
      {{1, 0}}, {{150, 0}}, {{1, 700}}, {{16, 3}, {90, 400}, {1, 0}, {17, 5}}, {{5, 600}, {5, 30}, {4, 2}}};
  for (const cpu::Isa isa : fast_isas()) {
    for (const bool nvfp4_activations : {false, true}) {
      SCOPED_TRACE(cpu::isa_name(isa));
      cpu::CpuOptions options;
      options.isa = isa;
      options.threads = 2;
      options.nvfp4_activations = nvfp4_activations;
      const auto shared = cpu::make_backend(options);
      auto& backend = dynamic_cast<cpu::CpuBackend&>(*shared);
      Layer layer(backend, kRows);
      backend.reserve({kRows, 8, 800, 16});
      const int64_t growths = cpu::Workspace::late_growths();
      for (size_t i = 0; i < steps.size(); ++i) {
        StepBatch step;
        std::vector<int32_t> logit_rows;
        for (const Work& work : steps[i]) {
          ops::Sequence sequence;
          sequence.first = static_cast<int32_t>(step.tokens.size());
          sequence.count = static_cast<int32_t>(work.count);
          sequence.position = static_cast<int32_t>(work.position);
          sequence.state_in = static_cast<int32_t>(step.sequences.size());
          sequence.pages = layer.pages(50 * static_cast<int64_t>(step.sequences.size()), 50);
          step.sequences.push_back(sequence);
          step.tokens.insert(step.tokens.end(), static_cast<size_t>(work.count), 3);
          logit_rows.push_back(static_cast<int32_t>(step.tokens.size()) - 1);
        }
        if (step.tokens.size() < kRows) step.tokens.insert(step.tokens.end(), 3, 0);  // padding
        ops::Batch batch = step.batch();
        batch.logit_rows = logit_rows;
        allocations = 0;
        counting = true;
        layer.run(batch);
        counting = false;
        EXPECT_EQ(allocations.load(), 0) << "step " << i;
        EXPECT_EQ(cpu::Workspace::late_growths(), growths) << "step " << i;
      }
    }
  }
}

TEST(Allocation, GrowthAfterReservingIsCounted) {
  cpu::Workspace workspace;
  const int64_t before = cpu::Workspace::late_growths();
  workspace.get<float>(10);
  EXPECT_EQ(cpu::Workspace::late_growths(), before);
  workspace.reserve<float>(100);
  workspace.get<float>(100);
  EXPECT_EQ(cpu::Workspace::late_growths(), before);
  workspace.get<float>(101);
  EXPECT_EQ(cpu::Workspace::late_growths(), before + 1);
}

TEST(Allocation, WhatIsSharedIsUsedByOneAtATime) {
  cpu::Occupancy place;
  {
    const cpu::Occupancy::Guard first(place);
    EXPECT_ANY_THROW(cpu::Occupancy::Guard second(place));
    EXPECT_ANY_THROW(cpu::Occupancy::Guard third(place));
  }
  EXPECT_NO_THROW(cpu::Occupancy::Guard again(place));
}

}  // namespace
}  // namespace fourfold::test
