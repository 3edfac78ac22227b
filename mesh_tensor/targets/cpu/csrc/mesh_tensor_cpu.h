// What the C code of a re-targeted kernel is built on: 16-bit floats, 8-bit floats, constants, min and max, integer division.
#pragma once

#include <stddef.h>
#include <stdint.h>

// The compiler's built-in functions stand for the C library's: its C++ headers take longer to read than a kernel.
extern "C" void *aligned_alloc(size_t alignment, size_t size) noexcept;
extern "C" void free(void *memory) noexcept;

#define MT_INLINE static inline __attribute__((always_inline))

#if defined(__AVX512F__)
#define MT_VECTOR_BYTES 64
#elif defined(__AVX__)
#define MT_VECTOR_BYTES 32
#else
#define MT_VECTOR_BYTES 16
#endif

#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define MT_SHUFFLES
#endif
#endif

template <typename To, typename From> MT_INLINE To mt_bits(From value) {
  static_assert(sizeof(To) == sizeof(From), "bit patterns differ in size");
  To result;
  __builtin_memcpy(&result, &value, sizeof(To));
  return result;
}

// The 16-bit floats as storage types: same size and conversions to and from float.
struct mt_float16 {
  uint16_t bits;
};
struct mt_bfloat16 {
  uint16_t bits;
};

// The 8-bit floats: a sign, an exponent that is 0 at `Bias`, and `Mantissa` bits.
struct mt_float8_e4m3fn {
  uint8_t bits;
};
struct mt_float8_e5m2 {
  uint8_t bits;
};

// What is not infinite or NaN: multiplying moves the exponent, and makes subnormals right.
template <int Mantissa, int Bias> MT_INLINE float mt_load_float8(uint8_t bits) {
  float magnitude = mt_bits<float>((uint32_t)(bits & 0x7fu) << (23 - Mantissa));
  float moved = magnitude * mt_bits<float>((uint32_t)(127 + 127 - Bias) << 23);
  return mt_bits<float>(mt_bits<uint32_t>(moved) | ((uint32_t)(bits & 0x80u) << 24));
}

// The magnitude's bits, rounded to nearest even, as if there were no largest exponent.
template <int Mantissa, int Bias> MT_INLINE uint32_t mt_round_float8(uint32_t magnitude) {
  constexpr int shift = 23 - Mantissa;
  constexpr uint32_t smallest_normal = (uint32_t)(128 - Bias) << 23;
  // Adding this lines a subnormal up with its last bit, and the addition rounds.
  constexpr uint32_t aligned = (uint32_t)(128 - Bias - Mantissa + 23) << 23;
  uint32_t half = (1u << (shift - 1)) - 1u + ((magnitude >> shift) & 1u);
  uint32_t normal = (magnitude - ((uint32_t)(127 - Bias) << 23) + half) >> shift;
  uint32_t subnormal = mt_bits<uint32_t>(mt_bits<float>(magnitude) + mt_bits<float>(aligned)) - aligned;
  return magnitude < smallest_normal ? subnormal : normal;
}

// A whole number as a float. Of one that was a float, as (float)(int)x, g++ makes trunc(x) where nothing traps, which is
// -0 for some.
template <typename To, typename Bits, typename From> MT_INLINE To mt_of_whole(From value) {
  Bits bits = mt_bits<Bits>((To)value);
  return mt_bits<To>(bits == (Bits)1 << (8 * sizeof(Bits) - 1) ? (Bits)0 : bits);
}

