#include "plan/moe/problem.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <map>
#include <vector>

#include "base/check.h"
#include "base/math.h"
#include "plan/moe/tile.h"

namespace fourfold::plan::moe {
namespace {

// Sources: the models' config.json (hidden_size, moe_intermediate_size, num_experts, num_experts_per_tok,
// shared_expert_intermediate_size, num_hidden_layers).
constexpr NamedShape kShapes[] = {
    {"397B-A17B", "Qwen3.5-397B-A17B", 512, 10, 4096, 1024, 1024, Activation::kSwiGlu, 60},
    {"122B-A10B", "Qwen3.5-122B-A10B", 256, 8, 3072, 1024, 1024, Activation::kSwiGlu, 48},
    {"35B-A3B", "Qwen3.5/3.6-35B-A3B", 256, 8, 2048, 512, 512, Activation::kSwiGlu, 40},
    {"27B", "Qwen3.5-27B (dense: one expert)", 1, 1, 5120, 17408, 0, Activation::kSwiGlu, 64},
    {"flash-next", "E 512, top-10, H 2560, I 640", 512, 10, 2560, 640, 0, Activation::kSwiGlu, 0},
    {"flash-next-tp2", "E 512, top-10, H 2560, I 320 (one of two ranks)", 512, 10, 2560, 320, 0, Activation::kSwiGlu,
     0},
    {"glm-flash", "E 288, top-8, H 4096, I 2048", 288, 8, 4096, 2048, 0, Activation::kSwiGlu, 0},
    {"nemotron-30B", "E 128, top-6, H 2688, I 1856, squared ReLU", 128, 6, 2688, 1856, 0, Activation::kRelu2, 0},
    {"i704", "E 128, top-8, H 2816, I 704", 128, 8, 2816, 704, 0, Activation::kSwiGlu, 0},
};

void in_range(const char* field, int64_t value, int64_t low, int64_t high) {
  if (value < low || value > high) fail("{}: found {}, wanted {} to {}", field, value, low, high);
}

double pick_probability(const Problem& p) {
  return std::min(1.0, static_cast<double>(p.top_k) / static_cast<double>(p.experts));
}

// How many rows an expert has: Binomial(n, p), kept as its survival function over the counts that matter (all but about
// 1e-12 of the mass). Planning asks for it thousands of times, so each thread keeps the last one.
class RowCounts {
 public:
  static const RowCounts& of(const Problem& problem) {
    thread_local RowCounts last;
    const double p = pick_probability(problem);
    if (last.survival_.empty() || last.n_ != problem.tokens || last.p_ != p) last = RowCounts(problem.tokens, p);
    return last;
  }

  // P(rows > r).
  double above(int64_t r) const {
    if (r < low_) return 1;
    const size_t i = static_cast<size_t>(r - low_);
    return i < survival_.size() ? survival_[i] : 0;
  }
  // Smallest count that is exceeded with at most this probability.
  int64_t quantile(double tail) const {
    int64_t r = low_;
    while (above(r) > tail) ++r;
    return r;
  }
  // E[ceil(rows / tile)] = sum over j of P(rows > j * tile).
  double tiles(int tile) const {
    double sum = 0;
    for (int64_t r = 0;; r += tile) {
      const double term = above(r);
      if (term == 0) return sum;
      sum += term;
    }
  }
  // E[f(rows)], f(0) = 0.
  template <typename F>
  double mean(const F& f) const {
    double sum = 0, above_last = above(low_ - 1);
    for (size_t i = 0; i < survival_.size(); ++i) {
      const double probability = above_last - survival_[i];
      above_last = survival_[i];
      if (const auto rows = low_ + static_cast<int64_t>(i); rows > 0) sum += probability * f(rows);
    }
    return sum;
  }
  // mean() of wgmma_columns_of(), kept for each tile.
  double wgmma_columns(int tile) const;

 private:
  RowCounts() = default;
  RowCounts(int64_t n, double p) : n_(n), p_(p) {
    if (n == 0) {
      survival_ = {0};
      return;
    }
    if (p >= 1) {
      low_ = n;
      survival_ = {0};
      return;
    }
    const double all = static_cast<double>(n), mean = all * p;
    const double spread = 12 * std::sqrt(mean * (1 - p)) + 40;
    low_ = std::max<int64_t>(0, static_cast<int64_t>(mean - spread));
    const int64_t high = std::min<int64_t>(n, static_cast<int64_t>(mean + spread));
    const double log_p = std::log(p), log_q = std::log1p(-p);
    survival_.resize(static_cast<size_t>(high - low_ + 1));
    double tail = 0;
    for (int64_t r = high; r >= low_; --r) {
      survival_[static_cast<size_t>(r - low_)] = tail;
      const double rows = static_cast<double>(r);
      tail += std::exp(std::lgamma(all + 1) - std::lgamma(rows + 1) - std::lgamma(all - rows + 1) + rows * log_p +
                       (all - rows) * log_q);
    }
  }

