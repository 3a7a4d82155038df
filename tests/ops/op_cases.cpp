#include "op_cases.h"

#include <algorithm>

#include "base/math.h"
#include "nvfp4/number.h"

namespace fourfold::test {
namespace {

using ops::Format;

// Of steps without a script.
ops::ReserveLimits limits_of(const Column& column) { return {column.token_counts().back(), 1, 256, 16}; }

StepBatch plain_batch(int64_t tokens) {
  StepBatch step;
  step.tokens.assign(static_cast<size_t>(tokens), 0);
  ops::Sequence sequence;
  sequence.count = static_cast<int32_t>(tokens);
  step.sequences.push_back(sequence);
  return step;
}

// ---- products

// Whose memory lives as long as it is needed.
ops::MatrixSource source_of(const std::shared_ptr<OwnedMatrix>& matrix) {
  ops::MatrixSource source = matrix->source;
  source.owner = matrix;
  return source;
}

Type other(Type type) { return type == Type::kFloat ? Type::kActivation : Type::kFloat; }

struct Part {
  Format format;
  int64_t rows;
  Grid grid = Grid::kBlocks;
};

std::vector<Result> run_linear(Column& column, const std::vector<Part>& parts, int64_t columns) {
  Random random(17);
  std::vector<std::shared_ptr<OwnedMatrix>> owned;
  std::vector<ops::MatrixSource> sources;
  int64_t rows = 0;
  ProductOf of{.depth = columns};
  for (const Part& part : parts) {
    of.add(part.format);
    owned.push_back(part.format == Format::kFp8 ? random_fp8(random, part.rows, columns, part.grid)
                                                : random_matrix(random, part.format, part.rows, columns));
    sources.push_back(source_of(owned.back()));
    rows += part.rows;
  }
  ops::Backend& backend = column.backend();
  const auto matrix = backend.load_matrix(sources);
  EXPECT_EQ(matrix->rows(), rows);
  EXPECT_EQ(matrix->columns(), columns);
  backend.reserve(limits_of(column));
  owned.clear();
  sources.clear();  // a backend keeps nothing of them
  std::vector<Result> results;
  Type type = Type::kActivation;
  for (const int64_t tokens : column.token_counts()) {
    type = other(type);
    const StepBatch step = plain_batch(tokens);
    backend.begin_step(step.batch());
    const Placed x = column.place(column.inputs(random, tokens * columns), tokens, columns);
    const Placed out = column.empty(tokens, rows, type);
    backend.linear(x.tensor, *matrix, out.tensor);
    // With one output a row's error is a single sum's and not a norm's: the worst of hundreds lies further out.
    results.push_back({"T=" + std::to_string(tokens), tokens, rows, column.values(out),
                       column.product_error(of, type) * (rows == 1 ? 1.5 : 1.0),
                       0.05 * std::sqrt(static_cast<double>(columns))});
  }
  return results;
}

// The first rows of a matrix, and all of it behind them.
std::vector<Result> run_first_rows(Column& column, Format format, int64_t first, int64_t rows, int64_t columns) {
  Random random(18);
  ops::Backend& backend = column.backend();
  const auto owned = format == Format::kFp8 ? random_fp8(random, rows, columns, Grid::kCells)
                                            : random_matrix(random, format, rows, columns);
  const auto matrix = backend.load_matrix(std::vector{source_of(owned)});
  const auto view = backend.first_rows(*matrix, first);
  EXPECT_EQ(view->rows(), first);
  EXPECT_EQ(view->columns(), columns);
  EXPECT_LT(view->bytes(), matrix->bytes());
  backend.reserve(limits_of(column));
  ProductOf of{.depth = columns};
  of.add(format);
  std::vector<Result> results;
  for (const int64_t tokens : column.token_counts()) {
    const StepBatch step = plain_batch(tokens);
    backend.begin_step(step.batch());
    const Placed x = column.place(column.inputs(random, tokens * columns), tokens, columns);
    for (const ops::Matrix* weight : {view.get(), matrix.get()}) {
      const Placed out = column.empty(tokens, weight->rows(), Type::kFloat);
      backend.linear(x.tensor, *weight, out.tensor);
      results.push_back({fmt::format("T={} rows={}", tokens, weight->rows()), tokens, weight->rows(),
                         column.values(out), column.product_error(of, Type::kFloat),
                         0.05 * std::sqrt(static_cast<double>(columns))});
    }
  }
  return results;
}

// A norm and the product behind it, which a backend may take as one.
std::vector<Result> run_norm_linear(Column& column, Format format, int64_t rows, int64_t columns) {
  Random random(19);
  ops::Backend& backend = column.backend();
  const auto matrix = backend.load_matrix(std::vector{source_of(random_matrix(random, format, rows, columns))});
  const ops::Vector weight = backend.load_vector(random_values(random, columns));
  backend.reserve(limits_of(column));
  ProductOf of{.depth = columns};
  of.add(format);
  std::vector<Result> results;
  for (const int64_t tokens : column.token_counts()) {
    const StepBatch step = plain_batch(tokens);
    backend.begin_step(step.batch());
    const Placed x = column.place(column.inputs(random, tokens * columns, 3.0, Type::kFloat), tokens, columns,
                                  Type::kFloat, Rows::kDense);
    const Placed delta = column.place(column.inputs(random, tokens * columns), tokens, columns);
    const Placed normed = column.empty(tokens, columns, Type::kActivation, Rows::kDense);
    const Placed first = column.empty(tokens, rows, Type::kFloat), second = column.empty(tokens, rows, Type::kFloat);
    backend.add_rms_norm(x.tensor, delta.tensor, weight, 1e-6f, normed.tensor);
    backend.linear(normed.tensor, *matrix, first.tensor);
    backend.add_rms_norm(x.tensor, delta.tensor, weight, 1e-6f, normed.tensor);
    backend.linear(normed.tensor, *matrix, second.tensor);
    const std::string count = " T=" + std::to_string(tokens);
    const double error = column.product_error(of, Type::kFloat) + column.norm_error(columns);
    results.push_back({"first" + count, tokens, rows, column.values(first), error});
    results.push_back({"second" + count, tokens, rows, column.values(second), error});
    results.push_back({"residual" + count, tokens, columns, column.values(x), 0.0});
  }
  return results;
}

struct MoeShape {
  int64_t experts, top_k, hidden, width, shared;
  bool shared_gate;
  bool renormalize = true;
  Grid grid = Grid::kBlocks;  // of fp8 weights
};

std::vector<Result> run_moe(Column& column, Format format, Format shared_format, const MoeShape& shape,
                            double extra_tolerance) {
  Random random(23);
  ops::Backend& backend = column.backend();
  ProductOf of{.depth = std::max(shape.hidden, shape.width)};
  of.add(format);
  of.add(shared_format);
  const auto make = [&](Format wanted, int64_t rows, int64_t columns, double scale = 0.05) {
    return wanted == Format::kFp8 ? random_fp8(random, rows, columns, shape.grid)
                                  : random_matrix(random, wanted, rows, columns, scale);
  };
  const auto router = random_matrix(random, Format::kBf16, shape.experts, shape.hidden, 0.1);
  std::vector<std::shared_ptr<OwnedMatrix>> weights;
  for (int64_t e = 0; e < shape.experts; ++e) {
    weights.push_back(make(format, shape.width, shape.hidden));
    weights.push_back(make(format, shape.width, shape.hidden, 0.08));
    weights.push_back(make(format, shape.hidden, shape.width));
  }
  const auto at = [&](int64_t i) { return source_of(weights[static_cast<size_t>(i)]); };
  std::vector<std::shared_ptr<OwnedMatrix>> shared;
  if (shape.shared > 0) {
    shared = {make(shared_format, shape.shared, shape.hidden), make(shared_format, shape.shared, shape.hidden),
              make(shared_format, shape.hidden, shape.shared)};
  }
  // As a model loads them: the shared expert with the others where the backend has kernels for that.
  int64_t announced = 0;
  const auto expert = [&](int64_t e) { return ops::ExpertSource{at(3 * e), at(3 * e + 1), at(3 * e + 2)}; };
  const auto done = [&](int64_t e) { EXPECT_EQ(e, announced++); };
  std::unique_ptr<ops::Experts> experts;
  if (shape.shared > 0) {
    experts = backend.load_experts_with_shared(shape.experts, expert, done,
                                               {source_of(shared[0]), source_of(shared[1]), source_of(shared[2])});
  }
  const bool beside = experts != nullptr;
  if (!beside) experts = backend.load_experts(shape.experts, expert, done);
  backend.reserve(limits_of(column));  // what was given is in its place
  EXPECT_EQ(announced, shape.experts);
  EXPECT_EQ(experts->count(), shape.experts);
  EXPECT_EQ(experts->hidden(), shape.hidden);
  EXPECT_EQ(experts->intermediate(), shape.width);
  weights.clear();

  std::unique_ptr<ops::Matrix> shared_gate_up, shared_down, shared_gate;
  const auto load = [&](std::initializer_list<std::shared_ptr<OwnedMatrix>> parts) {
    std::vector<ops::MatrixSource> sources;
    for (const auto& part : parts) sources.push_back(source_of(part));
    return backend.load_matrix(sources);
  };
  const auto router_matrix = load({router});
  if (shape.shared > 0) {
    if (!beside) {
      shared_gate_up = backend.load_gate_up(source_of(shared[0]), source_of(shared[1]));
      shared_down = load({shared[2]});
    }
    if (shape.shared_gate) shared_gate = load({random_matrix(random, Format::kBf16, 1, shape.hidden)});
  }
  shared.clear();
  const ops::Vector weight = backend.load_vector(std::vector<float>(static_cast<size_t>(shape.hidden), 1.0f));
  backend.reserve(limits_of(column));
  ops::MoeParams params;
  params.router = router_matrix.get();
  params.experts = experts.get();
  params.top_k = shape.top_k;
  params.renormalize = shape.renormalize;
  params.shared_gate_up = shared_gate_up.get();
  params.shared_down = shared_down.get();
  params.shared_gate = shared_gate.get();

  // Tokens whose choice of experts is clear: the last chosen logit stands out from the next by more than rounding.
  std::vector<float> router_rows(static_cast<size_t>(shape.experts * shape.hidden));
  for (int64_t e = 0; e < shape.experts; ++e) ops::dequantize(router->source, e, router_rows.data() + e * shape.hidden);
  const auto clear_choice = [&](const float* x) {
    std::vector<double> logits;
    for (int64_t e = 0; e < shape.experts; ++e) {
      double sum = 0;
      for (int64_t i = 0; i < shape.hidden; ++i) {
        sum += static_cast<double>(x[i]) * static_cast<double>(router_rows[static_cast<size_t>(e * shape.hidden + i)]);
      }
      logits.push_back(sum);
    }
    std::sort(logits.rbegin(), logits.rend());
    const auto k = static_cast<size_t>(shape.top_k);
    return k == logits.size() || logits[k - 1] - logits[k] > 0.03;
  };

  std::vector<Result> results;
  for (const int64_t tokens : column.token_counts()) {
    std::vector<float> x;
    while (static_cast<int64_t>(x.size()) < tokens * shape.hidden) {
      // Every fifth token repeats the first: experts that several tokens share.
      std::vector<float> row = column.inputs(random, shape.hidden);
      if (static_cast<int64_t>(x.size()) / shape.hidden % 5 == 4) row.assign(x.begin(), x.begin() + shape.hidden);
      if (clear_choice(row.data())) x.insert(x.end(), row.begin(), row.end());
    }
    const StepBatch step = plain_batch(tokens);
    backend.begin_step(step.batch());
    const Placed in = column.place(x, tokens, shape.hidden, Type::kActivation, Rows::kDense);
    const Placed out = column.empty(tokens, shape.hidden, Type::kActivation, Rows::kDense);
    backend.moe(params, in.tensor, out.tensor);
    const std::string count = "T=" + std::to_string(tokens);
    const double error = column.mlp_error(of) + extra_tolerance;
    results.push_back({count, tokens, shape.hidden, column.values(out), error});
    // And the norm behind it, which a backend may leave sums to.
    const Placed residual = column.place(column.inputs(random, tokens * shape.hidden, 0.1, Type::kFloat), tokens,
                                         shape.hidden, Type::kFloat, Rows::kDense);
    const Placed normed = column.empty(tokens, shape.hidden, Type::kActivation, Rows::kDense);
    backend.moe(params, in.tensor, out.tensor);
    backend.add_rms_norm(residual.tensor, out.tensor, weight, 1e-6f, normed.tensor);
    results.push_back({"sum " + count, tokens, shape.hidden, column.values(residual), error});
    results.push_back({"norm " + count, tokens, shape.hidden, column.values(normed), error});
  }
  return results;
}

std::vector<Result> run_mlp(Column& column, Format gate, Format up, Format down, int64_t hidden, int64_t width,
                            double extra_tolerance) {
  Random random(29);
  ops::Backend& backend = column.backend();
  ProductOf of{.depth = std::max(hidden, width)};
  for (const Format format : {gate, up, down}) of.add(format);
  const ops::MatrixSource gate_matrix = source_of(random_matrix(random, gate, width, hidden)),
                          up_matrix = source_of(random_matrix(random, up, width, hidden)),
                          down_matrix = source_of(random_matrix(random, down, hidden, width));
  const auto gate_up = backend.load_matrix(std::vector{gate_matrix, up_matrix});
  const auto down_loaded = backend.load_matrix(std::vector{down_matrix});
  const ops::MlpParams params{gate_up.get(), down_loaded.get()};
  backend.reserve(limits_of(column));
  std::vector<Result> results;
  for (const int64_t tokens : column.token_counts()) {
    const StepBatch step = plain_batch(tokens);
    backend.begin_step(step.batch());
    const Placed x = column.place(column.inputs(random, tokens * hidden), tokens, hidden);
    const Placed out = column.empty(tokens, hidden);
    backend.mlp(params, x.tensor, out.tensor);
    results.push_back(
        {"T=" + std::to_string(tokens), tokens, hidden, column.values(out), column.mlp_error(of) + extra_tolerance});
  }
  return results;
}

// ---- rows

std::vector<Result> run_norms(Column& column, int64_t cols) {
  Random random(31);
  ops::Backend& backend = column.backend();
  std::vector<Result> results;
  const auto keep = [&](const char* what, const Placed& x, double error) {
    results.push_back(
        {std::string(what) + " T=" + std::to_string(x.tensor.rows), x.tensor.rows, cols, column.values(x), error});
  };
  const ops::Vector weight = backend.load_vector(random_values(random, cols));
  backend.reserve(limits_of(column));
  const double error = column.norm_error(cols);
  for (const int64_t tokens : column.token_counts()) {
    const StepBatch step = plain_batch(tokens);
    backend.begin_step(step.batch());
    const Placed x = column.place(column.inputs(random, tokens * cols, 3.0, Type::kFloat), tokens, cols, Type::kFloat);
    const Placed delta = column.place(column.inputs(random, tokens * cols), tokens, cols);
    const Placed out = column.empty(tokens, cols);
    backend.rms_norm(x.tensor, weight, 1e-6f, out.tensor);
    keep("rms_norm", out, error);
    backend.add_rms_norm(x.tensor, delta.tensor, weight, 1e-6f, out.tensor);
    keep("add_rms_norm residual", x, 0);
    keep("add_rms_norm", out, error);
    backend.rms_norm(delta.tensor, weight, 1e-6f, delta.tensor);
    keep("rms_norm in place", delta, error);
    std::vector<int32_t> rows;
    for (int64_t i = 0; i < tokens; i += 3) rows.push_back(static_cast<int32_t>((i * 7) % tokens));
    const Placed gathered = column.empty(static_cast<int64_t>(rows.size()), cols, Type::kFloat);
    backend.gather_rows(x.tensor, rows, gathered.tensor);
    keep("gather_rows", gathered, 0);
  }
  return results;
}

std::vector<Result> run_add(Column& column, int64_t cols) {
  Random random(33);
  ops::Backend& backend = column.backend();
  backend.reserve(limits_of(column));
  std::vector<Result> results;
  for (const int64_t tokens : column.token_counts()) {
    const StepBatch step = plain_batch(tokens);
    backend.begin_step(step.batch());
    const Placed x = column.place(column.inputs(random, tokens * cols, 3.0, Type::kFloat), tokens, cols, Type::kFloat);
    const Placed delta = column.place(column.inputs(random, tokens * cols), tokens, cols);
    backend.add(x.tensor, delta.tensor);
    results.push_back({"T=" + std::to_string(tokens), tokens, cols, column.values(x), 0.0});
  }
  return results;
}

std::vector<Result> run_embed(Column& column, Format format, int64_t rows, int64_t cols) {
  Random random(37);
  ops::Backend& backend = column.backend();
  const auto table = backend.load_table(source_of(random_matrix(random, format, rows, cols)));
  backend.reserve(limits_of(column));
  std::vector<Result> results;
  Type type = Type::kActivation;
  for (const int64_t tokens : column.token_counts()) {
    type = other(type);
    StepBatch step = plain_batch(tokens);
    for (int32_t& token : step.tokens) token = static_cast<int32_t>(random.below(static_cast<uint64_t>(rows)));
    step.tokens[0] = static_cast<int32_t>(rows - 1);
    backend.begin_step(step.batch());
    const Placed out = column.empty(tokens, cols, type);
    backend.embed(*table, out.tensor);
    results.push_back({"T=" + std::to_string(tokens), tokens, cols, column.values(out), column.rounding_error(type)});
  }
  return results;
}

// ---- token mixers: several sequences over several steps

// Tokens that sequences 0, 1, ... contribute to each step; 0: not in the batch.
using Script = std::vector<std::vector<int64_t>>;

const Script kMixedScript = {{37, 65, 0}, {1, 64, 0}, {1, 17, 3}, {1, 1, 1}, {5, 1, 16}, {1, 2, 1}};

struct AttentionShape {
  int64_t heads, kv_heads, head_dim, rotary_dim, page_size;
  bool gated, norms;
};

// `exact`: keys and values are f16 numbers that no norm or rotation changes, so that the cache rounds nothing.
// `append`: keys and values of every other step are appended by themselves, and seen by the steps behind it.
std::vector<Result> run_attention(Column& column, const AttentionShape& shape, const Script& script, bool exact,
                                  bool append = false) {
  Random random(41);
  ops::Backend& backend = column.backend();
  const int64_t dim = shape.head_dim;
  ops::AttentionParams params;
  params.heads = shape.heads;
  params.kv_heads = shape.kv_heads;
  params.head_dim = dim;
  params.rotary_dim = exact ? 0 : shape.rotary_dim;
  params.rope_theta = 1e7f;
  params.scale = 1.0f / std::sqrt(static_cast<float>(dim));
  params.norm_eps = 1e-6f;
  params.gated = shape.gated;
  const ops::Vector q_norm = backend.load_vector(random_values(random, dim));
  const ops::Vector k_norm = backend.load_vector(random_values(random, dim));
  if (shape.norms) params.q_norm = &q_norm;
  if (shape.norms && !exact) params.k_norm = &k_norm;

  const auto sequences = static_cast<int64_t>(script[0].size());
  int64_t longest = 0;
  for (int64_t s = 0; s < sequences; ++s) {
    int64_t total = 0;
    for (const auto& counts : script) total += counts[static_cast<size_t>(s)];
    longest = std::max(longest, total);
  }
  const int64_t pages_each = ceil_div(longest, shape.page_size);
  ops::KvCacheShape cache_shape;
  cache_shape.layers = 2;
  cache_shape.kv_heads = shape.kv_heads;
  cache_shape.head_dim = dim;
  cache_shape.pages = sequences * pages_each + 3;
  cache_shape.page_size = shape.page_size;
  const auto cache = backend.make_kv_cache(cache_shape);
  column.poison(*cache);  // pages hold whatever was there before
  backend.reserve({200, sequences, pages_each * shape.page_size, shape.page_size});
  // Pages of a sequence are neither adjacent nor in order.
  std::vector<std::vector<int32_t>> pages(static_cast<size_t>(sequences));
  for (int64_t p = 0; p < pages_each; ++p) {
    for (int64_t s = 0; s < sequences; ++s) {
      const int64_t page = cache_shape.pages - 1 - (p * sequences + (s + p) % sequences);
      pages[static_cast<size_t>((s + p) % sequences)].push_back(static_cast<int32_t>(page));
    }
  }

  std::vector<int64_t> positions(static_cast<size_t>(sequences), 0);
  std::vector<Result> results;
  for (size_t i = 0; i < script.size(); ++i) {
    StepBatch step;
    for (size_t s = 0; s < script[i].size(); ++s) {
      const int64_t count = script[i][s];
      if (count == 0) continue;
      ops::Sequence sequence;
      sequence.first = static_cast<int32_t>(step.tokens.size());
      sequence.count = static_cast<int32_t>(count);
      sequence.position = static_cast<int32_t>(positions[s]);
      sequence.pages = pages[s];
      step.sequences.push_back(sequence);
      step.tokens.insert(step.tokens.end(), static_cast<size_t>(count), 0);
      positions[s] += count;
    }
    const auto tokens = static_cast<int64_t>(step.tokens.size());
    const int64_t q_cols = shape.heads * dim * (shape.gated ? 2 : 1);
    std::vector<float> keys = column.inputs(random, tokens * shape.kv_heads * dim);
    std::vector<float> values = column.inputs(random, tokens * shape.kv_heads * dim);
    if (exact) {
      for (auto* list : {&keys, &values}) {
        for (float& x : *list) x = nvfp4::f16_to_float(nvfp4::float_to_f16(x));
      }
    }
    backend.begin_step(step.batch());
    if (append && i % 2 == 0) {
      const std::vector<Placed> kv = column.beside(tokens, {keys, values});
      backend.append_keys(params, kv[0].tensor, kv[1].tensor, *cache, 1);
      continue;
    }
    const std::vector<Placed> qkv = column.beside(tokens, {column.inputs(random, tokens * q_cols, 1.5), keys, values});
    const Placed out = column.empty(tokens, shape.heads * dim);
    backend.attention(params, qkv[0].tensor, qkv[1].tensor, qkv[2].tensor, *cache, 1, out.tensor);
    results.push_back(
        {"step " + std::to_string(i), tokens, shape.heads * dim, column.values(out), column.attention_error(exact)});
  }
  return results;
}

struct DeltaShape {
  int64_t key_heads, value_heads, key_dim, value_dim, taps;
};

std::vector<Result> run_delta_net(Column& column, const DeltaShape& shape, const Script& script) {
  Random random(43);
  ops::Backend& backend = column.backend();
  ops::StateCacheShape cache_shape;
  cache_shape.layers = 2;
  cache_shape.key_heads = shape.key_heads;
  cache_shape.value_heads = shape.value_heads;
  cache_shape.key_dim = shape.key_dim;
  cache_shape.value_dim = shape.value_dim;
  cache_shape.conv_taps = shape.taps;
  const auto sequences = static_cast<int64_t>(script[0].size());
  cache_shape.slots = 2 * sequences + 1;
  const auto cache = backend.make_state_cache(cache_shape);
  const int64_t channels = cache_shape.conv_channels();
  column.poison(*cache);
  backend.reserve({600, sequences, 2048, 0});

  ops::DeltaNetParams params;
  params.key_heads = shape.key_heads;
  params.value_heads = shape.value_heads;
  params.key_dim = shape.key_dim;
  params.value_dim = shape.value_dim;
  params.conv_taps = shape.taps;
  params.norm_eps = 1e-6f;
  const ops::Vector conv = backend.load_vector(random_values(random, channels * shape.taps, 0.5));
  const ops::Vector a_log = backend.load_vector(random_values(random, shape.value_heads, 1.0));
  const ops::Vector dt_bias = backend.load_vector(random_values(random, shape.value_heads, 1.0));
  const ops::Vector norm = backend.load_vector(random_values(random, shape.value_dim));
  params.conv = &conv;
  params.a_log = &a_log;
  params.dt_bias = &dt_bias;
  params.norm = &norm;

  // Sequence s keeps its state in slot s, moves to slot sequences + s in every third step, and back in the next.
  std::vector<int64_t> positions(static_cast<size_t>(sequences), 0);
  std::vector<int32_t> slots;
  for (int32_t s = 0; s < sequences; ++s) slots.push_back(s);
  std::vector<Result> results;
  const int64_t width = shape.value_heads * shape.value_dim;
  for (size_t i = 0; i < script.size(); ++i) {
    StepBatch step;
    for (size_t s = 0; s < script[i].size(); ++s) {
      const int64_t count = script[i][s];
      if (count == 0) continue;
      ops::Sequence sequence;
      sequence.first = static_cast<int32_t>(step.tokens.size());
      sequence.count = static_cast<int32_t>(count);
      sequence.position = static_cast<int32_t>(positions[s]);
      sequence.state_in = slots[s];
      const auto other = static_cast<int32_t>(slots[s] < sequences ? slots[s] + sequences : slots[s] - sequences);
      if (i % 3 != 0) slots[s] = other;
      sequence.state_out = std::span(&slots[s], 1);
      step.sequences.push_back(sequence);
      step.tokens.insert(step.tokens.end(), static_cast<size_t>(count), 0);
      positions[s] += count;
    }
    const auto tokens = static_cast<int64_t>(step.tokens.size());
    const std::vector<Placed> in = column.beside(
        tokens, {column.inputs(random, tokens * channels), column.inputs(random, tokens * width),
                 column.inputs(random, tokens * shape.value_heads), column.inputs(random, tokens * shape.value_heads)});
    const Placed out = column.empty(tokens, width);
    backend.begin_step(step.batch());
    backend.delta_net(params, in[0].tensor, in[1].tensor, in[2].tensor, in[3].tensor, *cache, 1, out.tensor);
    results.push_back({"step " + std::to_string(i), tokens, width, column.values(out), column.delta_error()});
    for (const ops::Sequence& sequence : step.sequences) {
      results.push_back({"state after step " + std::to_string(i), shape.value_heads, shape.key_dim * shape.value_dim,
                         column.state(*cache, 1, sequence.state_out[0]), column.state_error()});
      if (shape.taps > 1) {
        results.push_back({"convolution after step " + std::to_string(i), shape.taps - 1, channels,
                           column.history(*cache, 1, sequence.state_out[0]), 0.0});
      }
    }
  }
  return results;
}

class Cases {
 public:
  // The row that was added, for what is to be said of it.
  OpCase& add(std::string name, std::function<std::vector<Result>(Column&)> run) {
    cases_.push_back({std::move(name), std::move(run)});
    return cases_.back();
  }
  std::vector<OpCase> take() { return std::move(cases_); }

