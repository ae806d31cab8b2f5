/* Vectors of sixteen floats and of sixteen integers, on any processor.
 *
 * Everything is written for vectors of 64 bytes, which the compiler splits where the processor has
 * shorter ones. The order of a sum depends on nothing but the width of a row, and products and sums
 * are fused only where the code says so (-ffp-contract=off), so a row has the same bits in any
 * batch. */

#pragma once

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define LANES 16
#define INLINE static inline __attribute__((always_inline))

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));
typedef uint8_t u8x16 __attribute__((vector_size(16)));
typedef int8_t s8x16 __attribute__((vector_size(16)));
typedef uint8_t u8x64 __attribute__((vector_size(64)));

INLINE f32x16 load(const float *p) { f32x16 v; memcpy(&v, p, sizeof v); return v; }
INLINE void store(float *p, f32x16 v) { memcpy(p, &v, sizeof v); }
INLINE f32x16 splat(float x) { return x - (f32x16){0}; }

/* The first `count` lanes; the others are `rest`. */
INLINE f32x16 load_part(const float *p, int64_t count, float rest) {
  if (count == LANES) return load(p);
  f32x16 v = splat(rest);
  memcpy(&v, p, (size_t)count * sizeof(float));
  return v;
}
INLINE void store_part(float *p, f32x16 v, int64_t count) {
  if (count == LANES) {
    store(p, v);
    return;
  }
  memcpy(p, &v, (size_t)count * sizeof(float));
}

/* A bfloat16 is the upper half of a float. */
INLINE f32x16 load_bf16(const uint16_t *p) {
#if defined(__AVX512F__)
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
  return (f32x16)_mm512_slli_epi32(wide, 16);
#else
  u16x16 half;
  memcpy(&half, p, sizeof half);
  return (f32x16)(__builtin_convertvector(half, u32x16) << 16);
#endif
}
INLINE u16x16 round_bf16(f32x16 x) {
  const u32x16 bits = (u32x16)x, rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  const u32x16 quiet = bits >> 16 | 64; /* NaN stays NaN */
  const u32x16 is_nan = (u32x16)(x != x);
  return __builtin_convertvector((is_nan & quiet) | (~is_nan & rounded), u16x16);
}
INLINE uint16_t to_bf16(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)(bits >> 16 | 64); /* NaN stays NaN */
  return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* Halves: 5 bits of exponent, 10 of mantissa. */
INLINE f32x16 load_f16(const uint16_t *p) {
#if defined(__AVX512F__)
  return (f32x16)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#elif defined(__F16C__)
  __m256 parts[2];
  f32x16 v;
  for (int i = 0; i < 2; i++)
    parts[i] = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p + i));
  memcpy(&v, parts, sizeof v);
  return v;
#else
  u16x16 half;
  memcpy(&half, p, sizeof half);
  const u32x16 bits = __builtin_convertvector(half, u32x16), sign = (bits & 0x8000) << 16;
  const u32x16 is_infinite = (u32x16)((bits & 0x7c00) == 0x7c00);
  /* The exponents of floats are 112 larger; the product is exact, of small halves too. */
  const f32x16 finite = (f32x16)((bits & 0x7fff) << 13) * 0x1p112f;
  const u32x16 infinite = (bits & 0x7fff) << 13 | 0x7f800000;
  return (f32x16)(sign | (is_infinite & infinite) | (~is_infinite & (u32x16)finite));
#endif
}
INLINE u16x16 round_f16(f32x16 x) {
#if defined(__AVX512F__)
  return (u16x16)_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__F16C__)
  __m256 parts[2];
  __m128i halves[2];
  u16x16 v;
  memcpy(parts, &x, sizeof parts);
  for (int i = 0; i < 2; i++)
    halves[i] = _mm256_cvtps_ph(parts[i], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  memcpy(&v, halves, sizeof v);
  return v;
#else
  const u32x16 bits = (u32x16)x, sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
  const u32x16 normal = (size + 0xfff + (size >> 13 & 1) - (112u << 23)) >> 13;
  /* Behind 0.5 a float's last bit is worth as much as that of the small halves. */
  const u32x16 small = (u32x16)((f32x16)size + 0.5f) - 0x3f000000;
  const u32x16 is_small = (u32x16)(size < 113u << 23), is_large = (u32x16)(size >= 0x477ff000);
  const u32x16 is_nan = (u32x16)(size > 0x7f800000);
  const u32x16 finite = (is_small & small) | (~is_small & normal);
  const u32x16 found = (is_large & 0x7c00) | (~is_large & finite) | (is_nan & 0x7e00);
  return __builtin_convertvector(sign | found, u16x16);
#endif
}