  int64_t n_ = -1;
  double p_ = 0;
  int64_t low_ = 0;
  std::vector<double> survival_;  // [i] = P(rows > low + i)
  mutable std::map<int, double> wgmma_columns_;
};

// Columns that blocks of an expert with so many rows compute.
double wgmma_columns_of(int64_t rows, int tile) {
  const auto width = [&](int64_t size) {
    for (int i = 0;; ++i) {
      const int w = wgmma_width(tile, i);
      if (w >= size || w == tile) return static_cast<double>(w);
    }
  };
  const int64_t blocks = ceil_div(rows, int64_t{tile});
  const int64_t size = std::min<int64_t>(round_up(ceil_div(rows, blocks), int64_t{8}), tile);
  return static_cast<double>(blocks - 1) * width(size) + width(std::max<int64_t>(rows - (blocks - 1) * size, 1));
}

double RowCounts::wgmma_columns(int tile) const {
  const auto [found, fresh] = wgmma_columns_.emplace(tile, 0.0);
  if (fresh) found->second = mean([&](int64_t rows) { return wgmma_columns_of(rows, tile); });
  return found->second;
}

}  // namespace

int64_t Problem::shared_slices() const {
  if (shared != SharedExpert::kNvfp4 || weights != WeightFormat::kNvfp4 || intermediate == 0) return 0;
  return shared_intermediate % intermediate == 0 ? shared_intermediate / intermediate : 0;
}

int64_t Problem::padded_depth(Pass pass) const { return round_up(depth(pass), kDepthGrain); }

std::string_view to_string(ActivationFormat format) {
  switch (format) {
    case ActivationFormat::kBf16:
      return "bf16";
    case ActivationFormat::kNvfp4:
      return "nvfp4";
    case ActivationFormat::kAuto:
      return "auto";
  }
  return "?";
}

ActivationFormat parse_activations(std::string_view name) {
  for (const auto format : {ActivationFormat::kBf16, ActivationFormat::kNvfp4, ActivationFormat::kAuto}) {
    if (to_string(format) == name) return format;
  }
  fail("--activations '{}': wanted bf16, nvfp4 or auto", printable(name));
}

void validate(const Problem& p) {
  in_range("experts", p.experts, 1, kLimits.experts);
  in_range("top-k", p.top_k, 1, std::min(p.experts + p.elsewhere, kLimits.top_k));
  in_range("hidden", p.hidden, kLimits.hidden_min, kLimits.hidden);
  in_range("intermediate", p.intermediate, kLimits.intermediate_min, kLimits.intermediate);
  in_range("tokens", p.tokens, 0, kLimits.tokens);
  const int vector = p.scale_vector();
  if (p.hidden % vector != 0) fail("hidden: found {}, wanted a multiple of the scale vector {}", p.hidden, vector);
  if (p.intermediate % vector != 0) {
    fail("intermediate: found {}, wanted a multiple of the scale vector {}", p.intermediate, vector);
  }
  if (p.allows(ActivationFormat::kNvfp4) && p.weights == WeightFormat::kMxfp4) {
    fail("activations {} with weights mxfp4: the scale vectors differ (16 and 32), wanted bf16",
         to_string(p.activations));
  }
}

Problem rank_slice(const Problem& problem, int64_t ranks) {
  in_range("tensor-parallel ranks", ranks, 1, kLimits.ranks);
  const auto part = [&](int64_t width) { return round_up(ceil_div(width, ranks), int64_t{problem.scale_vector()}); };
  Problem slice = problem;
  slice.intermediate = part(problem.intermediate);
  slice.shared_intermediate = part(problem.shared_intermediate);
  return slice;
}

std::span<const NamedShape> named_shapes() { return kShapes; }

Problem find_shape(std::string_view name) {
  auto lower = [](std::string_view text) {
    std::string out(text);
    for (char& c : out) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
    return out;
  };
  std::string known;
  for (const NamedShape& shape : kShapes) {
    if (lower(shape.name) == lower(name)) {
      Problem p;
      p.name = shape.name;
      p.experts = shape.experts;
      p.top_k = shape.top_k;
      p.hidden = shape.hidden;
      p.intermediate = shape.intermediate;
      p.activation = shape.activation;
      p.shared_intermediate = shape.shared_intermediate;
      return p;
    }
    known += (known.empty() ? "" : ", ") + std::string(shape.name);
  }
  fail("model '{}' has no shape in the table; wanted one of {}, or --experts, --top-k, --hidden and --intermediate",
       printable(name), known);
}

double touched_experts(const Problem& p) {
  if (p.tokens == 0) return 0;
  return static_cast<double>(p.experts) * (1 - std::pow(1 - pick_probability(p), static_cast<double>(p.tokens))) +
         static_cast<double>(p.shared_slices());
}

double token_tiles(const Problem& p, int tile) {
  return RowCounts::of(p).tiles(tile) * static_cast<double>(p.experts) +
         static_cast<double>(p.shared_slices() * ceil_div(p.tokens, tile));
}

double wgmma_columns(const Problem& p, int tile) {
  if (p.tokens == 0) return 0;
  return RowCounts::of(p).wgmma_columns(tile) * static_cast<double>(p.experts) +
         static_cast<double>(p.shared_slices()) * wgmma_columns_of(p.tokens, tile);
}

int64_t busiest_rows(const Problem& p) {
  if (p.tokens == 0) return 0;
  if (p.shared_slices() > 0) return p.tokens;
  return std::max<int64_t>(1, RowCounts::of(p).quantile(1 / static_cast<double>(p.experts + 1)));
}

}  // namespace fourfold::plan::moe
