// The operations a model is written in. A backend (src/cpu, src/cuda) implements this interface; the model (src/model)
// is written once against it.
//
// Conventions: T = rows of the batch, activations are [T, features], y = x W^T. The residual stream and logits are
// fp32, everything between is of the backend's activation type; inputs and results of one call may differ in type only
// where this file says so. An operation never allocates; what it needs beyond its arguments it reserved when the model
// was built (reserve()). begin_step() names the batch that the following operations work on. Norm weights are the
// factor itself: where a checkpoint stores the offset w of (1 + w), the model adds the one in fp32 at load.
//
// Shapes are checked where weights are loaded; inside an operation a wrong shape is our own mistake (FF_ASSERT).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "ops/batch.h"
#include "ops/step.h"
#include "ops/tensor.h"

namespace fourfold::ops {

// Memory of a backend.
class Buffer {
 public:
  virtual ~Buffer() = default;
  virtual void* data() = 0;
  virtual int64_t bytes() const = 0;
};

// Of Backend::first_rows(): whole panels and tiles of all backends.
inline constexpr int64_t kFirstRows = 128;

// A loaded weight matrix [rows, columns] in the backend's own layout; possibly several checkpoint matrices stacked by
// rows, each with its own format and scale.
class Matrix {
 public:
  virtual ~Matrix() = default;
  virtual int64_t rows() const = 0;
  virtual int64_t columns() const = 0;
  virtual int64_t bytes() const = 0;  // bytes read when every row is used once
};

// The routed experts of one layer: gate and up [intermediate, hidden], down [hidden, intermediate] for each expert.
class Experts {
 public:
  virtual ~Experts() = default;
  virtual int64_t count() const = 0;
  virtual int64_t hidden() const = 0;
  virtual int64_t intermediate() const = 0;
  virtual int64_t bytes_per_expert() const = 0;
  // As how many more experts of this size the shared expert is held with them; 0: it is not
  // (load_experts_with_shared()).
  virtual int64_t shared_slices() const { return 0; }
};

struct ExpertSource {
  MatrixSource gate, up, down;
};

// fp32 vector parameters (norms, convolution, decay): a backend buffer of `count` floats.
struct Vector {
  std::unique_ptr<Buffer> buffer;
  int64_t count = 0;
  const float* data() const { return count == 0 ? nullptr : static_cast<const float*>(buffer->data()); }
};

// ---- caches
// ----------------------------------------------------------------------------------------------------------

struct KvCacheShape {
  int64_t layers = 0;  // attention layers, the MTP head's included
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  int64_t pages = 0;
  int64_t page_size = 0;  // positions in a page
};

// Keys (after norm and RoPE) and values, in pages shared by all layers: page p of each layer belongs to the same
// sequence.
class KvCache {
 public:
  virtual ~KvCache() = default;
  virtual const KvCacheShape& shape() const = 0;
  virtual int64_t bytes() const = 0;
  // Copies a page to another, all layers.
  virtual void copy_page(int64_t from, int64_t to) = 0;
};

struct StateCacheShape {
  int64_t layers = 0;  // recurrent layers
  int64_t slots = 0;
  int64_t key_heads = 0;
  int64_t value_heads = 0;
  int64_t key_dim = 0;    // per head
  int64_t value_dim = 0;  // per head
  int64_t conv_taps = 0;  // kernel width; the state holds conv_taps - 1 columns

