// The totals of a reduction combined: the upper half with the lower, until one is left.
#pragma once

struct mt_add {
  template <typename V> MT_INLINE V of(V a, V b) { return a + b; }
};
// NaN on either side gives NaN.
struct mt_larger {
  template <typename V> MT_INLINE V of(V a, V b) {
    V larger = a > b ? a : b;
    return a != a ? a : larger;
  }
};
struct mt_smaller {
  template <typename V> MT_INLINE V of(V a, V b) {
    V smaller = a < b ? a : b;
    return a != a ? a : smaller;
  }
};

#if defined(MT_SHUFFLES)
typedef float mt_floats __attribute__((vector_size(MT_VECTOR_BYTES), aligned(4), may_alias));
typedef float mt_floats_4 __attribute__((vector_size(16)));
typedef float mt_floats_8 __attribute__((vector_size(32)));
typedef float mt_floats_16 __attribute__((vector_size(64)));

// What is left at `totals` when halves down to HALF are combined.
template <typename Op, int HALF> MT_INLINE mt_floats mt_halved(const float *totals) {
  if constexpr (HALF == MT_TOTALS)
    return *(const mt_floats *)totals;
  else
    return Op::of(mt_halved<Op, 2 * HALF>(totals), mt_halved<Op, 2 * HALF>(totals + HALF));
}

template <typename Op> MT_INLINE float mt_fold_4(mt_floats_4 v) {
  v = Op::of(v, (mt_floats_4)__builtin_shufflevector(v, v, 2, 3, 2, 3));
  v = Op::of(v, (mt_floats_4)__builtin_shufflevector(v, v, 1, 1, 1, 1));
  return v[0];
}
template <typename Op> MT_INLINE float mt_fold_8(mt_floats_8 v) {
  mt_floats_4 low = __builtin_shufflevector(v, v, 0, 1, 2, 3), high = __builtin_shufflevector(v, v, 4, 5, 6, 7);
  return mt_fold_4<Op>(Op::of(low, high));
}
template <typename Op> MT_INLINE float mt_fold_16(mt_floats_16 v) {
  mt_floats_8 low = __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7);
  mt_floats_8 high = __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
  return mt_fold_8<Op>(Op::of(low, high));
}

template <typename Op> MT_INLINE float mt_fold(const float *totals) {
  auto v = mt_halved<Op, MT_VECTOR_BYTES / 4>(totals);
  if constexpr (MT_VECTOR_BYTES == 64)
    return mt_fold_16<Op>((mt_floats_16)v);
  else if constexpr (MT_VECTOR_BYTES == 32)
    return mt_fold_8<Op>((mt_floats_8)v);
  else
    return mt_fold_4<Op>((mt_floats_4)v);
}
#else
template <typename Op> MT_INLINE float mt_fold(float *totals) {
  for (int half = MT_TOTALS / 2; half > 0; half /= 2)
    for (int lane = 0; lane < half; ++lane) totals[lane] = Op::of(totals[lane], totals[lane + half]);
  return totals[0];
}
#endif

extern "C" {
MT_INLINE float mt_fold_Add_float32(float *totals) { return mt_fold<mt_add>(totals); }
MT_INLINE float mt_fold_Max_float32(float *totals) { return mt_fold<mt_larger>(totals); }
MT_INLINE float mt_fold_Min_float32(float *totals) { return mt_fold<mt_smaller>(totals); }
}  // extern "C"
