/* Products of codes without a sign and of signed bytes, added up as integers. */

#pragma once

#include "common.h"

/* Whether codes of 8 bits are multiplied as signed ones, and not 128 above these. */
#if defined(__AVX2__) && LANES == 8
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
#elif defined(__AVX2__) && LANES == 8
  const __m256i values = _mm256_set1_epi32(x), ones = _mm256_set1_epi16(1), codes = (__m256i)w;
  /* Of 8 bits, a pair of products only fits in 16 bits if both factors are signed. */
  const __m256i pairs = bits == 4 ? _mm256_maddubs_epi16(codes, values)
                                  : _mm256_maddubs_epi16(_mm256_abs_epi8(codes),
                                                         _mm256_sign_epi8(values, codes));
  return acc + (i32v)_mm256_madd_epi16(pairs, ones);
#else
  (void)bits;
  int8_t four[4];
  memcpy(four, &x, sizeof four);
  for (int lane = 0; lane < LANES; lane++)
    for (int i = 0; i < 4; i++) acc[lane] += (int32_t)w[4 * lane + i] * four[i];
  return acc;
#endif
}
