// The operations of ops.h as launches on one stream. Products of up to 16 rows and of more are kernels of their own,
// and so are attention and the delta rule over sequences of up to 16 rows and of more (step_tables.h).
//
// plan(): operations that only say which kernels and how much memory they need. make_stepper() runs the body once like
// that, so that no step compiles or allocates anything; used without a stepper, operations fetch what is missing.
#pragma once

#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "base/threads.h"
#include "cpu/step/host_stepper.h"
#include "cuda/backend/backend.h"
#include "cuda/backend/choice_tables.h"
#include "cuda/backend/lane_table.h"
#include "cuda/backend/library_products.h"
#include "cuda/backend/memory.h"
#include "cuda/backend/op_timer.h"
#include "cuda/backend/part_graphs.h"
#include "cuda/backend/plain_experts.h"
#include "cuda/backend/rank_choice.h"
#include "cuda/backend/ranks.h"
#include "cuda/backend/sources.h"
#include "cuda/backend/step_tables.h"
#include "cuda/moe/kernels.h"
#include "cuda/moe/layer.h"
#include "kernels/norm/norm_args.h"
#include "kernels/step/sample_args.h"
#include "plan/step/work.h"
#include "ranks/checks.h"

namespace fourfold::cuda {

class CudaBackend : public ops::Backend {
 public:
  explicit CudaBackend(const CudaOptions& options);
  CudaBackend(const CudaOptions& options, std::shared_ptr<Card> card);
  // With kernels chosen for `target`, which are launched as on a card of so many SMs: for their self-tests.
  CudaBackend(const CudaOptions& options, std::shared_ptr<Card> card, Target target, int sms);
  ~CudaBackend() override;

  std::string description() const override;
  const Device& device() const { return card_->device; }
  std::optional<int> gpu() const override { return options_.device; }
  ops::DType activation_type() const override { return ops::DType::kBf16; }

  std::unique_ptr<ops::Buffer> allocate(int64_t bytes) override;
  ops::Vector load_vector(std::span<const float> values) override;
  std::unique_ptr<ops::Matrix> load_matrix(std::span<const ops::MatrixSource> parts) override;
  std::unique_ptr<ops::Matrix> first_rows(const ops::Matrix& matrix, int64_t rows) override;
  std::unique_ptr<ops::Matrix> load_gate_up(const ops::MatrixSource& gate, const ops::MatrixSource& up) override;
  std::unique_ptr<ops::Matrix> load_table(const ops::MatrixSource& source) override;
  std::unique_ptr<ops::Experts> load_experts(int64_t count, const std::function<ops::ExpertSource(int64_t)>& source,
                                             const std::function<void(int64_t)>& done) override;
  std::unique_ptr<ops::Experts> load_experts_with_shared(int64_t count,
                                                         const std::function<ops::ExpertSource(int64_t)>& source,
                                                         const std::function<void(int64_t)>& done,
                                                         const ops::ExpertSource& shared) override;
  std::unique_ptr<ops::KvCache> make_kv_cache(const ops::KvCacheShape& shape) override;
  std::unique_ptr<ops::StateCache> make_state_cache(const ops::StateCacheShape& shape) override;
  int64_t kv_element_bytes() const override { return options_.fp8_cache ? 1 : 2; }
  void reserve(const ops::ReserveLimits& limits) override;

  void begin_step(const ops::Batch& batch) override;
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
  void expect_routing(const ops::Matrix& output, const ops::Vector& norm, const ops::MoeParams& params) override;
  void mlp(const ops::MlpParams& params, const ops::Tensor& x, const ops::Tensor& out) override;
  void gather_rows(const ops::Tensor& x, std::span<const int32_t> rows, const ops::Tensor& out) override;
  bool all_reduce(const ops::Tensor& delta, const ops::Tensor& out) override;
  void reduce_add_rms_norm(const ops::Tensor& residual, const ops::Tensor& delta, const ops::Vector& weight, float eps,
                           const ops::Tensor& out, ops::Residual left) override;
  void gather_columns(const ops::Tensor& part, const ops::Tensor& out) override;
  std::unique_ptr<ops::Stepper> make_stepper(const ops::StepLimits& limits, ops::KvCache* kv, ops::StateCache* states,
                                             ops::StepBody body) override;
  std::optional<ops::OperationTimes> time_operations(const std::function<void()>& forward) override;
  CardTimeline timeline(const std::function<void()>& forward);
  std::vector<plan::step::Work> works(const std::function<void()>& run);                             // works_of()
  std::vector<ListedKernel> kernels(const std::set<std::string>& refused, int64_t most_rows) const;  // kernels_of()
  void read(const ops::Tensor& x, std::span<float> out) override;
  // For tuning: microseconds of a step that `forward` takes, back to back with itself; the matrices of the products in
  // such steps; how products of few rows are taken from now on; what self-tests find wrong with a way (empty: nothing).
  double time_step(const std::function<void()>& forward, int rounds, int replays);
  const std::set<MatrixShape>& matrices() const { return matrices_; }
  const Target& target() const { return arch_; }
  void take_ways(const MeasuredWays& ways);
  void load_kernels(const std::vector<RowsWay>& ways);  // in parallel
  std::string test_way(const RowsWay& way);
  // test_kernels_of(): on this backend's card.
  KernelReport test_kernels_of(const CudaBackend& counting, int64_t most_rows);

