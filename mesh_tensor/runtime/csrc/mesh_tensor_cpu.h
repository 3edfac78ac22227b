// What the C code of a re-targeted kernel is built on: 16-bit floats, math by dtype, integer division, block matmul.
#pragma once

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define MT_INLINE static inline __attribute__((always_inline))

template <typename To, typename From> MT_INLINE To mt_bits(From value) {
  static_assert(sizeof(To) == sizeof(From), "bit patterns differ in size");
  To result;
  memcpy(&result, &value, sizeof(To));
  return result;
}

// The 16-bit floats as storage types: same size and conversions to and from float.
struct mt_float16 {
  uint16_t bits;
};
struct mt_bfloat16 {
  uint16_t bits;
};

extern "C" {

MT_INLINE float mt_load_bfloat16(uint16_t bits) { return mt_bits<float>((uint32_t)bits << 16); }

// Round to nearest even; NaN stays NaN.
MT_INLINE uint16_t mt_store_bfloat16(float value) {
  uint32_t bits = mt_bits<uint32_t>(value);
  uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return (uint16_t)(value != value ? (bits >> 16) | 0x40u : rounded);
}

MT_INLINE float mt_load_float16(uint16_t bits) {
  uint32_t magnitude = (uint32_t)(bits & 0x7fffu) << 13;
  // Multiplying by 2^112 moves the exponent; it also makes subnormals right. Infinity and NaN are put back.
  uint32_t finite = mt_bits<uint32_t>(mt_bits<float>(magnitude) * mt_bits<float>(0x77800000u));
  uint32_t special = magnitude | 0x7f800000u;
  uint32_t result = magnitude >= 0x0f800000u ? special : finite;
  return mt_bits<float>(result | ((uint32_t)(bits & 0x8000u) << 16));
}

// Round to nearest even; overflow gives infinity; NaN stays NaN.
MT_INLINE uint16_t mt_store_float16(float value) {
  uint32_t bits = mt_bits<uint32_t>(value);
  uint32_t sign = (bits >> 16) & 0x8000u;
  uint32_t magnitude = bits & 0x7fffffffu;
  uint32_t normal = (magnitude - 0x38000000u + 0x0fffu + ((magnitude >> 13) & 1u)) >> 13;
  // Below 2^-14: adding 0.5 lines the value up with the subnormal's last bit, and the addition rounds.
  uint32_t subnormal = mt_bits<uint32_t>(mt_bits<float>(magnitude) + 0.5f) - 0x3f000000u;
  uint32_t result = magnitude < 0x38800000u ? subnormal : normal;
  result = magnitude >= 0x477ff000u ? 0x7c00u : result;
  result = magnitude > 0x7f800000u ? 0x7e00u | ((magnitude >> 13) & 0x3ffu) : result;
  return (uint16_t)(result | sign);
}

MT_INLINE float mt_round_bfloat16(float value) { return mt_load_bfloat16(mt_store_bfloat16(value)); }
MT_INLINE float mt_round_float16(float value) { return mt_load_float16(mt_store_float16(value)); }

// A double as the float on whose further rounding to 16 bits nothing is lost (round to odd).
MT_INLINE float mt_narrow_float64(double value) {
  float nearest = (float)value;
  uint32_t bits = mt_bits<uint32_t>(nearest);
  double back = (double)nearest;
  if (back == value || value != value || (bits & 0x7f800000u) == 0x7f800000u) return nearest;
  uint32_t truncated = fabs(back) > fabs(value) ? bits - 1u : bits;
  return mt_bits<float>(truncated | 1u);
}

MT_INLINE float mt_const_float32(int32_t bits) { return mt_bits<float>(bits); }
MT_INLINE double mt_const_float64(int64_t bits) { return mt_bits<double>(bits); }

// NaN on either side gives NaN, as in torch.
#define MT_EXTREMES(type, name)                                                                     \
  MT_INLINE type mt_max_##name(type a, type b) { return a > b || a != a ? a : b; }                   \
  MT_INLINE type mt_min_##name(type a, type b) { return a < b || a != a ? a : b; }
MT_EXTREMES(float, float32)
MT_EXTREMES(double, float64)

#define MT_INT(type, name)                                                                          \
  MT_INLINE type mt_max_##name(type a, type b) { return a > b ? a : b; }                             \
  MT_INLINE type mt_min_##name(type a, type b) { return a < b ? a : b; }                             \
  MT_INLINE type mt_div_##name(type a, type b) { return b == 0 ? 0 : b == (type)-1 ? 0 - a : a / b; } \
  MT_INLINE type mt_mod_##name(type a, type b) { return b == 0 || b == (type)-1 ? 0 : a % b; }        \
  MT_INLINE type mt_floordiv_##name(type a, type b) {                                                \
    type quotient = mt_div_##name(a, b), rest = mt_mod_##name(a, b);                                 \
    return rest != 0 && ((rest < 0) != (b < 0)) ? quotient - 1 : quotient;                           \
  }                                                                                                 \
  MT_INLINE type mt_floormod_##name(type a, type b) {                                                \
    type rest = mt_mod_##name(a, b);                                                                 \
    return rest != 0 && ((rest < 0) != (b < 0)) ? rest + b : rest;                                   \
  }
MT_INT(int32_t, int32)
MT_INT(int64_t, int64)

#define MT_UINT(type, name)                                                                         \
  MT_INLINE type mt_max_##name(type a, type b) { return a > b ? a : b; }                             \
  MT_INLINE type mt_min_##name(type a, type b) { return a < b ? a : b; }                             \
  MT_INLINE type mt_div_##name(type a, type b) { return b == 0 ? 0 : a / b; }                        \
  MT_INLINE type mt_mod_##name(type a, type b) { return b == 0 ? 0 : a % b; }                        \
  MT_INLINE type mt_floordiv_##name(type a, type b) { return mt_div_##name(a, b); }                  \
  MT_INLINE type mt_floormod_##name(type a, type b) { return mt_mod_##name(a, b); }