INLINE void round_row(const float *x, uint16_t *y, int64_t width) {
  int64_t i = 0;
  for (; i + LANES <= width; i += LANES) {
    const u16x16 rounded = round_bf16(load(x + i));
    memcpy(y + i, &rounded, sizeof rounded);
  }
  for (; i < width; i++) y[i] = to_bf16(x[i]);
}

/* a · b + c, fused on processors that can. */
INLINE f32x16 fma16(f32x16 a, f32x16 b, f32x16 c) {
#if defined(__AVX512F__)
  return (f32x16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  __m256 x[2], y[2], z[2];
  memcpy(x, &a, sizeof x), memcpy(y, &b, sizeof y), memcpy(z, &c, sizeof z);
  for (int i = 0; i < 2; i++) z[i] = _mm256_fmadd_ps(x[i], y[i], z[i]);
  memcpy(&c, z, sizeof z);
  return c;
#else
  return a * b + c;
#endif
}

INLINE f32x16 select16(i32x16 where, f32x16 a, f32x16 b) {
  return (f32x16)((where & (i32x16)a) | (~where & (i32x16)b));
}
INLINE f32x16 max16(f32x16 a, f32x16 b) { return select16(a > b, a, b); }

/* The sum of all lanes, added pairwise: first those that are 8 apart, then 4, 2, 1. */
INLINE float sum_lanes(f32x16 v) {
#if defined(__AVX512F__)
  v += (f32x16)_mm512_shuffle_f32x4((__m512)v, (__m512)v, 0x4e); /* halves change places */
  v += (f32x16)_mm512_shuffle_f32x4((__m512)v, (__m512)v, 0xb1);
  v += (f32x16)_mm512_permute_ps((__m512)v, 0x4e);
  v += (f32x16)_mm512_permute_ps((__m512)v, 0xb1);
  return v[0];
#else
  float x[LANES];
  memcpy(x, &v, sizeof x);
  for (int width = LANES / 2; width > 0; width /= 2)
    for (int i = 0; i < width; i++) x[i] += x[i + width];
  return x[0];
#endif
}
/* The sums of sixteen vectors, each in the order of sum_lanes. */
INLINE void sum_lanes_of_16(const f32x16 *v, float *sums) {
#if defined(__AVX512F__)
#define PICK(a, b, ...) __builtin_shuffle(a, b, (i32x16){__VA_ARGS__})
  f32x16 by_8[8], by_4[4], by_2[2];
  for (int i = 0; i < 8; i++) {
    const f32x16 a = v[2 * i], b = v[2 * i + 1];
    by_8[i] = PICK(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
              PICK(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
  }
  for (int i = 0; i < 4; i++) {
    const f32x16 a = by_8[2 * i], b = by_8[2 * i + 1];
    by_4[i] = PICK(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
              PICK(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
  }
  for (int i = 0; i < 2; i++) {
    const f32x16 a = by_4[2 * i], b = by_4[2 * i + 1];
    by_2[i] = PICK(a, b, 0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29) +
              PICK(a, b, 2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31);
  }
  const f32x16 a = by_2[0], b = by_2[1];
  store(sums, PICK(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30) +
                  PICK(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31));
#undef PICK
#else
  for (int i = 0; i < LANES; i++) sums[i] = sum_lanes(v[i]);
#endif
}
INLINE float max_lanes(f32x16 v) {
  float x[LANES];
  memcpy(x, &v, sizeof x);
  for (int width = LANES / 2; width > 0; width /= 2)
    for (int i = 0; i < width; i++) x[i] = x[i + width] > x[i] ? x[i + width] : x[i];
  return x[0];
}

/* e to the x, within one or two units in the last place; 0 below -87, infinite above 88. Range
 * reduction by ln 2 in two parts, then a polynomial of degree 6 (Cephes, expf). */
INLINE f32x16 exp16(f32x16 x) {
  const f32x16 magic = splat(12582912.0f); /* adding it rounds to a whole number */
  const i32x16 is_low = x < splat(-87.0f), is_high = x > splat(88.0f);
  const f32x16 within = select16(is_low | is_high, splat(0.0f), x);
  f32x16 whole = fma16(within, splat(1.44269504f), magic);
  const i32x16 exponent = (i32x16)whole - (i32x16)magic;
  whole -= magic;
  f32x16 r = fma16(whole, splat(-0.693359375f), within);
  r = fma16(whole, splat(2.12194440e-4f), r);
  f32x16 p = splat(1.9875691500e-4f);
  p = fma16(p, r, splat(1.3981999507e-3f));
  p = fma16(p, r, splat(8.3334519073e-3f));
  p = fma16(p, r, splat(4.1665795894e-2f));
  p = fma16(p, r, splat(1.6666665459e-1f));
  p = fma16(p, r, splat(5.0000001201e-1f));
  p = fma16(p, r * r, r + splat(1.0f)) * (f32x16)((exponent + 127) << 23);
  return select16(is_low, splat(0.0f), select16(is_high, splat(INFINITY), p));
}
