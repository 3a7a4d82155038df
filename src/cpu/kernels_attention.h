// Attention over Vec; included after kernels_common.h.

// Where the pair of vectors that load_pair() makes of elements [g, g + 2 kLanes) lies in split order.
inline int64_t even_offset(int64_t g) { return (g & ~int64_t{31}) + ((g & 31) >> 1); }
constexpr int64_t kOdd = 16;

void split_order(const float* x, int64_t padded_dim, float scale, float* out) {
  for (int64_t g = 0; g < padded_dim; g += 32) {
    for (int64_t i = 0; i < 16; ++i) {
      out[g + i] = x[g + 2 * i] * scale;
      out[g + 16 + i] = x[g + 2 * i + 1] * scale;
    }
  }
}

void natural_order(const float* x, int64_t padded_dim, float scale, float* out) {
  for (int64_t g = 0; g < padded_dim; g += 32) {
    for (int64_t i = 0; i < 16; ++i) {
      out[g + 2 * i] = x[g + i] * scale;
      out[g + 2 * i + 1] = x[g + 16 + i] * scale;
    }
  }
}

// Scores of kRows queries and kKeys keys; kRows <= 4. One vector of partial sums for each, the same order of additions
// whatever the tile. `ahead`: values to bring into cache meanwhile, or null.
template <int kRows, int kKeys, bool kAhead>
inline void score_tile(const float* queries, int64_t padded_dim, const uint16_t* const* keys,
                       const uint16_t* const* ahead, float* scores) {
  Vec sums[kRows][kKeys];
  for (auto& row : sums) {
    for (Vec& sum : row) sum = Vec::zero();
  }
  for (int64_t g = 0; g < padded_dim; g += 2 * kLanes) {
    Vec even[kKeys];
    Vec odd[kKeys];
    for (int j = 0; j < kKeys; ++j) {
      Vec::load_pair(keys[j] + g, even[j], odd[j]);
      if (kAhead && (g & 31) == 0) _mm_prefetch(reinterpret_cast<const char*>(ahead[j] + g), _MM_HINT_T0);
    }
    const int64_t at = even_offset(g);
    for (int r = 0; r < kRows; ++r) {
      const Vec q = Vec::load(queries + r * padded_dim + at);
      for (int j = 0; j < kKeys; ++j) sums[r][j] = fma(q, even[j], sums[r][j]);
    }
    for (int r = 0; r < kRows; ++r) {
      const Vec q = Vec::load(queries + r * padded_dim + at + kOdd);
      for (int j = 0; j < kKeys; ++j) sums[r][j] = fma(q, odd[j], sums[r][j]);
    }
  }
  for (int j = 0; j < kKeys; ++j) {
    const Vec zero = Vec::zero();
    float four[4];
    _mm_storeu_ps(
        four, Vec::sums(sums[0][j], kRows > 1 ? sums[kRows > 1 ? 1 : 0][j] : zero,
                        kRows > 2 ? sums[kRows > 2 ? 2 : 0][j] : zero, kRows > 3 ? sums[kRows > 3 ? 3 : 0][j] : zero));
    for (int r = 0; r < kRows; ++r) scores[r * kKeyBlock + j] = four[r];
  }
}

template <int kRows, bool kAhead>
inline void score_rows(const float* queries, int64_t padded_dim, int64_t count, const uint16_t* const* keys,
                       const uint16_t* const* ahead, float* scores) {
  // Twelve sums of partial products hide the latency of the multiply-add and fit sixteen registers.
  constexpr int kKeys = kRows == 1 ? 8 : kRows == 2 ? 6 : kRows == 3 ? 4 : 3;
  int64_t j = 0;
  for (; j + kKeys <= count; j += kKeys) {
    score_tile<kRows, kKeys, kAhead>(queries, padded_dim, keys + j, ahead + j, scores + j);
  }
  for (; j < count; ++j) score_tile<kRows, 1, kAhead>(queries, padded_dim, keys + j, ahead + j, scores + j);
}

// output = output * scale + weights values for kRows rows and kPairs pairs of vectors of dimensions.
template <int kRows, int kPairs>
inline void value_tile(const float* weights, int64_t count, const uint16_t* const* values, int64_t g,
                       const float* scale, int64_t padded_dim, float* output) {
  Vec sums[kRows][2 * kPairs];
  for (int r = 0; r < kRows; ++r) {
    const Vec factor = Vec::all(scale[r]);
    for (int p = 0; p < kPairs; ++p) {
      const float* from = output + r * padded_dim + even_offset(g + 2 * kLanes * p);
      sums[r][2 * p] = Vec::load(from) * factor;
      sums[r][2 * p + 1] = Vec::load(from + kOdd) * factor;
    }
  }
  for (int64_t j = 0; j < count; ++j) {
    Vec even[kPairs];
    Vec odd[kPairs];
    for (int p = 0; p < kPairs; ++p) Vec::load_pair(values[j] + g + 2 * kLanes * p, even[p], odd[p]);
    for (int r = 0; r < kRows; ++r) {
      const Vec weight = Vec::all(weights[r * kKeyBlock + j]);
      for (int p = 0; p < kPairs; ++p) {
        sums[r][2 * p] = fma(weight, even[p], sums[r][2 * p]);
        sums[r][2 * p + 1] = fma(weight, odd[p], sums[r][2 * p + 1]);
      }
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int p = 0; p < kPairs; ++p) {
      float* to = output + r * padded_dim + even_offset(g + 2 * kLanes * p);
      sums[r][2 * p].store(to);
      sums[r][2 * p + 1].store(to + kOdd);
    }
  }
}