 private:
  struct Rehearsal;
  friend class KernelTests;
  // All that layers of one shape of experts share.
  struct ExpertSet {
    std::unique_ptr<ExpertKernels> kernels;
    std::unique_ptr<ExpertWorkspace> workspace;
    bool asked_for = false;  // its sources were noted
  };

  // Of matrices whose products are taken the same way.
  struct ProductKernels {
    const std::vector<Kernel>*few = nullptr, *many = nullptr;
  };
  // A norm that has been asked for and waits to see whether a product can take it along. Where the product does, the
  // residual with the delta added goes to shadow_, or from there back to its own place: the product's CTAs all read the
  // sum's parts.
  struct WaitingNorm {
    norm::NormArgs args = {};
    int64_t rows = 0;
    const void* out = nullptr;  // null: none waits
    bool over_ranks = false;    // of the ranks' deltas: only the router's choice takes it along
  };

  // Rows of experts that wait to be added up: a norm that adds the sum to the residual takes it along.
  struct WaitingSum {
    moe::RowSum rows = {};
    const FixedKernels* kernels = nullptr;
    int64_t tokens = 0;
  };

  // The shared expert's output of a layer, which is to be added to the routed experts': a norm that adds them to the
  // residual takes it along.
  struct WaitingShare {
    step::SharedArgs args = {};  // without `x` none waits
    int64_t rows = 0;
  };

  // A router that the product in front of it takes along (kernels/gemm/routing.h), and its weights for that.
  struct RouterAhead {
    const Stack* router = nullptr;
    const Stack* gate = nullptr;  // of the shared expert; null: none
    const float* norm_weight = nullptr;
    int columns = 0;
    cuda::Buffer weights = {};
  };
  // A product that has taken a router along: the norm behind it waits for the choice.
  struct RoutedProduct {
    const RouterAhead* of = nullptr;  // null: none has
    int64_t rows = 0;
    const float* residual = nullptr;  // its own place
    const void* out = nullptr;
  };
  // The last norm's residual.
  struct NormedResidual {
    const float* residual = nullptr;
    int64_t stride = 0, rows = 0;
  };

  // Row tiles at the end of a matrix that are gate and up of an MLP, and where its activations go, bf16.
  struct Gated {
    int tiles = 0;
    ops::Tensor out = {};
  };

  std::unique_ptr<Stack> noted(std::unique_ptr<Stack> stack);  // its kernels are to be loaded
  const std::vector<Kernel>& loaded(const plan::KernelSource& source);
  // A choice of tokens that is under way.
  struct Choices {
    cuda::Buffer tokens;   // for the device
    PinnedBuffer results;  // for the host: tokens, then the tokens of log-probabilities and these
    std::unique_ptr<Event> there;
    bool told = false;                   // the tokens in `results` themselves say when they are there, not the event
    std::vector<int> defined, logprobs;  // of each row, as SampleRow has them
    std::array<uint64_t, 6> taken = {};  // of uploads(), before `there`
    uint64_t part = 0;                   // the last one of graphs_ before it
  };

