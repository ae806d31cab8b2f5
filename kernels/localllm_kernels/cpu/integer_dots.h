/* Products of codes without a sign and of signed bytes, added up as integers. */

#pragma once

#include "common.h"

/* Whether codes of 8 bits are multiplied as signed ones, and not 128 above these: where no instruction
 * multiplies bytes without a sign by signed ones. */
#if LANES == 8 && defined(__AVX2__) && !defined(__AVXVNNI__)
#define IS_SIGNED8 1
#elif defined(__aarch64__) && !defined(__ARM_FEATURE_MATMUL_INT8)
#define IS_SIGNED8 1
#else
#define IS_SIGNED8 0
#endif

INLINE int is_signed(int bits) { return bits == 8 && IS_SIGNED8; }

/* acc + the four products of each lane; w: uint8, x: int8 from -127. */
INLINE i32v dot4(i32v acc, u8x4v w, int32_t x, int bits) {
#if defined(__AVX512VNNI__)
  (void)bits;
  return (i32v)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, _mm512_set1_epi32(x));
#elif defined(__AVX512BW__)
  const __m512i values = _mm512_set1_epi32(x), ones = _mm512_set1_epi16(1);
  __m512i whole = (__m512i)w;
  if (bits == 8) { /* a pair of products does not fit in 16 bits: the lowest bit goes by itself */
    const __m512i low = _mm512_and_si512(whole, _mm512_set1_epi8(1));
    acc += (i32v)_mm512_madd_epi16(_mm512_maddubs_epi16(low, values), ones);
    whole = _mm512_and_si512(_mm512_srli_epi16(whole, 1), _mm512_set1_epi8(127));
  }
  const i32v sum = (i32v)_mm512_madd_epi16(_mm512_maddubs_epi16(whole, values), ones);
  return acc + (bits == 8 ? sum << 1 : sum);
#elif defined(__AVXVNNI__) && LANES == 8
  (void)bits;
  return (i32v)_mm256_dpbusd_avx_epi32((__m256i)acc, (__m256i)w, _mm256_set1_epi32(x));
#elif defined(__AVX2__) && LANES == 8
  const __m256i values = _mm256_set1_epi32(x), ones = _mm256_set1_epi16(1), codes = (__m256i)w;
  /* Of 8 bits, a pair of products only fits in 16 bits if both factors are signed. */
  const __m256i pairs = bits == 4 ? _mm256_maddubs_epi16(codes, values)
                                  : _mm256_maddubs_epi16(_mm256_abs_epi8(codes),
                                                         _mm256_sign_epi8(values, codes));
  return acc + (i32v)_mm256_madd_epi16(pairs, ones);
#elif defined(__aarch64__)
  (void)bits;
  const int8x16_t values = vreinterpretq_s8_s32(vdupq_n_s32(x));
#if defined(__ARM_FEATURE_MATMUL_INT8)
  return (i32v)vusdotq_s32((int32x4_t)acc, (uint8x16_t)w, values);
#elif defined(__ARM_FEATURE_DOTPROD)
  return (i32v)vdotq_s32((int32x4_t)acc, (int8x16_t)w, values);
#else
  /* Two products of signed bytes fit in 16 bits: x is not -128. */
  const int16x8_t low = vmull_s8(vget_low_s8((int8x16_t)w), vget_low_s8(values));
  const int16x8_t high = vmull_high_s8((int8x16_t)w, values);
  return (i32v)vpadalq_s16((int32x4_t)acc, vpaddq_s16(low, high));
#endif
#else
  (void)bits;
  int8_t four[4];
  memcpy(four, &x, sizeof four);
  for (int lane = 0; lane < LANES; lane++)
    for (int i = 0; i < 4; i++) acc[lane] += (int32_t)w[4 * lane + i] * four[i];
  return acc;
#endif
}
