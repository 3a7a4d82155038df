// The CUDA backend's column of the table of operations (tests/ops): on the machine's card where there is one, otherwise
// on the host driver, with the rows whose kernels are compiled for it.
#include "ops/op_table.h"
#include "cuda/backend/cuda_backend.h"
#include "cuda/backend/tensors.h"
#include "hostcuda/testing.h"
#include "nvfp4/number.h"

namespace fourfold::hostcuda {
namespace {

using test::OnCuda;
using test::OpCase;

// Asked once, before the host driver takes the place of the machine's.
bool on_card() {
  static const bool there = jit::Driver::find(nullptr) != nullptr && jit::Nvrtc::find(nullptr) != nullptr;
  return there;
}

// Each way of products: one row, up to 16, up to 64, and more.
constexpr int64_t kHostCounts[] = {1, 3, 17, 65};
std::span<const int64_t> token_counts() {
  if (on_card()) return {};  // all of the table's
  return kHostCounts;
}

float to_bf16(float value) { return nvfp4::bf16_to_float(nvfp4::float_to_bf16(value)); }

class CudaColumn : public test::Column {
 public:
  explicit CudaColumn(bool fp8_cache)
      : fp8_cache_(fp8_cache),
        card_(std::make_shared<cuda::Card>(0, on_card() ? jit::default_store_directory() : kernel_store())),
        backend_(cuda_options(true, fp8_cache), card_),
        counts_(test::CpuColumn(test::backend_of(cpu::Isa::kReference), hostcuda::token_counts()).token_counts()) {
    card_->loading_block = uint64_t{1} << 20;  // all weights are small
  }

  ops::Backend& backend() override { return backend_; }
  std::span<const int64_t> token_counts() const override { return counts_; }
  float stored(float value) const override { return to_bf16(value); }

  void poison(ops::KvCache& cache) override { fill(static_cast<cuda::CardKvCache&>(cache).layer(0), cache.bytes()); }
  void poison(ops::StateCache& cache) override {
    auto& states = static_cast<cuda::CardStateCache&>(cache);
    fill(states.states(0), states.shape().slots * states.state_stride() * 4);
    fill(states.history(0), states.shape().slots * states.history_stride() * 2);
  }
  std::vector<float> state(ops::StateCache& cache, int64_t layer, int64_t slot) override {
    auto& states = static_cast<cuda::CardStateCache&>(cache);
    const ops::StateCacheShape& s = states.shape();
    const std::vector<float> panels =
        fetch(states.states(layer) + slot * states.state_stride(), s.value_heads * s.key_dim * s.value_dim);
    std::vector<float> rows(panels.size());
    for (int64_t i = 0; i < static_cast<int64_t>(panels.size()); ++i) {
      const int64_t in_head = i % (s.key_dim * s.value_dim), panel = in_head / (s.key_dim * gdn::kPanel);
      const int64_t key = in_head / gdn::kPanel % s.key_dim, column = panel * gdn::kPanel + in_head % gdn::kPanel;
      rows[static_cast<size_t>(i - in_head + key * s.value_dim + column)] = panels[static_cast<size_t>(i)];
    }
    return rows;
  }
  std::vector<float> history(ops::StateCache& cache, int64_t layer, int64_t slot) override {
    auto& states = static_cast<cuda::CardStateCache&>(cache);
    const gdn::DeltaShape shape = cuda::delta_shape(states.shape());
    const std::vector<uint16_t> heads =
        fetch(states.history(layer) + slot * states.history_stride(), shape.history_elements());
    const int width = 2 * shape.key_dim + shape.value_dim;
    std::vector<float> rows(static_cast<size_t>(gdn::kHistory * shape.channels()));
    for (int i = 0; i < static_cast<int>(heads.size()); ++i) {
      const int head = i / shape.history_head(), step = i / width % gdn::kHistory, c = i % width;
      const int channel = c < shape.key_dim       ? shape.q_column(head) + c
                          : c < 2 * shape.key_dim ? shape.k_column(head) + c - shape.key_dim
                                                  : shape.v_column(head) + c - 2 * shape.key_dim;
      rows[static_cast<size_t>(step * shape.channels() + channel)] =
          nvfp4::bf16_to_float(heads[static_cast<size_t>(i)]);
    }
    return rows;
  }