  // Loads what can be known of the model's kernels, at once.
  void load_known();
  // The same for all that `rehearse`, a planned body, asks for.
  void load_asked_for(const std::function<void()>& rehearse);
  // Tests the kernels that `rehearse` asked for, disables wrong ones, and asks again, until all are right.
  void test_kernels(const std::function<void()>& rehearse);
  // At least `bytes` of memory; grows outside of steps that were planned.
  DeviceAddress scratch(cuda::Buffer& buffer, int64_t bytes, const char* what);
  // Rows that an operation must have memory for: those of the batch, or all when it is planned.
  int64_t rows_of(const ops::Tensor& x) const { return planning_ ? std::max(x.rows, limits_.rows) : x.rows; }
  // Launches the sum, the share and the norm that wait, those that there are.
  void settle_waiting();
  void launch_share(const WaitingShare& share);
  void launch_norm(const norm::NormArgs& args, int64_t rows, const moe::RowSum* sum = nullptr);
  void launch_reduce(const norm::NormArgs& args, const moe::RowSum& sum, int64_t rows, ops::Residual left);
  moe::RowSum take_sum(const ops::Tensor& delta, const ops::Tensor& out);
  norm::Share take_share(const ops::Tensor& delta, const ops::Tensor& out);
  bool can_wait(const norm::NormArgs& args, const ops::Tensor& out) const;
  // All of a part is on its way.
  void end_part();
  void abandon_part();
  void norm(const float* residual, int64_t residual_stride, const ops::Tensor* delta, const ops::Vector& weight,
            float eps, float* residual_out, const ops::Tensor& out);
  const ProductKernels& product_kernels(const RowsWay& way);
  // out = x W^T, fp32 or bf16: 16 rows a launch, or all at once. A norm that waits to make x is taken along.
  // The name and the weights' bytes are for timing. Some row tiles may be gated, of more than kFewRows rows all or
  // none.
  void product(std::string_view name, const ops::Tensor& x, const gemm::Matrix& matrix, int formats, int64_t rows,
               int64_t weight_bytes, const ops::Tensor& out, const Gated& gated);
  void product(std::string_view name, const ops::Tensor& x, const gemm::Matrix& matrix, int formats, int64_t rows,
               int64_t weight_bytes, const ops::Tensor& out) {
    product(name, x, matrix, formats, rows, weight_bytes, out, {});
  }
  // The same of up to kMostRows rows beside the router's choice, as one launch; whether that is possible.
  const std::vector<Kernel>& choosing_kernels(const RowsWay& way);
  bool chooses(int formats) const {  // with such weights
    return std::any_of(choosing_.begin(), choosing_.end(),
                       [&](const auto& entry) { return entry.first.formats == formats; });
  }
  bool chooses_beside(const Stack& stack, int64_t rows) const;
  void choosing_product(std::string_view name, const gemm::RouteArgs& choice, const ops::Tensor& x, const Stack& stack,
                        const ops::Tensor& out);
  void add_router(const Stack& output, const Stack& router, const Stack* gate, const ops::Vector& norm);
  int most_routed() const {  // columns of a router
    int most = 0;
    for (const auto& entry : ahead_) most = std::max(most, entry.second.columns);
    return most;
  }
  bool goes_ahead(const Stack& output, const RouterAhead& ahead, int64_t rows) const;
  const std::vector<Kernel>& routing_kernels(const RowsWay& way, int route);
  const std::vector<Kernel>& routed_kernels();
  void pack(const RouterAhead& ahead, int tiles);
  // out = x W^T with the router's part, where there is one; the norm behind that waits; the choice with the norm, where
  // x is to be what it makes. False: nothing was done.
  bool routed_product(std::string_view name, const ops::Tensor& x, const Stack& output, const ops::Tensor& out);
  bool waits_for_router(const norm::NormArgs& args, const ops::Tensor& out) const;
  bool routed_choice(const gemm::RouteArgs& choice, const ops::Tensor& x, const Stack& router, const Stack* gate);
  void drop_routed();
  void take_along(gemm::RowsArgs& args);
  // Memory for parts of sums, of products of so many rows.
  void wide_room(int formats, int64_t rows);
  void wide_product(const ops::Tensor& x, const gemm::Matrix& matrix, int formats, const std::vector<Kernel>& kernels,
                    const ops::Tensor& out, bool paired = false);
  // The same by cuBLASLt, where that is asked for.
  bool takes_library(const Stack& stack, int64_t rows) const;
  void library_product(std::string_view name, const ops::Tensor& x, const Stack& stack, const ops::Tensor& out);
  // The activations of a gated MLP: silu(gate) x up, in narrow_.
  ops::Tensor activated(const ops::Tensor& x, const Stack& gate_up);
  ops::Tensor activated_rows(const ops::Tensor& x, const Stack& gate_up);  // where they are
  const std::vector<Kernel>& attention_kernels(const ops::AttentionParams& params);
  attn::AttentionArgs attention_args(const ops::AttentionParams& params, const attn::AttentionShape& shape,
                                     const uint16_t* first, int64_t row_stride, const CardKvCache& cache,
                                     int64_t layer);
  void take_places(attn::AttentionArgs& args, int first, int live, int page_row) const;
  AttentionEntry attention_entry(const attn::AttentionShape& shape, const StepTables::Round& round, int splits) const;
  static constexpr int kMostNarrowCtas = 2;  // of an SM
  int narrow_parts(const attn::NarrowTile& tile, const attn::AttentionShape& shape,
                   const StepTables::Round& round) const;
  int attention_span(const attn::DecodeTile& tile, const attn::AttentionShape& shape, const attn::AttentionArgs& args,
                     int longest, int places) const;
  // Sequences of more than 16 rows.
  void attend_whole(const attn::AttentionArgs& shared, const ops::AttentionParams& params);
  const float* frequencies(float theta, int64_t rotary_dim);
  // The layer's routed experts, where they are no NVFP4 ones.
  void plain_experts(const PlainExperts& experts, const ops::Tensor& x, const int* ids, const float* weights,
                     int64_t top_k, const ops::Tensor& out, const std::function<ops::Cost()>& cost);
  ExpertSet& experts_of(const CardExperts& experts, int64_t top_k);
  void routed_experts(const ops::MoeParams& params, const ops::Tensor& x, const int* ids, const float* weights,
                      const ops::Tensor& out);
  // The stepper's choice of tokens on the device: of HostStepParts.
  bool choose_later(const ops::Tensor& logits, std::span<const cpu::RowChoice> rows);
  void collect(std::span<cpu::Chosen> chosen, std::span<std::string> errors);
  void choose_rows(step::SampleArgs args, int64_t vocabulary);
  void begin_counts(std::span<const cpu::RowChoice> rows);
  void reserve_choices(const ops::StepLimits& limits);
  void reserve_parts(const ops::StepLimits& limits);
  // Brings columns of logits together that were left where they are.
  void gather_open();
  void settle();  // the stream was waited for
  // As the driver says it of events: whether the tokens, and what was launched before they were chosen, are there.
  int query(const Choices& choices) const;
  // Before an operation between ranks is launched.
  void meet_ranks(int64_t columns);
  void check_sums();  // behind a step
  void build_tables(const ops::Batch& batch);
  // Of a sequence, whose states can be put off; 0: they cannot.
  int put_off_rows();
  const std::vector<Kernel>& updates_kernels(int64_t key_dim, int64_t value_dim);
  void make_states(const CardStateCache& states, std::span<const cpu::PutOffState> made);
  // Launches from here on find their tables: at once, or when the part's graph is launched.
  void send_tables();
  void flush_tables() {
    const Kernel& kernel = step_->at(kCopyTables);
    lanes_.waits() ? lanes_.flush(copies_, kernel, overlap_) : copies_.flush(kernel, overlap_);
  }
  // The next part of a step's body.
  void begin_part(const ops::Batch& batch, cpu::StepPart part, std::span<const cpu::CarriedRow> carried);
  void carry(std::span<const cpu::CarriedRow> carried);
  bool rounds_ahead() const { return options_.rounds_ahead && options_.wide; }
  // HostStepParts' parts of lanes that the card moves on.
  void keep_lanes(const ops::StepLimits& limits, cpu::HostStepParts& parts);
  // Operations are not to be launched: the graph of their part is there.
  bool replaying() const { return graphs_.replaying(); }
  // `measure` with a timer, to which it gives what calls forward.
  void with_timer(const std::function<void()>& forward,
                  const std::function<void(OpTimer& timer, const std::function<void()>& run)>& measure);
  // An operation is left out of a recording that times others. `cost` is asked for where it is to be noted.
  template <typename F>
  bool left_out(std::string_view name, F&& cost, const plan::step::Extent& extent) {
    if (works_ != nullptr) note_work(name, cost(), extent);
    return timer_ != nullptr && !timer_->takes(name, cost());
  }
  // The same for what is not timed: `bytes` that it moves.
  void note_work(std::string_view name, double bytes) {
    if (works_ != nullptr) note_work(name, {bytes, 0}, {});
  }
  void note_work(std::string_view name, const ops::Cost& cost, const plan::step::Extent& extent);
  void clear_padding(const ops::Tensor& out);

