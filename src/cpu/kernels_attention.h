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
__attribute__((noinline)) void score_tile(const float* queries, int64_t padded_dim, const uint16_t* const* keys,
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
    const float* q = queries + even_offset(g);
    for (int r = 0; r < kRows; ++r) {
      const Vec first = Vec::load(q + r * padded_dim);
      for (int j = 0; j < kKeys; ++j) sums[r][j] = fma(first, even[j], sums[r][j]);
      const Vec second = Vec::load(q + r * padded_dim + kOdd);
      for (int j = 0; j < kKeys; ++j) sums[r][j] = fma(second, odd[j], sums[r][j]);
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
  // Sums, both halves of the keys and a query fit the registers, sixteen or thirty-two.
  constexpr int kKeys = kLanes == 16 ? (kRows == 1 ? 8 : kRows == 2 ? 6 : 4) : (kRows == 1 ? 4 : kRows == 2 ? 3 : 2);
  int64_t j = 0;
  for (; j + kKeys <= count; j += kKeys) {
    score_tile<kRows, kKeys, kAhead>(queries, padded_dim, keys + j, ahead + j, scores + j);
  }
  for (; j < count; ++j) score_tile<kRows, 1, kAhead>(queries, padded_dim, keys + j, ahead + j, scores + j);
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

// Scores, then weights, of kRows rows; what was summed before is scaled down where a larger score appears.
template <int kRows>
inline void weigh_rows(const AttendRows& rows, int64_t r, int64_t first, int64_t count, const uint16_t* const* keys,
                       const uint16_t* const* ahead, float* scores) {
  int64_t longest = 0;
  for (int i = 0; i < kRows; ++i) {
    const int64_t visible = rows.last_key[r + i] - first + 1;
    if (visible > longest) longest = visible;
  }
  longest = least(longest, count);
  const float* queries = rows.queries + r * rows.padded_dim;
  if (ahead != nullptr) {
    score_rows<kRows, true>(queries, rows.padded_dim, longest, keys, ahead, scores);
  } else {
    score_rows<kRows, false>(queries, rows.padded_dim, longest, keys, keys, scores);
  }
  for (int i = 0; i < kRows; ++i) {
    float* row = scores + i * kKeyBlock;
    const int64_t visible = least(count, rows.last_key[r + i] - first + 1);
    if (visible <= 0) {
      for (int64_t j = 0; j < count; ++j) row[j] = 0.0f;
      continue;
    }
    const float factor = softmax_row(row, visible, count, rows.maximum[r + i], rows.sum[r + i]);
    if (factor != 1.0f) {
      float* output = rows.output + (r + i) * rows.padded_dim;
      for (int64_t d = 0; d < rows.padded_dim; d += kLanes)
        (Vec::load(output + d) * Vec::all(factor)).store(output + d);
    }
  }
}

void attend_block(const AttendRows& rows, int64_t first, int64_t count, const uint16_t* const* keys,
                  const uint16_t* const* values, float* scores) {
  int64_t r = 0;
  for (; r + 4 <= rows.rows; r += 4) {
    // the first rows bring the values into cache
    weigh_rows<4>(rows, r, first, count, keys, r == 0 ? values : nullptr, scores + r * kKeyBlock);
  }
  const uint16_t* const* ahead = r == 0 ? values : nullptr;
  if (rows.rows - r == 3) weigh_rows<3>(rows, r, first, count, keys, ahead, scores + r * kKeyBlock);
  if (rows.rows - r == 2) weigh_rows<2>(rows, r, first, count, keys, ahead, scores + r * kKeyBlock);
  if (rows.rows - r == 1) weigh_rows<1>(rows, r, first, count, keys, ahead, scores + r * kKeyBlock);

  // Weights times values, 32 dimensions at a time: the values become fp32 panels of even and odd ones in L1.
  float panels[kKeyBlock * 32];
  for (int64_t g = 0; g < rows.padded_dim; g += 32) {
    for (int64_t j = 0; j < count; ++j) {
      for (int64_t h = 0; h < 16; h += kLanes) {
        Vec even;
        Vec odd;
        Vec::load_pair(values[j] + g + 2 * h, even, odd);
        even.store(panels + j * 16 + h);
        odd.store(panels + (kKeyBlock + j) * 16 + h);
      }
    }
    for (int64_t half = 0; half < 2; ++half) {
      float* output = rows.output + g + 16 * half;
      product(rows.rows, count, false, scores, kKeyBlock, panels + half * kKeyBlock * 16, 16, output, 1.0f, output,
              rows.padded_dim);
    }
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