  // Products are exact, and sums fp32: those of a card's matrix units have fewer bits than fp32 additions.
  double product_error(const test::ProductOf& of, test::Type out) const override {
    return 1e-4 + (of.rounded ? kRounded : 0) + (out == test::Type::kFloat ? 0 : kRounded);
  }
  double mlp_error(const test::ProductOf& of) const override { return 3 * product_error(of, test::Type::kActivation); }
  double norm_error(int64_t) const override { return kRounded; }
  double rounding_error(test::Type out) const override { return out == test::Type::kFloat ? 0 : kRounded; }
  double attention_error(bool) const override { return fp8_cache_ ? 0.08 : 0.01; }
  // The output norm divides by what the state's terms leave; some elements of a state are 30 times its mean.
  double delta_error() const override { return 0.03; }
  double state_error() const override { return 0.02; }

 protected:
  void write(ops::Buffer& buffer, const std::vector<uint8_t>& bytes) override {
    static_cast<cuda::DeviceBuffer&>(buffer).buffer().upload(card_->stream, bytes);
  }
  bool wants_beside() const override { return true; }
  bool wants_dense() const override { return true; }

 private:
  static constexpr double kRounded = 0x1p-8;  // half a unit in the last place, of values some times their row's mean

  void fill(void* from, int64_t bytes) {
    card_->device.check(card_->device.driver().call().fill_bytes(cuda::address_of(from), 0xff,
                                                                 static_cast<size_t>(bytes), card_->stream.handle()),
                        "filling device memory");
  }
  template <typename T>
  std::vector<T> fetch(const T* from, int64_t count) {
    std::vector<T> values(static_cast<size_t>(count));
    card_->device.check(card_->device.driver().call().copy_to_host(values.data(), cuda::address_of(from),
                                                                   values.size() * sizeof(T), card_->stream.handle()),
                        "copy from the device");
    card_->stream.synchronize();
    return values;
  }

  bool fp8_cache_;
  std::shared_ptr<cuda::Card> card_;
  cuda::CudaBackend backend_;
  std::span<const int64_t> counts_;
};

struct Cell {
  const OpCase* op;
  bool fp8_cache = false;
};

void PrintTo(const Cell& cell, std::ostream* out) {
  *out << cell.op->name << (cell.fp8_cache ? " with an e4m3 cache" : "");
}
std::string cell_name(const testing::TestParamInfo<Cell>& cell) {
  return cell.param.op->name + (cell.param.fp8_cache ? "_fp8_cache" : "");
}

class CudaOpTable : public testing::TestWithParam<Cell> {
 protected:
  void SetUp() override {
    if (on_card()) return;
    if (!executor::Device::checks_plain_accesses()) GTEST_SKIP() << "sanitizers see the kernels' accesses here";
    if (GetParam().op->cuda == OnCuda::kOnCard) GTEST_SKIP() << "no card, and no kernels of this row for the host";
    install({});
  }
  void TearDown() override {
    if (!on_card() && !IsSkipped()) {
      EXPECT_EQ(live(), Live{});
    }
  }
};

using Agreement = CudaOpTable;
using Refusal = CudaOpTable;

TEST_P(Agreement, WithTheReference) {
  const auto [op, fp8_cache] = GetParam();
  test::CpuColumn reference(test::backend_of(cpu::Isa::kReference), token_counts(), to_bf16);
  const std::vector<test::Result> expected = op->run(reference);
  CudaColumn column(fp8_cache);
  test::expect_agrees(*op, expected, column);
}

TEST_P(Refusal, SaysWhatIsWanted) {
  CudaColumn column(false);
  try {
    GetParam().op->run(column);
    FAIL() << "it ran";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("wanted"), std::string::npos) << error.what();
  }
}

std::vector<Cell> cells(std::initializer_list<OnCuda> kinds, bool fp8_caches) {
  std::vector<Cell> all;
  for (const OpCase& op : test::op_cases()) {
    if (std::find(kinds.begin(), kinds.end(), op.cuda) == kinds.end()) continue;
    all.push_back({&op});
    if (fp8_caches && op.has_cache) all.push_back({&op, true});
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(Cuda, Agreement, testing::ValuesIn(cells({OnCuda::kRuns, OnCuda::kOnCard}, true)), cell_name);
INSTANTIATE_TEST_SUITE_P(Cuda, Refusal, testing::ValuesIn(cells({OnCuda::kRefused}, false)), cell_name);

}  // namespace
}  // namespace fourfold::hostcuda
