// Causal attention, softmax(q k' * scale) v where a query sees the keys up to its own position, and its gradients: of each
// head a few queries at a time, beside the keys that they see, so that scores stay in a cache. Heads don't know of each
// other, so parts of them give the bits of the whole.
#pragma once

#define MT_QUERIES 32

// Strides are of batches, rows and heads; the elements of a row are one after the other. `share` heads of queries have one
// of keys and values.
struct mt_attention_sizes {
  int64_t heads, positions, width, share, q[3], k[3], v[3], seed[3];
};

MT_INLINE int64_t mt_smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// Where a head begins in a tensor with these strides; in one without gaps.
MT_INLINE int64_t mt_head(const mt_attention_sizes &n, const int64_t *strides, int64_t head, int64_t share = 1) {
  return head / n.heads * strides[0] + head % n.heads / share * strides[2];
}

MT_INLINE int64_t mt_plain_head(const mt_attention_sizes &n, int64_t head) {
  return (head / n.heads * n.positions * n.heads + head % n.heads) * n.width;
}

// out = a b', out = a b, and out += a' b; rows of `a_row`, `b_row` and `out_row` elements.
MT_INLINE void mt_times_turned(const float *a, int64_t a_row, const float *b, int64_t b_row, float *out, int64_t out_row,
                               int64_t m, int64_t n, int64_t k) {
  mt_gemm_own<float, float, float, float>(a, b, out, m, n, k, a_row, 1, 1, b_row, out_row, 1, 1);
}

MT_INLINE void mt_times(const float *a, int64_t a_row, const float *b, int64_t b_row, float *out, int64_t out_row,
                        int64_t m, int64_t n, int64_t k) {
  mt_gemm_own<float, float, float, float>(a, b, out, m, n, k, a_row, 1, b_row, 1, out_row, 1, 1);
}

MT_INLINE void mt_add_turned_times(const float *a, int64_t a_row, const float *b, int64_t b_row, float *out,
                                   int64_t out_row, int64_t m, int64_t n, int64_t k) {
  mt_gemm_own<float, float, float, float>(a, b, out, m, n, k, 1, a_row, b_row, 1, out_row, 1, 0);
}

// Rows of scores are walked in whole vectors: what follows those of keys that are seen has a place, too.
typedef mt_tile<float>::vector mt_floats;
typedef mt_tile<float>::unaligned mt_floats_at;

MT_INLINE int64_t mt_whole(int64_t count) {
  const int LANES = mt_tile<float>::LANES;
  return (count + LANES - 1) / LANES * LANES;
}

MT_FUSED static float mt_dot(const float *a, const float *b, int64_t count) {
  MT_FUSED_BODY
  const int LANES = mt_tile<float>::LANES;
  mt_floats sums = {};
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) sums += (mt_floats) * (const mt_floats_at *)(a + i) * *(const mt_floats_at *)(b + i);
  float sum = 0;
  for (; i < count; ++i) sum += a[i] * b[i];
  for (int lane = 0; lane < LANES; ++lane) sum += sums[lane];
  return sum;
}

MT_INLINE float mt_sum_of(const float *row, int64_t whole) {
  const int LANES = mt_tile<float>::LANES;
  mt_floats sums = {};
  for (int64_t j = 0; j < whole; j += LANES) sums += (mt_floats) * (const mt_floats_at *)(row + j);
  float sum = 0;
  for (int lane = 0; lane < LANES; ++lane) sum += sums[lane];
  return sum;
}

MT_INLINE float mt_largest_of(const float *row, int64_t whole) {
  const int LANES = mt_tile<float>::LANES;
  mt_floats most = (mt_floats) * (const mt_floats_at *)row;
  for (int64_t j = LANES; j < whole; j += LANES) {
    mt_floats next = (mt_floats) * (const mt_floats_at *)(row + j);
    most = most > next ? most : next;
  }
  float largest = most[0];
  for (int lane = 1; lane < LANES; ++lane) largest = largest > most[lane] ? largest : most[lane];
  return largest;
}

// `value` in the places seen ... end - 1 of a row, which begins at a whole vector. In the vector that `seen` is in by one
// store: a load of a vector that several made would wait for all.
MT_INLINE void mt_fill(float *row, int64_t seen, int64_t end, float value) {
  const int LANES = mt_tile<float>::LANES;
  typedef int32_t places __attribute__((vector_size(MT_VECTOR_BYTES)));
  int64_t j = seen / LANES * LANES;
  if (j < seen) {
    places at;
    for (int lane = 0; lane < LANES; ++lane) at[lane] = lane;
    mt_floats x = (mt_floats) * (const mt_floats_at *)(row + j);
    x = at < (int32_t)(seen - j) ? x : mt_floats{} + value;
    *(mt_floats_at *)(row + j) = (mt_floats_at)x;
    j += LANES;
  }
  for (; j < end; j += LANES) *(mt_floats_at *)(row + j) = (mt_floats_at)(mt_floats{} + value);
}