MT_UINT(uint32_t, uint32)
MT_UINT(uint64_t, uint64)

#define MT_MATH1(name)                                                                              \
  MT_INLINE float mt_##name##_float32(float x) { return name##f(x); }                                \
  MT_INLINE double mt_##name##_float64(double x) { return name(x); }
#define MT_MATH2(name)                                                                              \
  MT_INLINE float mt_##name##_float32(float x, float y) { return name##f(x, y); }                    \
  MT_INLINE double mt_##name##_float64(double x, double y) { return name(x, y); }
MT_MATH1(acos) MT_MATH1(acosh) MT_MATH1(asin) MT_MATH1(asinh) MT_MATH1(atan) MT_MATH1(atanh)
MT_MATH1(ceil) MT_MATH1(cos) MT_MATH1(cosh) MT_MATH1(erf) MT_MATH1(exp) MT_MATH1(exp2) MT_MATH1(fabs)
MT_MATH1(floor) MT_MATH1(log) MT_MATH1(log10) MT_MATH1(log1p) MT_MATH1(log2) MT_MATH1(nearbyint) MT_MATH1(round)
MT_MATH1(sin) MT_MATH1(sinh) MT_MATH1(sqrt) MT_MATH1(tan) MT_MATH1(tanh) MT_MATH1(trunc)
MT_MATH2(atan2) MT_MATH2(copysign) MT_MATH2(fmod) MT_MATH2(hypot) MT_MATH2(nextafter) MT_MATH2(pow)

#define MT_DERIVED(type, name, one, ten)                                                            \
  MT_INLINE type mt_exp10_##name(type x) { return mt_pow_##name(ten, x); }                           \
  MT_INLINE type mt_rsqrt_##name(type x) { return one / mt_sqrt_##name(x); }                         \
  MT_INLINE type mt_rcp_##name(type x) { return one / x; }                                           \
  MT_INLINE type mt_sigmoid_##name(type x) { return one / (one + mt_exp_##name(-x)); }               \
  MT_INLINE type mt_floordiv_##name(type a, type b) { return mt_floor_##name(a / b); }               \
  MT_INLINE bool mt_isnan_##name(type x) { return x != x; }                                          \
  MT_INLINE bool mt_isinf_##name(type x) { return mt_fabs_##name(x) == (type)INFINITY; }             \
  MT_INLINE bool mt_isfinite_##name(type x) { return mt_fabs_##name(x) < (type)INFINITY; }
MT_DERIVED(float, float32, 1.0f, 10.0f)
MT_DERIVED(double, float64, 1.0, 10.0)
MT_INLINE float mt_fma_float32(float x, float y, float z) { return fmaf(x, y, z); }
MT_INLINE double mt_fma_float64(double x, double y, double z) { return fma(x, y, z); }

}  // extern "C"

// c[i, j] += sum over k of a[i, k] * b[k, j] over a block, any strides. Sums are kept in `Sum`.
template <typename To, typename From> MT_INLINE To mt_as(From value) { return (To)value; }
template <> inline float mt_as<float, mt_float16>(mt_float16 value) { return mt_load_float16(value.bits); }
template <> inline float mt_as<float, mt_bfloat16>(mt_bfloat16 value) { return mt_load_bfloat16(value.bits); }
template <> inline mt_float16 mt_as<mt_float16, float>(float value) { return {mt_store_float16(value)}; }
template <> inline mt_bfloat16 mt_as<mt_bfloat16, float>(float value) { return {mt_store_bfloat16(value)}; }

template <typename A, typename B, typename C, typename Sum>
static void mt_gemm(const A *a, const B *b, C *c, int64_t m, int64_t n, int64_t k, int64_t a_m, int64_t a_k,
                    int64_t b_k, int64_t b_n, int64_t c_m, int64_t c_n, int32_t clear) {
  const int64_t width = 64;
  for (int64_t j0 = 0; j0 < n; j0 += width) {
    int64_t columns = n - j0 < width ? n - j0 : width;
    for (int64_t i = 0; i < m; ++i) {
      Sum sums[width];
      for (int64_t j = 0; j < columns; ++j) sums[j] = clear ? (Sum)0 : mt_as<Sum>(c[i * c_m + (j0 + j) * c_n]);
      for (int64_t p = 0; p < k; ++p) {
        Sum x = mt_as<Sum>(a[i * a_m + p * a_k]);
        for (int64_t j = 0; j < columns; ++j) sums[j] += x * mt_as<Sum>(b[p * b_k + (j0 + j) * b_n]);
      }
      for (int64_t j = 0; j < columns; ++j) c[i * c_m + (j0 + j) * c_n] = mt_as<C>(sums[j]);
    }
  }
}

// A function of that name for C: pointers as the generated code has them.
#define MT_GEMM(name, A, B, C, Sum, StoredA, StoredB, StoredC)                                       \
  extern "C" {                                                                                      \
  MT_INLINE void name(StoredA *a, StoredB *b, StoredC *c, int64_t m, int64_t n, int64_t k, int64_t a_m, int64_t a_k, \
                      int64_t b_k, int64_t b_n, int64_t c_m, int64_t c_n, int32_t clear) {                           \
    mt_gemm<A, B, C, Sum>((const A *)a, (const B *)b, (C *)c, m, n, k, a_m, a_k, b_k, b_n, c_m, c_n, clear);         \
  }                                                                                                 \
  }