  CudaOptions options_;
  std::shared_ptr<Card> card_;
  std::unique_ptr<CardRanks> ranks_;          // null: there is one
  std::unique_ptr<ranks::SumChecks> checks_;  // where they are asked for
  ops::Tensor last_sum_;                      // of ranks, the residual
  Target arch_;                               // that kernels are chosen for
  const int sms_;                             // that launches are made for
  ThreadPool pool_;
  Overlap overlap_;
  const bool by_parts_;  // CudaOptions::choose_by_parts
  Uploads step_uploads_, row_uploads_, block_uploads_, sample_uploads_, carry_uploads_;
  LaneTable lanes_;  // with rounds_ahead
  std::array<Uploads*, 6> uploads() {
    return {&step_uploads_, &row_uploads_, &block_uploads_, &sample_uploads_, &carry_uploads_, &lanes_.uploads()};
  }
  StepTables tables_;
  TableCopies copies_;
  PartGraphs graphs_;
  OpTimer* timer_ = nullptr;                        // within time_operations()
  std::vector<plan::step::Work>* works_ = nullptr;  // within works()
  // Of the attention over whole sequences, once a layer of the step has asked for them.
  DeviceAddress blocks_ = 0;
  int block_count_ = 0, block_group_ = 0;  // 0: not there
  ops::ReserveLimits limits_;
  ops::KvCacheShape kv_shape_;
  ops::StateCacheShape state_shape_;
  bool planning_ = false;
  bool stepping_ = false;  // what runs was planned
  bool drafting_ = false;  // the part that runs is a drafting pass
  bool drafts_ = false;    // the stepper's lanes may have drafts
  int put_off_rows_ = -1;  // put_off_rows(), once it was asked for
  bool known_loaded_ = false;
  std::vector<plan::KernelSource>* asked_for_ = nullptr;  // not null: sources are noted here instead of loaded