extern "C" {

#define MT_OF_WHOLE(NAME)                                                                              \
  MT_INLINE float mt_float32_of_##NAME(NAME##_t value) { return mt_of_whole<float, uint32_t>(value); } \
  MT_INLINE double mt_float64_of_##NAME(NAME##_t value) { return mt_of_whole<double, uint64_t>(value); }
MT_OF_WHOLE(int32)
MT_OF_WHOLE(uint32)
MT_OF_WHOLE(int64)
MT_OF_WHOLE(uint64)

// No infinity: all bits set is NaN, and what is too large becomes the largest number.
MT_INLINE float mt_load_float8_e4m3fn(uint8_t bits) {
  return (bits & 0x7fu) == 0x7fu ? __builtin_nanf("") : mt_load_float8<3, 7>(bits);
}
MT_INLINE uint8_t mt_store_float8_e4m3fn(float value) {
  uint32_t bits = mt_bits<uint32_t>(value), magnitude = bits & 0x7fffffffu;
  uint32_t rounded = magnitude >= 0x43e00000u ? 0x7eu : mt_round_float8<3, 7>(magnitude);
  return (uint8_t)((magnitude > 0x7f800000u ? 0x7fu : rounded) | ((bits >> 24) & 0x80u));
}

// Infinities and NaN as in the 16-bit format that it is the upper half of.
MT_INLINE float mt_load_float8_e5m2(uint8_t bits) {
  if ((bits & 0x7fu) > 0x7cu) return __builtin_nanf("");
  float infinite = mt_bits<float>(0x7f800000u | ((uint32_t)(bits & 0x80u) << 24));
  return (bits & 0x7fu) == 0x7cu ? infinite : mt_load_float8<2, 15>(bits);
}
MT_INLINE uint8_t mt_store_float8_e5m2(float value) {
  uint32_t bits = mt_bits<uint32_t>(value), magnitude = bits & 0x7fffffffu;
  uint32_t rounded = magnitude >= 0x47800000u ? 0x7cu : mt_round_float8<2, 15>(magnitude);
  return (uint8_t)((magnitude > 0x7f800000u ? 0x7fu : rounded) | ((bits >> 24) & 0x80u));
}

MT_INLINE float mt_round_float8_e4m3fn(float value) { return mt_load_float8_e4m3fn(mt_store_float8_e4m3fn(value)); }
MT_INLINE float mt_load_float8_e4m3(uint8_t bits) { return mt_load_float8_e4m3fn(bits); }
MT_INLINE uint8_t mt_store_float8_e4m3(float value) { return mt_store_float8_e4m3fn(value); }
MT_INLINE float mt_round_float8_e4m3(float value) { return mt_round_float8_e4m3fn(value); }
MT_INLINE float mt_round_float8_e5m2(float value) { return mt_load_float8_e5m2(mt_store_float8_e5m2(value)); }

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
  uint32_t truncated = __builtin_fabs(back) > __builtin_fabs(value) ? bits - 1u : bits;
  return mt_bits<float>(truncated | 1u);
}

#define MT_REINTERPRET(type_a, a, type_b, b) \
  MT_INLINE type_b mt_bits_##a##_##b(type_a value) { return mt_bits<type_b>(value); } \
  MT_INLINE type_a mt_bits_##b##_##a(type_b value) { return mt_bits<type_a>(value); }
MT_REINTERPRET(float, float32, int32_t, int32) MT_REINTERPRET(float, float32, uint32_t, uint32)
MT_REINTERPRET(double, float64, int64_t, int64) MT_REINTERPRET(double, float64, uint64_t, uint64)
MT_REINTERPRET(int8_t, int8, uint8_t, uint8) MT_REINTERPRET(int16_t, int16, uint16_t, uint16)
MT_REINTERPRET(int32_t, int32, uint32_t, uint32) MT_REINTERPRET(int64_t, int64, uint64_t, uint64)

MT_INLINE float mt_const_float32(int32_t bits) { return mt_bits<float>(bits); }
MT_INLINE double mt_const_float64(int64_t bits) { return mt_bits<double>(bits); }

// NaN on either side gives NaN, as in torch.
#define MT_EXTREMES(type, name) \
  MT_INLINE type mt_max_##name(type a, type b) { type larger = a > b ? a : b; return a != a ? a : larger; } \
  MT_INLINE type mt_min_##name(type a, type b) { type smaller = a < b ? a : b; return a != a ? a : smaller; }
MT_EXTREMES(float, float32)
MT_EXTREMES(double, float64)

#define MT_INT(type, name) \
  MT_INLINE type mt_max_##name(type a, type b) { return a > b ? a : b; } \
  MT_INLINE type mt_min_##name(type a, type b) { return a < b ? a : b; } \
  MT_INLINE type mt_div_##name(type a, type b) { return b == 0 ? 0 : b == (type)-1 ? 0 - a : a / b; } \
  MT_INLINE type mt_mod_##name(type a, type b) { return b == 0 || b == (type)-1 ? 0 : a % b; } \
  MT_INLINE type mt_floordiv_##name(type a, type b) { \
    type quotient = mt_div_##name(a, b), rest = mt_mod_##name(a, b); \
    return rest != 0 && ((rest < 0) != (b < 0)) ? quotient - 1 : quotient; \
  } \
  MT_INLINE type mt_floormod_##name(type a, type b) { \
    type rest = mt_mod_##name(a, b); \
    return rest != 0 && ((rest < 0) != (b < 0)) ? rest + b : rest; \
  }
