/* Vectors of floats and of integers, as long as the processor's own: compilers keep longer ones in
 * memory, not in registers (GCC 12: 3 to 6 times slower).
 *
 * The order of a sum depends on nothing but the width of a row, and products and sums
 * are fused only where the code says so (-ffp-contract=off), so a row has the same bits in any
 * batch. */

#pragma once

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif
#define OF_LANES(bytes) __attribute__((vector_size((bytes) * LANES)))
#define ALIGNED __attribute__((aligned(64)))
#define INLINE static inline __attribute__((always_inline))

typedef float f32v OF_LANES(4);
typedef int32_t i32v OF_LANES(4);
typedef uint32_t u32v OF_LANES(4);
typedef uint16_t u16v OF_LANES(2);
typedef uint8_t u8v OF_LANES(1);
typedef int8_t s8v OF_LANES(1);
typedef uint8_t u8x4v OF_LANES(4); /* four bytes a lane */

/* Lanes of two vectors, by number; those of the second follow those of the first. */
#if defined(__clang__)
#define PICK(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define PICK(a, b, ...) __builtin_shuffle(a, b, (i32v){__VA_ARGS__})
#endif

INLINE f32v load(const float *p) { f32v v; memcpy(&v, p, sizeof v); return v; }
INLINE void store(float *p, f32v v) { memcpy(p, &v, sizeof v); }
INLINE f32v splat(float x) { return x - (f32v){0}; }

/* The first `count` lanes; the others are `rest`. */
INLINE f32v load_part(const float *p, int64_t count, float rest) {
  if (count == LANES) return load(p);
  f32v v = splat(rest);
  memcpy(&v, p, (size_t)count * sizeof(float));
  return v;
}
INLINE void store_part(float *p, f32v v, int64_t count) {
  if (count == LANES) {
    store(p, v);
    return;
  }
  memcpy(p, &v, (size_t)count * sizeof(float));
}

INLINE u32v load_u16(const uint16_t *p) {
#if defined(__AVX512F__)
  return (u32v)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
#elif defined(__AVX2__)
  return (u32v)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
#else
  u16v half;
  memcpy(&half, p, sizeof half);
  return __builtin_convertvector(half, u32v);
#endif
}
/* A bfloat16 is the upper half of a float. */
INLINE f32v load_bf16(const uint16_t *p) { return (f32v)(load_u16(p) << 16); }
INLINE u16v round_bf16(f32v x) {
  const u32v bits = (u32v)x, rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  const u32v quiet = bits >> 16 | 64; /* NaN stays NaN */
  const u32v is_nan = (u32v)(x != x);
  return __builtin_convertvector((is_nan & quiet) | (~is_nan & rounded), u16v);
}
INLINE uint16_t to_bf16(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)(bits >> 16 | 64); /* NaN stays NaN */
  return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

INLINE float from_bf16(uint16_t half) {
  const uint32_t bits = (uint32_t)half << 16;
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

/* Halves: 5 bits of exponent, 10 of mantissa. */
INLINE f32v load_f16(const uint16_t *p) {
#if defined(__AVX512F__)
  return (f32v)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#elif defined(__F16C__)
  return (f32v)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#elif defined(__aarch64__)
  return (f32v)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
#else
  u16v half;
  memcpy(&half, p, sizeof half);
  const u32v bits = __builtin_convertvector(half, u32v), sign = (bits & 0x8000) << 16;
  const u32v is_infinite = (u32v)((bits & 0x7c00) == 0x7c00);
  /* The exponents of floats are 112 larger; the product is exact, of small halves too. */
  const f32v finite = (f32v)((bits & 0x7fff) << 13) * 0x1p112f;
  const u32v infinite = (bits & 0x7fff) << 13 | 0x7f800000;
  return (f32v)(sign | (is_infinite & infinite) | (~is_infinite & (u32v)finite));
#endif
}
INLINE u16v round_f16(f32v x) {
#if defined(__AVX512F__)
  return (u16v)_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__F16C__)
  return (u16v)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__aarch64__)
  return (u16v)vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)x));
#else
  const u32v bits = (u32v)x, sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
  const u32v normal = (size + 0xfff + (size >> 13 & 1) - (112u << 23)) >> 13;
  /* Behind 0.5 a float's last bit is worth as much as that of the small halves. */
  const u32v small = (u32v)((f32v)size + 0.5f) - 0x3f000000;
  const u32v is_small = (u32v)(size < 113u << 23), is_large = (u32v)(size >= 0x477ff000);
  const u32v is_nan = (u32v)(size > 0x7f800000);
  const u32v finite = (is_small & small) | (~is_small & normal);
  const u32v found = (is_large & 0x7c00) | (~is_large & finite) | (is_nan & 0x7e00);
  return __builtin_convertvector(sign | found, u16v);
#endif
}