  std::set<RowsWay> ways_;               // of the stacks that were loaded
  std::set<std::pair<int, int>> plain_;  // formats of experts that are not NVFP4, where a layer has such
  std::set<MatrixShape> matrices_;       // of products that were timed
  std::map<std::string, const std::vector<Kernel>*> by_name_;
  std::map<std::string, std::string> expressions_;  // of loaded kernels, by their names
  std::map<RowsWay, ProductKernels> products_;
  std::map<RowsWay, const std::vector<Kernel>*> choosing_;
  std::map<std::pair<RowsWay, int>, const std::vector<Kernel>*> routing_;  // by how many columns a thread has
  std::set<RowsWay> gated_;                                                // of products with gated row tiles
  std::map<std::pair<int64_t, int64_t>, const std::vector<Kernel>*> attention_, prefill_, delta_, updates_;
  std::map<std::array<int64_t, 5>, ExpertSet> experts_;  // by count, choices, sizes, slices of the shared one
  std::map<std::pair<float, int64_t>, cuda::Buffer> frequencies_;
  std::vector<std::unique_ptr<std::vector<Kernel>>> owned_;
  const std::vector<Kernel>*norm_ = nullptr, *step_ = nullptr,
        *sample_ = nullptr;  // after load_known()
  const std::vector<Kernel>*unpack_ = nullptr,
        *routed_kernels_ = nullptr;  // once a product has asked for it

  cuda::Buffer zeros_, ones_, arrived_, narrow_words_;
  cuda::Buffer plain_tables_, plain_hidden_, plain_partial_;
  cuda::Buffer floats_, logits_, ids_, weights_, wide_, narrow_, share_, queries_, partial_, partial_sums_,
      wide_partial_, chunk_space_, chunk_flags_;
  std::unique_ptr<LibraryProducts> library_;  // null: none is asked for, or the card only counts
  cuda::Buffer unpacked_, library_space_;
  WaitingNorm waiting_;
  WaitingSum waiting_sum_;
  WaitingShare waiting_share_;
  std::map<const Stack*, RouterAhead> ahead_;
  RoutedProduct routed_;
  NormedResidual normed_;
  cuda::Buffer routing_sums_;
  bool routing_dirty_ = false;  // a part was given up
  cuda::Buffer shadow_;
  const float* shadowed_ = nullptr;  // the residual that is in shadow_ and not in its own place
  std::unique_ptr<float[]> fetched_;
  int64_t fetched_room_ = 0;
  std::array<Choices, cpu::kChoicesUnderWay> choices_;
  uint64_t chosen_ = 0, collected_ = 0;  // how many choices were begun, and how many are known
  cuda::Buffer sample_states_, counts_;
  // With by_parts_: logits of this step that ranks have in parts, until it is known who needs them. `out` without
  // data: there are none.
  struct OpenGather {
    ops::Tensor part, out;
  };
  OpenGather open_gather_;
  std::unique_ptr<RankChoice> rank_choice_;  // with by_parts_, of the stepper
  ChoiceTables asked_;                       // what the choice that was begun last is made by
  uint64_t sample_bytes_ = 0;                // of such tables
  int64_t choice_rows_ = 0;                  // that logits have room for
};

}  // namespace fourfold::cuda
