// Elementwise kernels over Vec. Included inside the anonymous namespace of one source per instruction set, after
// simd_*.h; it includes nothing itself.

constexpr int64_t kLanes = Vec::kLanes;

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// e^x to about 1e-7 relative for x in [-87.3, 88.3], clamped outside; NaN stays NaN. Range reduction to |r| <= ln 2 / 2
// and the Taylor polynomial of degree 7, whose remainder there is below 6e-9.
inline Vec exp(Vec x) {
  x = min(Vec::all(88.3f), max(Vec::all(-87.3f), x));
  const Vec n = round(x * Vec::all(1.44269504f));
  Vec r = fnma(n, Vec::all(0.693359375f), x);  // ln 2 in two parts, the first exact times n
  r = fnma(n, Vec::all(-2.12194440e-4f), r);
  Vec p = Vec::all(1.0f / 5040);
  p = fma(p, r, Vec::all(1.0f / 720));
  p = fma(p, r, Vec::all(1.0f / 120));
  p = fma(p, r, Vec::all(1.0f / 24));
  p = fma(p, r, Vec::all(1.0f / 6));
  p = fma(p, r, Vec::all(0.5f));
  p = fma(p, r, Vec::all(1.0f));
  p = fma(p, r, Vec::all(1.0f));
  return p * power_of_two(n);
}

inline float exp_one(float x) {
  float lanes[kLanes];
  exp(Vec::all(x)).store(lanes);
  return lanes[0];
}

// x / (1 + e^-x)
inline Vec silu(Vec x) { return x / (Vec::all(1.0f) + exp(Vec::zero() - x)); }

// fn(i, vec) for whole vectors of [0, n), then once more on a zero-padded copy of the rest. `fn` returns what is
// stored.
template <typename F>
inline void transform(float* x, int64_t n, F fn) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) fn(i, Vec::load(x + i)).store(x + i);
  if (i < n) {
    float rest[kLanes] = {};
    for (int64_t j = i; j < n; ++j) rest[j - i] = x[j];
    fn(i, Vec::load(rest)).store(rest);
    for (int64_t j = i; j < n; ++j) x[j] = rest[j - i];
  }
}

// kLanes values of p from i on, zero beyond n.
inline Vec load_padded(const float* p, int64_t i, int64_t n) {
  if (i + kLanes <= n) return Vec::load(p + i);
  float rest[kLanes] = {};
  for (int64_t j = i; j < n; ++j) rest[j - i] = p[j];
  return Vec::load(rest);
}

inline void store_padded(Vec x, float* p, int64_t i, int64_t n) {
  if (i + kLanes <= n) {
    x.store(p + i);
    return;
  }
  float rest[kLanes];
  x.store(rest);
  for (int64_t j = i; j < n; ++j) p[j] = rest[j - i];
}

// Four running sums: a row of 2048 has 16 to 64 additions in each lane.
inline float sum_of_squares(const float* x, int64_t n) {
  Vec sums[4] = {Vec::zero(), Vec::zero(), Vec::zero(), Vec::zero()};
  int64_t i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
    for (int64_t j = 0; j < 4; ++j) {
      const Vec y = Vec::load(x + i + j * kLanes);
      sums[j] = fma(y, y, sums[j]);
    }
  }
  for (; i < n; i += kLanes) {
    const Vec y = load_padded(x, i, n);
    sums[0] = fma(y, y, sums[0]);
  }
  return ((sums[0] + sums[1]) + (sums[2] + sums[3])).sum();
}

inline float inverse_root(float x) { return 1.0f / __builtin_sqrtf(x); }

void rms_norm(const float* x, const float* weight, float eps, int64_t n, float* out) {
  const Vec factor = Vec::all(inverse_root(sum_of_squares(x, n) / static_cast<float>(n) + eps));
  for (int64_t i = 0; i < n; i += kLanes) {
    store_padded(load_padded(x, i, n) * factor * load_padded(weight, i, n), out, i, n);
  }
}

void add(float* x, const float* delta, int64_t n) {
  transform(x, n, [&](int64_t i, Vec y) { return y + load_padded(delta, i, n); });
}

void to_bf16(const float* x, int64_t n, uint16_t* out) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) Vec::load(x + i).store_bf16(out + i);
  if (i < n) {
    uint16_t rest[kLanes];
    load_padded(x, i, n).store_bf16(rest);
    for (int64_t j = i; j < n; ++j) out[j] = rest[j - i];
  }
}

void apply_gate(float* x, const float* gate, int64_t n) {
  transform(x, n, [&](int64_t i, Vec y) { return y / (Vec::all(1.0f) + exp(Vec::zero() - load_padded(gate, i, n))); });
}