  int64_t conv_channels() const { return 2 * key_heads * key_dim + value_heads * value_dim; }
};

// Per slot and layer: the delta-rule state [value_heads, key_dim, value_dim] fp32 and the last conv_taps - 1 inputs of
// the convolution [conv_taps - 1, conv_channels], oldest first.
class StateCache {
 public:
  virtual ~StateCache() = default;
  virtual const StateCacheShape& shape() const = 0;
  virtual int64_t bytes() const = 0;
  // Copies all layers of one slot to another (prefix snapshots, roll-back).
  virtual void copy(int64_t from, int64_t to) = 0;
};

// ---- parameters of the larger operations
// -----------------------------------------------------------------------------

// Softmax attention with optional per-head q/k norm, partial rotary embedding and output gate.
struct AttentionParams {
  int64_t heads = 0;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  int64_t rotary_dim = 0;  // leading dimensions of a head that rotate, pairs (i, i + rotary_dim / 2)
  float rope_theta = 0.0f;
  float scale = 0.0f;  // of the scores, head_dim^-0.5
  float norm_eps = 0.0f;
  bool gated = false;              // q has [head_dim query | head_dim gate] per head; output x sigmoid(gate)
  const Vector* q_norm = nullptr;  // [head_dim], may be null
  const Vector* k_norm = nullptr;
};

// Gated DeltaNet between its projections. Formulas: Yang et al. 2024, "Gated Delta Networks" (arXiv 2412.06464); per
// token and value head, with S the state [key_dim, value_dim], k and q L2-normalised, q scaled by key_dim^-0.5:
//   g = -exp(A_log) softplus(a + dt_bias), beta = sigmoid(b)
//   S <- exp(g) S;  S <- S + k (beta (v - S^T k))^T;  o = S^T q
//   out = RMSNorm(o) * norm * silu(z)
struct DeltaNetParams {
  int64_t key_heads = 0;
  int64_t value_heads = 0;  // value head h reads key head h / (value_heads / key_heads)
  int64_t key_dim = 0;
  int64_t value_dim = 0;
  int64_t conv_taps = 0;
  float norm_eps = 0.0f;
  const Vector* conv = nullptr;     // [conv_channels, conv_taps], the last tap multiplies the current token
  const Vector* a_log = nullptr;    // [value_heads]
  const Vector* dt_bias = nullptr;  // [value_heads]
  const Vector* norm = nullptr;     // [value_dim]
};

// Mixture of experts: softmax over all router logits, the top_k largest (ties: the lower expert index), their weights
// renormalised to sum 1 when `renormalize`; an expert is a gated MLP (SiLU); plus an optional shared expert scaled by
// sigmoid(x . shared_gate).
struct MoeParams {
  const Matrix* router = nullptr;  // [experts, hidden]
  const Experts* experts = nullptr;
  // Of `experts` among the router's, where others hold the rest: the sum is over the experts that are here.
  int64_t first_expert = 0;
  int64_t top_k = 0;
  bool renormalize = true;
  // [2 x shared intermediate, hidden]: gate rows, then up rows; null: there is none, or the experts hold it
  const Matrix* shared_gate_up = nullptr;
  const Matrix* shared_down = nullptr;  // [hidden, shared intermediate]
  const Matrix* shared_gate = nullptr;  // [1, hidden]; null: weight 1
};

// Dense gated MLP: down(silu(gate(x)) * up(x)).
struct MlpParams {
  const Matrix* gate_up = nullptr;  // [2 x intermediate, hidden]: gate rows, then up rows
  const Matrix* down = nullptr;     // [hidden, intermediate]
};

// What a step may have at most.
struct ReserveLimits {
  int64_t rows = 0;       // of a batch, padding included, and of its logit rows
  int64_t sequences = 0;  // in a batch
  int64_t context = 0;    // positions of a sequence
  int64_t page_size = 0;
};

// ---- measuring

// One kind of operation of a step, in a chain of its own: all of its calls one after the other.
struct OperationTime {
  std::string name;
  int64_t count = 0;
  double microseconds = 0;  // each, in the chain
  double bytes = 0;         // each: of weights, caches and states that it reads and writes at least
  double flops = 0;         // each
};
struct OperationTimes {
  std::vector<OperationTime> operations;
  double microseconds = 0;  // the whole step, back to back with itself
};

// ---- the backend
// -----------------------------------------------------------------------------------------------------

// Who uses a residual behind a sum over ranks: anything, or further sums over the same rows alone.
enum class Residual : uint8_t { kWhole, kForSums };

class Backend {
 public:
  virtual ~Backend() = default;