INLINE void round_row(const float *x, uint16_t *y, int64_t width) {
  int64_t i = 0;
  for (; i + LANES <= width; i += LANES) {
    const u16v rounded = round_bf16(load(x + i));
    memcpy(y + i, &rounded, sizeof rounded);
  }
  for (; i < width; i++) y[i] = to_bf16(x[i]);
}

/* a · b + c, fused on processors that can. */
INLINE f32v fmav(f32v a, f32v b, f32v c) {
#if defined(__AVX512F__)
  return (f32v)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (f32v)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (f32v)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

INLINE f32v selectv(i32v where, f32v a, f32v b) {
  return (f32v)((where & (i32v)a) | (~where & (i32v)b));
}
/* The same, loaded once: compilers prefer to load again for each product, and a processor can load no
 * more often than it can multiply. */
INLINE f32v kept(f32v v) {
#if defined(__AVX512F__)
  __asm__("" : "+v"(v));
#elif defined(__AVX__)
  __asm__("" : "+x"(v));
#elif defined(__aarch64__)
  __asm__("" : "+w"(v));
#endif
  return v;
}

/* The larger of each lane; b where one of them is not a number. */
INLINE f32v maxv(f32v a, f32v b) {
#if defined(__AVX512F__)
  return (f32v)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX__)
  return (f32v)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return selectv(a > b, a, b);
#endif
}

/* The sum of all lanes, added pairwise: first those that are LANES / 2 apart, and 1 apart at last. */
INLINE float sum_lanes(f32v v) {
#if defined(__AVX512F__)
  v += (f32v)_mm512_shuffle_f32x4((__m512)v, (__m512)v, 0x4e); /* halves change places */
  v += (f32v)_mm512_shuffle_f32x4((__m512)v, (__m512)v, 0xb1);
  v += (f32v)_mm512_permute_ps((__m512)v, 0x4e);
  v += (f32v)_mm512_permute_ps((__m512)v, 0xb1);
  return v[0];
#elif defined(__AVX__)
  v += (f32v)_mm256_permute2f128_ps((__m256)v, (__m256)v, 1); /* halves change places */
  v += (f32v)_mm256_permute_ps((__m256)v, 0x4e);
  v += (f32v)_mm256_permute_ps((__m256)v, 0xb1);
  return v[0];
#else
  return (v[0] + v[2]) + (v[1] + v[3]);
#endif
}
/* Of as many vectors as there are lanes, what JOIN(a, b) makes of the lanes of each, in the order of
 * sum_lanes. */
#if defined(__AVX512F__)
#define LANES_OF_EACH(name, JOIN)                                                                  \
  INLINE void name(const f32v *v, float *found) {                                                  \
    f32v by_8[8], by_4[4], by_2[2];                                                                \
    for (int i = 0; i < 8; i++) {                                                                  \
      const f32v a = v[2 * i], b = v[2 * i + 1];                                                   \
      by_8[i] = JOIN(PICK(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23),           \
                     PICK(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31));    \
    }                                                                                              \
    for (int i = 0; i < 4; i++) {                                                                  \
      const f32v a = by_8[2 * i], b = by_8[2 * i + 1];                                             \
      by_4[i] = JOIN(PICK(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27),         \
                     PICK(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31));      \
    }                                                                                              \
    for (int i = 0; i < 2; i++) {                                                                  \
      const f32v a = by_4[2 * i], b = by_4[2 * i + 1];                                             \
      by_2[i] = JOIN(PICK(a, b, 0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29),         \
                     PICK(a, b, 2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31));      \
    }                                                                                              \
    const f32v a = by_2[0], b = by_2[1];                                                           \
    store(found, JOIN(PICK(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30),       \
                      PICK(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31)));     \
  }
#elif defined(__AVX__)
#define LANES_OF_EACH(name, JOIN)                                                                  \
  INLINE void name(const f32v *v, float *found) {                                                  \
    f32v by_4[4], by_2[2];                                                                         \
    for (int i = 0; i < 4; i++) {                                                                  \
      const f32v a = v[2 * i], b = v[2 * i + 1];                                                   \
      by_4[i] = JOIN(PICK(a, b, 0, 1, 2, 3, 8, 9, 10, 11), PICK(a, b, 4, 5, 6, 7, 12, 13, 14, 15)); \
    }                                                                                              \
    for (int i = 0; i < 2; i++) {                                                                  \
      const f32v a = by_4[2 * i], b = by_4[2 * i + 1];                                             \
      by_2[i] = JOIN(PICK(a, b, 0, 1, 4, 5, 8, 9, 12, 13), PICK(a, b, 2, 3, 6, 7, 10, 11, 14, 15)); \
    }                                                                                              \
    const f32v a = by_2[0], b = by_2[1];                                                           \
    store(found, JOIN(PICK(a, b, 0, 2, 4, 6, 8, 10, 12, 14), PICK(a, b, 1, 3, 5, 7, 9, 11, 13, 15))); \
  }
