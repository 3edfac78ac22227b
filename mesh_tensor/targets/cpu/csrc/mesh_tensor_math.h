// Functions of floats by dtype: most are the C library's.
#pragma once

extern "C" {

// These of float32 have no branches and no calls, so that compilers vectorise them. Their errors are below 2 units in
// the last place.
MT_INLINE float mt_multiply_add(float a, float b, float c) {
#ifdef __FMA__
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

// e^r for |r| <= ln(2) / 2.
MT_INLINE float mt_exp_near_0(float r) {
  float p = mt_multiply_add(1.381459879e-3f, r, 8.368716575e-3f);
  p = mt_multiply_add(p, r, 4.166838899e-2f);
  p = mt_multiply_add(p, r, 1.666652113e-1f);
  p = mt_multiply_add(p, r, 4.999999404e-1f);
  p = mt_multiply_add(p, r, 1.0f);
  return mt_multiply_add(p, r, 1.0f);
}

// x, at least low (< 0) and at most high (> 0). Integers are compared: that is one instruction each, where floats would
// need masks because of NaN, which may become anything here.
MT_INLINE float mt_between(float x, float low, float high) {
  int32_t top = mt_bits<int32_t>(high), bits = mt_bits<int32_t>(x);
  uint32_t bottom = mt_bits<uint32_t>(low), below = (uint32_t)(bits < top ? bits : top);
  return mt_bits<float>(below < bottom ? below : bottom);
}

// Adding it leaves the nearest integer in a float's lowest bits, and 254 more: two exponents of 0 as floats have them.
#define MT_TO_INTEGER 12583166.0f

// value * 2^n for a value near 1, where n + 254 is in the lowest bits of `integer`. Half of n goes to each of two
// powers of two, so that these are normal floats; the second product ends in a subnormal or infinity where it must.
MT_INLINE float mt_scale_float32(float value, float integer) {
  uint32_t both = mt_bits<uint32_t>(integer), half = both >> 1;
  return value * mt_bits<float>(half << 23) * mt_bits<float>((both - half) << 23);
}

MT_INLINE float mt_exp_float32(float value) {
  float x = mt_between(value, -104.0f, 89.0f);
  float integer = mt_multiply_add(x, 1.44269504f, MT_TO_INTEGER), n = integer - MT_TO_INTEGER;
  float r = mt_multiply_add(n, 2.12194440e-4f, mt_multiply_add(n, -0.693359375f, x));
  float result = mt_scale_float32(mt_exp_near_0(r), integer);
  return value == value ? result : value;
}

MT_INLINE float mt_exp2_float32(float value) {
  float x = mt_between(value, -151.0f, 129.0f);
  float integer = x + MT_TO_INTEGER, n = integer - MT_TO_INTEGER;
  float result = mt_scale_float32(mt_exp_near_0((x - n) * 0.69314718f), integer);
  return value == value ? result : value;
}

MT_INLINE float mt_tanh_float32(float x) {
  float magnitude = __builtin_fabsf(x), z = x * x;
  float p = -5.70498872745e-3f;
  p = p * z + 2.06390887954e-2f;
  p = p * z - 5.37397155531e-2f;
  p = p * z + 1.33314422036e-1f;
  p = p * z - 3.33332819422e-1f;
  float small = p * z * x + x;
  float large = 1.0f - 2.0f / (mt_exp_float32(2.0f * magnitude) + 1.0f);
  return __builtin_copysignf(magnitude < 0.625f ? small : large, x);
}

MT_INLINE float mt_erf_float32(float x) {
  float magnitude = __builtin_fabsf(x), z = x * x;
  float p = -5.96761703e-4f;
  p = p * z + 4.99119423e-3f;
  p = p * z - 2.67681349e-2f;
  p = p * z + 1.12819925e-1f;
  p = p * z - 3.76125336e-1f;
  p = p * z + 1.28379166e-1f;
  float small = p * x + x;
  float t = magnitude < 4.0f ? magnitude : 4.0f;
  float q = (-1.72853470e-5f * t + 3.83197126e-4f) * (t * t) + (-3.88396438e-3f * t + 2.42546219e-2f);
  q = q * t - 1.06777877e-1f;
  q = q * t - 6.34846687e-1f;
  q = q * t - 1.28717512e-1f;
  float large = 1.0f - mt_exp_float32(q * t - t);
  return magnitude > 0.927734375f ? __builtin_copysignf(large, x) : small;
}

// The C library's.
#define MT_MATH1(name) \
  MT_INLINE float mt_##name##_float32(float x) { return __builtin_##name##f(x); } \
  MT_INLINE double mt_##name##_float64(double x) { return __builtin_##name(x); }
#define MT_MATH2(name) \
  MT_INLINE float mt_##name##_float32(float x, float y) { return __builtin_##name##f(x, y); } \
  MT_INLINE double mt_##name##_float64(double x, double y) { return __builtin_##name(x, y); }
#define MT_FLOAT64(name) MT_INLINE double mt_##name##_float64(double x) { return __builtin_##name(x); }
MT_FLOAT64(erf) MT_FLOAT64(exp) MT_FLOAT64(exp2) MT_FLOAT64(tanh)
MT_MATH1(acos) MT_MATH1(acosh) MT_MATH1(asin) MT_MATH1(asinh) MT_MATH1(atan) MT_MATH1(atanh)
MT_MATH1(ceil) MT_MATH1(cos) MT_MATH1(cosh) MT_MATH1(fabs)
MT_MATH1(floor) MT_MATH1(log) MT_MATH1(log10) MT_MATH1(log1p) MT_MATH1(log2) MT_MATH1(nearbyint) MT_MATH1(round)
MT_MATH1(sin) MT_MATH1(sinh) MT_MATH1(sqrt) MT_MATH1(tan) MT_MATH1(trunc)
MT_MATH2(atan2) MT_MATH2(copysign) MT_MATH2(fmod) MT_MATH2(hypot) MT_MATH2(nextafter) MT_MATH2(pow)

#define MT_DERIVED(type, name, one, ten) \
  MT_INLINE type mt_exp10_##name(type x) { return mt_pow_##name(ten, x); } \
  MT_INLINE type mt_rsqrt_##name(type x) { return one / mt_sqrt_##name(x); } \
  MT_INLINE type mt_rcp_##name(type x) { return one / x; } \
  MT_INLINE type mt_sigmoid_##name(type x) { return one / (one + mt_exp_##name(-x)); } \
  MT_INLINE type mt_floordiv_##name(type a, type b) { return mt_floor_##name(a / b); } \
  MT_INLINE bool mt_isnan_##name(type x) { return x != x; } \
  MT_INLINE bool mt_isinf_##name(type x) { return mt_fabs_##name(x) == (type)__builtin_inff(); } \
  MT_INLINE bool mt_isfinite_##name(type x) { return mt_fabs_##name(x) < (type)__builtin_inff(); }
MT_DERIVED(float, float32, 1.0f, 10.0f)
MT_DERIVED(double, float64, 1.0, 10.0)
MT_INLINE float mt_ldexp_float32(float x, int32_t exponent) { return __builtin_ldexpf(x, exponent); }
MT_INLINE double mt_ldexp_float64(double x, int32_t exponent) { return __builtin_ldexp(x, exponent); }
MT_INLINE float mt_fma_float32(float x, float y, float z) { return __builtin_fmaf(x, y, z); }
MT_INLINE double mt_fma_float64(double x, double y, double z) { return __builtin_fma(x, y, z); }

}  // extern "C"