template <int kRows>
inline void value_rows(const float* weights, int64_t count, const uint16_t* const* values, const float* scale,
                       int64_t padded_dim, float* output) {
  constexpr int kPairs = kLanes == 16 ? 2 : 1;
  int64_t g = 0;
  for (; g + 2 * kLanes * kPairs <= padded_dim; g += 2 * kLanes * kPairs) {
    value_tile<kRows, kPairs>(weights, count, values, g, scale, padded_dim, output);
  }
  for (; g < padded_dim; g += 2 * kLanes) {
    value_tile<kRows, 1>(weights, count, values, g, scale, padded_dim, output);
  }
}

// Scores of one row to weights e^(score - maximum), zero from `visible` to `count`; updates maximum and sum and
// returns the factor for what was summed before.
inline float softmax_row(float* scores, int64_t visible, int64_t count, float& maximum, float& sum) {
  constexpr float kLowest = -__builtin_inff();
  const int64_t end = (visible + kLanes - 1) / kLanes * kLanes;  // at most kKeyBlock
  for (int64_t j = visible; j < end; ++j) scores[j] = kLowest;
  Vec largest = Vec::all(kLowest);
  for (int64_t j = 0; j < end; j += kLanes) largest = max(Vec::load(scores + j), largest);
  const float block = largest.largest();
  const float next = block > maximum ? block : maximum;
  // Without a finite score yet, nothing is there to rescale.
  const float factor = maximum == kLowest ? 0.0f : maximum == next ? 1.0f : exp_one(maximum - next);
  Vec total = Vec::zero();
  const Vec shift = Vec::all(next);
  for (int64_t j = 0; j < end; j += kLanes) {
    exp(Vec::load(scores + j) - shift).store(scores + j);
    if (j + kLanes > visible) {
      for (int64_t i = visible; i < end; ++i) scores[i] = 0.0f;
    }
    total = total + Vec::load(scores + j);
  }
  for (int64_t j = end; j < count; ++j) scores[j] = 0.0f;
  sum = sum * factor + total.sum();
  maximum = next;
  return factor;
}

template <int kRows>
inline void attend_rows(const AttendRows& rows, int64_t r, int64_t first, int64_t count, const uint16_t* const* keys,
                        const uint16_t* const* values, bool ahead, float* scores) {
  int64_t longest = 0;
  for (int i = 0; i < kRows; ++i) {
    const int64_t visible = rows.last_key[r + i] - first + 1;
    if (visible > longest) longest = visible;
  }
  if (longest <= 0) return;
  longest = least(longest, count);
  const float* queries = rows.queries + r * rows.padded_dim;
  if (ahead) {
    score_rows<kRows, true>(queries, rows.padded_dim, longest, keys, values, scores);
  } else {
    score_rows<kRows, false>(queries, rows.padded_dim, longest, keys, keys, scores);
  }
  float factors[kRows];
  for (int i = 0; i < kRows; ++i) {
    const int64_t visible = least(longest, rows.last_key[r + i] - first + 1);
    factors[i] = 1.0f;
    if (visible > 0) {
      factors[i] = softmax_row(scores + i * kKeyBlock, visible, longest, rows.maximum[r + i], rows.sum[r + i]);
    } else {
      for (int64_t j = 0; j < longest; ++j) scores[i * kKeyBlock + j] = 0.0f;
    }
  }
  value_rows<kRows>(scores, longest, values, factors, rows.padded_dim, rows.output + r * rows.padded_dim);
}

void attend_block(const AttendRows& rows, int64_t first, int64_t count, const uint16_t* const* keys,
                  const uint16_t* const* values, float* scores) {
  bool ahead = true;  // the first rows bring the values in
  int64_t r = 0;
  for (; r + 4 <= rows.rows; r += 4) {
    attend_rows<4>(rows, r, first, count, keys, values, ahead, scores);
    ahead = false;
  }
  switch (rows.rows - r) {
    case 3:
      return attend_rows<3>(rows, r, first, count, keys, values, ahead, scores);
    case 2:
      return attend_rows<2>(rows, r, first, count, keys, values, ahead, scores);
    case 1:
      return attend_rows<1>(rows, r, first, count, keys, values, ahead, scores);
    default:
      return;
  }
}

void merge_row(int64_t padded_dim, const float* output, float maximum, float sum, float* into_output,
               float* into_maximum, float* into_sum) {
  constexpr float kLowest = -__builtin_inff();
  if (maximum == kLowest && sum == 0.0f) return;  // saw no key
  const float next = maximum > *into_maximum ? maximum : *into_maximum;
  const float old_factor = *into_maximum == kLowest ? 0.0f
                           : *into_maximum == next  ? 1.0f
                                                    : exp_one(*into_maximum - next);
  const float new_factor = maximum == next ? 1.0f : exp_one(maximum - next);
  const Vec a = Vec::all(old_factor);
  const Vec b = Vec::all(new_factor);
  for (int64_t i = 0; i < padded_dim; i += kLanes) {
    fma(Vec::load(output + i), b, Vec::load(into_output + i) * a).store(into_output + i);
  }
  *into_sum = *into_sum * old_factor + sum * new_factor;
  *into_maximum = next;
}