  // E.g. "cpu avx512, 2 threads".
  virtual std::string description() const = 0;
  // The number of the GPU that it runs on; none: the processor.
  virtual std::optional<int> gpu() const { return std::nullopt; }
  virtual DType activation_type() const = 0;

  // -- memory and weights
  virtual std::unique_ptr<Buffer> allocate(int64_t bytes) = 0;  // zeroed, aligned to at least 64 bytes
  Tensor tensor(Buffer& buffer, int64_t rows, int64_t cols) const {
    return {buffer.data(), activation_type(), rows, cols, cols};
  }
  static Tensor floats(Buffer& buffer, int64_t rows, int64_t cols) {
    return {buffer.data(), DType::kF32, rows, cols, cols};
  }
  virtual Vector load_vector(std::span<const float> values) = 0;
  // The parts are stacked by rows; all have the same number of columns.
  virtual std::unique_ptr<Matrix> load_matrix(std::span<const MatrixSource> parts) = 0;
  // The first rows of a loaded matrix of one part, a multiple of kFirstRows, as a matrix: without a copy, so that
  // `matrix` must outlive it.
  virtual std::unique_ptr<Matrix> first_rows(const Matrix& matrix, int64_t rows) = 0;
  // Gate and up of a shared expert, [intermediate, columns] each, for MoeParams::shared_gate_up and nothing else: a
  // backend may keep their rows in another order.
  virtual std::unique_ptr<Matrix> load_gate_up(const MatrixSource& gate, const MatrixSource& up) {
    const MatrixSource parts[] = {gate, up};
    return load_matrix(parts);
  }
  // An embedding table: rows are looked up, never multiplied.
  virtual std::unique_ptr<Matrix> load_table(const MatrixSource& source) = 0;
  // `source(i)` is called once for each expert, in order, from the calling thread; `done(i)` when its bytes were
  // copied.
  virtual std::unique_ptr<Experts> load_experts(int64_t count, const std::function<ExpertSource(int64_t)>& source,
                                                const std::function<void(int64_t)>& done) = 0;
  // The same with the layer's shared expert, which every row chooses, beside the routed ones, where the backend has
  // kernels for that; `shared` may go when it returns. source(0) may be called twice. Null: it has none, and the two
  // are to be loaded by themselves (source(0) may have been called, and is called again).
  virtual std::unique_ptr<Experts> load_experts_with_shared(int64_t count,
                                                            const std::function<ExpertSource(int64_t)>& source,
                                                            const std::function<void(int64_t)>& done,
                                                            const ExpertSource& shared) {
    static_cast<void>(count), static_cast<void>(source), static_cast<void>(done), static_cast<void>(shared);
    return nullptr;
  }
  virtual std::unique_ptr<KvCache> make_kv_cache(const KvCacheShape& shape) = 0;
  virtual std::unique_ptr<StateCache> make_state_cache(const StateCacheShape& shape) = 0;

  // Bytes of an element of the caches for keys and values.
  virtual int64_t kv_element_bytes() const = 0;
  // After weights are loaded and caches are made, before the first step: steps within these limits allocate nothing.
  virtual void reserve(const ReserveLimits& limits) = 0;

  // -- operations
  virtual void begin_step(const Batch& batch) = 0;