#else
#define LANES_OF_EACH(name, JOIN)                                                                  \
  INLINE void name(const f32v *v, float *found) {                                                  \
    const f32v a = JOIN(PICK(v[0], v[1], 0, 1, 4, 5), PICK(v[0], v[1], 2, 3, 6, 7));               \
    const f32v b = JOIN(PICK(v[2], v[3], 0, 1, 4, 5), PICK(v[2], v[3], 2, 3, 6, 7));               \
    store(found, JOIN(PICK(a, b, 0, 2, 4, 6), PICK(a, b, 1, 3, 5, 7)));                            \
  }
#endif
INLINE f32v addv(f32v a, f32v b) { return a + b; }
LANES_OF_EACH(sum_lanes_of_each, addv)
LANES_OF_EACH(max_lanes_of_each, maxv)
INLINE float max_lanes(f32v v) {
#if defined(__AVX512F__)
  v = maxv(v, (f32v)_mm512_shuffle_f32x4((__m512)v, (__m512)v, 0x4e));
  v = maxv(v, (f32v)_mm512_shuffle_f32x4((__m512)v, (__m512)v, 0xb1));
  v = maxv(v, (f32v)_mm512_permute_ps((__m512)v, 0x4e));
  return maxv(v, (f32v)_mm512_permute_ps((__m512)v, 0xb1))[0];
#elif defined(__AVX__)
  v = maxv(v, (f32v)_mm256_permute2f128_ps((__m256)v, (__m256)v, 1));
  v = maxv(v, (f32v)_mm256_permute_ps((__m256)v, 0x4e));
  return maxv(v, (f32v)_mm256_permute_ps((__m256)v, 0xb1))[0];
#else
  v = maxv(v, PICK(v, v, 2, 3, 0, 1));
  return maxv(v, PICK(v, v, 1, 0, 3, 2))[0];
#endif
}

/* e to the x, within one or two units in the last place; 0 below -87, infinite above 88. Range
 * reduction by ln 2 in two parts, then a polynomial of degree 6 (Cephes, expf). */
INLINE f32v expv(f32v x) {
  const f32v magic = splat(12582912.0f); /* adding it rounds to a whole number */
  const i32v is_low = x < splat(-87.0f), is_high = x > splat(88.0f);
  const f32v within = selectv(is_low | is_high, splat(0.0f), x);
  f32v whole = fmav(within, splat(1.44269504f), magic);
  const i32v exponent = (i32v)whole - (i32v)magic;
  whole -= magic;
  f32v r = fmav(whole, splat(-0.693359375f), within);
  r = fmav(whole, splat(2.12194440e-4f), r);
  f32v p = splat(1.9875691500e-4f);
  p = fmav(p, r, splat(1.3981999507e-3f));
  p = fmav(p, r, splat(8.3334519073e-3f));
  p = fmav(p, r, splat(4.1665795894e-2f));
  p = fmav(p, r, splat(1.6666665459e-1f));
  p = fmav(p, r, splat(5.0000001201e-1f));
  p = fmav(p, r * r, r + splat(1.0f)) * (f32v)((exponent + 127) << 23);
  return selectv(is_low, splat(0.0f), selectv(is_high, splat(INFINITY), p));
}

/* Two to the x for x up to 0 or little above, within two units in the last place; 0 where a float ends.
 * Of all polynomials of degree 6 this one has the smallest greatest relative error between -1/2 and 1/2,
 * 2.6e-9 (Remez' exchange). */
INLINE f32v exp2v(f32v x) {
#if defined(__AVX512F__)
  const f32v within = maxv(splat(-160.0f), x); /* NaN stays NaN */
  const f32v whole = (f32v)_mm512_roundscale_ps((__m512)within, _MM_FROUND_TO_NEAREST_INT);
#else
  const f32v magic = splat(12582912.0f); /* adding it rounds to a whole number */
  const f32v within = maxv(splat(-126.0f), x);
  const f32v raised = within + magic, whole = raised - magic;
#endif
  const f32v r = within - whole;
  f32v p = splat(0x1.470b48p-13f);
  p = fmav(p, r, splat(0x1.5f7276p-10f));
  p = fmav(p, r, splat(0x1.3b2708p-7f));
  p = fmav(p, r, splat(0x1.c6ae72p-5f));
  p = fmav(p, r, splat(0x1.ebfbe2p-3f));
  p = fmav(p, r, splat(0x1.62e432p-1f));
  p = fmav(p, r, splat(1.0f));
#if defined(__AVX512F__)
  return (f32v)_mm512_scalef_ps((__m512)p, (__m512)whole);
#else
  const f32v scaled = p * (f32v)((((i32v)raised - (i32v)magic) + 127) << 23);
  return selectv(x < splat(-126.0f), splat(0.0f), scaled);
#endif
}