// Of the heads `first` ... `last` - 1 of all batches: y, and per query the logarithm of the sum of powers. 1 if there is
// no memory.
extern "C" __attribute__((visibility("default"))) int mt_attention(const float *q, const float *k, const float *v,
                                                                   float *y, float *sums,
                                                                   const mt_attention_sizes *sizes, float scale,
                                                                   int64_t first, int64_t last) {
  const mt_attention_sizes n = *sizes;
  const int64_t width = n.width, y_row = n.heads * width, line = mt_whole(n.positions);
  float *scores = (float *)aligned_alloc(64, MT_QUERIES * line * sizeof(float));
  if (!scores) return 1;
  float parts[MT_QUERIES];
  for (int64_t head = first; head < last; ++head) {
    const float *qs = q + mt_head(n, n.q, head), *ks = k + mt_head(n, n.k, head, n.share);
    const float *vs = v + mt_head(n, n.v, head, n.share);
    float *ys = y + mt_plain_head(n, head), *all = sums + head * n.positions;
    for (int64_t i = 0; i < n.positions; i += MT_QUERIES) {
      const int64_t rows = mt_smaller(MT_QUERIES, n.positions - i), keys = i + rows;
      mt_times_turned(qs + i * n.q[1], n.q[1], ks, n.k[1], scores, line, rows, keys, width);
      for (int64_t r = 0; r < rows; ++r) {
        float *row = scores + r * line;
        const int64_t seen = i + r + 1, whole = mt_whole(seen);
        mt_fill(row, seen, whole, row[0]);
        for (int64_t j = 0; j < whole; ++j) row[j] *= scale;
        const float most = mt_largest_of(row, whole);
        for (int64_t j = 0; j < whole; ++j) row[j] = mt_exp_float32(row[j] - most);
        mt_fill(row, seen, whole < keys ? keys : whole, 0);
        const float sum = mt_sum_of(row, whole);
        all[i + r] = most + mt_log_float32(sum);
        parts[r] = 1.0f / sum;
      }
      float *y_rows = ys + i * y_row;
      mt_times(scores, line, vs, n.v[1], y_rows, y_row, rows, width, keys);
      for (int64_t r = 0; r < rows; ++r)
        for (int64_t d = 0; d < width; ++d) y_rows[r * y_row + d] *= parts[r];
    }
  }
  free(scores);
  return 0;
}

// The gradients of q, k and v, of that of y, `seed`, and of what the above gave.
extern "C" __attribute__((visibility("default"))) int mt_attention_backward(
    const float *seed, const float *q, const float *k, const float *v, const float *y, const float *sums, float *dq,
    float *dk, float *dv, const mt_attention_sizes *sizes, float scale, int64_t first, int64_t last) {
  const mt_attention_sizes n = *sizes;
  const int64_t width = n.width, plain = n.heads * width, line = mt_whole(n.positions);
  float *powers = (float *)aligned_alloc(64, 2 * MT_QUERIES * line * sizeof(float));
  if (!powers) return 1;
  float *slopes = powers + MT_QUERIES * line;
  for (int64_t head = first; head < last; ++head) {
    const float *qs = q + mt_head(n, n.q, head), *ks = k + mt_head(n, n.k, head), *vs = v + mt_head(n, n.v, head);
    const float *seeds = seed + mt_head(n, n.seed, head), *all = sums + head * n.positions;
    const int64_t plain_head = mt_plain_head(n, head);
    const float *ys = y + plain_head;
    for (int64_t j = 0; j < n.positions; ++j)
      for (int64_t d = 0; d < width; ++d) dk[plain_head + j * plain + d] = dv[plain_head + j * plain + d] = 0;
    for (int64_t i = 0; i < n.positions; i += MT_QUERIES) {
      const int64_t rows = mt_smaller(MT_QUERIES, n.positions - i), keys = i + rows;
      const float *q_rows = qs + i * n.q[1], *seed_rows = seeds + i * n.seed[1];
      mt_times_turned(q_rows, n.q[1], ks, n.k[1], powers, line, rows, keys, width);
      mt_times_turned(seed_rows, n.seed[1], vs, n.v[1], slopes, line, rows, keys, width);
      for (int64_t r = 0; r < rows; ++r) {
        float *__restrict__ p = powers + r * line, *__restrict__ s = slopes + r * line;
        const int64_t seen = i + r + 1, whole = mt_whole(seen), end = whole < keys ? keys : whole;
        const float share = mt_dot(seed_rows + r * n.seed[1], ys + (i + r) * plain, width), sum = all[i + r];
        mt_fill(p, seen, whole, p[0]), mt_fill(s, seen, whole, 0);
        for (int64_t j = 0; j < whole; ++j) p[j] = mt_exp_float32(p[j] * scale - sum);
        for (int64_t j = 0; j < whole; ++j) s[j] = p[j] * (s[j] - share) * scale;
        mt_fill(p, seen, end, 0), mt_fill(s, seen, end, 0);
      }
      mt_add_turned_times(powers, line, seed_rows, n.seed[1], dv + plain_head, plain, keys, width, rows);
      mt_add_turned_times(slopes, line, q_rows, n.q[1], dk + plain_head, plain, keys, width, rows);
      mt_times(slopes, line, ks, n.k[1], dq + plain_head + i * plain, plain, rows, width, keys);
    }
  }
  free(powers);
  return 0;
}