  // out[t] = table[batch.tokens[t]]; out is fp32 or of the activation type
  virtual void embed(const Matrix& table, const Tensor& out) = 0;
  // out = x / rms(x) * weight; out may be x. x is fp32 or of the activation type.
  virtual void rms_norm(const Tensor& x, const Vector& weight, float eps, const Tensor& out) = 0;
  // residual += delta; out = rms_norm(residual). The residual is fp32.
  virtual void add_rms_norm(const Tensor& residual, const Tensor& delta, const Vector& weight, float eps,
                            const Tensor& out) = 0;
  virtual void add(const Tensor& residual, const Tensor& delta) = 0;
  // out[T, rows] = x[T, columns] W^T; out is fp32 or of the activation type.
  virtual void linear(const Tensor& x, const Matrix& weight, const Tensor& out) = 0;
  // q: [T, heads x head_dim x (gated ? 2 : 1)], k and v: [T, kv_heads x head_dim]; out: [T, heads x head_dim].
  // Normalises and rotates q and k (in place), appends k and v to the cache, attends causally, applies the gate.
  virtual void attention(const AttentionParams& params, const Tensor& q, const Tensor& k, const Tensor& v,
                         KvCache& cache, int64_t layer, const Tensor& out) = 0;
  // What attention() does to the cache, without its result: normalises and rotates k (in place), appends k and v.
  virtual void append_keys(const AttentionParams& params, const Tensor& k, const Tensor& v, KvCache& cache,
                           int64_t layer) = 0;
  // qkv: [T, conv_channels] (all q heads, all k heads, all v heads; overwritten), z: [T, value_heads x value_dim],
  // b, a: [T, value_heads]; out: [T, value_heads x value_dim]. Updates the state of each sequence.
  virtual void delta_net(const DeltaNetParams& params, const Tensor& qkv, const Tensor& z, const Tensor& b,
                         const Tensor& a, StateCache& states, int64_t layer, const Tensor& out) = 0;
  virtual void moe(const MoeParams& params, const Tensor& x, const Tensor& out) = 0;
  // A hint, once the weights are loaded: what linear() makes of `output` is the delta of an add_rms_norm() with `norm`,
  // whose result goes to moe(params). The residual is that of the last norm before linear(). A backend may have the
  // product compute a part of the router's logits.
  virtual void expect_routing(const Matrix& output, const Vector& norm, const MoeParams& params) {
    (void)output, (void)norm, (void)params;
  }
  virtual void mlp(const MlpParams& params, const Tensor& x, const Tensor& out) = 0;
  // out[i] = x[rows[i]], of one type
  virtual void gather_rows(const Tensor& x, std::span<const int32_t> rows, const Tensor& out) = 0;

  // -- between the ranks of a model (docs/ranks.md): each holds a part of the weights on a backend of its own, and all
  // call the same operations. Every rank gets the same bits. An Error on a backend that was made for one rank, and on
  // every rank when one fails.
  //
  // residual += delta of rank 0, then of rank 1, ..., in fp32; out = rms_norm(residual). The residual is the same on
  // all ranks, or wherever a further such sum over these rows needs it.
  virtual void reduce_add_rms_norm(const Tensor& residual, const Tensor& delta, const Vector& weight, float eps,
                                   const Tensor& out, Residual left);
  // out = delta of rank 0, then of rank 1, ..., in fp32. False, and nothing is done, where a backend has no such
  // operation for these rows.
  virtual bool all_reduce(const Tensor& delta, const Tensor& out);
  // out[T, ...] = the ranks' parts [T, columns of the part] side by side. `part` may be its own place in `out`.
  virtual void gather_columns(const Tensor& part, const Tensor& out);

  // Steps on these caches (null where the model has none), whose body is `body`. Its operations are this backend's.
  virtual std::unique_ptr<Stepper> make_stepper(const StepLimits& limits, KvCache* kv, StateCache* states,
                                                StepBody body) = 0;

  // Times the operations that `forward` calls after its begin_step(), which has at most 16 rows of a sequence; it is
  // called several times with the same batch. What it computes is of no use. None where the backend cannot.
  virtual std::optional<OperationTimes> time_operations(const std::function<void()>& forward) {
    static_cast<void>(forward);
    return std::nullopt;
  }

  // Copies a tensor to host memory as fp32, [rows, cols] without gaps; waits for the operations before it.
  virtual void read(const Tensor& x, std::span<float> out) = 0;
};

}  // namespace fourfold::ops