 private:
  std::vector<OpCase> cases_;
};

void add_products(Cases& cases) {
  // Shapes of the Qwen3.5 models with every size divided by 8 or so, then odd ones.
  for (const Format format : {Format::kF32, Format::kBf16, Format::kF16, Format::kFp8, Format::kNvfp4}) {
    const std::string name = std::string("linear_") + ops::format_name(format);
    // The GPU has no kernels for scales of 24 x 32.
    const OnCuda blocks = format == Format::kFp8 ? OnCuda::kRefused : OnCuda::kRuns;
    const auto linear = [&](const char* shape, int64_t rows, int64_t columns, OnCuda cuda) {
      cases.add(name + "_" + shape, [=](Column& c) { return run_linear(c, {{format, rows}}, columns); }).cuda = cuda;
    };
    linear("1024x256", 1024, 256, blocks == OnCuda::kRuns ? OnCuda::kOnCard : blocks);
    linear("384x1024", 384, 1024, blocks);
    linear("37x48", 37, 48, blocks);
    linear("1x272", 1, 272, blocks);
    linear("5x16", 5, 16, OnCuda::kRuns);  // one scale along a row
    if (format != Format::kNvfp4) {
      linear("67x101", 67, 101, OnCuda::kRefused);
      linear("2x1", 2, 1, OnCuda::kRefused);
    }
  }
  const auto linear = [&](const char* name, const std::vector<Part>& parts, int64_t columns) {
    cases.add(name, [=](Column& c) { return run_linear(c, parts, columns); });
  };
  linear("linear_fp8_tensor_128x320", {{Format::kFp8, 128, Grid::kTensor}}, 320);
  linear("linear_fp8_rows_100x320", {{Format::kFp8, 100, Grid::kRows}}, 320);
  linear("linear_fp8_cells_100x320", {{Format::kFp8, 100, Grid::kCells}}, 320);
  linear("linear_stacked_same", {{Format::kNvfp4, 64}, {Format::kNvfp4, 8}, {Format::kNvfp4, 24}}, 512);
  linear("linear_stacked_odd", {{Format::kNvfp4, 33}, {Format::kNvfp4, 7}, {Format::kNvfp4, 1}}, 80);
  linear("linear_stacked_mixed",
         {{Format::kFp8, 40, Grid::kTensor}, {Format::kBf16, 3}, {Format::kNvfp4, 21}, {Format::kF32, 2}}, 192);
  cases.add("linear_w4a4",
            [](Column& c) {
              return run_linear(c, {{Format::kNvfp4, 200}, {Format::kBf16, 8}}, 512);
            })
      .nvfp4_activations = true;
  cases.add("first_rows_nvfp4", [](Column& c) { return run_first_rows(c, Format::kNvfp4, 256, 400, 512); });
  cases.add("first_rows_fp8", [](Column& c) { return run_first_rows(c, Format::kFp8, 128, 391, 256); });
  cases.add("norm_linear_nvfp4", [](Column& c) { return run_norm_linear(c, Format::kNvfp4, 37, 272); });
  cases.add("norm_linear_bf16", [](Column& c) { return run_norm_linear(c, Format::kBf16, 19, 1040); });
}

void add_experts(Cases& cases) {
  const MoeShape small{32, 8, 256, 64, 64, true};     // 35B-A3B
  const MoeShape middle{16, 8, 384, 128, 128, true};  // 122B-A10B
  const MoeShape large{64, 10, 256, 128, 128, true};  // 397B-A17B
  const auto moe = [&](const char* name, Format format, Format shared, const MoeShape& shape,
                       OnCuda cuda = OnCuda::kRuns) {
    cases.add(name, [=](Column& c) { return run_moe(c, format, shared, shape, 0); }).cuda = cuda;
  };
  moe("moe_nvfp4_small", Format::kNvfp4, Format::kBf16, small, OnCuda::kOnCard);
  moe("moe_nvfp4_middle", Format::kNvfp4, Format::kNvfp4, middle, OnCuda::kOnCard);
  moe("moe_nvfp4_large", Format::kNvfp4, Format::kNvfp4, large, OnCuda::kOnCard);
  moe("moe_bf16_small", Format::kBf16, Format::kBf16, small, OnCuda::kOnCard);
  moe("moe_bf16_middle", Format::kBf16, Format::kBf16, middle, OnCuda::kOnCard);
  moe("moe_fp8_small", Format::kFp8, Format::kBf16, small, OnCuda::kRefused);
  moe("moe_fp8_middle", Format::kFp8, Format::kFp8, middle, OnCuda::kRefused);
  // The shared expert as two more, whose kernels the demo model runs.
  moe("moe_nvfp4_slices", Format::kNvfp4, Format::kNvfp4, {24, 4, 256, 64, 128, true});
  moe("moe_bf16", Format::kBf16, Format::kBf16, {6, 2, 80, 48, 16, true});
  moe("moe_fp8_rows", Format::kFp8, Format::kFp8, {6, 2, 80, 48, 16, true, true, Grid::kRows});
  moe("moe_no_shared", Format::kNvfp4, Format::kBf16, {6, 2, 80, 48, 0, false});
  moe("moe_all_experts", Format::kNvfp4, Format::kBf16, {5, 5, 48, 16, 32, false, false}, OnCuda::kOnCard);
  moe("moe_plain_softmax", Format::kNvfp4, Format::kFp8, {7, 1, 112, 32, 16, true, false, Grid::kRows},
      OnCuda::kOnCard);
  // A value that rounds the other way before its second quantisation is one step of e2m1 off.
  cases.add("moe_w4a4", [=](Column& c) { return run_moe(c, Format::kNvfp4, Format::kNvfp4, small, 2e-2); })
      .nvfp4_activations = true;

  // Widths that are no whole words, so that padding is multiplied.
  moe("moe_bf16_odd", Format::kBf16, Format::kBf16, {6, 2, 75, 23, 9, true}, OnCuda::kRefused);
  moe("moe_fp8_odd", Format::kFp8, Format::kFp8, {6, 2, 75, 23, 9, true}, OnCuda::kRefused);

  const auto mlp = [&](const char* name, Format gate, Format up, Format down, int64_t hidden, int64_t width,
                       OnCuda cuda = OnCuda::kRuns) {
    cases.add(name, [=](Column& c) { return run_mlp(c, gate, up, down, hidden, width, 0); }).cuda = cuda;
  };
  mlp("mlp_bf16_odd", Format::kBf16, Format::kBf16, Format::kBf16, 51, 23, OnCuda::kRefused);
  mlp("mlp_nvfp4", Format::kNvfp4, Format::kNvfp4, Format::kNvfp4, 256, 704, OnCuda::kOnCard);
  mlp("mlp_nvfp4_small", Format::kNvfp4, Format::kNvfp4, Format::kNvfp4, 80, 112);
  mlp("mlp_bf16", Format::kBf16, Format::kBf16, Format::kBf16, 320, 96);
  mlp("mlp_mixed", Format::kFp8, Format::kNvfp4, Format::kF16, 144, 48, OnCuda::kRefused);
  cases
      .add("mlp_w4a4",
           [](Column& c) { return run_mlp(c, Format::kNvfp4, Format::kNvfp4, Format::kNvfp4, 256, 192, 2e-2); })
      .nvfp4_activations = true;
}

void add_rows(Cases& cases) {
  // Rows of a norm on the GPU are whole pieces of 16 bytes; models have no others.
  for (const int64_t cols : {1, 7, 100, 1032, 2048}) {
    cases.add("norms_" + std::to_string(cols), [=](Column& c) { return run_norms(c, cols); }).cuda =
        cols % 8 == 0 ? OnCuda::kRuns : OnCuda::kNever;
  }
  for (const int64_t cols : {1, 7, 2048}) {
    cases.add("add_" + std::to_string(cols), [=](Column& c) { return run_add(c, cols); });
  }
  for (const Format format : {Format::kF32, Format::kBf16, Format::kF16, Format::kFp8, Format::kNvfp4}) {
    cases.add(std::string("embed_") + ops::format_name(format),
              [=](Column& c) { return run_embed(c, format, 99, 112); });
  }
}

void add_mixers(Cases& cases) {
  const auto attention = [&](const std::string& name, const AttentionShape& shape, const Script& script, OnCuda cuda,
                             OnCuda exact) {
    OpCase& row = cases.add("attention_" + name, [=](Column& c) { return run_attention(c, shape, script, false); });
    row.cuda = cuda;
    row.has_cache = shape.head_dim == 256;
    cases.add("attention_" + name + "_exact", [=](Column& c) { return run_attention(c, shape, script, true); }).cuda =
        exact;
  };
  const AttentionShape large{16, 2, 256, 64, 16, true, true};
  attention("35b", large, kMixedScript, OnCuda::kOnCard, OnCuda::kOnCard);
  attention("122b", {32, 2, 256, 64, 64, true, true}, {{20, 9}, {1, 1}, {1, 4}}, OnCuda::kOnCard, OnCuda::kOnCard);
  attention("three_to_one", {3, 1, 256, 64, 32, false, true}, {{21, 2}, {1, 17}, {5, 1}, {1, 1}}, OnCuda::kRuns,
            OnCuda::kOnCard);
  attention("narrow", {10, 2, 128, 32, 16, true, false}, {{37, 3}, {1, 1}, {1, 16}}, OnCuda::kRuns, OnCuda::kOnCard);
  // Pages and heads that the GPU has no kernels for.
  attention("plain", {4, 4, 64, 64, 7, false, false}, kMixedScript, OnCuda::kRefused, OnCuda::kRefused);
  attention("odd", {6, 2, 40, 20, 1, false, true}, kMixedScript, OnCuda::kRefused, OnCuda::kRefused);
  attention("five_to_one", {5, 1, 96, 32, 100, true, false}, kMixedScript, OnCuda::kRefused, OnCuda::kRefused);
  attention("tiny", {2, 1, 2, 2, 3, true, true}, kMixedScript, OnCuda::kRefused, OnCuda::kRefused);
  attention("long", {4, 1, 32, 16, 16, true, true}, {{700, 0}, {600, 3}, {1, 1}, {4, 300}, {1, 1}}, OnCuda::kRefused,
            OnCuda::kRefused);
  OpCase& append = cases.add("append_keys", [](Column& c) {
    return run_attention(c, {3, 1, 256, 64, 16, true, true}, {{19, 2}, {1, 1}, {1, 17}, {2, 1}}, false, true);
  });
  append.has_cache = true;

  const auto delta = [&](const char* name, const DeltaShape& shape, const Script& script,
                         OnCuda cuda = OnCuda::kOnCard) {
    cases.add(std::string("delta_net_") + name, [=](Column& c) { return run_delta_net(c, shape, script); }).cuda = cuda;
  };
  delta("35b", {2, 4, 128, 128, 4}, kMixedScript);
  delta("122b", {1, 4, 128, 128, 4}, kMixedScript);
  delta("three_to_one", {1, 3, 128, 128, 4}, {{33, 2}, {1, 17}, {5, 1}, {1, 1}}, OnCuda::kRuns);
  delta("small", {3, 3, 16, 32, 4}, kMixedScript);
  delta("narrow", {1, 2, 64, 48, 4}, {{37, 1}, {1, 16}, {1, 1}}, OnCuda::kRuns);
  delta("odd", {2, 4, 21, 19, 3}, kMixedScript, OnCuda::kRefused);
  delta("tiny", {1, 2, 2, 2, 2}, kMixedScript, OnCuda::kRefused);
  delta("no_history", {2, 2, 24, 40, 1}, kMixedScript, OnCuda::kRefused);
  delta("long", {1, 2, 64, 48, 4}, {{513, 1}, {200, 79}, {1, 15}});
}

std::vector<OpCase> make_cases() {
  Cases cases;
  add_products(cases);
  add_experts(cases);
  add_rows(cases);
  add_mixers(cases);
  std::vector<OpCase> all = cases.take();
  for (OpCase& row : all) {
    if (row.nvfp4_activations) row.cuda = OnCuda::kNever;
  }
  return all;
}

}  // namespace

const std::vector<OpCase>& op_cases() {
  static const std::vector<OpCase> cases = make_cases();
  return cases;
}

}  // namespace fourfold::test