MT_INT(int32_t, int32)
MT_INT(int64_t, int64)

#define MT_UINT(type, name) \
  MT_INLINE type mt_max_##name(type a, type b) { return a > b ? a : b; } \
  MT_INLINE type mt_min_##name(type a, type b) { return a < b ? a : b; } \
  MT_INLINE type mt_div_##name(type a, type b) { return b == 0 ? 0 : a / b; } \
  MT_INLINE type mt_mod_##name(type a, type b) { return b == 0 ? 0 : a % b; } \
  MT_INLINE type mt_floordiv_##name(type a, type b) { return mt_div_##name(a, b); } \
  MT_INLINE type mt_floormod_##name(type a, type b) { return mt_mod_##name(a, b); }
MT_UINT(uint32_t, uint32)
MT_UINT(uint64_t, uint64)

// Of the lowest `width` bits; the others are 0.
MT_INLINE int32_t mt_popcount(uint64_t bits, int32_t) { return __builtin_popcountll(bits); }
MT_INLINE int32_t mt_clz(uint64_t bits, int32_t width) { return bits ? __builtin_clzll(bits) - 64 + width : width; }

// AMD's fetch the rows that are read ahead by themselves: asked to, they take a fifth longer.
#if defined(__znver1__) || defined(__znver2__) || defined(__znver3__) || defined(__znver4__) || defined(__znver5__)
#define MT_FETCHES_READS 1
#else
#define MT_FETCHES_READS 0
#endif

// Asks for the memory of 32 elements. Nothing is read: the address may be anywhere.
#define MT_PREFETCH(type, name) \
  MT_INLINE void mt_prefetch_##name(type *first, int32_t for_writing) { \
    for (size_t byte = 0; byte < 32 * sizeof(type); byte += 64) { \
      if (for_writing) __builtin_prefetch((const char *)first + byte, 1); \
      else if (!MT_FETCHES_READS) __builtin_prefetch((const char *)first + byte, 0); \
    } \
  }
MT_PREFETCH(float, float32)
MT_PREFETCH(double, float64)
MT_PREFETCH(uint16_t, float16)
MT_PREFETCH(uint16_t, bfloat16)

#define MT_POWER(type, name, inverse) \
  MT_INLINE type mt_power_##name(type x, int32_t exponent) { \
    type power = 1; \
    for (int32_t i = 0; i < (exponent < 0 ? -exponent : exponent); ++i) power *= x; \
    return exponent < 0 ? inverse : power; \
  }
MT_POWER(float, float32, 1.0f / power)
MT_POWER(double, float64, 1.0 / power)
MT_POWER(int32_t, int32, mt_div_int32(1, power))
MT_POWER(int64_t, int64, mt_div_int64(1, power))
MT_POWER(uint32_t, uint32, mt_div_uint32(1, power))
MT_POWER(uint64_t, uint64, mt_div_uint64(1, power))

}  // extern "C"

// Conversions by type.
template <typename To, typename From> MT_INLINE To mt_as(From value) { return (To)value; }
template <> inline float mt_as<float, mt_float16>(mt_float16 value) { return mt_load_float16(value.bits); }
template <> inline float mt_as<float, mt_bfloat16>(mt_bfloat16 value) { return mt_load_bfloat16(value.bits); }
template <> inline float mt_as<float, mt_float8_e4m3fn>(mt_float8_e4m3fn value) {
  return mt_load_float8_e4m3fn(value.bits);
}
template <> inline float mt_as<float, mt_float8_e5m2>(mt_float8_e5m2 value) { return mt_load_float8_e5m2(value.bits); }
template <> inline mt_float8_e4m3fn mt_as<mt_float8_e4m3fn, float>(float value) {
  return {mt_store_float8_e4m3fn(value)};
}
template <> inline mt_float8_e5m2 mt_as<mt_float8_e5m2, float>(float value) { return {mt_store_float8_e5m2(value)}; }
template <> inline mt_float16 mt_as<mt_float16, float>(float value) { return {mt_store_float16(value)}; }
template <> inline mt_bfloat16 mt_as<mt_bfloat16, float>(float value) { return {mt_store_bfloat16(value)}; }
